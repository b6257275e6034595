"""Callbacks that every domain's training uses: a line per epoch, a log file, the report on routing."""

from zoo.callbacks.console import EpochLine
from zoo.callbacks.logfile import LogFile
from zoo.callbacks.routing import RoutingReport

__all__ = ["EpochLine", "LogFile", "RoutingReport"]

"""Callbacks of every training: the best checkpoint, a line per epoch, a log file, the report on routing."""

from zoo.callbacks.checkpoint import BestCheckpoint
from zoo.callbacks.console import EpochLine
from zoo.callbacks.logfile import LogFile
from zoo.callbacks.routing import RoutingReport

__all__ = ["BestCheckpoint", "EpochLine", "LogFile", "RoutingReport"]

"""Networks of the forecasting domain; plain modules called as ``network(past, phase, known)``."""

from zoo.domains.forecasting.network.blocks import Forecast
from zoo.domains.forecasting.network.dynamic_tmoe import DynamicTMoE

__all__ = ["DynamicTMoE", "Forecast"]

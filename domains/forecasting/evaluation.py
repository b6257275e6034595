"""Running forecasters over windows: the network and the yardsticks alike.

A forecaster is any callable from a batch of windows to forecasts (B, H, C).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from zoo.data.forecasting.module import ForecastingData
from zoo.data.forecasting.windows import WindowBatch, Windows
from zoo.domains.forecasting.baselines import Baseline, Naive, Ridge, SeasonalNaive
from zoo.domains.forecasting.metrics import window_sums

Forecaster = Callable[[WindowBatch], Tensor]

_WINDOWS = 256  # per batch


def batches(windows: Windows, most: int | None = None) -> Iterator[WindowBatch]:
    """All windows in order, or ``most`` of them evenly spaced."""
    chosen = np.arange(len(windows))
    if most is not None and len(chosen) > most:
        chosen = np.unique(np.linspace(0, len(chosen) - 1, most).round().astype(int))
    for chunk in np.array_split(chosen, -(-len(chosen) // _WINDOWS)):
        yield windows.__getitems__(chunk.tolist())


def test_sums(forecaster: Forecaster, windows: Windows) -> dict[str, Tensor]:
    """Error sums of each window, see :func:`~zoo.domains.forecasting.metrics.window_sums`."""
    parts = [window_sums(forecaster(batch), batch.future, batch.scored) for batch in batches(windows)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def fitted_baselines(data: ForecastingData) -> tuple[list[Baseline], dict[str, str]]:
    """The yardsticks fitted on the training windows, and by name why one could not be."""
    spec, windows = data.spec, data.dataset("train")
    given = (windows.values, torch.from_numpy(windows.starts()), windows.lookback, windows.horizon)
    fitted: list[Baseline] = [Naive().fit(*given)]
    refused: dict[str, str] = {}
    if spec.cycle <= spec.lookback:
        fitted.append(SeasonalNaive(spec.cycle).fit(*given))
    else:
        reason = f"a lookback of {spec.lookback} holds no cycle of {spec.cycle} rows"
        refused["seasonal_naive"] = f"{reason} (mse, mae)"
    try:
        ridge = Ridge(data.ridge_center).fit(*given, observed=windows.observed, known=windows.known)
        fitted.append(ridge)
    except ValueError as error:
        refused["ridge"] = f"{error} (mse, mae)"
    return fitted, refused


def baseline_forecaster(baseline: Baseline) -> Forecaster:
    """A yardstick as a forecaster."""
    return lambda batch: baseline(batch.past, batch.known)


def network_forecaster(task: torch.nn.Module) -> Forecaster:
    """A trained task as a forecaster: evaluation mode, no gradients, answers on the CPU."""
    task.eval()
    weight = next(task.parameters())

    @torch.no_grad()
    def forecast(batch: WindowBatch) -> Tensor:
        y: Tensor = task(batch.to(weight.device).floats(weight.dtype)).y
        return y.cpu().to(batch.past.dtype)

    return forecast

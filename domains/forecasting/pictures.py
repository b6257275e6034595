"""Pictures of a finished training: error by step, typical and worst windows, change points."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from zoo.data.forecasting.module import ForecastingData
from zoo.domains.forecasting.evaluation import (
    Forecaster,
    baseline_forecaster,
    fitted_baselines,
    network_forecaster,
    test_sums,
)
from zoo.domains.forecasting.metrics import horizon_curve
from zoo.domains.forecasting.plots import drift_figure, error_by_horizon_figure, windows_figure
from zoo.pictures import save

if TYPE_CHECKING:
    from zoo.domains.forecasting.task import ForecastingTask


def draw_test(task: ForecastingTask, data: ForecastingData, directory: Path) -> list[Path]:
    """Draw the test split and the training rows' change points into a run folder; returns the files."""
    forecasters: dict[str, Forecaster] = {task.network: network_forecaster(task)}
    forecasters |= {item.name: baseline_forecaster(item) for item in fitted_baselines(data)[0]}
    windows = data.dataset("test")
    sums = {name: test_sums(forecaster, windows) for name, forecaster in forecasters.items()}
    curves = {name: horizon_curve(parts)["mse"].numpy() for name, parts in sums.items()}
    title = f"{data.spec.name}: error by step, test split"
    files = [save(error_by_horizon_figure(curves, title=title), directory / "error_by_step.png")]
    own = sums[task.network]
    error = (own["squared"].sum(-1) / own["count"].sum(-1).clamp_min(1)).numpy()
    files.append(_windows(data, forecasters, error, directory))
    if task.change_points is not None:
        files.append(_drift(task, data, directory))
    return files


def _windows(
    data: ForecastingData, forecasters: dict[str, Forecaster], error: np.ndarray, directory: Path
) -> Path:
    """The best, median and worst window by the model's error, in the column that varies most."""
    order = np.argsort(error, kind="stable")
    picks = {"best": order[0], "median": order[len(order) // 2], "worst": order[-1]}
    shown = []
    for label, pick in picks.items():
        batch = data.dataset("test").__getitems__([int(pick)])
        column = int(batch.future[0].var(0).argmax())
        with torch.no_grad():
            forecasts = {
                name: forecaster(batch)[0, :, column].numpy() for name, forecaster in forecasters.items()
            }
        shown.append(
            {
                "label": f"{label}, mse {error[pick]:.3f}, column {data.spec.columns[column]}",
                "history": batch.past[0, :, column].numpy(),
                "truth": batch.future[0, :, column].numpy(),
                "forecasts": forecasts,
            }
        )
    return save(windows_figure(shown, f"{data.spec.name}: test windows"), directory / "windows.png")


def _drift(task: ForecastingTask, data: ForecastingData, directory: Path) -> Path:
    start, stop = data.borders.train
    time = data.series.time[start:stop]  # type: ignore[union-attr]
    points = [
        {**point, "row": point["row"] - start, "date": point["time"], "type": point["kind"]}
        for point in task.change_points or []
    ]
    values = data.values[start:stop].numpy()
    return save(drift_figure(time, values, points, data.spec.columns), directory / "drift.png")

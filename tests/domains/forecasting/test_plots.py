"""Pictures of forecasts: what stands in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from numpy.typing import NDArray

from zoo.domains.forecasting.plots import (
    MAX_COLUMNS,
    drift_figure,
    error_by_horizon_figure,
    forecast_figure,
    windows_figure,
)
from zoo.pictures import save

HOUR = np.timedelta64(1, "h")
START = np.datetime64("2020-01-01T00")


def line(axes: Axes, label: str) -> NDArray[Any]:
    return next(np.asarray(entry.get_ydata()) for entry in axes.lines if entry.get_label() == label)


def forecast(columns: int, **changes: Any) -> Any:
    history = np.arange(6.0 * columns).reshape(6, columns)
    ahead = np.ones((4, columns))
    values: dict[str, Any] = {
        "time_history": START + np.arange(6) * HOUR,
        "history": history,
        "time_future": START + np.arange(6, 10) * HOUR,
        "forecast": ahead,
        "lower": ahead - 1,
        "upper": ahead + 2,
        "columns": [f"c{place}" for place in range(columns)],
    }
    return forecast_figure(**(values | changes))


class TestForecast:
    def test_every_column_has_history_forecast_and_interval(self) -> None:
        made = forecast(2, title="my.csv")
        assert made.get_suptitle() == "my.csv"
        assert [axes.get_title(loc="left") for axes in made.axes] == ["c0", "c1"]
        assert line(made.axes[1], "history").tolist() == [1, 3, 5, 7, 9, 11]
        assert line(made.axes[1], "forecast").tolist() == [1, 1, 1, 1]
        heights = made.axes[0].collections[0].get_paths()[0].vertices[:, 1]
        assert (heights.min(), heights.max()) == (0.0, 3.0)
        assert [text.get_text() for text in made.legends[0].get_texts()] == [
            "interval",
            "history",
            "forecast",
        ]

    def test_truth_continues_the_history(self) -> None:
        made = forecast(1, truth=np.full((4, 1), 7.0), lower=None, upper=None)
        assert line(made.axes[0], "truth").tolist() == [5, 7, 7, 7, 7]
        assert len(made.axes[0].collections) == 0

    def test_experts_are_stacked_to_one(self) -> None:
        made = forecast(1, expert_share={"0_trend": np.full(4, 0.25), "1_seasonal": np.full(4, 0.75)})
        tops = [band.get_paths()[0].vertices[:, 1].max() for band in made.axes[1].collections]
        assert tops == pytest.approx([0.25, 1.0])
        assert [text.get_text() for text in made.axes[1].get_legend().get_texts()] == [
            "0_trend",
            "1_seasonal",
        ]

    def test_many_columns_are_cut_and_counted(self) -> None:
        made = forecast(MAX_COLUMNS + 3, title="wide.csv")
        assert len(made.axes) == MAX_COLUMNS
        assert made.get_suptitle() == "wide.csv (first 8 of 11 columns)"

    def test_whole_number_index(self, tmp_path: Path) -> None:
        made = forecast(1, time_history=np.arange(6), time_future=np.arange(6, 10))
        path = save(made, tmp_path / "pictures" / "f.png")
        assert path.read_bytes().startswith(b"\x89PNG")
        assert [entry.name for entry in path.parent.iterdir()] == ["f.png"]


class TestDrift:
    CHANGES: tuple[dict[str, Any], ...] = (
        {"row": 40, "date": "d", "type": "trend", "channels": ["a"], "p_value": 0.0099},
        {"row": 80, "date": "d", "type": "seasonal", "channels": ["a", "b"], "p_value": 0.005},
    )

    def test_changes_stand_at_their_dates(self) -> None:
        times = START + np.arange(100) * HOUR
        made = drift_figure(times, np.zeros((100, 2)), self.CHANGES, ["a", "b"])
        marks = [entry for entry in made.axes[1].lines if len(entry.get_xdata()) == 2]
        assert [entry.get_xdata()[0] for entry in marks] == [times[40], times[80]]
        assert [entry.get_linestyle() for entry in marks] == [":", "-"]
        assert [text.get_text() for text in made.axes[0].texts] == [
            "trend\np = 0.0099",
            "seasonal\np = 0.005",
        ]
        assert made.get_suptitle() == "2 change points"

    def test_crowded_texts_are_left_out(self) -> None:
        changes = [{**self.CHANGES[0], "row": row} for row in (40, 42, 60)]
        made = drift_figure(np.arange(100), np.zeros((100, 1)), changes, ["a"])
        assert [text.xy[0] for text in made.axes[0].texts] == [40, 60]
        assert sum(len(entry.get_xdata()) == 2 for entry in made.axes[0].lines) == 3

    def test_no_change(self) -> None:
        assert drift_figure(np.arange(9), np.zeros((9, 1)), [], ["a"]).get_suptitle() == "No change points"


def test_error_by_horizon() -> None:
    made = error_by_horizon_figure({"dynamic_tmoe": [0.1, 0.2], "ridge": [0.2, 0.3]}, metric="mae", title="t")
    (axes,) = made.axes
    assert line(axes, "dynamic_tmoe").tolist() == [0.1, 0.2]
    assert axes.lines[1].get_xdata().tolist() == [1, 2]
    assert axes.get_ylabel() == "mae"
    assert axes.get_ylim()[0] == 0
    assert axes.lines[0].get_linewidth() > axes.lines[1].get_linewidth()


def test_windows() -> None:
    window = {
        "history": [1.0, 2.0],
        "truth": [3.0, 4.0],
        "forecasts": {"model": [3.5, 4.5], "naive": [2.0, 2.0]},
    }
    made = windows_figure(
        [{"label": "best, mse 0.25", **window}, {"label": "worst, mse 9", **window}], title="t"
    )
    assert [axes.get_title(loc="left") for axes in made.axes] == ["best, mse 0.25", "worst, mse 9"]
    assert line(made.axes[1], "model").tolist() == [3.5, 4.5]
    assert line(made.axes[0], "truth").tolist() == [2, 3, 4]
    assert [text.get_text() for text in made.legends[0].get_texts()] == ["history", "truth", "model", "naive"]

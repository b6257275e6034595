"""Yardsticks that cannot be had are told with their reason; short horizons and single kinds do not stop growth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cases.commands import results, three_regimes, train, write
from zoo.data.forecasting.module import ForecastingData
from zoo.domains.forecasting.task import ForecastingTask


def test_yardsticks_without_a_fit_have_null_metrics_and_a_reason(tmp_path: Path) -> None:
    values = np.sin(np.arange(400) / 3)
    values[::20] = np.nan  # no window of 30 rows is complete
    path = write(tmp_path / "holes.csv", y=values)
    data = ForecastingData(path=str(path), lookback=20, horizon=10, fill="mask")
    data.setup()
    rows = {row.name: row for row in ForecastingTask().baselines(data)}
    assert list(rows) == ["naive", "seasonal_naive", "ridge"]
    assert rows["naive"].metrics["mse"] is not None
    assert rows["ridge"].metrics == {"mse": None, "mae": None}
    assert "none of 251 training windows is complete" in rows["ridge"].notes
    assert rows["seasonal_naive"].notes == "a lookback of 20 holds no cycle of 24 rows (mse, mae)"


def test_two_steps_ahead_grow_a_fluctuation_expert(tmp_path: Path) -> None:
    path = write(tmp_path / "regimes.csv", y=three_regimes())
    done = train(tmp_path, path, "trainer.max_epochs=2", horizon=2)
    assert done.status == 0, done.err
    assert "enabled fluctuation" in (done.run / "log.txt").read_text()
    assert results(done.run)["dynamic_tmoe"]["n"] == 600 - 2 + 1


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_growth_calibration_and_pictures_in_other_precisions(tmp_path: Path, precision: str) -> None:
    path = write(tmp_path / "regimes.csv", y=three_regimes())
    done = train(tmp_path, path, "trainer.max_epochs=2", f"trainer.precision={precision}")
    assert done.status == 0, done.err
    assert "enabled" in (done.run / "log.txt").read_text()
    assert (done.run / "windows.png").is_file()
    assert results(done.run)["dynamic_tmoe"]["metrics"]["mse"] < 2

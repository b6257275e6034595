"""ForecastingData: columns of the generated series, known-future columns, stamps and the scaler."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from zoo.data.forecasting.generator import regimes
from zoo.data.forecasting.module import ForecastingData
from zoo.errors import UserError


def ready(**settings: Any) -> ForecastingData:
    data = ForecastingData(**({"horizon": 24} | settings))
    data.prepare_data()
    data.setup()
    return data


def test_generated_columns_are_chosen_by_name() -> None:
    data = ready(columns=["district_3", "district_1"], known_future=["temperature"])
    made = regimes()
    assert data.spec.columns == ("district_3", "district_1")
    assert data.spec.known == ("temperature",)
    assert data.spec.mean[0] == pytest.approx(
        made.values[: int(0.7 * 4000), made.columns.index("district_3")].mean()
    )


@pytest.mark.parametrize("word", ["columns", "known_future"])
def test_columns_that_are_not_generated_are_refused(word: str) -> None:
    with pytest.raises(UserError, match=f"data.{word}=nonsense: the generated series offers"):
        ready(**{word: ["nonsense"]})


def test_generated_weekends_are_weekends() -> None:
    data = ready()
    series = data.series
    assert series is not None
    assert pd.Timestamp(series.time[0]).day_name() == "Monday"


def test_a_set_s_known_future_columns_can_be_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_file: Any
) -> None:
    real_file("forecasting/EPF/NP.csv")
    assert ready(name="epf_np", lookback=168).spec.known == ("Grid load forecast", "Wind power forecast")
    off = ready(name="epf_np", lookback=168, known_future=[])
    assert off.spec.known == ()
    assert len(off.spec.columns) == 3


def test_csv_without_a_path_names_the_cure() -> None:
    with pytest.raises(UserError, match=r"needs data\.path=FILE"):
        ready(name="csv")


def test_scaler_is_of_training_rows_and_constants_keep_their_units(tmp_path: Path) -> None:
    rows = 400
    time = pd.date_range("2020-01-01", periods=rows, freq="h")
    values = np.where(np.arange(rows) < 280, np.arange(rows) % 2, 100.0)
    path = tmp_path / "a.csv"
    pd.DataFrame({"date": time, "a": values, "b": 7.0}).to_csv(path, index=False)
    data = ready(path=str(path), lookback=24, horizon=6)
    assert (data.spec.mean, data.spec.std) == ((0.5, 7.0), (0.5, 1.0))
    assert data.values[:, 1].abs().max() == 0
    assert data.fingerprint() == [
        {"name": "a", "file": "a.csv", "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    ]

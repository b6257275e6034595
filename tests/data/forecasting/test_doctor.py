"""The doctor says what the reader says, and what would hurt a training."""

import numpy as np
import pandas as pd
import pytest

from zoo.data.forecasting.doctor import examine
from zoo.data.forecasting.reader import read_series
from zoo.errors import UserError


@pytest.fixture
def write(tmp_path):
    """Return a function that writes columns to a file and gives its path."""

    def to_file(freq="h", start="2020-01-01", **columns):
        n = len(next(iter(columns.values())))
        index = pd.date_range(start, periods=n, freq=freq, name="date")
        path = tmp_path / "file.csv"
        pd.DataFrame(columns, index=index).to_csv(path)
        return path

    return to_file


def topics(report, level):
    return [item.topic for item in report.items if item.level == level]


def wave(n):
    return np.sin(2 * np.pi * np.arange(n) / 24)


def test_a_good_file(write):
    report = examine(write(a=wave(500), b=wave(500) * 2), lookback=48, horizon=24)
    assert (report.refusals, report.warnings) == ([], [])
    facts = {item.topic: item.text for item in report.items}
    assert facts["frequency"] == "step: hours (h), 2020-01-01 00:00 to 2020-01-21 19:00, cycle 24 steps"
    assert facts["columns"] == "500 rows x 2 columns: a, b"
    assert facts["length"] == "windows of 48 + 24 rows: train 279, val 27, test 77"


def test_refusals_are_those_of_the_reader(write):
    values = wave(500)
    values[7] = np.nan
    path = write(a=values)
    with pytest.raises(UserError) as caught:
        read_series(path)
    report = examine(path, lookback=24, horizon=24)
    assert str(caught.value) == f"{path}: {'; '.join(report.refusals)}"
    assert examine(path, lookback=24, horizon=24, fill="mask").refusals == []


def test_minimum_length(write):
    report = examine(write(a=wave(100)), lookback=24, horizon=12)
    assert topics(report, "refusal") == ["length"]
    assert "the val split has 10 rows but needs 12" in report.refusals[0]
    assert examine(write(a=wave(120)), lookback=24, horizon=12).refusals == []
    with pytest.raises(UserError, match="lookback=0"):
        examine(write(a=wave(120)), lookback=0)


def test_outliers_sentinels_constants_and_repeats(write):
    values = wave(500)
    values[100] = 1000
    report = examine(write(a=values, b=np.where(np.arange(500) == 3, -999, wave(500)), c=np.ones(500)))
    assert set(topics(report, "warning")) == {"outliers", "sentinels", "constants"}
    assert "a (1, first 1000 at 2020-01-05 04:00:00)" in " ".join(report.warnings)
    report = examine(write(a=np.repeat(wave(250), 2)))
    assert topics(report, "warning") == ["repeats"]
    assert "250 rows equal to the row before in every column (50.1%)" in report.warnings[0]


def test_invented_dates_are_suspected_and_real_weeks_are_not(write):
    noise = np.random.default_rng(0).normal(size=(1000, 3)).cumsum(axis=0)
    columns = dict(zip("abc", noise.T, strict=True))
    assert topics(examine(write("D", **columns)), "warning") == ["dates"]
    columns["a"] = noise[:, 0] + 5 * (np.arange(1000) % 7 < 2)
    assert topics(examine(write("D", **columns)), "warning") == []


def test_real_files_are_fit_for_use(real_file):
    for name in ("ETTh1.csv", "ETTh2.csv", "EPF/NP.csv", "national_illness.csv"):
        assert examine(real_file(f"forecasting/{name}")).refusals == []
    report = examine(real_file("forecasting/exchange_rate.csv"))
    assert any("invented" in text for text in report.warnings)


def test_absent_file_is_a_finding(tmp_path):
    assert examine(tmp_path / "none.csv").refusals == ["no such file"]

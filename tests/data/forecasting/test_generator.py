"""The embedded series: deterministic, with regimes where it says and something to learn."""

import numpy as np
import pytest
import torch

from zoo.data.forecasting.generator import CYCLE, START, regimes
from zoo.domains.forecasting.baselines import Naive, Ridge
from zoo.domains.forecasting.drift import detect
from zoo.domains.forecasting.metrics import score, window_sums

TRAIN, TEST, LOOKBACK, HORIZON = 2800, 3200, 96, 24


@pytest.fixture(scope="module")
def series():
    return regimes()


@pytest.fixture(scope="module")
def scaled(series):
    train = series.values[:TRAIN]
    return (series.values - train.mean(axis=0)) / train.std(axis=0)


def test_shape_names_and_rows(series):
    assert series.values.shape == (4000, 5)
    assert series.columns == tuple(f"district_{number}" for number in range(1, 6))
    assert series.known.shape == (4000, 1)
    assert series.known_columns == ("temperature",)
    assert series.change_rows == (800, 1440, 2000, 2400, 3600)
    assert series.kinds == ("base", "level", "season", "volatile", "trend", "season")
    assert np.isfinite(series.values).all()
    assert np.datetime64(START).astype("datetime64[D]").item().weekday() == 0


def test_same_seed_same_numbers_other_seed_others(series):
    again, other = regimes(), regimes(seed=1)
    np.testing.assert_array_equal(again.values, series.values)
    np.testing.assert_array_equal(again.known, series.known)
    assert np.abs(other.values - series.values).max() > 1


def test_size_is_the_callers():
    small = regimes(rows=1000, channels=2)
    assert small.values.shape == (1000, 2)
    assert small.change_rows == (200, 360, 500, 600, 900)
    with pytest.raises(ValueError, match="got 999 and 5"):
        regimes(rows=999)


def test_regimes_are_what_they_are_called(series, scaled):
    base, level, season, volatile = (
        scaled[a:b] for a, b in ((0, 800), (800, 1440), (1440, 2000), (2000, 2400))
    )

    def profile(rows: np.ndarray) -> np.ndarray:
        return rows[: len(rows) // CYCLE * CYCLE].reshape(-1, CYCLE, 5).mean(axis=0)

    assert (level.mean(axis=0) - base.mean(axis=0)).min() > 0.5
    assert (np.ptp(profile(season), axis=0) > 1.5 * np.ptp(profile(base), axis=0)).all()
    assert (volatile[CYCLE:] - volatile[:-CYCLE]).std() > 1.5 * (base[CYCLE:] - base[:-CYCLE]).std()


def test_news_reaches_further_districts_later(series):
    steps = np.diff(series.values[:800], n=1, axis=0)
    steps -= steps[: 33 * CYCLE].reshape(33, CYCLE, 5).mean(axis=0)[np.arange(len(steps)) % CYCLE]
    lagged = [
        np.corrcoef(steps[: -24 or None, 0], steps[lag : len(steps) - 24 + lag, 4])[0, 1] for lag in range(25)
    ]
    assert int(np.argmax(lagged)) == 24


def test_detector_finds_the_regimes_of_the_training_rows(series, scaled):
    found = [point.row for point in detect(scaled[:TRAIN], cycle=CYCLE).change_points]
    expected = [row for row in series.change_rows if row < TRAIN]
    assert len(found) == len(expected)
    assert np.abs(np.array(found) - expected).max() <= 2 * CYCLE


def test_ridge_beats_naive_and_the_known_column_helps(series, scaled):
    values = torch.tensor(scaled)
    known = torch.tensor((series.known - series.known[:TRAIN].mean()) / series.known[:TRAIN].std())
    starts = torch.arange(TRAIN - LOOKBACK - HORIZON + 1)
    rows = torch.arange(TEST - LOOKBACK, 4000 - LOOKBACK - HORIZON + 1)[:, None] + torch.arange(
        LOOKBACK + HORIZON
    )
    window, context = values[rows], known[rows]
    past, future = window[:, :LOOKBACK], window[:, LOOKBACK:]
    forecasts = (
        Naive().fit(values, starts, LOOKBACK, HORIZON)(past),
        Ridge().fit(values, starts, LOOKBACK, HORIZON)(past),
        Ridge().fit(values, starts, LOOKBACK, HORIZON, known=known)(past, context),
    )
    naive, ridge, seeing = (score(window_sums(forecast, future))["mse"] for forecast in forecasts)
    assert ridge < 0.4 * naive
    assert seeing < 0.92 * ridge

"""Errors as sums: the metric does not know how windows were batched."""

import math

import numpy as np
import pytest
import torch

from zoo.domains.forecasting.metrics import horizon_curve, score, window_sums

LOOKBACK, HORIZON = 24, 6


@pytest.fixture
def spike():
    """Test windows of a series that alternates 0, 1 and ends in three values of 100."""
    values = np.arange(100.0) % 2
    values[97:] = 100
    mean, deviation = values[:70].mean(), values[:70].std()
    assert (mean, deviation) == (0.5, 0.5)
    scaled = torch.tensor((values - mean) / deviation, dtype=torch.float32)
    first = 80 - LOOKBACK
    window = scaled[first:].unfold(0, LOOKBACK + HORIZON, 1)[..., None]
    assert len(window) == 15
    return window[:, LOOKBACK - 1 : LOOKBACK].expand(-1, HORIZON, -1), window[:, LOOKBACK:]


@pytest.mark.parametrize("batch", [1, 4, 7, 8, 15, 64])
def test_naive_errors_are_exact_for_every_batch_size(spike, batch):
    parts = [window_sums(f, t) for f, t in zip(*(x.split(batch) for x in spike), strict=True)]
    sums = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    assert score(sums) == pytest.approx({"mse": 2633.2, "mae": 14.2}, rel=1e-5)
    original = score(sums, torch.tensor([0.5]))
    assert original == pytest.approx({"mse": 658.3, "mae": 7.1}, rel=1e-5)


def test_sums_agree_with_numpy_and_skip_unobserved_cells():
    rng = np.random.default_rng(0)
    forecast, target = rng.standard_normal((2, 5, 4, 3))
    observed = rng.random((5, 4, 3)) > 0.3
    broken = np.where(observed, target, np.nan)
    sums = window_sums(torch.tensor(forecast), torch.tensor(broken), torch.tensor(observed))
    error = np.where(observed, forecast - target, 0)
    np.testing.assert_allclose(sums["squared"], (error**2).sum(axis=1))
    np.testing.assert_allclose(sums["absolute_step"], np.abs(error).sum(axis=2))
    assert sums["count"].sum() == observed.sum()
    scale = np.array([1.0, 2.0, 10.0])
    masked = np.ma.masked_array(forecast - target, ~observed)
    expected = {"mse": ((masked * scale) ** 2).mean(), "mae": np.abs(masked * scale).mean()}
    assert score(sums, torch.tensor(scale)) == pytest.approx(expected)
    curve = horizon_curve(sums)
    np.testing.assert_allclose(curve["mse"], (masked**2).mean(axis=(0, 2)))
    np.testing.assert_allclose(curve["mae"], np.abs(masked).mean(axis=(0, 2)))


def test_nothing_observed_scores_nan():
    zeros = torch.zeros(2, 3, 1)
    assert math.isnan(score(window_sums(zeros, zeros, zeros.bool()))["mse"])

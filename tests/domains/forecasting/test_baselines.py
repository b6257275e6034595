"""Yardsticks: definitions, and the published numbers on the real files."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import Ridge as SklearnRidge

from zoo.domains.forecasting import baselines
from zoo.domains.forecasting.baselines import Naive, Ridge, SeasonalNaive
from zoo.domains.forecasting.metrics import score, window_sums


def series(rows: int = 300, channels: int = 3, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.standard_normal((rows, channels)).cumsum(axis=0))


def cut(values: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    return values[starts[:, None] + torch.arange(length)]


def test_naive_repeats_the_last_row():
    past = torch.tensor([[[1.0, 5.0], [2.0, 6.0]]])
    forecast = Naive().fit(past[0], torch.tensor([0]), 2, 3)(past)
    assert forecast.tolist() == [[[2.0, 6.0]] * 3]


def test_seasonal_naive_repeats_the_last_cycle():
    past = torch.arange(5.0).reshape(1, 5, 1)
    forecast = SeasonalNaive(3).fit(past[0], torch.tensor([0]), 5, 7)(past)
    assert forecast[0, :, 0].tolist() == [2.0, 3.0, 4.0, 2.0, 3.0, 4.0, 2.0]


def test_seasonal_naive_needs_a_cycle():
    model = SeasonalNaive(52).fit(torch.zeros(60, 1), torch.tensor([0]), 36, 24)
    with pytest.raises(ValueError, match="36 rows holds no cycle of 52"):
        model(torch.zeros(1, 36, 1))


@pytest.mark.parametrize("with_known", [False, True])
@pytest.mark.parametrize(("center", "penalty"), [("mean", 1e-3), ("last", 1e-2)])
def test_ridge_agrees_with_sklearn(monkeypatch, center, penalty, with_known):
    monkeypatch.setattr(baselines, "_CELLS", 1000)  # several chunks
    lookback, horizon = 12, 4
    values, known = series(), series(channels=2, seed=1) if with_known else None
    starts = torch.arange(200)
    model = Ridge(center).fit(values, starts, lookback, horizon, known=known)

    def features(rows: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        window = cut(values, rows, 16).numpy()
        past = window[:, :lookback]
        origin = past.mean(axis=1, keepdims=True) if center == "mean" else past[:, -1:]
        columns = (past - origin).transpose(0, 2, 1)
        if known is not None:
            context = cut(known, rows, 16).numpy()
            head = context[:, :lookback]
            context = context - (head.mean(axis=1, keepdims=True) if center == "mean" else head[:, -1:])
            shared = np.repeat(context.reshape(len(rows), 1, -1), 3, axis=1)
            columns = np.concatenate([columns, shared], axis=2)
        target = (window[:, lookback:] - origin).transpose(0, 2, 1)
        return columns.reshape(-1, columns.shape[2]), target.reshape(-1, horizon), origin

    inputs, targets, _ = features(starts)
    reference = SklearnRidge(alpha=penalty * len(inputs)).fit(inputs, targets)
    rows = torch.arange(220, 260)
    asked, _, origin = features(rows)
    expected = reference.predict(asked).reshape(40, 3, horizon).transpose(0, 2, 1) + origin
    past = cut(values, rows, lookback)
    context = None if known is None else cut(known, rows, 16)
    np.testing.assert_allclose(model(past, context), expected, atol=1e-8)
    assert model(past.float(), context).dtype == torch.float32


def test_ridge_leaves_out_windows_with_unobserved_cells():
    values = series()
    spoiled, observed = values.clone(), torch.ones_like(values, dtype=torch.bool)
    spoiled[100, 1], observed[100, 1] = 1e6, False
    masked = Ridge().fit(spoiled, torch.arange(200), 12, 4, observed=observed)
    clean = Ridge().fit(values, torch.arange(200), 12, 4)
    past = cut(values, torch.arange(220, 230), 12)
    assert (masked(past) - clean(past)).abs().max() < 0.1
    with pytest.raises(ValueError, match="none of 3 training windows"):
        Ridge().fit(values, torch.arange(3), 12, 4, observed=torch.zeros_like(observed))


def test_known_columns_help_when_they_drive_the_series():
    driver = torch.tensor(np.random.default_rng(0).standard_normal((600, 1)))
    values = 2 * driver + 0.1 * series(600, 1)
    starts, asked = torch.arange(400), torch.arange(450, 560)
    window, context = cut(values, asked, 28), cut(driver, asked, 28)
    blind = Ridge().fit(values, starts, 24, 4)(window[:, :24])
    seeing = Ridge().fit(values, starts, 24, 4, known=driver)(window[:, :24], context)
    errors = [score(window_sums(forecast, window[:, 24:]))["mse"] for forecast in (blind, seeing)]
    assert errors[1] < 0.05 * errors[0]


def test_unknown_center_is_refused():
    with pytest.raises(ValueError, match="got 'median'"):
        Ridge("median")


@pytest.mark.parametrize(
    ("name", "lookback", "horizon", "model", "mse", "mae"),
    [
        ("ETTh1", 96, 96, Naive(), 1.294, 0.713),
        ("ETTh1", 96, 96, SeasonalNaive(24), 0.512, 0.433),
        ("ETTh1", 96, 96, Ridge(), 0.383, 0.392),
        ("ETTh2", 96, 96, Naive(), 0.432, 0.422),
        ("ETTh2", 96, 96, SeasonalNaive(24), 0.391, 0.380),
        ("ETTh2", 96, 96, Ridge(), 0.289, 0.338),
        ("exchange_rate", 96, 96, Naive(), 0.081, 0.196),
        ("exchange_rate", 96, 96, Ridge("last"), 0.083, 0.198),
        ("national_illness", 36, 24, Naive(), 6.213, 1.622),
        ("national_illness", 36, 24, Ridge("last"), 2.572, 1.029),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_published_numbers(real_file, name, lookback, horizon, model, mse, mae):
    values = pd.read_csv(real_file(f"forecasting/{name}.csv")).iloc[:, 1:].to_numpy(np.float64)
    rows = len(values)
    if name.startswith("ETT"):
        train, validation, end = 8640, 11520, 14400
    else:
        train, validation, end = int(0.7 * rows), rows - int(0.2 * rows), rows
    scaled = torch.tensor((values - values[:train].mean(axis=0)) / values[:train].std(axis=0))
    model.fit(scaled, torch.arange(train - lookback - horizon + 1), lookback, horizon)
    tested = torch.arange(validation - lookback, end - lookback - horizon + 1)
    parts = []
    for starts in tested.split(512):
        window = cut(scaled, starts, lookback + horizon)
        parts.append(window_sums(model(window[:, :lookback]), window[:, lookback:]))
    sums = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    assert score(sums) == pytest.approx({"mse": mse, "mae": mae}, abs=1e-3)

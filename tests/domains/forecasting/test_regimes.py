"""Kinds of residuals, and distance from the training regime."""

import numpy as np
import pytest

from zoo.domains.forecasting.drift import patch_statistics
from zoo.domains.forecasting.regimes import regime_distance, residual_kind

STEPS = np.arange(96)


def windows(rows: int = 60, scale: float = 0.3) -> np.ndarray:
    return scale * np.random.default_rng(0).standard_normal((rows, 96))


def phases(rows: int = 60) -> np.ndarray:
    return np.random.default_rng(1).uniform(0, 2 * np.pi, (rows, 1))


@pytest.mark.parametrize(
    ("residual", "kind"),
    [
        (windows() + np.linspace(-1, 1, 96), "trend"),
        (windows() + np.sin(2 * np.pi * STEPS / 24 + phases()), "seasonal"),
        (windows() + np.sin(2 * np.pi * STEPS / 12 + phases()) + np.linspace(-0.5, 0.5, 96), "seasonal"),
        (windows() + (-1.0) ** STEPS * phases(), "fluctuation"),
        (np.diff(windows(), axis=1), "fluctuation"),
        (windows(), "fluctuation"),
        (windows() + 1.0, "fluctuation"),
        (np.zeros((5, 24)), "fluctuation"),
    ],
    ids=["line", "day", "day on a line", "alternating", "differences", "white", "offset", "zero"],
)
def test_residual_kind(residual, kind):
    found, scores = residual_kind(residual)
    assert found == kind
    assert set(scores) == {"trend", "seasonal", "fluctuation"}


def test_scores_of_white_residuals_are_small_whatever_their_raw_shares():
    _, scores = residual_kind(windows(rows=256))
    assert max(abs(score) for score in scores.values()) < 3.5


def test_residual_kind_is_deterministic():
    assert residual_kind(windows(), seed=4) == residual_kind(windows(), seed=4)


@pytest.mark.parametrize(
    "residual", [np.zeros(10), np.zeros((3, 3)), np.full((3, 8), np.nan), np.zeros((0, 8))]
)
def test_residuals_that_are_no_table_are_refused(residual):
    with pytest.raises(ValueError, match=r"\(windows, steps >= 4\)"):
        residual_kind(residual)


def cut(values: np.ndarray) -> np.ndarray:
    return patch_statistics(values.reshape(-1, 24, values.shape[1]))


def test_distance_is_uniform_inside_and_one_outside():
    rng = np.random.default_rng(0)
    reference = cut(rng.standard_normal((24 * 300, 3)))
    inside = regime_distance(cut(rng.standard_normal((24 * 300, 3))), reference)
    outside = regime_distance(cut(rng.standard_normal((24 * 20, 3)) + 4), reference)
    assert inside.mean() == pytest.approx(0.5, abs=0.1)
    assert inside.min() >= 0
    assert outside.tolist() == [1.0] * 20


def test_rare_training_regime_is_not_outside():
    rng = np.random.default_rng(0)
    common, rare = rng.standard_normal((24 * 270, 2)), rng.standard_normal((24 * 30, 2)) + 6
    seen = regime_distance(cut(rng.standard_normal((24 * 50, 2)) + 6), cut(np.concatenate([common, rare])))
    unseen = regime_distance(cut(rng.standard_normal((24 * 50, 2)) + 6), cut(common))
    assert seen.mean() < 0.9
    assert unseen.min() == 1.0


def test_distance_changes_nothing_and_needs_enough_windows():
    reference, asked = np.ones((4, 2)), np.ones((1, 2))
    with pytest.raises(ValueError, match="4 training windows are too few for 5"):
        regime_distance(asked, reference)
    assert (reference == 1).all()


def test_patch_statistics_are_means_and_deviations():
    window = np.array([[[1.0], [3.0], [5.0], [5.0]]])
    assert patch_statistics(window, 2).tolist() == [[[2.0, 1.0, 5.0, 0.0]]]

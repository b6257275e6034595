"""The pattern that residuals of a regime hold, and how far a window lies from the training regime."""

from __future__ import annotations

import numpy as np

from .drift import Kind
from .mmd import Array

_TOP_BINS = 3  # frequencies that make a season
_WEAK = 2.0  # standard deviations under which a residual pattern is chance
_WINDOW_CAP = 256  # residual windows looked at, evenly spaced
_FLOOR = 1e-6  # spread of a z-scored feature below which it counts as constant


def residual_kind(
    residual: Array, *, permutations: int = 100, seed: int = 0
) -> tuple[Kind, dict[str, float]]:
    """Which kind of pattern a forecaster leaves in its residuals.

    Three shares of the power of each window are averaged over windows: that of a straight line (trend), that
    of the three strongest of the slower frequencies once the line is removed (seasonal), and that of the
    faster half of the frequencies (fluctuation). Raw shares are not comparable, so each is told in standard
    deviations of its own null: the same windows with their steps shuffled. Residuals without a pattern are
    irregular, hence fluctuation.

    Args:
        residual: ``(windows, steps)``, at least 4 steps.
        permutations: Shuffles that make the null.
        seed: Seed of the shuffles.

    Returns:
        The kind with the largest score, and the score of each kind.

    Raises:
        ValueError: If the residual is no finite table of at least 4 steps.
    """
    if residual.ndim != 2 or residual.shape[1] < 4 or not len(residual) or not np.isfinite(residual).all():
        raise ValueError(
            f"residuals must be a finite (windows, steps >= 4) table, got shape {residual.shape}"
        )
    chosen = np.linspace(0, len(residual) - 1, min(len(residual), _WINDOW_CAP)).astype(np.int64)
    rows = np.asarray(residual[chosen], dtype=np.float64)
    rng = np.random.default_rng(seed)
    observed = _pattern_shares(rows)
    null = np.stack([_pattern_shares(rng.permuted(rows, axis=1)) for _ in range(permutations)])
    scores = (observed - null.mean(axis=0)) / np.maximum(null.std(axis=0), _FLOOR)
    kinds: tuple[Kind, Kind, Kind] = ("trend", "seasonal", "fluctuation")
    kind = kinds[int(scores.argmax())] if scores.max() >= _WEAK else "fluctuation"
    return kind, {name: float(score) for name, score in zip(kinds, scores, strict=True)}


def _pattern_shares(rows: Array) -> Array:
    """Mean over windows of the trend, seasonal and fluctuation share: ``(3,)``."""
    rows = rows - rows.mean(axis=1, keepdims=True)
    line = np.linspace(-1, 1, rows.shape[1])
    line /= np.linalg.norm(line)
    slope = rows @ line
    power = np.abs(np.fft.rfft(rows - slope[:, None] * line))[:, 1:] ** 2
    half = power.shape[1] // 2
    total = np.maximum(power.sum(axis=1), _FLOOR**2)
    trend = slope**2 / np.maximum((rows**2).sum(axis=1), _FLOOR**2)
    seasonal = np.sort(power[:, :half], axis=1)[:, -_TOP_BINS:].sum(axis=1) / total
    return np.array([trend.mean(), seasonal.mean(), (power[:, half:].sum(axis=1) / total).mean()])


def regime_distance(features: Array, reference: Array, *, neighbours: int = 5) -> Array:
    """How far windows lie outside the training regime; nothing is learned or stored.

    The distance of a window is its mean distance to the nearest training windows, so that a regime seen in
    only a part of the training rows still counts as known. It is reported as the share of training
    windows that lie nearer to the others than this one does.

    Args:
        features: Any description of the windows asked about, such as ``patch_statistics``: ``(B, ...)``.
        reference: The same of training windows that do not overlap, ``(R, ...)``: overlapping ones would be
            each other's nearest and make everything else look new.
        neighbours: Nearest training windows that count.

    Returns:
        ``(B,)`` in [0, 1]; 1 is farther out than every training window.

    Raises:
        ValueError: If there are not more training windows than neighbours.
    """
    if len(reference) <= neighbours:
        raise ValueError(f"{len(reference)} training windows are too few for {neighbours} neighbours")
    centre, spread = reference.mean(axis=0), np.maximum(reference.std(axis=0), _FLOOR)
    known = ((reference - centre) / spread).reshape(len(reference), -1)
    asked = ((features - centre) / spread).reshape(len(features), -1)
    own = np.sort(_distances(known, known), axis=1)[:, 1 : neighbours + 1].mean(axis=1)
    theirs = np.sort(_distances(asked, known), axis=1)[:, :neighbours].mean(axis=1)
    return np.asarray(np.searchsorted(np.sort(own), theirs) / len(own))


def _distances(a: Array, b: Array) -> Array:
    squared = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T
    return np.asarray(np.sqrt(np.maximum(squared, 0)))

"""Change points of a series by permutation-tested maximum mean discrepancy (MMD).

The detector looks at data, never at weights. Rows are cut into blocks of whole cycles; a block is described
by the mean and the spread of its patches. A check takes two neighbouring windows of blocks and compares what
lies before and after every border inside them, against the same after shuffling groups of neighbouring
blocks, which keeps the autocorrelation within a group. After every check, flagged or not, the pair moves on
by one window.

A walk that wanders for longer than a group of blocks has no regimes: it is told as a few changes of level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .mmd import Array, Splits, by_group, gaussian_kernels, unbiased_mmd

Kind = Literal["trend", "seasonal", "fluctuation"]

_WINDOWS = 12  # a default window is this part of the series: about a dozen checks whatever the length
_GROUPS = 10  # shuffled units per window; 20 over 10 gives 184,756 arrangements, enough for p = 0.001
_MIN_GROUPS = 6  # 924 arrangements, the least with which p <= 0.01 can be reached
_MIN_BLOCK = 4  # rows in a block below which a standard deviation says nothing
# A flagged check is repeated with this many times the permutations: the correction over checks needs small p.
_REFINE = 10
_FLOOR = 1e-6  # spread of a z-scored feature below which it counts as constant
_SHARE = 0.25  # a channel is named if its statistic is at least this part of the largest


@dataclass(frozen=True, kw_only=True)
class ChangePoint:
    """One change of regime.

    Attributes:
        row: First row of the new regime.
        score: Unbiased MMD^2 of the channels between the blocks before and after the row.
        p_value: Permutation p-value of the check that found it.
        kind: What changed most: level or slope ("trend"), the profile of the cycle ("seasonal"), or the
            variation around both ("fluctuation").
        channels: Columns that changed.
    """

    row: int
    score: float
    p_value: float
    kind: Kind
    channels: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DriftReport:
    """What a run of the detector found.

    Attributes:
        change_points: In time order.
        checks: Number of comparisons made.
        flagged: Comparisons with p <= alpha, before the correction for their number.
        window: Rows of one detector window.
        alpha: Level of the test.
    """

    change_points: tuple[ChangePoint, ...]
    checks: int
    flagged: int
    window: int
    alpha: float

    def described(
        self, stamps: Sequence[str], columns: Sequence[str], start: int = 0
    ) -> list[dict[str, Any]]:
        """The change points as JSON-ready records, with dates and names.

        Args:
            stamps: Date of each row.
            columns: Name of each column.
            start: Number of the first row in the whole series.
        """
        return [
            {
                "row": start + point.row,
                "time": stamps[point.row],
                "score": point.score,
                "p_value": point.p_value,
                "kind": point.kind,
                "channels": [columns[channel] for channel in point.channels],
            }
            for point in self.change_points
        ]


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """How rows become blocks, groups of blocks and windows of groups."""

    block: int  # rows
    pieces: int  # patches per block
    per_group: int  # blocks
    groups: int  # per window

    @property
    def window(self) -> int:
        return self.block * self.per_group * self.groups

    @property
    def guard(self) -> int:
        """Groups between a border and an edge; what lies nearer is inside the neighbouring check."""
        return max(3, self.groups // 4)


@dataclass(frozen=True, kw_only=True)
class _Check:
    """Outcome of one comparison; the statistic of each channel and its own p-value beside the joint one."""

    p_value: float
    peaks: Array  # (C,)
    p_values: Array  # (C,)


def detect(
    values: Array,
    *,
    cycle: int = 24,
    window: int | None = None,
    patch: int | None = None,
    alpha: float = 0.01,
    permutations: int = 200,
    seed: int = 0,
) -> DriftReport:
    """Find the change points of a series.

    A check is flagged at ``p <= alpha``. A flagged check becomes a change point if it also survives the
    Benjamini-Hochberg correction over all checks, so that long stationary series stay without one. Change
    points nearer than one window are one change seen twice: the clearer is kept.

    Args:
        values: Series ``(n, C)`` without missing cells, each column on a scale of order one.
        cycle: Rows of the seasonal cycle; blocks hold whole cycles.
        window: Rows of a detector window, cut to whole blocks; if None, about a twelfth of the series.
        patch: Rows of a patch; a quarter of a block if None.
        alpha: Level of the test.
        permutations: Shuffles per check.
        seed: Seed of the shuffles.

    Returns:
        The report; without checks if the series is shorter than two windows.

    Raises:
        ValueError: If the series is not a finite table, or the window holds too few cycles to test.
    """
    if values.ndim != 2 or not np.isfinite(values).all():
        raise ValueError(f"drift detection needs a finite (rows, channels) table, got shape {values.shape}")
    layout = _layout(len(values), cycle, window, patch)
    blocks = len(values) // layout.block
    cut = values[: blocks * layout.block].reshape(blocks, layout.block, values.shape[1])
    features = patch_statistics(cut, layout.pieces)
    size = layout.groups * layout.per_group
    starts = range(0, len(features) - 2 * size + 1, size)
    rng = np.random.default_rng(seed)
    quick = Splits.shuffled(2 * layout.groups, layout.guard, permutations, rng)
    fine = Splits.shuffled(2 * layout.groups, layout.guard, permutations * _REFINE, rng)

    found: list[ChangePoint] = []
    for start in starts:
        kernels = gaussian_kernels(features[start : start + 2 * size])
        check = _check(kernels, layout, quick)
        if check.p_value <= alpha:
            rows = values[start * layout.block : (start + 2 * size) * layout.block]
            exact = _check(kernels, layout, fine).p_value
            found.append(_describe(rows, kernels, layout, start * layout.block, check, exact, alpha))
    kept = _survivors(found, len(starts), alpha)
    return DriftReport(
        change_points=_merge(kept, layout.window),
        checks=len(starts),
        flagged=len(found),
        window=layout.window,
        alpha=alpha,
    )


def _layout(rows: int, cycle: int, window: int | None, patch: int | None) -> _Layout:
    block = cycle * math.ceil(_MIN_BLOCK / cycle)
    pieces = max(1, block // patch) if patch else min(4, max(1, block // 2))
    blocks = (rows // _WINDOWS if window is None else window) // block
    per_group = max(1, round(blocks / _GROUPS))
    half = rows // (2 * block * per_group)
    groups = min(_GROUPS, max(_MIN_GROUPS, half)) if window is None else blocks // per_group
    if groups < _MIN_GROUPS:
        raise ValueError(f"a detector window needs at least {_MIN_GROUPS * block} rows, got window={window}")
    return _Layout(block=block, pieces=pieces, per_group=per_group, groups=groups)


def patch_statistics(windows: Array, pieces: int = 4) -> Array:
    """Mean and standard deviation of every patch of every channel.

    Args:
        windows: ``(B, L, C)``.
        pieces: Patches a window is cut into, of equal length as far as L allows.

    Returns:
        ``(B, C, 2 * pieces)``.
    """
    patches = np.array_split(windows, min(pieces, windows.shape[1]), axis=1)
    return np.stack([f(patch, axis=1) for patch in patches for f in (np.mean, np.std)], axis=-1)


def _check(kernels: Array, layout: _Layout, splits: Splits) -> _Check:
    """Permutation test of a pair of windows, exact over channels: each is scaled by its own null."""
    mmd, weight = unbiased_mmd(by_group(kernels, layout.per_group), splits, layout.per_group)
    peaks = (mmd * weight).max(axis=-1).round(9)  # equal sums differ in the last bits
    deviation = np.maximum(peaks.std(axis=1, keepdims=True), _FLOOR)
    clearest = ((peaks - peaks.mean(axis=1, keepdims=True)) / deviation).max(axis=0)
    return _Check(
        p_value=float((clearest >= clearest[0]).mean()),
        peaks=peaks[:-1, 0],
        p_values=(peaks[:-1] >= peaks[:-1, :1]).mean(axis=1),
    )


def _describe(
    rows: Array, kernels: Array, layout: _Layout, first: int, check: _Check, p_value: float, alpha: float
) -> ChangePoint:
    """Change point of a flagged pair of windows that begins at row ``first``."""
    named = (check.p_values <= alpha) & (check.peaks >= _SHARE * check.peaks.max())
    moved = np.flatnonzero(named) if named.any() else np.array([check.peaks.argmax()])
    guard = layout.guard * layout.per_group
    mmd, weight = unbiased_mmd(
        kernels[moved].mean(axis=0, keepdims=True), Splits.in_time(kernels.shape[-1], guard)
    )
    best = int((mmd[0] * weight).argmax())
    border = (guard + best) * layout.block
    return ChangePoint(
        row=first + border,
        score=float(mmd[0, best]),
        p_value=p_value,
        kind=_change_kind(rows[:border, moved], rows[border:, moved], layout.block),
        channels=tuple(int(channel) for channel in moved),
    )


def _change_kind(before: Array, after: Array, block: int) -> Kind:
    """Which of level and slope, cycle profile, and remaining spread moved most, in units of the series."""
    (level, slope, profile, spread), (level2, slope2, profile2, spread2) = (
        _parts(before, block),
        _parts(after, block),
    )
    moves: dict[Kind, float] = {
        "trend": float(np.hypot(level2 - level, slope2 - slope).max()),
        "seasonal": float(np.sqrt(((profile2 - profile) ** 2).mean(axis=0)).max()),
        "fluctuation": float(np.abs(spread2 - spread).max()),
    }
    return max(moves, key=lambda kind: moves[kind])


def _parts(rows: Array, block: int) -> tuple[Array, Array, Array, Array]:
    """Level, spread due to a straight line, profile ``(block, C)`` and spread of the rest, per channel."""
    cut = rows.reshape(-1, block, rows.shape[1])
    means = cut.mean(axis=1)
    level = means.mean(axis=0)
    profile = (cut - means[:, None]).mean(axis=0)
    time = np.linspace(-math.sqrt(3), math.sqrt(3), len(means))  # unit variance
    slope = (time[:, None] * (means - level)).mean(axis=0)
    rest = (cut - means[:, None] - profile).std(axis=(0, 1))
    return level, slope, profile, rest


def _survivors(found: list[ChangePoint], checks: int, alpha: float) -> list[ChangePoint]:
    """Benjamini-Hochberg at level alpha over all checks."""
    ordered = sorted(found, key=lambda point: point.p_value)
    passed = [rank for rank, point in enumerate(ordered, 1) if point.p_value <= alpha * rank / checks]
    return ordered[: max(passed, default=0)]


def _merge(points: list[ChangePoint], window: int) -> tuple[ChangePoint, ...]:
    kept: list[ChangePoint] = []
    for point in sorted(points, key=lambda point: (point.p_value, -point.score)):
        if all(abs(point.row - other.row) >= window for other in kept):
            kept.append(point)
    return tuple(sorted(kept, key=lambda point: point.row))

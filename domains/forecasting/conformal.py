"""Split-conformal intervals around forecasts, calibrated on validation windows.

The guarantee is for exchangeable windows. Overlapping windows of a drifting series are not, so the coverage
found on test stands beside the nominal one wherever an interval is shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MINIMUM_WINDOWS = 50


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Half-widths of symmetric intervals.

    Attributes:
        radius: ``(H, C)``, in the units of the residuals.
        level: Nominal coverage.
        windows: Calibration windows.
    """

    radius: Tensor
    level: float
    windows: int


def windows_needed(level: float) -> int:
    """Calibration windows below which no interval of this level is given."""
    return max(MINIMUM_WINDOWS, math.ceil(round(level / (1 - level), 9)))


def calibrate(residuals: Tensor, level: float = 0.9, observed: Tensor | None = None) -> Intervals | None:
    """Intervals from the residuals of validation windows.

    The radius of a step and channel is the k-th smallest absolute residual with
    ``k = ceil((n + 1) * level)``, the finite-sample correction of split-conformal prediction.

    Args:
        residuals: ``(W, H, C)``.
        level: Nominal coverage, in (0, 1).
        observed: True where the target was measured, ``(W, H, C)``; everywhere if None.

    Returns:
        The intervals, or None if there are too few windows; see :func:`notice`. A step and channel with too
        few observed residuals has an infinite radius.

    Raises:
        ValueError: If the level is not between 0 and 1.
    """
    if not 0 < level < 1:
        raise ValueError(f"the level of an interval must lie between 0 and 1, got {level}")
    if len(residuals) < windows_needed(level):
        return None
    size = residuals.abs()
    if observed is not None:
        size = size.masked_fill(~observed.bool(), math.inf)
    count = size.isfinite().sum(dim=0)
    rank = torch.ceil((count + 1).double() * level - 1e-9).long()
    # unobserved cells sort last, so a rank beyond the count reads infinity once one more row is appended
    ordered = torch.cat([size.sort(dim=0).values, torch.full_like(size[:1], math.inf)])
    radius = ordered.gather(0, (rank - 1).unsqueeze(0)).squeeze(0)
    return Intervals(radius=radius, level=level, windows=len(residuals))


def notice(windows: int, level: float = 0.9) -> str:
    """Why there is no interval, in one line."""
    return f"no {level:.0%} interval: {windows} validation windows, {windows_needed(level)} are needed"


def covered(
    forecast: Tensor, target: Tensor, radius: Tensor, observed: Tensor | None = None
) -> dict[str, Tensor]:
    """Targets inside the interval and targets counted, per window and channel.

    Args:
        forecast: ``(B, H, C)``.
        target: ``(B, H, C)``.
        radius: ``(H, C)``.
        observed: True where the target was measured, ``(B, H, C)``; everywhere if None.

    Returns:
        ``inside`` and ``counted``, ``(B, C)``: their totals over all windows give the coverage.
    """
    counted = torch.ones_like(target, dtype=torch.bool) if observed is None else observed.bool()
    inside = ((target - forecast).abs() <= radius) & counted
    return {"inside": inside.sum(dim=1), "counted": counted.sum(dim=1)}

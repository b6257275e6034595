"""Errors of forecasts as sums, so that a metric never depends on how windows were batched.

Every window yields sums and counts; a metric is total error over total count. Windows overlap and are counted
each: ``rows - horizon + 1`` of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

PROTOCOL = "all windows, stride 1, z-scored by train"


def window_sums(forecast: Tensor, target: Tensor, observed: Tensor | None = None) -> dict[str, Tensor]:
    """Sums of errors of each window, in float64 where the device has it.

    Args:
        forecast: ``(B, H, C)``.
        target: ``(B, H, C)``.
        observed: True where the target was measured, ``(B, H, C)``; everywhere if None.

    Returns:
        ``squared``, ``absolute``, ``count`` per channel ``(B, C)``, and the same with suffix ``_step`` per
        step of the horizon ``(B, H)``. Unobserved cells count nowhere, whatever value they hold.
    """
    error = forecast - target
    if error.device.type != "mps":  # which has no float64
        error = error.double()
    count = torch.ones_like(error) if observed is None else observed.to(error.dtype)
    if observed is not None:
        error = error.masked_fill(~observed.bool(), 0.0)
    cells = {"squared": error.square(), "absolute": error.abs(), "count": count}
    channels = {name: cell.sum(dim=1) for name, cell in cells.items()}
    steps = {f"{name}_step": cell.sum(dim=2) for name, cell in cells.items()}
    return channels | steps


def score(sums: Mapping[str, Tensor], scale: Tensor | None = None) -> dict[str, float]:
    """Mean squared and mean absolute error over all counted cells.

    Args:
        sums: Output of :func:`window_sums`, concatenated over windows.
        scale: Standard deviation of each channel ``(C,)``, to score in the units of the file; None to score
            z-scored values.

    Returns:
        ``mse`` and ``mae``; NaN if no cell was observed.
    """
    squared, absolute = sums["squared"].sum(dim=0), sums["absolute"].sum(dim=0)
    if scale is not None:
        scale = scale.to(squared)
        squared, absolute = squared * scale.square(), absolute * scale
    count = sums["count"].sum()
    return {"mse": float(squared.sum() / count), "mae": float(absolute.sum() / count)}


def horizon_curve(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Errors of each step of the horizon: ``mse`` and ``mae``, ``(H,)``; NaN where nothing was observed."""
    count = sums["count_step"].sum(dim=0)
    return {"mse": sums["squared_step"].sum(dim=0) / count, "mae": sums["absolute_step"].sum(dim=0) / count}

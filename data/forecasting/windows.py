"""Sliding windows over one multivariate series: the samples of the forecasting domain.

Shapes: n rows, B windows, L lookback, H horizon, C columns to forecast, K known-future columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


@dataclass(frozen=True, kw_only=True)
class ForecastingSpec:
    """What a forecaster must know about its data.

    Attributes:
        name: of the data set or file.
        columns: C columns to forecast, in order.
        known: K columns whose future is known.
        lookback: L rows seen.
        horizon: H rows forecast.
        freq: step between rows, a pandas offset alias, or a number for integer indexes.
        cycle: steps per cycle.
        zone: time zone of the stamps, or None.
        mean, std: scaler of the columns, from the training rows.
        known_mean, known_std: scaler of the known-future columns.
    """

    name: str
    columns: tuple[str, ...]
    known: tuple[str, ...] = ()
    lookback: int
    horizon: int
    freq: str = "1"
    cycle: int = 1
    zone: str | None = None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    known_mean: tuple[float, ...] = ()
    known_std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        # JSON and checkpoints bring lists back.
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, list):
                object.__setattr__(self, item.name, tuple(value))


@dataclass(kw_only=True)
class WindowBatch:
    """A batch of windows, z-scored by the training rows.

    Attributes:
        index: (B,) number of each window in its split.
        past: (B, L, C).
        future: (B, H, C), the truth.
        scored: (B, H, C) bool, False where the file held no value.
        phase: (B,) position in the cycle of each window's first row.
        known: (B, L + H, K), or None without known-future columns.
    """

    index: Tensor
    past: Tensor
    future: Tensor
    scored: Tensor
    phase: Tensor
    known: Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> WindowBatch:
        """The same batch on another device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def floats(self, dtype: torch.dtype) -> WindowBatch:
        """The same batch with its values in another precision."""
        return self._each(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    def pin_memory(self) -> WindowBatch:
        """The same batch in page-locked memory."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, move: Callable[[Tensor], Tensor]) -> WindowBatch:
        held = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(self, **{name: move(tensor) for name, tensor in held.items() if tensor is not None})


def whole_batch(samples: WindowBatch) -> WindowBatch:
    """The batch as it comes out of :class:`Windows`."""
    return samples


class Windows(Dataset[WindowBatch]):
    """All windows whose targets lie in rows [start, stop), stride 1.

    Args:
        values: (n, C) float32, z-scored.
        observed: (n, C) bool.
        known: (n, K) float32 or None.
        phase: (n,) int64.
        first: row of the first window's first input.
        count: number of windows.
        lookback: L.
        horizon: H.
    """

    def __init__(
        self,
        *,
        values: Tensor,
        observed: Tensor,
        known: Tensor | None,
        phase: Tensor,
        first: int,
        count: int,
        lookback: int,
        horizon: int,
    ) -> None:
        self.values, self.observed, self.known, self.phase = values, observed, known, phase
        self.first, self.count = first, count
        self.lookback, self.horizon = lookback, horizon

    def __len__(self) -> int:
        return self.count

    def starts(self) -> np.ndarray:
        """Row of each window's first input, (count,)."""
        return np.arange(self.first, self.first + self.count)

    def cells(self) -> tuple[int, int]:
        """Target cells that are scored, and all target cells, counted in every window that they are in."""
        start = self.first + self.lookback
        targets = self.observed[start : start + self.count + self.horizon - 1]
        scored = targets.unfold(0, self.horizon, 1).sum()
        return int(scored), self.count * self.horizon * targets.shape[1]

    def __getitem__(self, index: int) -> WindowBatch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> WindowBatch:
        """Cut a whole batch at once, which is much faster than window by window."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        start = index + self.first
        rows = start[:, None] + torch.arange(self.lookback + self.horizon)
        window = self.values[rows]
        return WindowBatch(
            index=index,
            past=window[:, : self.lookback],
            future=window[:, self.lookback :],
            scored=self.observed[rows[:, self.lookback :]],
            phase=self.phase[start],
            known=None if self.known is None else self.known[rows],
        )

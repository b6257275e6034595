"""Forecasters without training loops: the yardsticks printed beside every model.

All take the same words: ``fit`` on training windows, then a call on a batch of pasts. Values are z-scored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

_CELLS = 2**23  # of one chunk of windows while a regression is fitted
_PENALTIES = {"mean": 1e-3, "last": 1e-2}


class Baseline(Protocol):
    """A closed-form or untrained forecaster."""

    name: str

    def fit(
        self,
        values: Tensor,
        starts: Tensor,
        lookback: int,
        horizon: int,
        *,
        observed: Tensor | None = None,
        known: Tensor | None = None,
    ) -> Self:
        """Learn from training windows.

        Args:
            values: Series ``(n, C)``.
            starts: First row of each training window, ``(W,)``.
            lookback: Rows that are given.
            horizon: Rows to forecast.
            observed: True where a cell was measured, ``(n, C)``; everywhere if None.
            known: Columns known in the future, ``(n, K)``.
        """
        ...

    def __call__(self, past: Tensor, known: Tensor | None = None) -> Tensor:
        """Forecast ``(B, H, C)`` from ``past (B, L, C)`` and ``known (B, L + H, K)``."""
        ...


class Naive:
    """The last value, repeated."""

    name = "naive"

    def __init__(self) -> None:
        self.horizon = 0

    def fit(
        self,
        values: Tensor,
        starts: Tensor,
        lookback: int,
        horizon: int,
        *,
        observed: Tensor | None = None,
        known: Tensor | None = None,
    ) -> Self:
        """Take the horizon; there is nothing to learn."""
        self.horizon = horizon
        return self

    def __call__(self, past: Tensor, known: Tensor | None = None) -> Tensor:
        """Forecast ``(B, H, C)`` from ``past (B, L, C)``."""
        return past[:, -1:].repeat(1, self.horizon, 1)


class SeasonalNaive(Naive):
    """The last cycle, repeated.

    Args:
        cycle: Rows of a cycle.
    """

    name = "seasonal_naive"

    def __init__(self, cycle: int) -> None:
        super().__init__()
        self.cycle = cycle

    def __call__(self, past: Tensor, known: Tensor | None = None) -> Tensor:
        """Forecast ``(B, H, C)`` from ``past (B, L, C)``.

        Raises:
            ValueError: If the past is shorter than a cycle.
        """
        if past.shape[1] < self.cycle:
            raise ValueError(f"a lookback of {past.shape[1]} rows holds no cycle of {self.cycle}")
        steps = torch.arange(self.horizon, device=past.device) % self.cycle
        return past[:, -self.cycle :][:, steps]


class Ridge:
    """One penalised linear map from past to future, shared by all channels, in closed form.

    Each window is taken relative to its own past, mapped, and put back. The normal equations are summed over
    chunks of windows in float64. Known columns are further regressors over past and future, relative to their
    own past as well. The intercept of each step carries no penalty.

    Args:
        center: What a window is taken relative to: the mean or the last row of its past.
        penalty: Weight of the squared coefficients per row of the regression; None for 1e-3 with the mean and
            1e-2 with the last row.
    """

    name = "ridge"

    def __init__(self, center: Literal["mean", "last"] = "mean", penalty: float | None = None) -> None:
        if center not in _PENALTIES:
            raise ValueError(f"center must be mean or last, got {center!r}")
        self.center = center
        self.penalty = _PENALTIES[center] if penalty is None else penalty
        self.lookback = 0
        self.weight = torch.zeros(0, 0, dtype=torch.float64)  # (1 + L + K (L + H), H)

    def fit(
        self,
        values: Tensor,
        starts: Tensor,
        lookback: int,
        horizon: int,
        *,
        observed: Tensor | None = None,
        known: Tensor | None = None,
    ) -> Self:
        """Solve the normal equations over the training windows; see :class:`Baseline`.

        A window of a channel with an unobserved cell is left out.

        Raises:
            ValueError: If no window is complete.
        """
        self.lookback = lookback
        width = 1 + lookback + (0 if known is None else known.shape[1] * (lookback + horizon))
        gram = torch.zeros(width, width, dtype=torch.float64, device=values.device)
        cross = torch.zeros(width, horizon, dtype=torch.float64, device=values.device)
        rows = 0
        for past, future, context, complete in _chunks(values, starts, lookback, horizon, observed, known):
            features = self._features(past, context)[complete]
            targets = (future - self._origin(past)).transpose(1, 2)[complete]
            gram += features.T @ features
            cross += features.T @ targets
            rows += len(features)
        if not rows:
            raise ValueError(f"none of {len(starts)} training windows is complete")
        gram.diagonal()[1:] += self.penalty * rows
        self.weight = torch.linalg.solve(gram, cross)
        return self

    def __call__(self, past: Tensor, known: Tensor | None = None) -> Tensor:
        """Forecast ``(B, H, C)`` from ``past (B, L, C)`` and ``known (B, L + H, K)``, if fitted with it."""
        exact = past.double()
        context = None if known is None else known.double()
        mapped = self._features(exact, context) @ self.weight.to(past.device)
        return (mapped.transpose(1, 2) + self._origin(exact)).to(past.dtype)

    def _origin(self, past: Tensor) -> Tensor:
        return past.mean(dim=1, keepdim=True) if self.center == "mean" else past[:, -1:]

    def _features(self, past: Tensor, known: Tensor | None) -> Tensor:
        """One and the regressors of each channel: ``(B, C, 1 + L + K (L + H))``."""
        relative = (past - self._origin(past)).transpose(1, 2)
        columns = [torch.ones_like(relative[..., :1]), relative]
        if known is not None:
            context = (known - self._origin(known[:, : past.shape[1]])).flatten(1)
            columns.append(context[:, None].expand(-1, relative.shape[1], -1))
        return torch.cat(columns, dim=2)


def _chunks(
    values: Tensor,
    starts: Tensor,
    lookback: int,
    horizon: int,
    observed: Tensor | None,
    known: Tensor | None,
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
    """Past ``(b, L, C)``, future ``(b, H, C)``, known ``(b, L + H, K)`` and completeness ``(b, C)``."""
    length = lookback + horizon
    width = values.shape[1] * (length + (0 if known is None else known.shape[1] * length))
    for chunk in torch.split(starts, max(1, _CELLS // width)):
        rows = chunk[:, None] + torch.arange(length, device=chunk.device)
        window = values[rows].double()
        complete = torch.ones_like(window[:, 0], dtype=torch.bool)
        if observed is not None:
            complete = observed[rows].bool().all(dim=1)
        context = None if known is None else known[rows].double()
        yield window[:, :lookback], window[:, lookback:], context, complete

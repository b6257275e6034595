"""Groups of tokens that share one decision: a window, a sequence, a sample, or any numbering.

A grouping turns tokens x (..., D) into one row per decision for the scorer, and says which decision each token follows.
Masked tokens have no say, whether they pad a sequence or lie in it; a group without real tokens is masked itself.

Shapes: ... any leading dimensions, B samples, P positions of a sequence, D width, T tokens, G groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zoo.moe.precision import raised
from zoo.moe.routing import Context, Members

Pool = Literal["mean", "last"]


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """Tokens by decision.

    Attributes:
        x: (..., D) one row per decision.
        mask: (...) bool, decisions with at least one real token; None if all have.
        members: the decision of each of the T tokens.
    """

    x: Tensor
    mask: Tensor | None
    members: Members


@dataclass(frozen=True)
class PerSample:
    """One decision per element of the first dimension: x (B, ..., D) → B decisions.

    Attributes:
        pool: what the scorer sees of a group: the mean of its real tokens, or its last one.
    """

    pool: Pool = "mean"

    def __call__(self, x: Tensor, mask: Tensor | None, context: Context | None) -> Grouped:
        """Group tokens (B, ..., D)."""
        count = x.shape[0]
        number = torch.arange(count, device=x.device)
        number = number.reshape(-1, *(1,) * (x.ndim - 2)).expand(x.shape[:-1])
        return _gather(x, mask, number, (count,), self.pool)


@dataclass(frozen=True)
class PerSequence:
    """One decision per sequence: x (..., P, D) → (...) decisions.

    Attributes:
        pool: what the scorer sees of a group: the mean of its real tokens, or its last one.
    """

    pool: Pool = "mean"

    def __call__(self, x: Tensor, mask: Tensor | None, context: Context | None) -> Grouped:
        """Group tokens (..., P, D)."""
        shape = x.shape[:-2]
        number = torch.arange(math.prod(shape), device=x.device).reshape(*shape, 1).expand(x.shape[:-1])
        return _gather(x, mask, number, shape, self.pool)


@dataclass(frozen=True)
class PerWindow:
    """One decision per run of ``size`` positions of a sequence, masked ones included; the last run may be shorter.

    Attributes:
        size: tokens per window.
        pool: what the scorer sees of a group: the mean of its real tokens, or its last one, which in a causal network
            has seen the others (n-gram windows of LiME, arXiv 2604.02338).
    """

    size: int
    pool: Pool = "mean"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a window needs size >= 1, not size={self.size}")

    def __call__(self, x: Tensor, mask: Tensor | None, context: Context | None) -> Grouped:
        """Group tokens (..., P, D) into (..., ceil(P / size)) decisions."""
        *outer, length = x.shape[:-1]
        windows = -(-length // self.size)
        first = torch.arange(math.prod(outer), device=x.device).reshape(*outer, 1) * windows
        number = first + torch.arange(length, device=x.device) // self.size
        return _gather(x, mask, number, (*outer, windows), self.pool)


@dataclass(frozen=True)
class PerGroup:
    """One decision per number in ``context.group``, which has one entry 0..G-1 per token.

    G is one above the largest number of a real token. A number that no real token has makes a masked decision.

    Attributes:
        pool: what the scorer sees of a group: the mean of its real tokens, or its last one.
    """

    pool: Pool = "mean"

    def __call__(self, x: Tensor, mask: Tensor | None, context: Context | None) -> Grouped:
        """Group tokens (..., D) into G decisions.

        Raises:
            ValueError: the context holds no group numbers of the tokens' shape, or a negative one.
        """
        number = None if context is None else context.group
        if number is None or number.shape != x.shape[:-1]:
            found = None if number is None else tuple(number.shape)
            raise ValueError(f"context.group must have the tokens' shape {tuple(x.shape[:-1])}, not {found}")
        mask = torch.ones_like(number, dtype=torch.bool) if mask is None else mask
        # Whatever number a masked token has, it goes along with the first group.
        number = torch.where(mask, number, 0)
        low, high = (int(bound) for bound in torch.aminmax(number)) if number.numel() else (0, -1)
        if low < 0:
            raise ValueError(f"context.group holds {low}, but groups are numbered from 0")
        return _gather(x, mask, number, (high + 1,), self.pool)


Grouping = PerSample | PerSequence | PerWindow | PerGroup


def _gather(x: Tensor, mask: Tensor | None, number: Tensor, shape: tuple[int, ...], pool: Pool) -> Grouped:
    """Pool tokens x (..., D) by ``number`` (...), their group, into ``shape`` groups."""
    rows, number = x.reshape(-1, x.shape[-1]), number.reshape(-1).long()
    real = None if mask is None else mask.reshape(-1)
    count = math.prod(shape)
    if pool == "mean":
        # Half precision loses the tail of a long group. Adding row after row, and zeros for masked tokens, gives a
        # padded group the same bits as a bare one.
        rows = raised(rows)
        weight = torch.ones_like(number) if real is None else real.long()
        total = number.new_zeros(count).index_add(0, number, weight)
        summed = rows.new_zeros(count, x.shape[-1]).index_add(0, number, rows * weight[:, None])
        pooled = (summed / total.clamp_min(1)[:, None]).to(x.dtype)
        seen = total > 0
    else:
        place = torch.arange(number.shape[0], device=x.device)
        place = place if real is None else torch.where(real, place, -1)
        last = torch.full((count,), -1, device=x.device).scatter_reduce(0, number, place, "amax")
        seen = last >= 0
        # A row of zeros at place -1, for groups without a real token.
        pooled = torch.cat([rows, rows.new_zeros(1, x.shape[-1])])[last]
    return Grouped(
        x=pooled.reshape(*shape, x.shape[-1]),
        mask=None if real is None and len(number) else seen.reshape(shape),
        members=Members(decision=number, mask=real),
    )

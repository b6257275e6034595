"""Selectors: which experts a decision goes to.

Every selector narrows a :class:`Selection`, which starts as "all experts that are on, for all real tokens". So they
chain: ``[TopK(2), Capacity(1.25)]`` takes the two best and then drops what finds its expert full. Ties go to the lowest
index, on every device.

A selector whose choice for one token depends on other tokens says so in ``depends_on_batch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Choices in the making, for R decisions among E experts.

    Attributes:
        scores: (R, E), comparable within a row; -inf for experts that are off.
        probs: (R, E), the router's distribution, comparable across rows too.
        index: (R, K) chosen experts; None for every expert in order, K = E.
        valid: (R, K) choices that count; None if all do.
        dropped: (R, K) choices refused for want of capacity; None if there was no capacity.
    """

    scores: Tensor
    probs: Tensor
    index: Tensor | None = None
    valid: Tensor | None = None
    dropped: Tensor | None = None

    def taken(self) -> Tensor:
        """(R, K) int64: the chosen experts, written out."""
        if self.index is not None:
            return self.index
        return torch.arange(self.scores.shape[-1], device=self.scores.device).expand_as(self.scores)

    def counting(self) -> Tensor:
        """(R, K) bool: the choices that count, written out."""
        if self.valid is not None:
            return self.valid
        shape = self.scores.shape if self.index is None else self.index.shape
        return torch.ones(shape, dtype=torch.bool, device=self.scores.device)

    def at(self, values: Tensor) -> Tensor:
        """(R, K): the entries of ``values`` (R, E) at the chosen experts."""
        return values if self.index is None else values.gather(1, self.index)


class TopK(nn.Module):
    """The k best of the experts still in question.

    Args:
        k: choices per token. If fewer experts are in question, the surplus choices are invalid.
    """

    depends_on_batch = False

    def __init__(self, k: int) -> None:
        super().__init__()
        if k < 1:
            raise ValueError(f"top-k needs k >= 1, not k={k}")
        self.k = k

    def forward(self, selection: Selection) -> Selection:
        """Narrow (R, K') choices to (R, k)."""
        if selection.index is None and selection.valid is None:
            place = first_largest(selection.scores, self.k)
            return Selection(scores=selection.scores, probs=selection.probs, index=place)
        scores = selection.at(selection.scores)
        if selection.valid is not None:
            scores = scores.masked_fill(~selection.valid, -torch.inf)
        place = first_largest(scores, self.k)
        return replace(
            selection,
            index=place if selection.index is None else selection.index.gather(1, place),
            valid=None if selection.valid is None else selection.valid.gather(1, place),
            dropped=None if selection.dropped is None else selection.dropped.gather(1, place),
        )

    def extra_repr(self) -> str:
        """Shows k in the module's print-out."""
        return f"k={self.k}"


def first_largest(scores: Tensor, k: int) -> Tensor:
    """(R, k) places of the k largest of each row (R, E), best first; among equals the lowest place."""
    if k == 1:
        return scores.argmax(-1, keepdim=True)
    experts = scores.shape[-1]
    if scores.device.type == "cpu" and experts >= 4 * k and scores.numel() >= 1024 * k:
        return _by_passes(scores, k)
    # A stable sort, because torch.topk breaks ties differently on each device.
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]


def _by_passes(scores: Tensor, k: int) -> Tensor:
    """The same by k passes of argmax, which returns the first of equals: less work for few choices of many experts."""
    # What is taken gets -inf, so that only the taken may hold it.
    scores = scores.clamp_min(torch.finfo(scores.dtype).min)
    places = [scores.argmax(-1, keepdim=True)]
    for _ in range(k - 1):
        scores.scatter_(1, places[-1], -torch.inf)
        places.append(scores.argmax(-1, keepdim=True))
    return torch.cat(places, 1)


class Dense(nn.Module):
    """Every expert that is switched on."""

    depends_on_batch = False

    def forward(self, selection: Selection) -> Selection:
        """Narrow nothing."""
        return selection


class RelativeThreshold(nn.Module):
    """Only experts whose probability reaches a share of the best one's: {e : p_e >= ratio · max p}.

    The best expert always stays, so no token is left without one.

    Args:
        ratio: in (0, 1]; 1 keeps the best (and its equals) alone.

    Reference: Auto Top-K of LiME (arXiv 2604.02338; 0.7 in the paper).
    """

    depends_on_batch = False

    def __init__(self, ratio: float) -> None:
        super().__init__()
        if not 0 < ratio <= 1:
            raise ValueError(f"a relative threshold lies in (0, 1], not at ratio={ratio}")
        self.ratio = ratio

    def forward(self, selection: Selection) -> Selection:
        """Clear the choices below the threshold."""
        valid = selection.counting()
        probs = torch.where(valid, selection.at(selection.probs), 0.0)
        return replace(selection, valid=valid & (probs >= self.ratio * probs.amax(-1, keepdim=True)))

    def extra_repr(self) -> str:
        """Shows the ratio in the module's print-out."""
        return f"ratio={self.ratio}"


class Capacity(nn.Module):
    """At most C = ceil(factor · choices / experts) choices per expert, at least 1; the others are dropped.

    Choices that do not count take no room. A dropped choice has weight 0; a gate that renormalises spreads its weight
    over the choices that are left. In evaluation nothing is dropped unless ``eval_factor`` is given.

    Args:
        factor: room over that of an even load, in training.
        drop: what to keep where there are too many: the most probable ("probs") or the first ("position": tokens in
            order, every token's first choice before any second one).
        eval_factor: the factor in evaluation; None drops nothing.

    Reference: Switch Transformer (arXiv 2101.03961, eq. 3) for the room; V-MoE (arXiv 2106.05974, sec. 4) for "probs".
    """

    def __init__(
        self, factor: float, drop: Literal["probs", "position"] = "probs", eval_factor: float | None = None
    ) -> None:
        super().__init__()
        for name, value in (("factor", factor), ("eval_factor", eval_factor)):
            if value is not None and not value > 0:
                raise ValueError(f"a capacity needs {name} > 0, not {value}")
        if drop not in ("probs", "position"):
            raise ValueError(f"drop={drop!r} must be 'probs' or 'position'")
        self.factor, self.drop, self.eval_factor = factor, drop, eval_factor

    @property
    def depends_on_batch(self) -> bool:
        """Whether anything can be dropped in the present mode."""
        return self.training or self.eval_factor is not None

    def forward(self, selection: Selection) -> Selection:
        """Clear the choices that find their expert full."""
        factor = self.factor if self.training else self.eval_factor
        if factor is None:
            return selection
        index, valid = selection.taken(), selection.counting()
        room = _ceil(factor * valid.sum() / _offered(selection))
        # Column after column, so that first choices come before second ones.
        expert = torch.where(valid, index, selection.scores.shape[-1]).T.flatten()
        order = torch.arange(expert.shape[0], device=expert.device)
        if self.drop == "probs":
            order = torch.argsort(selection.at(selection.probs).T.flatten(), descending=True, stable=True)
        fits = _place_in_run(expert, order) < room
        kept = valid & fits.reshape(index.T.shape).T
        return replace(selection, index=index, valid=kept, dropped=valid & ~kept)

    def extra_repr(self) -> str:
        """Shows the settings in the module's print-out."""
        return f"factor={self.factor}, drop={self.drop}, eval_factor={self.eval_factor}"


def _offered(selection: Selection) -> Tensor:
    """() int64: the number of experts that are on."""
    return (selection.scores > -torch.inf).any(0).sum()


def _ceil(room: Tensor) -> Tensor:
    """Rounded up, at least 1; a hair above a whole number is rounding error."""
    return torch.ceil(room - 1e-4).clamp_min(1)


def _place_in_run(key: Tensor, order: Tensor) -> Tensor:
    """How many entries of the same key (N,) come earlier in ``order`` (N,), for every entry."""
    order = order[torch.argsort(key[order], stable=True)]
    ordered = key[order]
    place = torch.arange(key.shape[0], device=key.device)
    start = torch.searchsorted(ordered, ordered)
    return torch.empty_like(place).scatter_(0, order, place - start)


class ExpertChoice(nn.Module):
    """Experts choose tokens: each takes its C most probable ones, so that the load is even by construction.

    A token may get several experts or none, and its choice depends on the other tokens of the batch: not for
    causal decoders, not for predictions that must not depend on their neighbours. The source weighs by the softmax over
    all experts, ``SoftmaxGate(renormalize=False)``.

    Args:
        factor: C = ceil(factor · tokens / experts), the mean number of experts per token.
        capacity: C itself, instead of a factor.

    Reference: Zhou et al. 2022, Expert Choice Routing (arXiv 2202.09368).
    """

    depends_on_batch = True

    def __init__(self, factor: float | None = None, capacity: int | None = None) -> None:
        super().__init__()
        if (factor is None) == (capacity is None):
            raise ValueError(f"give either factor={factor} or capacity={capacity}")
        if not (factor if factor is not None else capacity or 0) > 0:
            raise ValueError(f"factor={factor} or capacity={capacity} must be above 0")
        self.factor, self.capacity = factor, capacity

    def forward(self, selection: Selection) -> Selection:
        """Narrow to the C best tokens per expert; (R, E), surplus places stay empty."""
        valid = _whole(selection, self).counting()
        probs = selection.probs.masked_fill(~valid, -torch.inf)
        order = torch.argsort(probs, dim=0, descending=True, stable=True)
        place = torch.arange(probs.shape[0], device=probs.device)[:, None].expand_as(order)
        rank = torch.empty_like(order).scatter_(0, order, place)
        if self.capacity is not None:
            return replace(selection, valid=valid & (rank < self.capacity))
        tokens = valid.any(-1).sum()
        room = _ceil(self.factor * tokens / _offered(selection))  # type: ignore[operator]  # one of the two is given
        return replace(selection, valid=valid & (rank < room))

    def extra_repr(self) -> str:
        """Shows the settings in the module's print-out."""
        return f"factor={self.factor}, capacity={self.capacity}"


def _whole(selection: Selection, selector: nn.Module) -> Selection:
    """The selection, if every expert has its place in it still."""
    if selection.index is not None:
        raise ValueError(f"{selector} must come before selectors that pick experts per token")
    return selection


class Fixed(nn.Module):
    """The same experts for every token, whatever their scores: for tests and controls.

    Args:
        experts: their numbers.
    """

    depends_on_batch = False
    experts: Tensor

    def __init__(self, experts: Sequence[int]) -> None:
        super().__init__()
        if not experts or min(experts) < 0 or len(set(experts)) != len(experts):
            raise ValueError(f"experts={list(experts)} must be different numbers from 0 on")
        self.k = len(experts)
        self.register_buffer("experts", torch.tensor(experts), persistent=False)

    def forward(self, selection: Selection) -> Selection:
        """Narrow (R, E) choices to the given ones; those that did not count do not count now."""
        index = self.experts.expand(selection.scores.shape[0], -1)
        valid = _whole(selection, self).valid
        return replace(selection, index=index, valid=None if valid is None else valid.gather(1, index))

    def extra_repr(self) -> str:
        """Shows the experts in the module's print-out."""
        return f"experts={self.experts.tolist()}"

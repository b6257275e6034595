"""Where each choice goes when rows are sorted by expert and neighbouring experts are multiplied together.

Consecutive experts form a *run*, as many as the cache holds. Few rows of similar number for each are multiplied as
one batched product, at full speed: the run is *padded*, slots up to its largest load, the surplus filled with zeros.
Other loads form a *ragged* run, which ``F.grouped_mm`` multiplies without padding, or, where that cannot run, one run
for each expert. An expert of many rows is cut into several runs.

Shapes: T tokens, K choices, E experts, N valid choices, S slots (valid choices and padding).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.moe.dispatch.generic import sort_choices
from zoo.moe.routing import Routing

OWN_ROWS = 512
"""Most rows of an expert that shares a run; a larger product gains nothing from company."""
CUT_ROWS = 1024
"""Least rows of a piece of an expert: smaller pieces write its weight gradient too often."""
PADDED_ROWS = 96
"""Most rows per expert of a padded run; with more, a product of its own is as fast."""
SLACK = 0.35
"""Padding that a run may have, as a share of its cost."""
WEIGHT_ROWS = 32
"""An expert costs as much as this many rows before it has any: reading its weights takes time too."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive experts that are multiplied together.

    Attributes:
        first: the first expert.
        last: one past the last expert.
        start: the first slot.
        rows: slots per expert; 0 in a ragged run, which has no padding.
        choices: the run's choices among all, sorted by expert.
        further: whether this is not the first run of its expert.
        filled: (n,) int64 slots of these choices, counted from ``start``; None without padding.
        padding: (P,) int64 slots without a choice, counted from ``start``; None without padding.
        loads: choices per expert of a ragged run; empty otherwise.
    """

    first: int
    last: int
    start: int
    rows: int
    choices: slice
    further: bool = False
    filled: Tensor | None = None
    padding: Tensor | None = None
    loads: Sequence[int] = ()

    @property
    def stop(self) -> int:
        """One past the last slot."""
        return self.start + (sum(self.loads) if self.ragged else self.rows * (self.last - self.first))

    @property
    def ragged(self) -> bool:
        """Whether its experts have different numbers of slots."""
        return self.rows == 0

    @property
    def full(self) -> bool:
        """Whether every slot has a choice."""
        return self.filled is None

    @property
    def slots(self) -> slice:
        """Its slots among all."""
        return slice(self.start, self.stop)

    @property
    def experts(self) -> slice:
        """Its experts among all."""
        return slice(self.first, self.last)

    def pack(self, slots: Tensor) -> Tensor:
        """Only the slots with a choice: (slots, ·) → (n, ·)."""
        return slots if self.filled is None else slots.index_select(0, self.filled)

    def unpack(self, rows: Tensor) -> Tensor:
        """Back to slots, zeros in the padding: (n, ·) → (slots, ·)."""
        if self.filled is None:
            return rows
        return rows.new_zeros(self.stop - self.start, rows.shape[1]).index_copy_(0, self.filled, rows)

    def split(self, rows: Tensor) -> Tensor:
        """Slots (slots, ·) of a run that is not ragged as (experts, rows, ·)."""
        return rows.view(self.last - self.first, self.rows, -1)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Slots sorted by expert.

    Attributes:
        choice: (S,) int64, place t·K + k of the choice in each slot; 0 in padding.
        token: (S,) int64, token t of that choice.
        runs: what to multiply, covering every expert that has rows.
        idle: (first, last) spans of experts that no run covers.
        choices: N, valid choices.
        padding: (P,) int64, all slots without a choice; None if there are none.
    """

    choice: Tensor
    token: Tensor
    runs: Sequence[Run]
    idle: Sequence[tuple[int, int]]
    choices: int
    padding: Tensor | None = None


def make_plan(routing: Routing, largest: int, ragged: bool, cut: bool = True) -> Plan:
    """Plan the execution of a routing with one row per token.

    Args:
        routing: the decisions.
        largest: most slots of a run of several experts, to keep its working set in the cache.
        ragged: whether ragged runs can be executed.
        cut: whether an expert may be cut into several runs.
    """
    order, counts = sort_choices(routing)
    spans = [
        span
        for first, last in _chunks(counts, largest)
        for span in _spans(first, counts[first:last], largest if cut else sum(counts), ragged)
    ]
    # Where one run ends and the next one starts: what lies between is idle.
    edges = [0, *(edge for span in spans if not span.further for edge in span.experts), routing.num_experts]
    idle = [(first, last) for first, last in zip(edges[::2], edges[1::2], strict=True) if last > first]
    choice, runs, padding = _place(spans, order)
    token = choice // routing.index.shape[1]
    return Plan(choice=choice, token=token, runs=runs, idle=idle, choices=len(order), padding=padding)


class _Span(NamedTuple):
    """A run before it has slots: its first expert, the loads of its experts, its slots per expert (0: ragged)."""

    first: int
    loads: Sequence[int]
    rows: int
    further: bool = False

    @property
    def experts(self) -> tuple[int, int]:
        return self.first, self.first + len(self.loads)


def _chunks(counts: Sequence[int], largest: int) -> list[tuple[int, int]]:
    """Consecutive experts (first, last) of at most ``largest`` choices together, or one expert of many."""
    chunks: list[tuple[int, int]] = []
    room = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        if chunks and count <= min(room, OWN_ROWS):
            chunks[-1] = (chunks[-1][0], expert + 1)
            room -= count
        else:
            chunks.append((expert, expert + 1))
            room = largest - count if count <= OWN_ROWS else 0
    return chunks


def _spans(first: int, loads: Sequence[int], largest: int, ragged: bool) -> list[_Span]:
    """The runs of a chunk: one padded or ragged, or one per expert, or several for an expert."""
    if len(loads) == 1:
        pieces = max(1, loads[0] // max(largest, CUT_ROWS))
        cuts = [loads[0] * piece // pieces for piece in range(pieces + 1)]
        return [_Span(first, [b - a], b - a, further=a > 0) for a, b in itertools.pairwise(cuts)]
    rows, apart = max(loads), sum(load + WEIGHT_ROWS for load in loads if load)
    if rows <= PADDED_ROWS and (rows + WEIGHT_ROWS) * len(loads) <= (1 + SLACK) * apart:
        return [_Span(first, loads, rows)]
    if ragged:
        return [_Span(first, loads, 0)]
    return [_Span(first + place, [load], load) for place, load in enumerate(loads) if load]


def _place(spans: Sequence[_Span], order: Tensor) -> tuple[Tensor, list[Run], Tensor | None]:
    """Spread the sorted choices over slots: the choice in each slot, the runs, and the slots that stay empty."""
    runs: list[Run] = []
    loads: list[int] = []
    shift: list[int] = []
    start = seen = 0
    for span in spans:
        begin = seen
        for place, load in enumerate(span.loads):
            shift.append(start + place * span.rows - seen if span.rows else start - begin)
            loads.append(load)
            seen += load
        first, last = span.experts
        uneven = () if span.rows else tuple(span.loads)
        choices = slice(begin, seen)
        runs.append(
            Run(
                first=first,
                last=last,
                start=start,
                rows=span.rows,
                choices=choices,
                further=span.further,
                loads=uneven,
            )
        )
        start = runs[-1].stop
    if start == seen:
        return order, runs, None
    counts, shifts = torch.tensor([loads, shift], device=order.device)
    slot = torch.arange(seen, device=order.device) + shifts.repeat_interleave(counts, output_size=seen)
    choice = order.new_zeros(start).index_copy_(0, slot, order)
    vacant = torch.ones_like(choice, dtype=torch.bool).index_fill_(0, slot, False)
    padding = vacant.nonzero().squeeze(1)
    gaps = torch.split(
        padding, [run.stop - run.start - sum(span.loads) for run, span in zip(runs, spans, strict=True)]
    )
    padded = [
        replace(run, filled=slot[run.choices] - run.start, padding=gap - run.start) if len(gap) else run
        for run, gap in zip(runs, gaps, strict=True)
    ]
    return choice, padded, padding

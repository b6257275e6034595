"""Ways to execute any token bank.

Shapes: T tokens, K choices, N = valid rows of T·K, D in, F out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.moe.routing import Routing

if TYPE_CHECKING:
    from zoo.moe.experts import TokenExperts


def by_masks(bank: TokenExperts, x: Tensor, routing: Routing) -> Tensor:
    """One expert after the other on the rows that chose it: the definition; x (T, D) → (T, F)."""
    y = x.new_zeros(x.shape[0], bank.dim_out)
    for expert in range(routing.num_experts):
        token, choice = torch.nonzero((routing.index == expert) & routing.valid, as_tuple=True)
        rows = bank.expert(expert, x[token]) * routing.weight[token, choice][:, None]
        y = y.index_add(0, token, rows)
    return y


def blended(bank: TokenExperts, x: Tensor, routing: Routing) -> Tensor:
    """Every expert on every row, weighted by zero where it was not chosen; x (T, D) → (T, F)."""
    if not routing.complete:
        # What stands in rows that nothing chose, NaN perhaps, must not meet a weight of zero.
        x = torch.where(routing.valid.any(-1, keepdim=True), x, 0.0)
    return bank.blend(x, routing.dense_weight())


def by_slices(bank: TokenExperts, x: Tensor, routing: Routing) -> Tensor:
    """Rows sorted by expert, each expert on one slice; x (T, D) → (T, F)."""
    order, counts = sort_choices(routing)
    token = order // routing.index.shape[1]
    answers = bank.each(torch.split(x.index_select(0, token), counts))
    weighted = torch.cat(answers) * routing.weight.flatten().index_select(0, order)[:, None]
    return weighted.new_zeros(x.shape[0], bank.dim_out).index_add(0, token, weighted)


def sort_choices(routing: Routing) -> tuple[Tensor, list[int]]:
    """Places t·K + k of the valid choices (N,), sorted by expert, and how many each expert has (E)."""
    experts = routing.num_experts
    index = routing.index if routing.complete else torch.where(routing.valid, routing.index, experts)
    expert = index.flatten()
    counts = torch.bincount(expert, minlength=experts + 1).tolist()[:experts]
    return torch.argsort(expert, stable=True)[: sum(counts)], counts

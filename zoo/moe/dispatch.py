"""Execution of token banks: bring rows to their experts and the answers back.

Three ways that agree to rounding: ``reference`` (one expert after the other, whole masks: the definition),
``dense`` (every expert on every row: small banks, export) and ``sorted`` (rows sorted by expert, each expert sees
one slice). ``auto`` takes ``dense`` where the whole bank costs no more than a sort, else ``sorted``.

Shapes: T tokens, K choices, N = valid rows of T·K, D in, F out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from zoo.moe.routing import Routing

if TYPE_CHECKING:
    from zoo.moe.experts import FeedForwardExperts

Backend = Literal["auto", "reference", "dense", "sorted"]

DENSE_UP_TO = 256
"""Largest number of rows T·E for which running the whole bank beats sorting."""


def choose(backend: Backend, tokens: int, experts: int) -> Backend:
    """The back end that ``auto`` stands for at this size."""
    if backend != "auto":
        return backend
    # Sizes that depend on the routing cannot be compiled or exported.
    return "dense" if tokens * experts <= DENSE_UP_TO or torch.compiler.is_compiling() else "sorted"


def dispatch(bank: FeedForwardExperts, x: Tensor, routing: Routing, backend: Backend = "auto") -> Tensor:
    """Mix the experts' answers: y_t = Σ_k weight_tk · expert_{index_tk}(x_t) over valid choices.

    Args:
        bank: experts with ``expert(e, rows)`` and ``every(rows)``.
        x: (T, D) tokens.
        routing: decisions for the same T tokens.
        backend: how to execute.

    Returns:
        (T, F); exactly zero for tokens without a valid choice.
    """
    chosen = choose(backend, x.shape[0], routing.num_experts)
    if chosen == "reference":
        return _reference(bank, x, routing)
    if chosen == "dense":
        outputs = bank.every(torch.where(_alive(routing)[:, None], x, 0.0))
        return torch.einsum("te,etf->tf", routing.dense_weight(), outputs).to(x.dtype)
    return _sorted(bank, x, routing)


def _alive(routing: Routing) -> Tensor:
    """Tokens with at least one valid choice, (T,)."""
    return routing.valid.any(-1)


def _reference(bank: FeedForwardExperts, x: Tensor, routing: Routing) -> Tensor:
    y = x.new_zeros(x.shape[0], bank.dim_out)
    for expert in range(routing.num_experts):
        token, choice = torch.nonzero((routing.index == expert) & routing.valid, as_tuple=True)
        rows = bank.expert(expert, x[token]) * routing.weight[token, choice][:, None]
        y = y.index_add(0, token, rows)
    return y


def _sorted(bank: FeedForwardExperts, x: Tensor, routing: Routing) -> Tensor:
    valid = routing.valid.flatten()
    expert_of = torch.where(valid, routing.index.flatten(), routing.num_experts)
    order = torch.argsort(expert_of, stable=True)[: int(valid.sum())]
    token = order // routing.index.shape[1]
    rows = x.index_select(0, token)
    sizes = routing.counts().tolist()
    outputs = bank.slices(torch.split(rows, sizes))
    weighted = torch.cat(outputs) * routing.weight.flatten().index_select(0, order)[:, None]
    return x.new_zeros(x.shape[0], bank.dim_out).index_add(0, token, weighted)

"""Execution of token banks: bring rows to their experts and the answers back.

Ways that agree to rounding:

* ``reference``: one expert after the other, by masks: the definition;
* ``dense``: every expert on every row: little work, compilation, export;
* ``sorted``: rows sorted by expert, each expert sees one slice: any bank of modules;
* ``fused``: the same in one autograd node that keeps little for the backward pass (feed-forward banks);
* ``grouped``: rows sorted by expert, ``F.grouped_mm`` over all experts at once (feed-forward banks).

``auto`` decides by :func:`choose`. Other ways to execute, such as over several processes, go in here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from zoo.moe.dispatch.fused import by_one_node
from zoo.moe.dispatch.generic import blended, by_masks, by_slices
from zoo.moe.dispatch.grouped import by_groups, obstacle
from zoo.moe.routing import Routing

if TYPE_CHECKING:
    from zoo.moe.experts import TokenExperts
    from zoo.moe.feedforward import FeedForwardExperts

Backend = Literal["auto", "reference", "dense", "sorted", "fused", "grouped"]


def choose(bank: TokenExperts, x: Tensor, routing: Routing) -> Backend:
    """The back end that runs a bank on tokens x (T, D): its own, or what "auto" stands for at this size.

    Measured on CPUs; on accelerators ``grouped`` is taken where it can run, without measurement.
    """
    if bank.backend != "auto":
        return bank.backend
    tokens, choices = routing.index.shape
    if choices == routing.num_experts and not routing.complete:
        # Every expert is listed, but few may count: as if none did.
        choices = 0
    # Sizes that depend on the routing cannot be compiled or exported.
    if torch.compiler.is_compiling() or bank.prefers_dense(tokens, choices):
        return "dense"
    if "fused" not in bank.backends:
        return "sorted"
    on_cpu = x.device.type == "cpu"
    return "fused" if on_cpu or obstacle(cast("FeedForwardExperts", bank), x) is not None else "grouped"


def dispatch(bank: TokenExperts, x: Tensor, routing: Routing, backend: Backend) -> Tensor:
    """Mix the experts' answers: y_t = Σ_k weight_tk · expert_{index_tk}(x_t) over valid choices.

    Args:
        bank: the experts.
        x: (T, D) tokens.
        routing: decisions for the same T tokens.
        backend: how to execute; not "auto".

    Returns:
        (T, F) in the dtype of x; exactly zero for tokens without a valid choice.
    """
    match backend:
        case "reference":
            y = by_masks(bank, x, routing)
        case "dense":
            y = blended(bank, x, routing)
        case "sorted":
            y = by_slices(bank, x, routing)
        case "fused":
            y = by_one_node(cast("FeedForwardExperts", bank), x, routing)
        case "grouped":
            y = by_groups(cast("FeedForwardExperts", bank), x, routing)
        case "auto":
            raise ValueError("backend='auto' must be resolved by choose() first")
    # Autocast computes in half precision; the tokens keep their own.
    return y.to(x.dtype)

"""Feed-forward experts through ``F.grouped_mm``, one call over all experts, under plain autograd.

Made for accelerators whose kernels run all groups at once; on a CPU it loops over the experts.

Shapes: T tokens, D width in and out, N choices, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.moe.activation import activate
from zoo.moe.dispatch.generic import sort_choices
from zoo.moe.precision import autocast_dtype
from zoo.moe.routing import Routing

if TYPE_CHECKING:
    from zoo.moe.feedforward import FeedForwardExperts

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 16
"""Rows of every operand, and of the gradients, must be a multiple of this many bytes."""


def obstacle(bank: FeedForwardExperts, x: Tensor) -> str | None:
    """Why ``F.grouped_mm`` cannot run a bank on x, in one phrase; None if it can."""
    dtype = _dtype(x)
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has none"
    if dtype not in DTYPES:
        return f"it has no kernel for {dtype}"
    for name, width in (("dim", bank.up.shape[2]), ("hidden", bank.down.shape[2])):
        if width * dtype.itemsize % ALIGNMENT:
            return f"{name}={width} is no multiple of {ALIGNMENT // dtype.itemsize} in {dtype}"
    if bank.up_bias is not None or bank.down_bias is not None:
        return "it adds no biases"
    if torch.compiler.is_compiling():
        return "it does not compile for every dtype"
    return None


def by_groups(bank: FeedForwardExperts, x: Tensor, routing: Routing) -> Tensor:
    """Run a feed-forward bank by grouped products; x (T, D) → (T, D).

    Raises:
        ValueError: the kernel cannot run this bank.
    """
    reason = obstacle(bank, x)
    if reason is not None:
        raise ValueError(f"backend='grouped' cannot run here: {reason}; take 'auto'")
    dtype = _dtype(x)
    order, counts = sort_choices(routing)
    token = order // routing.index.shape[1]
    # The kernel knows no autocast.
    rows, up, down = (value.to(dtype) for value in (x.index_select(0, token), bank.up, bank.down))
    ends = torch.tensor(counts, device=x.device).cumsum(0).int()
    hidden = activate(F.grouped_mm(rows, up.mT, offs=ends), bank.activation)
    answer = F.grouped_mm(hidden, down.mT, offs=ends)
    weight = routing.weight.flatten().index_select(0, order)[:, None].to(dtype)
    # The product hands a contiguous gradient back, which the kernel needs.
    return answer.new_zeros(x.shape[0], bank.dim_out).index_add(0, token, answer * weight)


def _dtype(x: Tensor) -> torch.dtype:
    return autocast_dtype(x) or x.dtype

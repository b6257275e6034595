"""The activations of feed-forward experts."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

Activation = Literal["gelu", "swiglu"]


def activate(hidden: Tensor, activation: Activation) -> Tensor:
    """gelu(h), or silu(gate) · up with h = (gate, up) stacked in the last dimension."""
    if activation == "gelu":
        return F.gelu(hidden)
    gate, up = hidden.chunk(2, dim=-1)
    return F.silu(gate) * up

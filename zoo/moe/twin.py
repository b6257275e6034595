"""Dense twins: what a Mixture-of-Experts layer has to beat.

For a bank of feed-forward experts of which a token visits k, the twin is one :class:`DenseFeedForward` k times as wide
as an expert: the same active FLOPs without a router. For any other bank it is a :class:`DenseMixture` of the same
experts. A network's builder puts the twin where the layer would stand, beside the same shared expert.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.moe.activation import Activation, activate
from zoo.moe.experts import TokenExperts
from zoo.moe.field import FieldExperts
from zoo.moe.routing import Context


class DenseFeedForward(nn.Module):
    """One feed-forward network: an expert of :class:`~zoo.moe.feedforward.FeedForwardExperts` that every token visits.

    GELU: down(gelu(up x)).  SwiGLU: down(silu(gate x) · up x), with gate and up stacked in ``up``.

    It also serves as the ``shared`` expert of a layer. Its weights start as nn.Linear draws them, as the experts' do.

    Args:
        dim: width D of a token.
        hidden: width H of the hidden layer; k · H of one expert for a twin.
        activation: "gelu" or "swiglu".
        bias: whether the two maps have biases.

    Raises:
        ValueError: a width below 1 or an unknown activation.
    """

    def __init__(self, dim: int, hidden: int, activation: Activation = "gelu", bias: bool = False) -> None:
        super().__init__()
        if min(dim, hidden) < 1:
            raise ValueError(f"dim={dim} and hidden={hidden} must be at least 1")
        if activation not in ("gelu", "swiglu"):
            raise ValueError(f"activation={activation!r} must be 'gelu' or 'swiglu'")
        self.activation: Activation = activation
        self.up = nn.Linear(dim, hidden * (2 if activation == "swiglu" else 1), bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (..., D) to (..., D)."""
        y: Tensor = self.down(activate(self.up(x), self.activation))
        return y

    def extra_repr(self) -> str:
        """Shows the activation in the module's print-out."""
        return f"activation={self.activation}"


class DenseMixture(nn.Module):
    """The experts of a bank under one learned constant mixing vector: all run, switched on or off; nothing is routed.

    y = Σ_e softmax(a)_e · expert_e(x)

    Args:
        bank: the experts; each is executed for every input.
    """

    def __init__(self, bank: FieldExperts | TokenExperts) -> None:
        super().__init__()
        self.experts = bank.experts if isinstance(bank, FieldExperts) else bank
        self.mixing = nn.Parameter(torch.zeros(bank.num_experts))

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Mix all experts on x (..., D); field experts also see the context."""
        weight = self.mixing.softmax(0)
        if isinstance(self.experts, TokenExperts):
            rows = x.reshape(-1, x.shape[-1])
            answers = self.experts.blend(rows, weight.expand(rows.shape[0], -1))
            return answers.reshape(*x.shape[:-1], self.experts.dim_out)
        y: Tensor | float = 0.0
        for index, expert in enumerate(self.experts):
            y = y + weight[index] * expert(x, context)
        return torch.as_tensor(y)

"""Scorers: from tokens (and context) to one logit per expert.

A scorer sees ``x`` unflattened, shape (..., D), and returns logits (..., E).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.moe.routing import Context


class LinearScorer(nn.Module):
    """logits = W x + b, the router of most Mixture-of-Experts models.

    Args:
        dim: width D of a token.
        num_experts: E.
        bias: whether to learn b.
    """

    def __init__(self, dim: int, num_experts: int, bias: bool = False) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.out = nn.Linear(dim, num_experts, bias=bias)
        nn.init.normal_(self.out.weight, std=0.02)
        if self.out.bias is not None:
            nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Score tokens (..., D); returns (..., E)."""
        logits: Tensor = self.out(x)
        return logits


class RecurrentScorer(nn.Module):
    """A router with memory: a GRU reads the tokens in order and its state is scored.

    u_p = dropout(relu(norm(W x_p))),  h_p = GRU(u_p, h_{p-1}),  logits = V relu(U h_p)

    The order is the second-last dimension of x (..., P, D). The state starts at zero for every sequence, so a
    sequence's routing depends on no other sequence. An optional ``memory`` module rewrites the states before
    they are scored: it is called as ``memory(states, context)`` with states (..., P, H).

    Args:
        dim: width D of a token.
        num_experts: E.
        hidden: width H of the recurrent state.
        dropout: on the GRU's input and on the scoring layer.
        memory: module that maps states and context to states, such as a repository of known situations.

    Reference: temporal-memory router of Dynamic TMoE (arXiv 2605.20678).
    """

    def __init__(
        self, dim: int, num_experts: int, hidden: int, dropout: float = 0.0, memory: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.hidden = hidden
        self.project = nn.Linear(dim, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(dropout)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.inner = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, num_experts)
        nn.init.zeros_(self.out.bias)
        self.memory = memory

    def states(self, x: Tensor) -> Tensor:
        """The recurrent states (..., P, H) of tokens x (..., P, D), before any memory rewrites them."""
        u = self.dropout(F.relu(self.norm(self.project(x))))
        flat = u.reshape(-1, *u.shape[-2:])
        states, _ = self.gru(flat)
        return torch.as_tensor(states).reshape(*x.shape[:-1], self.hidden)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Score tokens (..., P, D) in order; returns (..., P, E)."""
        states = self.states(x)
        if self.memory is not None:
            states = self.memory(states, context)
        logits: Tensor = self.out(self.dropout(F.relu(self.inner(states))))
        return logits

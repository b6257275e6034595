"""Dense twins: what a Mixture-of-Experts layer has to beat."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.moe.experts import FieldExperts
from zoo.moe.routing import Context


class DenseMixture(nn.Module):
    """The experts of a field bank under one learned constant mixing vector: all run, nothing is routed.

    y = Σ_e softmax(a)_e · expert_e(x)

    Args:
        bank: the experts; each is executed for every input.
    """

    def __init__(self, bank: FieldExperts) -> None:
        super().__init__()
        self.experts = bank.experts
        self.mixing = nn.Parameter(torch.zeros(bank.num_experts))

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Mix all experts on x (..., D)."""
        weight = self.mixing.softmax(0)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            y = y + weight[index] * expert(x, context)
        return y

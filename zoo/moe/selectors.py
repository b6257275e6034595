"""Selectors: which experts a token goes to, given its logits. Ties go to the lowest index."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TopK(nn.Module):
    """The k best experts of each token.

    Args:
        k: choices per token. If fewer experts are switched on, the surplus choices are invalid.
    """

    depends_on_batch = False

    def __init__(self, k: int) -> None:
        super().__init__()
        if k < 1:
            raise ValueError(f"top-k needs k >= 1, not k={k}")
        self.k = k

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """From logits (T, E) to the chosen experts (T, K) and their validity (T, K)."""
        # A stable sort, because torch.topk breaks ties differently on each device.
        ordered, index = torch.sort(logits, dim=-1, descending=True, stable=True)
        return index[:, : self.k], ordered[:, : self.k] > -torch.inf

    def extra_repr(self) -> str:
        """Shows k in the module's print-out."""
        return f"k={self.k}"


class Dense(nn.Module):
    """Every expert that is switched on."""

    depends_on_batch = False

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """From logits (T, E) to all experts (T, E) and their validity (T, E)."""
        index = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
        return index, logits > -torch.inf

"""Dropout that does not wait for the random generator."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ByteDropout(nn.Module):
    """Dropout whose mask costs one random word per eight elements.

    On a CPU nn.Dropout draws each element's fate on its own, one after the other, which took a quarter of a training
    step in this zoo's forecaster. Here one 64-bit draw decides eight elements, so p is rounded to 1/256.

    Args:
        p: probability that an element becomes zero, at least 0 and below 1.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"dropout={p} must be at least 0 and below 1")
        self.p = p
        self.dropped = min(round(p * 256), 255)

    def forward(self, x: Tensor) -> Tensor:
        """Zero elements of x at random in training, and scale the others to keep the mean."""
        if not self.training or self.dropped == 0:
            return x
        words = torch.empty((x.numel() + 7) // 8, dtype=torch.int64, device=x.device).random_(-(2**63), None)
        bytes_ = words.view(torch.uint8)[: x.numel()].view(x.shape)
        return x * (bytes_ >= self.dropped).to(x.dtype).mul_(256 / (256 - self.dropped))

    def extra_repr(self) -> str:
        """Shows p in the module's print-out."""
        return f"p={self.p}"

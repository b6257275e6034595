"""Transforms of the logits between scorer and selectors: modules (R, E) → (R, E).

``torch.nn.Sequential`` chains them. Experts that are switched off are masked after the transforms, so nothing here
needs to know of them. What is random acts in training alone.

Shapes: R decisions, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Temperature(nn.Module):
    """logits / t: above 1 the distribution is flatter, below 1 sharper.

    Args:
        t: the temperature; a schedule assigns the attribute anew.
    """

    def __init__(self, t: float) -> None:
        super().__init__()
        if not t > 0:
            raise ValueError(f"a temperature is above 0, not t={t}")
        self.t = t

    def forward(self, logits: Tensor) -> Tensor:
        """Divide logits (R, E)."""
        return logits / self.t

    def extra_repr(self) -> str:
        """Shows the temperature in the module's print-out."""
        return f"t={self.t}"


class GaussianNoise(nn.Module):
    """logits + N(0, std²), drawn anew for every decision and expert; in training alone.

    Args:
        std: of the noise, in the unit of the logits.

    Reference: noisy top-k gating (Shazeer et al. 2017, arXiv 1701.06538, eq. 4), with a fixed std instead of a learned.
    """

    def __init__(self, std: float) -> None:
        super().__init__()
        if not std > 0:
            raise ValueError(f"noise needs std > 0, not std={std}")
        self.std = std

    def forward(self, logits: Tensor) -> Tensor:
        """Add noise to logits (R, E)."""
        return logits + self.std * torch.randn_like(logits) if self.training else logits

    def extra_repr(self) -> str:
        """Shows the width of the noise in the module's print-out."""
        return f"std={self.std}"


class Jitter(nn.Module):
    """logits · U(1 - ε, 1 + ε), drawn anew for every decision and expert; in training alone.

    This is the jitter of LiME: in proportion to each logit, so that a logit of zero stays. The jitter of the Switch
    Transformer is another: it multiplies the router's input, the tokens, and so moves all logits together.

    Args:
        epsilon: ε, in (0, 1).

    Reference: LiME (arXiv 2604.02338, ε = 0.1); Switch Transformer (arXiv 2101.03961, sec. 2.4) for the other.
    """

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        if not 0 < epsilon < 1:
            raise ValueError(f"jitter needs epsilon in (0, 1), not epsilon={epsilon}")
        self.epsilon = epsilon

    def forward(self, logits: Tensor) -> Tensor:
        """Multiply logits (R, E)."""
        if not self.training:
            return logits
        return logits * (1 + self.epsilon * (2 * torch.rand_like(logits) - 1))

    def extra_repr(self) -> str:
        """Shows the width of the jitter in the module's print-out."""
        return f"epsilon={self.epsilon}"

"""Gates: from logits and choices to mixing weights.

A gate also says what the router's *scores* are (what a selection bias is added to) and what its *distribution* is (what
losses and statistics read).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEAST_SUM = 1e-20
"""What a sum of sigmoids is divided by at least: small beside any that counts, with a gradient that stays finite."""


class SoftmaxGate(nn.Module):
    """Mixing weights from a softmax.

    Args:
        renormalize: take the softmax over the chosen experts alone, so that the weights sum to one and the others
            get no gradient at all; otherwise over all experts, before the choice.
    """

    def __init__(self, renormalize: bool = True) -> None:
        super().__init__()
        self.renormalize = renormalize

    def scores(self, logits: Tensor) -> Tensor:
        """Probabilities (R, E)."""
        return logits.softmax(-1)

    def probs(self, scores: Tensor) -> Tensor:
        """The scores themselves."""
        return scores

    def forward(self, logits: Tensor, scores: Tensor, index: Tensor, valid: Tensor | None) -> Tensor:
        """From logits and scores (R, E) and choices (R, K) to weights (R, K), zero for choices that are not valid.

        Args:
            logits: (R, E).
            scores: what :meth:`scores` made of them.
            index: (R, K) chosen experts.
            valid: (R, K) choices that count; None if all do, which saves the masking.
        """
        if not self.renormalize:
            weight = scores.gather(1, index)
            return weight if valid is None else torch.where(valid, weight, 0.0)
        chosen = logits.gather(1, index)
        if valid is None:
            return chosen.softmax(-1)
        # The least finite number and not -inf: a token may be left without any valid choice.
        weight = torch.where(valid, chosen, torch.finfo(logits.dtype).min).softmax(-1)
        return torch.where(valid, weight, 0.0)

    def extra_repr(self) -> str:
        """Shows the convention in the module's print-out."""
        return f"renormalize={self.renormalize}"


class SigmoidGate(nn.Module):
    """Mixing weights from independent sigmoids, as in DeepSeek-V3 (arXiv 2412.19437, eq. 12-16).

    Args:
        renormalize: divide the weights of a token by their sum.
        scale: multiplies the weights.
    """

    def __init__(self, renormalize: bool = True, scale: float = 1.0) -> None:
        super().__init__()
        self.renormalize, self.scale = renormalize, scale

    def scores(self, logits: Tensor) -> Tensor:
        """Sigmoids (R, E)."""
        return logits.sigmoid()

    def probs(self, scores: Tensor) -> Tensor:
        """The scores over their sum, because losses compare experts within a token."""
        return scores / scores.sum(-1, keepdim=True).clamp_min(LEAST_SUM)

    def forward(self, logits: Tensor, scores: Tensor, index: Tensor, valid: Tensor | None) -> Tensor:
        """From scores (R, E) and choices (R, K) to weights (R, K), zero for choices that are not valid."""
        weight = scores.gather(1, index)
        if valid is not None:
            weight = torch.where(valid, weight, 0.0)
        if self.renormalize:
            weight = weight / weight.sum(-1, keepdim=True).clamp_min(LEAST_SUM)
        return self.scale * weight

    def extra_repr(self) -> str:
        """Shows the settings in the module's print-out."""
        return f"renormalize={self.renormalize}, scale={self.scale}"


class UnweightedGate(nn.Module):
    """Every valid choice weighs 1; the router learns from auxiliary losses alone, if at all."""

    renormalize = False

    def scores(self, logits: Tensor) -> Tensor:
        """Probabilities (R, E)."""
        return logits.softmax(-1)

    def probs(self, scores: Tensor) -> Tensor:
        """The scores themselves."""
        return scores

    def forward(self, logits: Tensor, scores: Tensor, index: Tensor, valid: Tensor | None) -> Tensor:
        """Ones (R, K), zero for choices that are not valid."""
        # Zero times the scores, so that the router gets a zero gradient and not None.
        weight = 1.0 + 0.0 * scores.gather(1, index)
        return weight if valid is None else torch.where(valid, weight, 0.0)

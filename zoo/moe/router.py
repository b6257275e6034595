"""The router: scorer ► selector ► gate, computed in fp32 whatever the surrounding precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.moe.routing import Context, Routing
from zoo.moe.selectors import Dense, TopK


class SoftmaxGate(nn.Module):
    """Mixing weights from the softmax over all experts.

    Args:
        renormalize: divide by the sum over the chosen experts, which equals a softmax over the chosen logits.
    """

    def __init__(self, renormalize: bool = True) -> None:
        super().__init__()
        self.renormalize = renormalize

    def forward(self, probs: Tensor, index: Tensor, valid: Tensor) -> Tensor:
        """From probabilities (T, E) and choices (T, K) to weights (T, K)."""
        weight = torch.where(valid, probs.gather(1, index), 0.0)
        if self.renormalize:
            weight = weight / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
        return weight

    def extra_repr(self) -> str:
        """Shows the convention in the module's print-out."""
        return f"renormalize={self.renormalize}"


class Router(nn.Module):
    """Decides, for each token, which experts it visits and how their answers are mixed.

    Args:
        scorer: module (x, context) → logits (..., E) with an attribute ``num_experts``.
        selector: module logits (T, E) → (index, valid), each (T, K).
        gate: module (probs, index, valid) → weight (T, K).

    Raises:
        ValueError: k exceeds the number of experts, or k = 1 with renormalised weights: every weight would be
            the constant 1 and the router would never learn.
    """

    def __init__(self, scorer: nn.Module, selector: TopK | Dense, gate: SoftmaxGate | None = None) -> None:
        super().__init__()
        self.scorer = scorer
        self.selector = selector
        self.gate = gate if gate is not None else SoftmaxGate()
        self.num_experts = int(scorer.num_experts)  # type: ignore[arg-type]
        if isinstance(selector, TopK):
            if selector.k > self.num_experts:
                raise ValueError(f"top_k={selector.k} must lie in 1..num_experts={self.num_experts}")
            if selector.k == 1 and self.num_experts > 1 and self.gate.renormalize:
                raise ValueError("top_k=1 with renormalised weights gives the router no gradient: use renormalize=False")

    def forward(
        self, x: Tensor, mask: Tensor | None = None, context: Context | None = None, enabled: Tensor | None = None
    ) -> Routing:
        """Route tokens.

        Args:
            x: (..., D) tokens.
            mask: (...) bool, True for real tokens.
            context: what the scorer may see beside the tokens.
            enabled: (E,) bool, experts that may be chosen at all; None for all.

        Returns:
            The routing of the T flattened tokens.
        """
        with torch.autocast(x.device.type, enabled=False):
            logits = self.scorer(x.float(), context).reshape(-1, self.num_experts)
            if enabled is not None:
                logits = logits.masked_fill(~enabled, -torch.inf)
            probs = logits.softmax(-1)
            index, valid = self.selector(logits)
            weight = self.gate(probs, index, valid)
        if mask is not None:
            mask = mask.reshape(-1)
            valid = valid & mask[:, None]
        return Routing(index=index, weight=weight.to(x.dtype), valid=valid, probs=probs, logits=logits, mask=mask)

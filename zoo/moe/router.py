"""The router: scorer ► selector ► gate, outside autocast; fp32 from the logits on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.moe.routing import Context, Routing
from zoo.moe.selectors import Dense, TopK


class SoftmaxGate(nn.Module):
    """Mixing weights from a softmax.

    Args:
        renormalize: take the softmax over the chosen experts alone, so that the weights sum to one and the others
            get no gradient at all; otherwise over all experts, before the choice.
    """

    def __init__(self, renormalize: bool = True) -> None:
        super().__init__()
        self.renormalize = renormalize

    def forward(self, logits: Tensor, index: Tensor, valid: Tensor) -> Tensor:
        """From logits (T, E) and choices (T, K) to weights (T, K), zero for choices that are not valid."""
        if self.renormalize:
            # The least finite number and not -inf: a token may be left without any valid choice.
            chosen = torch.where(valid, logits.gather(1, index), torch.finfo(logits.dtype).min)
            weight = chosen.softmax(-1)
        else:
            weight = logits.softmax(-1).gather(1, index)
        return torch.where(valid, weight, 0.0)

    def extra_repr(self) -> str:
        """Shows the convention in the module's print-out."""
        return f"renormalize={self.renormalize}"


class Router(nn.Module):
    """Decides, for each token, which experts it visits and how their answers are mixed.

    Args:
        scorer: module (x, context) → logits (..., E) with an attribute ``num_experts``.
        selector: module logits (T, E) → (index, valid), each (T, K).
        gate: module (logits, index, valid) → weight (T, K).

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
                raise ValueError("top_k=1 with renormalised weights trains no router: use renormalize=False")

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        context: Context | None = None,
        enabled: Tensor | None = None,
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
        dtype = x.dtype
        if mask is not None:
            # A scorer that looks across tokens must not see what stands in masked ones.
            x = torch.where(mask.reshape(*x.shape[:-1], 1), x, 0.0)
        with torch.autocast(x.device.type, enabled=False):
            own = next((parameter.dtype for parameter in self.scorer.parameters()), torch.float32)
            logits = self.scorer(x.to(own), context).reshape(-1, self.num_experts).float()
            if enabled is not None:
                logits = logits.masked_fill(~enabled, -torch.inf)
            probs = logits.softmax(-1)
            index, valid = self.selector(logits)
            weight = self.gate(logits, index, valid)
        if mask is not None:
            mask = mask.reshape(-1)
            valid = valid & mask[:, None]
        return Routing(
            index=index, weight=weight.to(dtype), valid=valid, probs=probs, logits=logits, mask=mask
        )

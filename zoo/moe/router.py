"""The router: scorer ► transform ► selectors ► gate, outside autocast and, from the logits on, in fp32 or fp64.

Shapes: T tokens, R decisions (one per token, or per group of tokens), E experts, K choices, D width of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from zoo.moe.bias import SelectionBias
from zoo.moe.gates import SigmoidGate, SoftmaxGate, UnweightedGate
from zoo.moe.groups import Grouping
from zoo.moe.precision import autocast_dtype, raised
from zoo.moe.routing import Choices, Context, Members, Routing
from zoo.moe.selectors import Fixed, Selection, TopK

Gate = SoftmaxGate | SigmoidGate | UnweightedGate


class Router(nn.Module):
    """Decides, for each token or group of tokens, which experts it visits and how their answers are mixed.

    Choices in ``context.choices`` take the place of the selectors (replay); their weights are computed from the present
    logits, so that the router still learns.

    Logits, probabilities and weights are fp32 whatever the precision of tokens and weights, and fp64 in a network of
    doubles; the weights are then given the precision of the tokens.

    Args:
        scorer: module (x, context) → logits (..., E) with an attribute ``num_experts``.
        selectors: one or several modules that narrow a :class:`Selection`, in order.
        gate: module that weighs the choices; a softmax over the chosen experts by default.
        transform: module logits (R, E) → logits, such as a temperature or noise.
        bias: added to the gate's scores for the choice alone.
        groups: one decision per group of tokens instead of one per token.

    Raises:
        ValueError: a selector asks for experts that there are not, or k = 1 meets renormalised weights: every weight
            would be the constant 1 and the router would never learn.
    """

    def __init__(
        self,
        scorer: nn.Module,
        selectors: nn.Module | Sequence[nn.Module],
        gate: Gate | None = None,
        *,
        transform: nn.Module | None = None,
        bias: SelectionBias | None = None,
        groups: Grouping | None = None,
    ) -> None:
        super().__init__()
        self.scorer = scorer
        self.transform = transform
        self.selectors = nn.ModuleList([selectors] if isinstance(selectors, nn.Module) else selectors)
        self.bias = bias
        self.gate = gate if gate is not None else SoftmaxGate()
        self.groups = groups
        self.num_experts = int(scorer.num_experts)  # type: ignore[arg-type]
        self._check()

    def _check(self) -> None:
        if not self.selectors:
            raise ValueError("a router needs at least one selector; Dense() takes every expert")
        for selector in self.selectors:
            k = getattr(selector, "k", None)
            if isinstance(selector, Fixed) and int(selector.experts.max()) >= self.num_experts:
                raise ValueError(f"{selector} names experts beyond 0..{self.num_experts - 1}")
            if k is not None and k > self.num_experts:
                raise ValueError(f"top_k={k} must lie in 1..num_experts={self.num_experts}")
            if k == 1 and self.num_experts > 1 and self.gate.renormalize:
                raise ValueError("top_k=1 with renormalised weights trains no router: use renormalize=False")
        if self.bias is not None and not any(isinstance(selector, TopK) for selector in self.selectors):
            raise ValueError("a selection bias moves the choice of TopK, and none of the selectors is one")
        if self.bias is not None and self.bias.bias.shape != (self.num_experts,):
            raise ValueError(f"the bias is of {len(self.bias.bias)} experts, not of {self.num_experts}")

    @property
    def depends_on_batch(self) -> bool:
        """Whether tokens compete for experts, so that a choice depends on the whole batch, in the present mode.

        What the scorer and the groups look at, such as the rest of a sequence, is not meant.
        """
        return any(bool(selector.depends_on_batch) for selector in self.selectors)

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
            context: what the scorer may see beside the tokens, and choices to replay.
            enabled: (E,) bool, experts that may be chosen at all; None for all.

        Returns:
            The routing of the T flattened tokens, or of their groups.

        Raises:
            ValueError: choices to replay that do not fit.
        """
        if mask is not None:
            # A scorer that looks across tokens must not see what stands in masked ones.
            mask = mask.reshape(x.shape[:-1])
            x = torch.where(mask[..., None], x, 0.0)
        # To enter a context costs as much as an operator: only where there is something to leave.
        if autocast_dtype(x) is None:
            return self._route(x, mask, context, enabled)
        with torch.autocast(x.device.type, enabled=False):
            return self._route(x, mask, context, enabled)

    def _route(
        self, x: Tensor, mask: Tensor | None, context: Context | None, enabled: Tensor | None
    ) -> Routing:
        dtype = x.dtype
        members: Members | None = None
        if self.groups is not None:
            grouped = self.groups(x, mask, context)
            x, mask, members = grouped.x, grouped.mask, grouped.members
        if mask is not None:
            context = None if context is None else context.blanked(mask)
            mask = mask.flatten()
        logits = self._logits(x, context, enabled)
        scores = self.gate.scores(logits)
        probs = self.gate.probs(scores)
        chosen = self._offer(logits, scores, probs, mask, enabled)
        if context is None or context.choices is None:
            for selector in self.selectors:
                chosen = selector(chosen)
        else:
            chosen = _replayed(context.choices, chosen)
        index = chosen.taken()
        weight = self.gate(logits, scores, index, chosen.valid)
        return Routing(
            index=index,
            weight=weight.to(dtype),
            valid=chosen.counting(),
            probs=probs,
            logits=logits,
            mask=mask,
            dropped=chosen.dropped,
            members=members,
            complete=chosen.valid is None,
        )

    def _logits(self, x: Tensor, context: Context | None, enabled: Tensor | None) -> Tensor:
        if x.dtype != torch.float32:
            # Half-precision tokens may meet fp32 weights, under autocast; a scorer need not care.
            x = x.to(next((parameter.dtype for parameter in self.scorer.parameters()), torch.float32))
        logits: Tensor = raised(self.scorer(x, context).reshape(-1, self.num_experts))
        if self.transform is not None:
            logits = self.transform(logits)
        return logits if enabled is None else logits.masked_fill(~enabled, -torch.inf)

    def _offer(
        self, logits: Tensor, scores: Tensor, probs: Tensor, mask: Tensor | None, enabled: Tensor | None
    ) -> Selection:
        """Every expert that is on, for every real token."""
        # Without a bias by the logits: they keep apart what a softmax rounds to the same probability.
        by = logits if self.bias is None else self.bias(scores).masked_fill(logits == -torch.inf, -torch.inf)
        valid = None if enabled is None else enabled.expand_as(logits)
        if mask is not None:
            valid = mask[:, None].expand_as(logits) if valid is None else valid & mask[:, None]
        return Selection(scores=by.detach(), probs=probs.detach(), valid=valid)


def _replayed(choices: Choices, offer: Selection) -> Selection:
    """The offer narrowed to recorded choices; what is masked or off now does not count."""
    index, valid = choices.index, choices.valid
    rows, experts = offer.scores.shape
    whole = not index.is_floating_point() and valid.dtype == torch.bool
    if not whole or index.ndim != 2 or index.shape != valid.shape or index.shape[0] != rows:
        raise ValueError(
            f"choices of index {tuple(index.shape)} and valid {tuple(valid.shape)}, {index.dtype} and {valid.dtype}, "
            f"do not fit {rows} decisions"
        )
    if not torch.compiler.is_compiling() and index.numel():
        low, high = (int(bound) for bound in torch.aminmax(index))
        if low < 0 or high >= experts:
            raise ValueError(f"choices name experts {low}..{high}, not 0..{experts - 1}")
    index = index.long()
    return replace(
        offer, index=index, valid=valid if offer.valid is None else valid & offer.valid.gather(1, index)
    )

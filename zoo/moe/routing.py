"""The records that travel through a Mixture-of-Experts layer: pure data, no behaviour of their own.

Shapes: T tokens (all leading dimensions flattened), E experts, K choices per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a router or an expert may see beside the tokens themselves; every field is optional.

    Attributes:
        features: (..., F) floats that describe a token's group, such as a signature of its window.
        ids: (...) integer tags, such as a modality.
        phase: (B, P) integer position of each step in its cycle.
        group: (...) integer group of each token, for one decision per group.
    """

    features: Tensor | None = None
    ids: Tensor | None = None
    phase: Tensor | None = None
    group: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Who goes where: the one record that dispatch, losses, statistics and traces read.

    Attributes:
        index: (T, K) int64, the chosen experts.
        weight: (T, K), their mixing weights in the dtype of the tokens.
        valid: (T, K) bool, False where a choice was dropped or the token is masked.
        probs: (T, E) fp32, the router's distribution before selection.
        logits: (T, E) fp32; an expert that is switched off has -inf.
        mask: (T,) bool, True for real tokens; None if all are.
    """

    index: Tensor
    weight: Tensor
    valid: Tensor
    probs: Tensor
    logits: Tensor
    mask: Tensor | None = None

    @property
    def num_experts(self) -> int:
        """E, the number of experts that the router scores."""
        return self.probs.shape[-1]

    def counts(self) -> Tensor:
        """Valid choices per expert, (E,) int64; carries no gradient."""
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=self.index.device)
        return counts.scatter_add_(0, self.index.flatten(), self.valid.flatten().long())

    def dense_weight(self) -> Tensor:
        """(T, E) mixing weights with zeros for experts that were not chosen; differentiable."""
        weight = torch.where(self.valid, self.weight, 0.0)
        dense = weight.new_zeros(weight.shape[0], self.num_experts)
        return dense.scatter_add(1, self.index, weight)


@dataclass(frozen=True, kw_only=True)
class MoEOutput:
    """What a layer returns.

    Attributes:
        y: the mixed output, shaped like the input.
        routing: the decisions taken.
        losses: terms that need expert outputs, unweighted, by name; most layers have none.
    """

    y: Tensor
    routing: Routing
    losses: Mapping[str, Tensor] = field(default_factory=dict)

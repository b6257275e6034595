"""The records that travel through a Mixture-of-Experts layer: pure data.

Shapes: T tokens (all leading dimensions flattened), R decisions (one per token, unless the router decides for whole
groups), E experts, K choices per decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a router chose, without weights: the trace of one layer, enough to replay it.

    Attributes:
        index: (R, K) int64, the chosen experts; the order of the columns is kept.
        valid: (R, K) bool, False where a choice does not count.
    """

    index: Tensor
    valid: Tensor


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a router or an expert may see beside the tokens themselves; every field is optional.

    A router that decides for groups shows its scorer one row per decision: ``features``, ``ids`` and ``choices`` then
    hold one row per decision too.

    Attributes:
        features: (..., F) floats that describe a token or its group, such as a signature of its window.
        ids: (...) integer tags, such as a modality.
        phase: (B, P) integer position of each step in its cycle.
        group: (...) integer group of each token, for one decision per group.
        choices: experts to take instead of the router's own choice; the weights are computed anew.
        mask: (...) bool, True for real tokens; field experts find it here.
    """

    features: Tensor | None = None
    ids: Tensor | None = None
    phase: Tensor | None = None
    group: Tensor | None = None
    choices: Choices | None = None
    mask: Tensor | None = None

    def blanked(self, mask: Tensor) -> Context:
        """The same with zeros for what is masked (...), where features or ids have one row for each."""
        features, ids = self.features, self.ids
        if features is not None and features.shape[:-1] == mask.shape:
            features = torch.where(mask[..., None], features, 0.0)
        if ids is not None and ids.shape == mask.shape:
            ids = torch.where(mask, ids, 0)
        return replace(self, features=features, ids=ids)


@dataclass(frozen=True, kw_only=True)
class Members:
    """Which decision each token follows, where a router decides for groups of tokens.

    Attributes:
        decision: (T,) int64, row of the decision.
        mask: (T,) bool, True for real tokens; None if all are.
    """

    decision: Tensor
    mask: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Who goes where: the one record that dispatch, losses, statistics and traces read.

    Attributes:
        index: (R, K) int64, the chosen experts.
        weight: (R, K), their mixing weights in the dtype of the tokens.
        valid: (R, K) bool, False where a choice was dropped or the token is masked.
        probs: (R, E) in fp32 (fp64 for tokens in fp64), the router's distribution before selection.
        logits: (R, E), as precise; an expert that is switched off has -inf.
        mask: (R,) bool, True for real tokens; None if all are.
        dropped: (R, K) bool, choices that found their expert full; None without a capacity.
        members: the tokens behind each decision; None where every token has its own.
        complete: True if ``valid`` is known to be True everywhere, which spares work; False says nothing.
    """

    index: Tensor
    weight: Tensor
    valid: Tensor
    probs: Tensor
    logits: Tensor
    mask: Tensor | None = None
    dropped: Tensor | None = None
    members: Members | None = None
    complete: bool = False

    @property
    def num_experts(self) -> int:
        """E, the number of experts that the router scores."""
        return self.probs.shape[-1]

    def counts(self, dropped: bool = False) -> Tensor:
        """Valid choices per expert, (E,) int64, with those dropped for want of capacity on request; no gradient."""
        counted = self.valid if not dropped or self.dropped is None else self.valid | self.dropped
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=self.index.device)
        return counts.scatter_add_(0, self.index.flatten(), counted.flatten().long())

    def choices(self) -> Choices:
        """What :attr:`Context.choices` takes to replay this routing."""
        return Choices(index=self.index, valid=self.valid)

    def dense_weight(self) -> Tensor:
        """(R, E) mixing weights with zeros for experts that were not chosen; differentiable."""
        weight = self.weight if self.complete else torch.where(self.valid, self.weight, 0.0)
        dense = weight.new_zeros(weight.shape[0], self.num_experts)
        return dense.scatter_add(1, self.index, weight)

    def per_token(self) -> Routing:
        """The same routing with one row per token, (T, ·): what execution reads."""
        if self.members is None:
            return self
        row, mask = self.members.decision, self.members.mask
        valid = self.valid[row]
        return replace(
            self,
            index=self.index[row],
            weight=self.weight[row],
            valid=valid if mask is None else valid & mask[:, None],
            probs=self.probs[row],
            logits=self.logits[row],
            mask=mask,
            complete=self.complete and mask is None,
            dropped=None if self.dropped is None else self.dropped[row],
            members=None,
        )


@dataclass(frozen=True, kw_only=True)
class MoEOutput:
    """What a layer returns.

    Attributes:
        y: the mixed output, shaped like the input (its width is the experts').
        routing: the decisions taken.
        losses: terms that need expert outputs, unweighted, by name; most layers have none.
    """

    y: Tensor
    routing: Routing
    losses: Mapping[str, Tensor] = field(default_factory=dict)

"""Routing statistics that add up over batches, ranks and tags."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.moe.routing import Routing


@dataclass(frozen=True, kw_only=True)
class RouterStats:
    """Sums over tokens; add two of them to merge.

    Attributes:
        counts: (E,) int64, valid choices per expert.
        weights: (E,) float64, summed mixing weight per expert.
        entropy: () float64, summed entropy of the router's distribution, in nats.
        offered: (E,) int64, tokens that could have chosen each expert; 0 for one that is switched off.
        tokens: () int64, tokens counted.
    """

    counts: Tensor
    weights: Tensor
    entropy: Tensor
    offered: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, routing: Routing, keep: Tensor | None = None) -> RouterStats:
        """Statistics of a routing, of the tokens in ``keep`` (T,) bool if given; carries no gradient."""
        alive = torch.ones_like(routing.valid[:, 0]) if routing.mask is None else routing.mask
        if keep is not None:
            alive = alive & keep
        valid = (routing.valid & alive[:, None]).flatten()
        index = routing.index.flatten()
        counts = torch.zeros(routing.num_experts, dtype=torch.int64, device=index.device)
        weights = torch.zeros(routing.num_experts, dtype=torch.float32, device=index.device)
        probs = routing.probs.detach()
        entropy = -torch.special.xlogy(probs, probs).sum(-1)
        return cls(
            counts=counts.scatter_add_(0, index, valid.long()),
            # Doubles only off the device: not every accelerator has them.
            weights=weights.scatter_add_(0, index, routing.weight.detach().flatten().float() * valid)
            .cpu()
            .double(),
            entropy=entropy[alive].sum().cpu().double(),
            offered=(routing.logits.detach()[alive] > -torch.inf).sum(0),
            tokens=alive.sum(),
        )

    def __add__(self, other: RouterStats) -> RouterStats:
        return RouterStats(
            counts=self.counts + other.counts,
            weights=self.weights + other.weights,
            entropy=self.entropy + other.entropy,
            offered=self.offered + other.offered,
            tokens=self.tokens + other.tokens,
        )

    def load(self) -> list[float]:
        """Share of all choices that fell on each expert; zeros if nothing was counted."""
        return (self.counts / self.counts.sum().clamp_min(1)).tolist()

    def share(self) -> list[float]:
        """Share of all mixing weight that each expert carried."""
        return (self.weights / self.weights.sum().clamp_min(1e-12)).tolist()

    def summary(self) -> dict[str, object]:
        """JSON-ready: load, weight share, entropy, dead experts, violation and tokens.

        Entropy is the mean relative to that of an even choice among the offered experts; ``dead`` lists experts that
        were offered and never chosen; ``max_violation`` is the largest load over the even load, less one.
        """
        load, offered = self.load(), (self.offered > 0).tolist()
        even = max(sum(offered), 1)
        tokens = max(int(self.tokens), 1)
        return {
            "load": load,
            "share": self.share(),
            "entropy": float(self.entropy) / tokens / math.log(max(even, 2)),
            "dead": [expert for expert, part in enumerate(load) if part == 0.0 and offered[expert]],
            "off": [expert for expert, on in enumerate(offered) if not on],
            "max_violation": max(load) * even - 1.0 if sum(load) else 0.0,
            "tokens": int(self.tokens),
        }

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
        tokens: () int64, tokens counted.
    """

    counts: Tensor
    weights: Tensor
    entropy: Tensor
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
        weights = torch.zeros(routing.num_experts, dtype=torch.float64, device=index.device)
        probs = routing.probs.detach()
        entropy = -torch.special.xlogy(probs, probs).sum(-1)
        return cls(
            counts=counts.scatter_add_(0, index, valid.long()),
            weights=weights.scatter_add_(0, index, routing.weight.detach().flatten().double() * valid),
            entropy=entropy[alive].double().sum(),
            tokens=alive.sum(),
        )

    def __add__(self, other: RouterStats) -> RouterStats:
        return RouterStats(
            counts=self.counts + other.counts,
            weights=self.weights + other.weights,
            entropy=self.entropy + other.entropy,
            tokens=self.tokens + other.tokens,
        )

    def load(self) -> list[float]:
        """Share of all choices that fell on each expert; zeros if nothing was counted."""
        return (self.counts / self.counts.sum().clamp_min(1)).tolist()

    def share(self) -> list[float]:
        """Share of all mixing weight that each expert carried."""
        return (self.weights / self.weights.sum().clamp_min(1e-12)).tolist()

    def summary(self) -> dict[str, object]:
        """Load, weight share, mean entropy relative to ln E, dead experts and largest load over the mean, JSON-ready."""
        load = self.load()
        tokens = max(int(self.tokens), 1)
        return {
            "load": load,
            "share": self.share(),
            "entropy": float(self.entropy) / tokens / math.log(max(len(load), 2)),
            "dead": [expert for expert, part in enumerate(load) if part == 0.0],
            "max_violation": max(load) * len(load) - 1.0 if sum(load) else 0.0,
            "tokens": int(self.tokens),
        }

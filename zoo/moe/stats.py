"""Routing statistics that add up over batches, ranks and tags.

Shapes: R decisions (one per token, unless the router decides for whole groups), E experts, K choices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.moe.routing import Routing


@dataclass(frozen=True, kw_only=True)
class RouterStats:
    """Sums over decisions; add two of them to merge. Every ratio is taken from the sums.

    Attributes:
        counts: (E,) int64, valid choices per expert.
        weights: (E,) float64, summed mixing weight per expert.
        entropy: () float64, summed entropy of the router's distribution, in nats.
        offered: (E,) int64, decisions that could have chosen each expert; 0 for one that is switched off.
        dropped: () int64, choices that found their expert full.
        tokens: () int64, decisions counted.
    """

    counts: Tensor
    weights: Tensor
    entropy: Tensor
    offered: Tensor
    dropped: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, routing: Routing, keep: Tensor | None = None) -> RouterStats:
        """Statistics of a routing, of the decisions in ``keep`` (R,) bool if given; carries no gradient."""
        alive = torch.ones_like(routing.valid[:, 0]) if routing.mask is None else routing.mask
        if keep is not None:
            alive = alive & keep
        valid = (routing.valid & alive[:, None]).flatten()
        index = routing.index.flatten()
        counts = torch.zeros(routing.num_experts, dtype=torch.int64, device=index.device)
        weights = torch.zeros(routing.num_experts, dtype=torch.float32, device=index.device)
        weight = torch.where(valid, routing.weight.detach().flatten().float(), 0.0)
        probs = routing.probs.detach()
        entropy = -torch.special.xlogy(probs, probs).sum(-1)
        tokens = alive.sum()
        dropped = routing.dropped
        return cls(
            counts=counts.scatter_add_(0, index, valid.long()),
            # Doubles only off the device: not every accelerator has them.
            weights=weights.scatter_add_(0, index, weight).cpu().double(),
            entropy=entropy[alive].sum().cpu().double(),
            offered=(routing.logits.detach()[alive] > -torch.inf).sum(0),
            dropped=torch.zeros_like(tokens) if dropped is None else (dropped & alive[:, None]).sum(),
            tokens=tokens,
        )

    def __add__(self, other: RouterStats) -> RouterStats:
        return RouterStats(
            counts=self.counts + other.counts,
            weights=self.weights + other.weights,
            entropy=self.entropy + other.entropy,
            offered=self.offered + other.offered,
            dropped=self.dropped + other.dropped,
            tokens=self.tokens + other.tokens,
        )

    def load(self) -> list[float]:
        """Share of all choices that fell on each expert; zeros if nothing was counted."""
        return (self.counts / self.counts.sum().clamp_min(1)).tolist()

    def share(self) -> list[float]:
        """Share of all mixing weight that each expert carried."""
        return (self.weights / self.weights.sum().clamp_min(1e-12)).tolist()

    def dead(self) -> list[int]:
        """Experts that were offered and never chosen."""
        counts, offered = self.counts.tolist(), self.offered.tolist()
        return [
            expert for expert, (count, on) in enumerate(zip(counts, offered, strict=True)) if on and not count
        ]

    @property
    def max_load(self) -> float:
        """Largest over mean load of the offered experts: 1 when even; 0 if nothing was counted."""
        return max(self.load()) * max(int((self.offered > 0).sum()), 1)

    @property
    def variation(self) -> float:
        """Coefficient of variation of the load: population deviation over mean, among the offered experts."""
        counts = [float(count) for count in self.counts[self.offered > 0].tolist()]
        total = sum(counts)
        if not total:
            return 0.0
        mean = total / len(counts)
        return math.sqrt(sum((count - mean) ** 2 for count in counts) / len(counts)) / mean

    @property
    def load_entropy(self) -> float:
        """Entropy of the load in nats: log E when even, 0 when one expert does everything."""
        return sum((-part * math.log(part) for part in self.load() if part), 0.0)

    @property
    def dropped_fraction(self) -> float:
        """Share of the choices that found their expert full."""
        return int(self.dropped) / max(int(self.dropped + self.counts.sum()), 1)

    def summary(self) -> dict[str, object]:
        """JSON-ready: every ratio of this class, and the number of tokens.

        ``entropy`` is the router's, the mean relative to that of an even choice among the offered experts;
        ``load_entropy`` is in nats; ``off`` lists experts that were never offered; ``max_violation`` is the largest
        load over the even load, less one.
        """
        offered = (self.offered > 0).tolist()
        tokens, max_load = max(int(self.tokens), 1), self.max_load
        return {
            "load": self.load(),
            "share": self.share(),
            "entropy": float(self.entropy) / tokens / math.log(max(sum(offered), 2)),
            "load_entropy": self.load_entropy,
            "dead": self.dead(),
            "off": [expert for expert, on in enumerate(offered) if not on],
            "max_load": max_load,
            "max_violation": max_load - 1.0 if max_load else 0.0,
            "variation": self.variation,
            "dropped": self.dropped_fraction,
            "tokens": int(self.tokens),
        }

"""Dynamic TMoE: patch tokens, routed by a recurrent memory to heterogeneous experts whose number can grow.

Shapes: B windows, L lookback, H horizon, C channels, P patches, D width, K known-future columns, E expert slots.

Reference: Dynamic TMoE (arXiv 2605.20678). Where paper and release disagree, this is the paper's intent; the
domain's README lists the differences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zoo.domains.forecasting.network.blocks import (
    CycleProfile,
    Forecast,
    PatchEmbedding,
    WindowScale,
    count_patches,
    patches,
)
from zoo.domains.forecasting.network.experts import KINDS, CyclicRelation, RelatedExpert
from zoo.domains.forecasting.network.repository import AnomalyRepository
from zoo.moe import (
    Context,
    DenseMixture,
    ExpertPool,
    LinearScorer,
    MoE,
    MoEOutput,
    RecurrentScorer,
    Router,
    TopK,
)
from zoo.nn import ByteDropout


class TemporalMoELayer(nn.Module):
    """x + dropout(norm(W MoE(x))): one mixture over whole sequences of patches.

    Args:
        mixture: MoE layer, or the dense mixture of the twin.
        dim: width D.
        dropout: on the branch.
    """

    def __init__(self, mixture: MoE | DenseMixture, dim: int, dropout: float) -> None:
        super().__init__()
        self.mixture = mixture
        self.project = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.dropout = ByteDropout(dropout)

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, MoEOutput | None]:
        """Map tokens (B, C, P, D); the second value is None for the dense twin."""
        out = self.mixture(x, context=context)
        y = out.y if isinstance(out, MoEOutput) else out
        y = x + self.dropout(self.norm(self.project(y)))
        return y, out if isinstance(out, MoEOutput) else None


class DynamicTMoE(nn.Module):
    """The forecaster.

    past → instance normalisation → gated patch embedding → layers of temporal experts → linear head → restore

    Args:
        channels: C, forecast columns.
        lookback: L.
        horizon: H.
        cycle: phases in a cycle, e.g. 24 for hourly data.
        known: K, columns whose future is known.
        width: D.
        layers: number of expert layers.
        patch: patch length; the stride is a divisor of choice.
        stride: step between patches.
        base: kinds of the base experts, always on.
        drift_slots: slots that growth may switch on; they cycle trend, seasonal, fluctuation.
        top_k: experts per patch.
        router: "memory" (recurrent) or "linear".
        router_width: width of the recurrent state.
        repository: whether the router recalls stored anomalies.
        relation: which experts mix channels: the "drift" slots, "all" or "none".
        profile: whether a learned shape of the cycle is taken off the window and put back on the forecast.
        dropout: everywhere.
        dense: build the dense twin: same experts, one learned constant mixture, no router.

    Raises:
        ValueError: sizes that do not fit together.
    """

    def __init__(
        self,
        *,
        channels: int,
        lookback: int,
        horizon: int,
        cycle: int,
        known: int = 0,
        width: int = 64,
        layers: int = 1,
        patch: int = 16,
        stride: int = 8,
        base: Sequence[str] = ("identity", "trend", "seasonal", "fluctuation"),
        drift_slots: int = 3,
        top_k: int = 3,
        router: str = "memory",
        router_width: int = 32,
        repository: bool = True,
        relation: str = "drift",
        profile: bool = True,
        dropout: float = 0.1,
        dense: bool = False,
    ) -> None:
        super().__init__()
        _check(lookback=lookback, patch=patch, stride=stride, base=base, top_k=top_k)
        self.lookback, self.horizon, self.cycle = lookback, horizon, cycle
        self.patch, self.stride = patch, stride
        self.num_patches = count_patches(lookback, patch, stride)
        self.kinds = (*base, *_drift_kinds(drift_slots))
        self.embed = PatchEmbedding(patch, stride, lookback, width, dropout)
        self.known = KnownFuture(known, lookback, horizon, patch, stride, width) if known else None

        def layer() -> TemporalMoELayer:
            experts: list[nn.Module] = []
            for slot, kind in enumerate(self.kinds):
                expert = KINDS[kind](width, self.num_patches, dropout)
                if relation == "all" or (relation == "drift" and slot >= len(base)):
                    expert = RelatedExpert(expert, CyclicRelation(channels, cycle, width, dropout))
                experts.append(expert)
            pool = ExpertPool(experts, base=len(base))
            if dense:
                return TemporalMoELayer(DenseMixture(pool), width, dropout)
            scorer: nn.Module
            if router == "memory":
                memory = AnomalyRepository(2 * self.num_patches, router_width) if repository else None
                scorer = RecurrentScorer(width, len(experts), router_width, dropout, memory)
            else:
                scorer = LinearScorer(width, len(experts), bias=True)
            return TemporalMoELayer(MoE(Router(scorer, TopK(top_k)), pool), width, dropout)

        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.dropout = ByteDropout(dropout)
        self.head = nn.Linear(self.num_patches * width, horizon)
        self.profile = CycleProfile(channels, cycle) if profile else None

    def signature(self, past: Tensor) -> Tensor:
        """What a sequence looks like to the repository: mean and spread of each patch, (B, L, C) → (B, C, 2P)."""
        cut = patches(past.transpose(1, 2), self.patch, self.stride)
        return torch.cat([cut.mean(-1), cut.std(-1, unbiased=False)], dim=-1)

    def context(self, past: Tensor, phase: Tensor) -> Context:
        """Signatures and the true phase of each patch, from windows (B, L, C) whose first rows have phase (B,)."""
        steps = torch.arange(self.num_patches, device=past.device) * self.stride
        return Context(features=self.signature(past), phase=(phase[:, None] + steps) % self.cycle)

    def forward(self, past: Tensor, phase: Tensor, known: Tensor | None = None) -> Forecast:
        """Forecast.

        Args:
            past: (B, L, C) windows, z-scored by the training rows.
            phase: (B,) int64, position in the cycle of each window's first row.
            known: (B, L + H, K) known-future columns over lookback and horizon, z-scored.
        """
        scale = WindowScale.of(past)
        profile = None if self.profile is None else self.profile(phase, self.lookback + self.horizon)
        tokens, ahead = self._embed(scale, past, profile, known)
        context = self.context(past, phase)
        outputs: list[MoEOutput] = []
        for layer in self.layers:
            tokens, output = layer(tokens, context)
            if output is not None:
                outputs.append(output)
        y = (self.head(self.dropout(tokens.flatten(2))) + ahead).transpose(1, 2)
        if profile is not None:
            y = y + profile[:, self.lookback :]
        return Forecast(y=scale.restore(y), moe=outputs)

    def _embed(
        self, scale: WindowScale, past: Tensor, profile: Tensor | None, known: Tensor | None
    ) -> tuple[Tensor, Tensor | float]:
        """Tokens (B, C, P, D), and what known-future columns add to the forecast (B, 1, H)."""
        x = scale.normalise(past)
        if profile is not None:
            x = x - profile[:, : self.lookback]
        tokens = self.embed(x.transpose(1, 2))
        if self.known is None:
            return tokens, 0.0
        if known is None:
            raise ValueError("this network was built with known-future columns: pass `known`")
        across, ahead = self.known(known)
        return tokens + across[:, None], ahead[:, None]

    def router_states(self, past: Tensor, phase: Tensor, known: Tensor | None = None) -> list[Tensor | None]:
        """Each layer's recurrent state after the last patch, (B, C, H), before its repository; None without one."""
        profile = None if self.profile is None else self.profile(phase, self.lookback + self.horizon)
        context = self.context(past, phase)
        states: list[Tensor | None] = []
        was_training = self.training
        self.eval()
        with torch.no_grad():
            tokens, _ = self._embed(WindowScale.of(past), past, profile, known)
            for layer, scorer in zip(self.layers, self.scorers(), strict=True):
                states.append(
                    scorer.states(tokens)[..., -1, :] if isinstance(scorer, RecurrentScorer) else None
                )
                tokens, _ = layer(tokens, context)
        self.train(was_training)
        return states

    def pools(self) -> list[ExpertPool]:
        """The expert pool of each layer; empty for the dense twin."""
        return [m.experts for layer in self.layers if isinstance(m := layer.mixture, MoE)]  # type: ignore[misc]

    def scorers(self) -> list[RecurrentScorer | LinearScorer]:
        """The router's scorer of each layer; empty for the dense twin."""
        return [m.router.scorer for layer in self.layers if isinstance(m := layer.mixture, MoE)]  # type: ignore[misc]

    def shares(self, forecast: Forecast) -> Tensor:
        """Which expert stands behind which step: (B, C, H, E), summing to one over E.

        Routing is decided per patch of the past. A step's share is the mean over layers of the patches' mixing
        weights, each patch counted by the norm of the head's weights from it to that step.
        """
        batch, _, channels = forecast.y.shape
        weight = torch.stack([out.routing.dense_weight() for out in forecast.moe]).mean(0)
        weight = weight.reshape(batch, channels, self.num_patches, -1)
        reach = self.head.weight.reshape(self.horizon, self.num_patches, -1).norm(dim=-1)
        return (reach / reach.sum(-1, keepdim=True)) @ weight


class KnownFuture(nn.Module):
    """Known-future columns: patches of the lookback join the tokens, patches of the whole span join the head.

    Args:
        known: K columns.
        lookback: L.
        horizon: H.
        patch: patch length.
        stride: step between patches.
        dim: width D of a token.
    """

    def __init__(self, known: int, lookback: int, horizon: int, patch: int, stride: int, dim: int) -> None:
        super().__init__()
        self.lookback, self.patch, self.stride = lookback, patch, stride
        self.token = nn.Linear(known * patch, dim)
        self.ahead = nn.Linear(known * (lookback + horizon), horizon)
        nn.init.zeros_(self.token.weight)
        nn.init.zeros_(self.token.bias)

    def forward(self, known: Tensor) -> tuple[Tensor, Tensor]:
        """From (B, L + H, K) to what is added to tokens (B, P, D) and to the normalised forecast (B, H)."""
        # Over the whole span: a flag may be constant in the lookback and rise only in the horizon.
        scale = WindowScale.of(known)
        columns = scale.normalise(known).transpose(1, 2)
        cut = patches(columns[..., : self.lookback], self.patch, self.stride)
        return self.token(cut.transpose(1, 2).flatten(2)), self.ahead(columns.flatten(1))


def _drift_kinds(slots: int) -> tuple[str, ...]:
    cycle = ("trend", "seasonal", "fluctuation")
    return tuple(cycle[slot % len(cycle)] for slot in range(slots))


def _check(*, lookback: int, patch: int, stride: int, base: Sequence[str], top_k: int) -> None:
    if not 1 <= stride <= patch <= lookback:
        raise ValueError(
            f"need 1 <= stride <= patch <= lookback, got stride={stride}, patch={patch}, lookback={lookback}"
        )
    unknown = [kind for kind in base if kind not in KINDS]
    if unknown or not base:
        raise ValueError(f"base={list(base)} must name at least one of {', '.join(KINDS)}")
    if not 1 < top_k <= len(base):
        raise ValueError(f"top_k={top_k} must lie in 2..{len(base)}, the number of base experts")

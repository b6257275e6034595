"""Growth: how a change of regime adds an expert, fills the repository, and how idle experts leave.

One clock: change points are found once, before the first epoch; after a warm-up, each epoch handles the next one in
time order. Everything here is a function of the network, the regime's windows and a seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zoo.data.forecasting.windows import WindowBatch, Windows
from zoo.domains.forecasting.network.dynamic_tmoe import DynamicTMoE
from zoo.domains.forecasting.network.repository import AnomalyRepository
from zoo.domains.forecasting.regimes import residual_kind
from zoo.moe import ExpertPool

_SHORTEST = 4  # steps of a horizon below which residuals show no pattern but fluctuation


@dataclass(frozen=True, kw_only=True)
class GrowthSettings:
    """How to grow.

    Attributes:
        windows: regime windows looked at, evenly spaced.
        steps: most optimiser steps of an expert's pre-training.
        patience: steps without a better loss after which pre-training ends.
        lr: learning rate of the pre-training.
    """

    windows: int = 128
    steps: int = 20
    patience: int = 5
    lr: float = 1e-3


def regime_windows(windows: Windows, start: int, stop: int, limit: int) -> WindowBatch | None:
    """Up to ``limit`` windows that lie in rows [start, stop), evenly spaced; None if there is none."""
    last = stop - windows.lookback - windows.horizon
    inside = np.arange(max(start - windows.first, 0), min(last - windows.first + 1, len(windows)))
    if len(inside) == 0:
        return None
    chosen = inside[np.linspace(0, len(inside) - 1, min(limit, len(inside))).round().astype(int)]
    return windows.__getitems__(np.unique(chosen).tolist())


def residuals(network: DynamicTMoE, batch: WindowBatch) -> Tensor:
    """Truth minus forecast in units of each window's spread, (B, C, H); unscored cells count as met."""
    with _evaluation(network), torch.no_grad():
        error = batch.future - network(batch.past, batch.phase, batch.known).y
    spread = batch.past.std(1, unbiased=False, keepdim=True).clamp_min(1e-3)
    return torch.where(batch.scored, error / spread, 0.0).transpose(1, 2)


def grow(
    network: DynamicTMoE,
    batch: WindowBatch,
    settings: GrowthSettings,
    seed: int,
    optimizer: torch.optim.Optimizer,
) -> dict[str, object]:
    """Enable and pre-train one expert per layer for a regime.

    The residuals of the regime's windows choose the kind; the first free slot of that kind is switched on with fresh
    weights, given a place in the router's choice, and trained on these windows with everything else frozen.

    Returns:
        The event: kind, its scores, the slot per layer (None where no slot of the kind is free), and the loss on the
        windows before and after.
    """
    error = residuals(network, batch)
    kind, scores = "fluctuation", dict[str, float]()
    if error.shape[-1] >= _SHORTEST:
        kind, scores = residual_kind(error.flatten(0, 1).double().numpy(force=True), seed=seed)
    slots = [_free_slot(network, pool, kind) for pool in network.pools()]
    event: dict[str, object] = {"kind": kind, "scores": scores, "slots": slots}
    if all(slot is None for slot in slots):
        return event | {"action": "no free slot"}
    before = _loss(network, batch)
    for layer, slot in enumerate(slots):
        if slot is not None:
            network.pools()[layer].enable(slot, seed=seed + layer)
            _seat(network, layer, slot, batch)
    forget(optimizer, network, slots)
    after = _pretrain(network, batch, slots, settings)
    return event | {"action": "enabled", "loss_before": before, "loss_after": after}


def remember(
    network: DynamicTMoE, batch: WindowBatch, regime: int, picks: list[tuple[int, int]] | None
) -> list[tuple[int, int]]:
    """Write a regime's worst-forecast sequences into every layer's repository.

    Args:
        network: the forecaster.
        batch: windows of the regime.
        regime: which block of the repository to write.
        picks: (position in batch, channel) of the sequences; None picks those with the largest residuals.

    Returns:
        The picks, so that the entries can be refreshed when the weights have moved on.
    """
    memories = [getattr(scorer, "memory", None) for scorer in network.scorers()]
    if not any(isinstance(memory, AnomalyRepository) for memory in memories):
        return []
    if picks is None:
        size = residuals(network, batch).square().mean(-1)
        order = size.flatten().argsort(descending=True, stable=True)
        capacity = next(memory.capacity for memory in memories if isinstance(memory, AnomalyRepository))
        picks = [divmod(int(position), size.shape[1]) for position in order[:capacity]]
    window, channel = (torch.tensor(column) for column in zip(*picks, strict=True))
    signatures = network.signature(batch.past)[window, channel]
    for memory, states in zip(
        memories, network.router_states(batch.past, batch.phase, batch.known), strict=True
    ):
        if isinstance(memory, AnomalyRepository) and states is not None:
            memory.write(regime, signatures, states[window, channel])
    return picks


def prune(network: DynamicTMoE, idle: list[list[int]], patience: int) -> list[tuple[int, int]]:
    """Switch off, in each layer, the drift slot that has idled longest, if for ``patience`` epochs or more.

    Args:
        network: the forecaster.
        idle: per layer and slot, epochs in a row with next to no share of the routing; empty before any was seen.
        patience: epochs.

    Returns:
        (layer, slot) of what was switched off.
    """
    removed = []
    for layer, (pool, counters) in enumerate(zip(network.pools(), idle, strict=False)):
        candidates = [
            (epochs, -slot)
            for slot, epochs in enumerate(counters)
            if slot >= pool.base and bool(pool.enabled[slot]) and epochs >= patience
        ]
        if candidates:
            slot = -max(candidates)[1]
            pool.disable(slot)
            removed.append((layer, slot))
    return removed


@contextmanager
def _evaluation(network: DynamicTMoE) -> Iterator[None]:
    """Evaluation mode for the time being."""
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)


def _free_slot(network: DynamicTMoE, pool: ExpertPool, kind: str) -> int | None:
    free = (
        slot
        for slot in range(pool.base, pool.num_experts)
        if network.kinds[slot] == kind and not bool(pool.enabled[slot])
    )
    return next(free, None)


def _seat(network: DynamicTMoE, layer: int, slot: int, batch: WindowBatch) -> None:
    """Start the router's score of a new expert where it wins half of the regime's last places.

    A fresh random score may never be among the best k; such an expert would get no gradient and stay idle.
    """
    with _evaluation(network), torch.no_grad():
        routing = network(batch.past, batch.phase, batch.known).moe[layer].routing
        last_place = routing.logits.gather(1, routing.index[:, -1:])
        out = network.scorers()[layer].out
        out.weight[slot] = 0.0
        out.bias[slot] = last_place.median()


def _pretrain(
    network: DynamicTMoE, batch: WindowBatch, slots: list[int | None], settings: GrowthSettings
) -> float:
    """Fit the new experts to the regime's windows with all else frozen; returns the best loss.

    The router is frozen too: it would learn to avoid an expert that knows nothing yet, and out of the choice there
    is no gradient that leads back.
    """
    parameters = [
        parameter
        for pool, slot in zip(network.pools(), slots, strict=True)
        if slot is not None
        for parameter in pool.experts[slot].parameters()
    ]
    optimizer = torch.optim.Adam(parameters, lr=settings.lr)
    best, kept, stale = math.inf, [p.detach().clone() for p in parameters], 0
    for step in range(settings.steps + 1):
        loss = _error(network, batch)
        if loss.item() < best:
            best, kept, stale = loss.item(), [p.detach().clone() for p in parameters], 0
        else:
            stale += 1
        if stale >= settings.patience or step == settings.steps:
            break
        # torch.autograd.grad leaves .grad of the frozen parameters, and the hooks of DDP, alone.
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    return best


def _error(network: DynamicTMoE, batch: WindowBatch) -> Tensor:
    """Mean squared error over the scored cells, without dropout."""
    # cuDNN cannot differentiate a recurrent network in evaluation mode.
    with _evaluation(network), torch.backends.cudnn.flags(enabled=False):
        error = (network(batch.past, batch.phase, batch.known).y - batch.future).square()
    return torch.where(batch.scored, error, 0.0).sum() / batch.scored.sum().clamp_min(1)


def _loss(network: DynamicTMoE, batch: WindowBatch) -> float:
    with torch.no_grad():
        return float(_error(network, batch))


def forget(optimizer: torch.optim.Optimizer, network: DynamicTMoE, slots: list[int | None]) -> None:
    """Clear what the optimiser remembers of slots, one per layer or None, that start afresh."""
    for layer, slot in enumerate(slots):
        if slot is None:
            continue
        pool, scorer = network.pools()[layer], network.scorers()[layer]
        for parameter in pool.experts[slot].parameters():
            optimizer.state.pop(parameter, None)
        for stacked in (scorer.out.weight, scorer.out.bias):
            for name in ("exp_avg", "exp_avg_sq"):
                if name in optimizer.state.get(stacked, {}):
                    optimizer.state[stacked][name][slot] = 0.0

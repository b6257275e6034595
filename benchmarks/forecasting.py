"""Speed and memory of the forecaster against its dense twin and a straightforward build of the same network.

All variants run in one process in shuffled rounds; what counts are the ratios. ``straightforward`` is what one writes
first: every slot runs whether or not it is switched on, convolutions, Fourier transforms and dropout are library
calls, the router steps through the patches one by one.

    python benchmarks/forecasting.py --json PATH [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoo
from zoo.domains.forecasting.drift import detect
from zoo.domains.forecasting.network.dynamic_tmoe import DynamicTMoE
from zoo.environment import hardware, versions
from zoo.files import write_text
from zoo.moe import Context, RecurrentScorer

WINDOWS, CHANNELS, LOOKBACK, HORIZON, BATCH = 8449, 7, 96, 96, 256  # ETTh1-96
DROPOUT = 0.3  # of the base size, as is all else that build() reads
EPOCHS = 10  # of a base training


class PlainTrend(nn.Module):
    """Trend expert with a library pool."""

    def __init__(self, dim: int, kernel: int) -> None:
        super().__init__()
        self.kernel = kernel
        self.net = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(DROPOUT), nn.Linear(2 * dim, dim)
        )

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Map tokens (..., P, D)."""
        flat = x.flatten(0, -3).transpose(1, 2)
        pooled = F.avg_pool1d(F.pad(flat, (self.kernel // 2,) * 2, mode="replicate"), self.kernel, 1)
        y: Tensor = self.net(pooled.transpose(1, 2).reshape(x.shape))
        return y


class PlainSeasonal(nn.Module):
    """Seasonal expert with library Fourier transforms."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(2 * dim, 2 * dim), nn.Tanh(), nn.Linear(2 * dim, 2 * dim))
        self.wave, self.join = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(DROPOUT))

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Map tokens (..., P, D)."""
        steps = x.shape[-2]
        modes = torch.fft.rfft(x, dim=-2, norm="ortho")
        kept = modes[..., : steps // 2, :]
        real, imaginary = self.mix(torch.cat([kept.real, kept.imag], -1)).chunk(2, -1)
        full = torch.zeros_like(modes)
        full[..., : steps // 2, :] = torch.complex(real, imaginary)
        first, second = self.wave(torch.fft.irfft(full, n=steps, dim=-2, norm="ortho")).chunk(2, -1)
        y: Tensor = self.out(self.join(torch.cat([first.sin(), second.cos()], -1)))
        return y


class PlainFluctuation(nn.Module):
    """Fluctuation expert with library convolutions."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(dim, 2 * dim, 3, dilation=2, padding=2)
        self.second = nn.Conv1d(dim, 2 * dim, 3, padding=1)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Map tokens (..., P, D)."""
        flat = x.flatten(0, -3).transpose(1, 2)
        y = F.glu(self.second(F.glu(self.first(flat), 1)), 1)
        normed: Tensor = self.norm(y.transpose(1, 2).reshape(x.shape) + x)
        return normed


class PlainScorer(RecurrentScorer):
    """Memory router with a cell that is called patch by patch."""

    def __init__(self, dim: int, num_experts: int, hidden: int, memory: nn.Module | None) -> None:
        super().__init__(dim, num_experts, hidden, DROPOUT, memory)
        self.dropout = nn.Dropout(DROPOUT)
        self.cell = nn.GRUCell(hidden, hidden)

    def states(self, x: Tensor) -> Tensor:
        """The recurrent states (..., P, H)."""
        state = x.new_zeros(x.shape[:-2].numel(), self.hidden)
        out = []
        for step in range(x.shape[-2]):
            u = self.dropout(F.relu(self.norm(self.project(x[..., step, :])))).flatten(0, -2)
            state = self.cell(u, state)
            out.append(state)
        return torch.stack(out, 1).reshape(*x.shape[:-1], self.hidden)


def build(dense: bool = False) -> DynamicTMoE:
    """The base network."""
    torch.manual_seed(0)
    return DynamicTMoE(
        channels=CHANNELS,
        lookback=LOOKBACK,
        horizon=HORIZON,
        cycle=24,
        dropout=DROPOUT,
        dense=dense,
        **base_settings(),
    )


def base_settings() -> dict[str, Any]:
    """Sizes of configs/forecasting/model/base.yaml."""
    import yaml

    from zoo.registry import preset_path

    model = yaml.safe_load(preset_path("forecasting", "model", "base").read_text(encoding="utf-8"))["model"]
    return {key: model[key] for key in ("width", "layers", "patch", "stride", "router_width")}


def straightforward() -> DynamicTMoE:
    """The base network, built as one would first."""
    network = build()
    width = network.embed.maps.out_features // 3
    kernel = network.num_patches - (network.num_patches + 1) % 2
    plain: dict[str, Callable[[], nn.Module]] = {
        "trend": lambda: PlainTrend(width, kernel),
        "seasonal": lambda: PlainSeasonal(width),
        "fluctuation": lambda: PlainFluctuation(width),
    }
    for layer, pool in zip(network.layers, network.pools(), strict=True):
        pool.skip_idle = False
        for slot, kind in enumerate(network.kinds):
            expert = pool.experts[slot]
            if kind in plain and hasattr(expert, "relation"):
                expert.expert = plain[kind]()
            elif kind in plain:
                pool.experts[slot] = plain[kind]()
        pool.enabled = torch.ones_like(pool.enabled)
        router = layer.mixture.router  # type: ignore[union-attr]
        old = router.scorer
        router.scorer = PlainScorer(width, pool.num_experts, old.hidden, old.memory)  # type: ignore[union-attr, arg-type]
    for module in network.modules():
        for name, child in module.named_children():
            if type(child).__name__ == "ByteDropout":
                setattr(module, name, nn.Dropout(DROPOUT))
    return network


def grown() -> DynamicTMoE:
    """The base network with every slot switched on, which runs as many experts as its twin."""
    network = build()
    for pool in network.pools():
        pool.enabled = torch.ones_like(pool.enabled)
    return network


def step(
    network: DynamicTMoE, optimizer: torch.optim.Optimizer, past: Tensor, future: Tensor, phase: Tensor
) -> None:
    """One training step."""
    optimizer.zero_grad(set_to_none=True)
    (network(past, phase).y - future).abs().mean().backward()
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()


def kept_bytes(network: DynamicTMoE, past: Tensor, future: Tensor, phase: Tensor) -> int:
    """Bytes of activations that one forward keeps for its backward, each storage once."""
    owned = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = (network(past, phase).y - future).abs().mean()
    loss.backward()
    return sum(kept.values())


def measure(rounds: int) -> dict[str, Any]:
    """Times, memory and ratios of all variants."""
    generator = torch.Generator().manual_seed(0)
    past = torch.randn(BATCH, LOOKBACK, CHANNELS, generator=generator).cumsum(1) / 8
    future = torch.randn(BATCH, HORIZON, CHANNELS, generator=generator)
    phase = torch.arange(BATCH) % 24
    variants = {
        "model": build(),
        "model_grown": grown(),
        "dense_twin": build(dense=True),
        "straightforward": straightforward(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for network in variants.values():
        network.train()
    optimizers = {
        name: torch.optim.AdamW(network.parameters(), lr=1e-4) for name, network in variants.items()
    }
    for name, network in variants.items():
        step(network, optimizers[name], past, future, phase)
    order = np.random.default_rng(0)
    for _ in range(rounds):
        for name in order.permutation(list(variants)).tolist():
            start = time.perf_counter()
            step(variants[name], optimizers[name], past, future, phase)
            seconds[name].append(time.perf_counter() - start)
    rows = {}
    for name, times in seconds.items():
        ratio = statistics.median(own / base for own, base in zip(times, seconds["model"], strict=True))
        rows[name] = {
            "windows_per_second": BATCH / statistics.median(times),
            "time_over_model": ratio,
            "megabytes_kept": kept_bytes(variants[name], past, future, phase) / 1e6,
        }
    return rows


def drift_seconds() -> float:
    """Time of one drift detection over the training rows of an ETTh set."""
    series = np.random.default_rng(0).standard_normal((8640, CHANNELS))
    start = time.perf_counter()
    detect(series)
    return time.perf_counter() - start


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each variant")
    given = parser.parse_args()
    rows = measure(given.rounds)
    epoch = WINDOWS / rows["model"]["windows_per_second"]
    drift = drift_seconds()
    result = {
        "zoo": zoo.__version__,
        "versions": versions(),
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "batch": BATCH,
        "rows": rows,
        "seconds_per_base_epoch": epoch,
        "straightforward_seconds_per_base_epoch": epoch * rows["straightforward"]["time_over_model"],
        "drift_detection_seconds": drift,
        "drift_share_of_training": drift / (EPOCHS * epoch),
    }
    write_text(given.json, json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

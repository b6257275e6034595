"""Speed and memory of the MoE layer's execution against a dense network and against other dropless implementations.

Everything runs in one process, in shuffled rounds, with the same tokens, weights and routing; what counts are the
ratios of times within a round. The *ideal* is one dense expert on all T·K rows: the same active FLOPs, nothing
gathered, one set of weights. Every answer is checked against the mask loop before anything is timed.

    python benchmarks/moe.py --json PATH [--rounds 15] [--regimes R1 R3]

Needs the extra ``bench``. Regimes (tokens, width, hidden width, experts, choices) differ in what limits them: R1 large
products, R2 small products, R3 reading the weights, R4 one choice of narrow experts, R5 many experts and choices.

A row holds ``ours_over_ideal``, the ratio of every peer to the ideal, ``ours_over_best_peer`` (1 means as fast as the
fastest of them) and ``saved_floats``, what our forward keeps for its backward in units of T·K·hidden. ``summary``
holds the worst of every regime; ``tiny`` is a whole layer, router included, on 64 tokens of width 32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoo
from zoo.environment import hardware, versions
from zoo.files import write_text
from zoo.moe import FeedForwardExperts, LinearScorer, MoE, Router, Routing, TopK
from zoo.moe.activation import activate

REGIMES = {
    "R1": (2048, 512, 1024, 8, 2),
    "R2": (512, 256, 512, 16, 2),
    "R3": (64, 256, 512, 32, 4),
    "R4": (8192, 128, 256, 8, 1),
    "R5": (4096, 1024, 512, 64, 8),
}
LOADS = ("balanced", "skew", "empty")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}
NOT_COMPARED = {
    "tutel": "has no release on PyPI and builds its own kernels",
    "mixture-of-experts": "drops tokens",
    "st-moe-pytorch": "drops tokens",
    "megablocks, scattermoe, sonic-moe": "need a GPU",
}

Strategy = Callable[[], Tensor]


def routing(tokens: int, experts: int, choices: int, load: str, generator: torch.Generator) -> Routing:
    """Random experts for every token.

    All are equally likely ("balanced"), or one is everybody's and the others follow Zipf's law ("skew"), or only a
    quarter of them is ever chosen ("empty").
    """
    chance = torch.ones(experts)
    if load == "skew":
        chance = 1.0 / torch.arange(1, experts + 1)
        chance[0] = 1e9
    elif load == "empty":
        chance[torch.randperm(experts, generator=generator)[max(experts // 4, choices) :]] = 0.0
    index = torch.multinomial(chance.expand(tokens, -1), choices, generator=generator)
    if load == "skew":
        index = torch.randperm(experts, generator=generator)[index]
    logits = torch.randn(tokens, experts, generator=generator)
    return Routing(
        index=index,
        weight=logits.gather(1, index).softmax(-1),
        valid=torch.ones_like(index, dtype=torch.bool),
        probs=logits.softmax(-1),
        logits=logits,
        complete=True,
    )


class Dense(nn.Module):
    """One expert: the ideal on all rows, a part of the mask loop on its own."""

    def __init__(self, up: Tensor, down: Tensor, activation: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(up.clone()), nn.Parameter(down.clone())
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Rows (n, D) → (n, D)."""
        return F.linear(activate(F.linear(x, self.up), self.activation), self.down)


class MaskLoop(nn.Module):
    """What one writes first: separate experts, one after the other, on the rows that a mask picks."""

    def __init__(self, experts: FeedForwardExperts) -> None:
        super().__init__()
        pairs = zip(experts.up.detach(), experts.down.detach(), strict=True)
        self.experts = nn.ModuleList(Dense(up, down, experts.activation) for up, down in pairs)

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """Tokens (T, D) → (T, D)."""
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(index == number)
            if len(token):
                y.index_add_(0, token, expert(x[token]) * weight[token, choice, None])
        return y


def transformers_experts(experts: FeedForwardExperts, implementation: str) -> nn.Module:
    """The experts of transformers with the same weights: Qwen3-MoE's (SwiGLU) or Nemotron-H's (GELU)."""
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    count, dim, hidden = experts.down.shape
    config = SimpleNamespace(
        num_experts=count,
        n_routed_experts=count,
        hidden_size=dim,
        moe_intermediate_size=hidden,
        moe_latent_size=None,
        hidden_act="silu",
        mlp_hidden_act="gelu",
        _experts_implementation=implementation,
    )
    swiglu = experts.activation == "swiglu"
    block: nn.Module = (Qwen3MoeExperts if swiglu else NemotronHExperts)(config).to(experts.up.dtype)
    with torch.no_grad():
        block.get_parameter("gate_up_proj" if swiglu else "up_proj").copy_(experts.up)
        block.get_parameter("down_proj").copy_(experts.down)
    return block


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One measurement: all strategies on the same data."""

    strategies: dict[str, Strategy]
    upstream: dict[str, Tensor]
    leaves: list[Tensor]


def prepare(regime: str, dtype: str, activation: Any, load: str) -> Setup:
    """Build the strategies of one measurement."""
    tokens, dim, hidden, count, choices = REGIMES[regime]
    generator = torch.Generator().manual_seed(0)
    kind = DTYPES[dtype]
    torch.manual_seed(0)
    bank = FeedForwardExperts(dim, hidden, count, activation).to(kind)
    decided = routing(tokens, count, choices, load, generator)
    x = torch.randn(tokens, dim, generator=generator).to(kind).requires_grad_()
    weight = decided.weight.to(kind).requires_grad_()
    decided = replace(decided, weight=weight)
    rows = torch.randn(tokens * choices, dim, generator=generator).to(kind).requires_grad_()
    ideal = Dense(bank.up.detach()[0], bank.down.detach()[0], activation)
    loop = MaskLoop(bank)
    eager = transformers_experts(bank, "eager")
    by_group = transformers_experts(bank, "grouped_mm")
    index = decided.index
    upstream = torch.randn(tokens, dim, generator=generator).to(kind)
    strategies: dict[str, Strategy] = {
        "ideal": lambda: ideal(rows),
        "ours": lambda: bank(x, decided),
        "mask_loop": lambda: loop(x, index, weight),
        "transformers_eager": lambda: eager(x, index, weight),
        "transformers_grouped_mm": lambda: by_group(x, index, weight),
    }
    modules = (bank, ideal, loop, eager, by_group)
    return Setup(
        strategies=strategies,
        upstream={name: upstream.repeat(choices, 1) if name == "ideal" else upstream for name in strategies},
        leaves=[x, weight, rows, *(p for module in modules for p in module.parameters())],
    )


def check(setup: Setup, tolerance: float) -> None:
    """Raise unless every strategy gives the mask loop's answer."""
    with torch.no_grad():
        expected = setup.strategies["mask_loop"]().float()
        for name, strategy in setup.strategies.items():
            if name != "ideal":
                error = float((strategy().float() - expected).abs().max() / expected.abs().max().clamp_min(1))
                if error > tolerance:
                    raise ValueError(f"{name} is off by {error:.1e}")


def timed(setup: Setup, name: str, backward: bool) -> float:
    """Seconds of one call."""
    for leaf in setup.leaves:
        leaf.grad = None
    start = time.perf_counter()
    if backward:
        setup.strategies[name]().backward(setup.upstream[name])
    else:
        with torch.no_grad():
            setup.strategies[name]()
    return time.perf_counter() - start


def rounds_of(setup: Setup, backward: bool, rounds: int) -> dict[str, list[float]]:
    """Seconds of every strategy in every round, each round in another order, after one to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in setup.strategies}
    order = np.random.default_rng(0)
    for number in range(rounds + 1):
        for name in order.permutation(list(seconds)).tolist():
            took = timed(setup, name, backward)
            if number:
                seconds[name].append(took)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> float:
    """Median over rounds of one strategy's time over another's."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[base], strict=True))


def saved_floats(setup: Setup) -> int:
    """Numbers that our forward keeps for its backward beyond inputs and parameters, each storage once."""
    known = {leaf.untyped_storage().data_ptr() for leaf in setup.leaves}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes() // tensor.itemsize
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = setup.strategies["ours"]()
    del y
    return sum(kept.values())


def rows(regimes: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Measure everything, one row per setting."""
    for regime in regimes:
        tokens, _, hidden, _, choices = REGIMES[regime]
        for dtype in DTYPES:
            for activation in ("swiglu", "gelu"):
                for load in LOADS:
                    setup = prepare(regime, dtype, activation, load)
                    check(setup, TOLERANCE[dtype])
                    saved = saved_floats(setup) / (tokens * choices * hidden)
                    for backward in (False, True):
                        seconds = rounds_of(
                            setup, backward, max(rounds // 5, 1) if regime == "R5" else rounds
                        )
                        setting = {"regime": regime, "pass": "fwd+bwd" if backward else "fwd", "dtype": dtype}
                        setting |= {"activation": activation, "load": load}
                        yield setting | row(seconds) | {"saved_floats": round(saved, 3)}


def row(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Ratios of one setting."""
    peers = {
        name: round(ratio(seconds, name, "ideal"), 3) for name in seconds if name not in ("ideal", "ours")
    }
    best = min(peers, key=lambda name: peers[name])
    return {
        "ours_over_ideal": round(ratio(seconds, "ours", "ideal"), 3),
        "best_peer": best,
        "ours_over_best_peer": round(ratio(seconds, "ours", best), 3),
        "peers": peers,
        "ideal_ms": round(statistics.median(seconds["ideal"]) * 1e3, 3),
        "ours_ms": round(statistics.median(seconds["ours"]) * 1e3, 3),
    }


def summary(measured: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The worst of every regime: over the best peer, skew over balanced, and numbers kept."""
    table: dict[str, dict[str, float]] = {}
    settings = ("regime", "pass", "dtype", "activation")
    balanced = {
        tuple(one[key] for key in settings): one["ours_over_ideal"]
        for one in measured
        if one["load"] == "balanced"
    }
    for one in measured:
        worst = table.setdefault(
            one["regime"], {"over_best_peer": 0.0, "skew_over_balanced": 0.0, "saved_floats": 0.0}
        )
        worst["over_best_peer"] = max(worst["over_best_peer"], one["ours_over_best_peer"])
        worst["saved_floats"] = max(worst["saved_floats"], one["saved_floats"])
        if one["load"] == "skew":
            skew = one["ours_over_ideal"] / balanced[tuple(one[key] for key in settings)]
            worst["skew_over_balanced"] = max(worst["skew_over_balanced"], round(skew, 3))
    return table


def tiny(hidden: int, activation: Any, rounds: int) -> dict[str, Any]:
    """A whole layer on 64 tokens over one dense call of the same active FLOPs, and where its time goes."""
    tokens, dim, experts, choices = 64, 32, 8, 2
    torch.manual_seed(0)
    layer = MoE(
        Router(LinearScorer(dim, experts), TopK(choices)),
        FeedForwardExperts(dim, hidden, experts, activation),
    )
    ideal = Dense(layer.experts.up.detach()[0], layer.experts.down.detach()[0], activation)  # type: ignore[index, operator]
    x = torch.randn(tokens, dim, requires_grad=True)
    every = torch.randn(tokens * choices, dim, requires_grad=True)
    with torch.no_grad():
        decided = layer.router(x)
    decided = replace(decided, weight=decided.weight.requires_grad_())
    upstream = torch.randn(tokens, dim)
    setup = Setup(
        strategies={
            "ideal": lambda: ideal(every),
            "ours": lambda: layer(x).y,
            "router": lambda: layer.router(x).weight,
            "experts": lambda: layer.experts(x, decided),
        },
        upstream={
            "ideal": torch.randn(tokens * choices, dim),
            "ours": upstream,
            "router": torch.randn(tokens, choices),
            "experts": upstream,
        },
        leaves=[x, every, decided.weight, *ideal.parameters(), *layer.parameters()],
    )
    result: dict[str, Any] = {"hidden": hidden, "activation": activation}
    for name, backward in (("fwd", False), ("fwd+bwd", True)):
        seconds = rounds_of(setup, backward, 20 * rounds)
        result[name] = {
            f"{part}_over_ideal": round(ratio(seconds, part, "ideal"), 2)
            for part in ("ours", "router", "experts")
        } | {"ideal_us": round(statistics.median(seconds["ideal"]) * 1e6, 1)}
    return result


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument(
        "--rounds", type=int, default=15, help="timed rounds of each setting; a fifth of it for R5"
    )
    parser.add_argument(
        "--regimes", nargs="+", choices=REGIMES, default=list(REGIMES), help="which to measure"
    )
    given = parser.parse_args()
    try:
        import transformers
    except ImportError:
        parser.exit(2, "error: the peers are missing: pip install 'moe-zoo[bench]'\n")
    result: dict[str, Any] = {
        "zoo": zoo.__version__,
        "versions": versions() | {"transformers": transformers.__version__},
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "rounds": given.rounds,
        "not_compared": NOT_COMPARED,
        "rows": [],
        "tiny": [],
    }
    for measured in rows(given.regimes, given.rounds):
        result["rows"].append(measured)
        print(json.dumps(measured), flush=True)
    # Last: glibc hands small buffers back to the kernel at every call until larger ones have come and gone.
    for hidden in (64, 128):
        for activation in ("swiglu", "gelu"):
            result["tiny"].append(tiny(hidden, activation, given.rounds))
            print(json.dumps(result["tiny"][-1]), flush=True)
    result["summary"] = summary(result["rows"])
    print(json.dumps(result["summary"]))
    write_text(given.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

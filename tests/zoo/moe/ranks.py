"""What each of two processes computes for test_parallel.py, which compares it with one process.

``python ranks.py RANK FOLDER`` writes FOLDER/RANK.pt.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn

from zoo.moe import (
    ExpertBank,
    FeedForwardExperts,
    FieldExperts,
    LinearScorer,
    MoE,
    MoEOutput,
    Router,
    SelectionBias,
    TopK,
    balance_loss,
)
from zoo.moe.expert_list import ExpertList
from zoo.moe.lowrank import LowRankExperts
from zoo.moe.twin import DenseFeedForward

WORLD, TOKENS, D, H, STEPS, RATE = 2, 10, 8, 12, 3, 0.1
SECONDS = 200  # about 10 are needed, most of them for imports, which a busy machine makes long


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(D, D)

    def forward(self, x: Tensor, context: object = None) -> Tensor:
        return self.map(x).relu()


def feed_forward(backend: str) -> Callable[[int], ExpertBank]:
    return lambda experts: FeedForwardExperts(
        D, H, experts, "swiglu", bias=backend != "grouped", backend=backend
    )


FEED_FORWARD = {
    f"feed-forward, {backend}": feed_forward(backend) for backend in ("auto", *FeedForwardExperts.backends)
}
BANKS: dict[str, Callable[[int], ExpertBank]] = {
    **FEED_FORWARD,
    "low rank": lambda experts: LowRankExperts(D, D, experts, rank=4),
    "list": lambda experts: ExpertList(
        [DenseFeedForward(D, 2 * e + 2, bias=True) for e in range(experts)], D
    ),
    "field": lambda experts: FieldExperts([Mapped() for _ in range(experts)]),
}
# Bank, number of experts (one leaves a rank without any), what is sharded, and along which dimension.
SHARDED = [
    *((bank, experts, what, 0) for bank in BANKS for experts in (4, 1) for what in ("layer", "bank")),
    *((bank, experts, what, 1) for bank in FEED_FORWARD for experts in (4, 1) for what in ("layer", "bank")),
]


def layer(bank: str, experts: int = 4) -> MoE:
    """The same layer in every process; of four experts, rank 0 takes 0 and 1, rank 1 takes 0 and 2, nobody 3."""
    torch.manual_seed(0)
    scorer = LinearScorer(D, experts, bias=True)
    if experts == 4:
        with torch.no_grad():
            scorer.out.bias.copy_(torch.tensor([5.0, 0.0, 0.0, -5.0]))
            scorer.out.weight[:, 0] = torch.tensor([0.0, 1.0, -1.0, 0.0])
    router = Router(scorer, TopK(min(2, experts)))
    return MoE(router, BANKS[bank](experts), shared=DenseFeedForward(D, 4))


def tokens(rank: int, step: int = 0) -> Tensor:
    """Tokens of a rank; in its last step rank 1 has none."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(0 if (rank, step) == (1, STEPS - 1) else TOKENS, D, generator=generator)
    x[:, 0] = 3.0 - 6.0 * rank
    return x


def loss(out: MoEOutput) -> Tensor:
    return out.y.square().sum() / TOKENS + balance_loss(out.routing)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def step(module: nn.Module) -> None:
    """One step down the gradient, by hand."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= RATE * parameter.grad
            parameter.grad = None


def replicated(bank: str, rank: int) -> dict[str, object]:
    """Three steps under DistributedDataParallel."""
    from torch.nn.parallel import DistributedDataParallel

    moe = layer(bank)
    network = DistributedDataParallel(moe, find_unused_parameters=False)
    counts, found = [], []
    for number in range(STEPS):
        out = network(tokens(rank, number))
        loss(out).backward()
        counts.append(out.routing.counts().tolist())
        found.append(gradients(moe))
        step(moe)
    return {"counts": counts, "gradients": found, "weights": dict(moe.state_dict())}


def sharded(bank: str, experts: int, what: str, dim: int, rank: int) -> dict[str, object]:
    """One step with the parameters of the layer, or of its bank alone, spread over the ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    moe = layer(bank, experts)
    fully_shard(
        moe if what == "layer" else moe.experts,
        reshard_after_forward=True,
        shard_placement_fn=lambda parameter: Shard(dim if parameter.ndim > 1 else 0),
    )
    pieces = {name: tuple(piece.shape) for name, piece in local(moe.experts).items()}
    x = tokens(rank).requires_grad_()
    out = moe(x)
    loss(out).backward()
    found = {name: whole(parameter.grad) for name, parameter in moe.named_parameters()}
    return {"y": out.y.detach(), "x": x.grad, "gradients": found, "pieces": pieces}


def local(module: nn.Module) -> dict[str, Tensor]:
    """This rank's piece of each parameter."""
    return {name: parameter.to_local() for name, parameter in module.named_parameters()}


def whole(value: Tensor) -> Tensor:
    """All pieces of a tensor together."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def balanced(rank: int) -> Tensor:
    """The selection bias after a step in which each rank used one expert alone."""
    from torch import distributed

    counts = torch.tensor([(4, 0), (0, 4)][rank])
    distributed.all_reduce(counts)
    bias = SelectionBias(2, rate=0.1)
    bias.update(counts)
    return bias.bias


def main(rank: int, folder: Path) -> None:
    from torch import distributed

    torch.set_num_threads(1)
    # A hang shows where.
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=SECONDS / 2),
    )
    cases = {
        "bias": lambda: balanced(rank),
        **{bank: lambda bank=bank: replicated(bank, rank) for bank in BANKS},
        **{case: lambda case=case: sharded(*case, rank) for case in SHARDED},
    }
    found = {}
    for case, compute in cases.items():
        try:
            found[case] = compute()
        except Exception as error:
            error.add_note(f"rank {rank}, case {case}")
            raise
    torch.save(found, folder / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(int(sys.argv[1]), Path(sys.argv[2]))

"""Two processes compute what one does: replicated (DDP) and sharded (FSDP2) layers, and the selection bias."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.zoo.moe import ranks

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank computed, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes, logs = [], [folder / f"{rank}.log" for rank in range(ranks.WORLD)]
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            command = [sys.executable, ranks.__file__, str(rank), str(folder)]
            processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
    try:
        codes = [process.wait(ranks.SECONDS + 20) for process in processes]
    except subprocess.TimeoutExpired:
        codes = None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * ranks.WORLD, "\n".join(log.read_text()[-3000:] for log in logs)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks.WORLD)]


def same(got, expected, what):
    tolerance = 1e-6 * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance, msg=lambda text: f"{what}: {text}")


def alone(layer, rank, step=0):
    """Output and gradients of one rank's tokens in a single process."""
    layer.zero_grad()
    x = ranks.tokens(rank, step).requires_grad_()
    out = layer(x)
    ranks.loss(out).backward()
    return out.y.detach(), x.grad, ranks.gradients(layer)


def mean(one, other):
    assert one.keys() == other.keys()
    return {name: (one[name] + other[name]) / 2 for name in one}


@pytest.mark.parametrize("bank", ranks.BANKS)
def test_replicas_learn_as_one_process_does(found, bank):
    layer = ranks.layer(bank)
    for step in range(ranks.STEPS):
        expected = mean(alone(layer, 0, step)[2], alone(layer, 1, step)[2])
        for rank in range(ranks.WORLD):
            got = found[rank][bank]["gradients"][step]
            assert got.keys() == expected.keys()
            for name, gradient in expected.items():
                same(got[name], gradient, f"step {step}, rank {rank}, {name}")
        for name, parameter in layer.named_parameters():
            parameter.grad = expected[name]
        ranks.step(layer)
    for name, weight in layer.state_dict().items():
        same(found[0][bank]["weights"][name], weight, name)


@pytest.mark.parametrize("bank", ranks.BANKS)
def test_replicas_stay_equal_to_the_bit(found, bank):
    mine, other = (found[rank][bank]["weights"] for rank in range(ranks.WORLD))
    start = ranks.layer(bank).state_dict()
    assert mine.keys() == other.keys() == start.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    assert any(not torch.equal(mine[name], start[name]) for name in mine)


@pytest.mark.parametrize("bank", ranks.BANKS)
def test_experts_idle_on_one_rank_or_on_both(found, bank):
    n = ranks.TOKENS
    assert found[0][bank]["counts"] == [[n, n, 0, 0]] * ranks.STEPS
    # In its last step rank 1 has no tokens at all.
    assert found[1][bank]["counts"] == [[n, 0, n, 0]] * (ranks.STEPS - 1) + [[0, 0, 0, 0]]


@pytest.mark.parametrize("case", ranks.SHARDED, ids=lambda case: " ".join(map(str, case)))
def test_sharded_layers_compute_what_one_process_does(found, case):
    bank, experts, what, _ = case
    layer = ranks.layer(bank, experts)
    single = [alone(layer, rank) for rank in range(ranks.WORLD)]
    shared = mean(single[0][2], single[1][2])
    for rank, (y, x, own) in enumerate(single):
        got = found[rank][case]
        same(got["y"], y, "output")
        same(got["x"], x, "gradient of x")
        assert got["gradients"].keys() == shared.keys()
        for name, gradient in got["gradients"].items():
            # What is not sharded, nobody averages.
            averaged = what == "layer" or name.startswith("experts.")
            same(gradient, shared[name] if averaged else own[name], f"rank {rank}, {name}")


def test_one_stacked_expert_leaves_a_rank_empty_or_is_cut_along_another_dimension(found):
    bank = next(iter(ranks.FEED_FORWARD))
    up = [[found[rank][bank, 1, "bank", dim]["pieces"]["up"] for rank in range(2)] for dim in (0, 1)]
    width = 2 * ranks.H
    assert up[0] == [(1, width, ranks.D), (0, width, ranks.D)]
    assert up[1] == [(1, width // 2, ranks.D)] * 2


def test_a_load_that_is_even_over_all_ranks_moves_no_bias(found):
    # Each rank alone has (4, 0) or (0, 4) and would move.
    assert torch.equal(found[0]["bias"], torch.zeros(2))
    assert torch.equal(found[1]["bias"], torch.zeros(2))


def test_the_package_names_no_distributed_part_of_torch():
    sources = list((ROOT / "zoo" / "moe").rglob("*.py"))
    assert len(sources) > 10
    named = [path.name for path in sources if "distributed" in path.read_text()]
    assert named == []

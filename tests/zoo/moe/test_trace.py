"""Traces: what a network chose, written to files and replayed to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from zoo.moe.feedforward import FeedForwardExperts
from zoo.moe.layer import MoE
from zoo.moe.router import Router
from zoo.moe.routing import Choices, Context
from zoo.moe.scorers import LinearScorer
from zoo.moe.selectors import Capacity, Dense, TopK
from zoo.moe.trace import from_tensors, to_tensors
from zoo.moe.transforms import GaussianNoise


def choices(rows: int = 3, k: int = 2) -> Choices:
    return Choices(index=torch.randint(0, 9, (rows, k)), valid=torch.rand(rows, k) < 0.5)


def test_a_trace_is_flat_named_and_small():
    trace = [choices(), choices(5, 1)]
    tensors = to_tensors(trace)
    assert list(tensors) == ["0.index", "0.valid", "1.index", "1.valid"]
    assert {name: tensor.dtype for name, tensor in tensors.items() if name.startswith("0")} == {
        "0.index": torch.int32,
        "0.valid": torch.bool,
    }
    assert torch.equal(tensors["1.index"].long(), trace[1].index)
    assert to_tensors([]) == {}
    assert from_tensors({}) == []


@pytest.mark.parametrize("layers", [1, 2, 12])
def test_a_trace_comes_back_from_a_file_as_it_was(tmp_path, layers):
    trace = [choices(rows) for rows in range(layers)]
    save_file(to_tensors(trace), tmp_path / "trace.safetensors")
    back = from_tensors(load_file(tmp_path / "trace.safetensors"))
    assert len(back) == layers
    for one, other in zip(trace, back, strict=True):
        assert other.index.dtype == torch.int64
        assert torch.equal(one.index, other.index)
        assert torch.equal(one.valid, other.valid)


def test_the_choices_of_every_expert_in_order_are_written_out(tmp_path):
    routing = Router(LinearScorer(4, 3), Dense())(torch.randn(5, 4))
    tensors = to_tensors([routing.choices()])
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    save_file(tensors, tmp_path / "trace.safetensors")
    assert from_tensors(load_file(tmp_path / "trace.safetensors"))[0].index.tolist() == [[0, 1, 2]] * 5
    narrow = Choices(index=torch.zeros(5, 3, dtype=torch.int32)[:, :2], valid=torch.ones(5, 3).bool()[:, :2])
    assert all(tensor.is_contiguous() for tensor in to_tensors([narrow]).values())


class Stack(nn.Module):
    """Three noisy layers that drop, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            MoE(
                Router(LinearScorer(8, 5), [TopK(2), Capacity(1.0)], transform=GaussianNoise(0.5)),
                FeedForwardExperts(8, 16, 5),
            )
            for _ in range(3)
        )

    def forward(self, x, trace=(None, None, None)):
        routings = []
        for layer, chosen in zip(self.layers, trace, strict=True):
            out = layer(x, context=Context(choices=chosen))
            x = x + out.y
            routings.append(out.routing)
        return x, routings


def test_a_network_replays_its_trace_to_the_bit_and_its_routers_learn():
    network, x = Stack(), torch.randn(20, 8)
    torch.manual_seed(1)
    y, routings = network(x)
    trace = from_tensors(to_tensors([routing.choices() for routing in routings]))
    # The same noise again, so that the logits are equal; without a trace other noise gives other choices.
    torch.manual_seed(1)
    again, replayed = network(x, trace)
    assert torch.equal(again, y)
    other, free = network(x)
    assert not torch.equal(free[0].index, routings[0].index)
    assert not torch.equal(other, y)
    for one, two in zip(routings, replayed, strict=True):
        assert torch.equal(one.weight, two.weight)
        assert torch.equal(one.valid, two.valid)
    again.square().sum().backward()
    for layer in network.layers:
        assert layer.router.scorer.out.weight.grad.abs().max() > 0


def test_a_trace_brings_a_rounded_network_nearer_to_the_one_that_made_it():
    torch.manual_seed(0)
    router = Router(LinearScorer(16, 32), TopK(4))
    nn.init.normal_(router.scorer.out.weight)
    x = torch.randn(2000, 16)
    fine = router(x)
    coarse = router(x.bfloat16())
    replayed = router(x.bfloat16(), context=Context(choices=fine.choices()))

    def error(routing):
        return (routing.dense_weight().float() - fine.dense_weight()).abs().mean().item()

    assert not torch.equal(coarse.index, fine.index)
    assert torch.equal(replayed.index, fine.index)
    assert error(replayed) < 0.9 * error(coarse)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("1.valid"), r"a trace of 1 layers .* differs in \['1.index'\]"),
        (lambda t: t.pop("0.index"), "a trace of 1 layers"),
        (lambda t: t.update({"2.index": t.pop("1.index"), "2.valid": t.pop("1.valid")}), "2 layers"),
        (lambda t: t.update({"weight": t["0.index"]}), r"differs in \['weight'\]"),
        (lambda t: t.update({"0.valid": t["0.valid"][:1]}), r"layer 0: index torch.int32 \(3, 2\) and valid"),
        (lambda t: t.update({"0.valid": t["0.valid"].int()}), "valid torch.int32"),
        (lambda t: t.update({"1.index": t["1.index"].float()}), "layer 1: index torch.float32"),
        (lambda t: t.update({"1.index": t["1.index"][0], "1.valid": t["1.valid"][0]}), r"layer 1: .*\(2,\)"),
    ],
)
def test_a_broken_trace_is_refused(change, words):
    tensors = to_tensors([choices(), choices()])
    change(tensors)
    with pytest.raises(ValueError, match=words):
        from_tensors(tensors)


def test_choices_are_replaced_and_not_changed():
    one = choices()
    before = replace(one, index=one.index.clone(), valid=one.valid.clone())
    from_tensors(to_tensors([one]))[0].index.fill_(0)
    assert torch.equal(one.index, before.index)

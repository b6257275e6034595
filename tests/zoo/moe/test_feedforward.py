"""Stacked feed-forward experts: formulas, initialisation, upcycling and per-expert checkpoints."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers.mlp import Mlp, SwiGLU
from torch import nn
from torch.nn import functional as F

from zoo.moe import FeedForwardExperts, LinearScorer, MoE, Router, TopK

GELU = {"up": "experts.{e}.w1", "down": "experts.{e}.w2"}
SWIGLU = {
    "gate": "experts.{e}.gate_proj.weight",
    "up": "experts.{e}.up_proj.weight",
    "down": "experts.{e}.down_proj.weight",
    "gate_bias": "experts.{e}.gate_proj.bias",
    "up_bias": "experts.{e}.up_proj.bias",
    "down_bias": "experts.{e}.down_proj.bias",
}


def test_each_stacked_expert_starts_as_a_linear_layer_of_its_own():
    torch.manual_seed(0)
    bank = FeedForwardExperts(8, 256, 4, bias=True)
    for weight, fan_in in ((bank.up, 8), (bank.down, 256), (bank.up_bias, 8), (bank.down_bias, 256)):
        bound = 1 / math.sqrt(fan_in)
        largest = weight.abs().flatten(1).amax(1)
        # Eight values per expert are too few to come close to the bound.
        assert (largest > (0.93 if weight[0].numel() > 100 else 0.5) * bound).all()
        assert (largest <= bound).all()
        assert not torch.equal(weight[0], weight[1])


def test_the_bound_is_that_of_one_expert_and_not_of_the_stack():
    torch.manual_seed(0)
    largest = FeedForwardExperts(8, 16, 4).up.abs().max()
    assert 0.33 < largest <= 0.35356


def test_feed_forward_formulas():
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    gelu = FeedForwardExperts(4, 8, 2)
    assert gelu.up.shape == (2, 8, 4)
    expected = F.gelu(x @ gelu.up[1].T) @ gelu.down[1].T
    torch.testing.assert_close(gelu.expert(1, x), expected)
    swiglu = FeedForwardExperts(4, 8, 2, activation="swiglu", bias=True)
    assert swiglu.up.shape == (2, 16, 4)
    gate = x @ swiglu.up[1, :8].T + swiglu.up_bias[1, :8]
    up = x @ swiglu.up[1, 8:].T + swiglu.up_bias[1, 8:]
    expected = (F.silu(gate) * up) @ swiglu.down[1].T + swiglu.down_bias[1]
    torch.testing.assert_close(swiglu.expert(1, x), expected)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
def test_one_each_and_every_expert_agree(activation, bias):
    torch.manual_seed(0)
    bank = FeedForwardExperts(4, 8, 3, activation, bias)
    x = torch.randn(7, 4)
    every = bank.every(x)
    for index, answer in enumerate(bank.each([x, x[:2], x[:0]])):
        torch.testing.assert_close(answer, bank.expert(index, x)[: len(answer)])
        torch.testing.assert_close(every[index], bank.expert(index, x))


@pytest.mark.parametrize("sizes", [(0, 8, 2), (4, 0, 2)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ValueError, match="must be at least 1"):
        FeedForwardExperts(*sizes)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="activation='relu' must be 'gelu' or 'swiglu'"):
        FeedForwardExperts(4, 8, 2, activation="relu")
    with pytest.raises(ValueError, match="backend='loop' must be one of auto, reference"):
        FeedForwardExperts(4, 8, 2, backend="loop")
    with pytest.raises(ValueError, match="at least one expert"):
        FeedForwardExperts(4, 8, 0)


def test_the_matrices_of_an_expert_are_views():
    bank = FeedForwardExperts(4, 6, 3, activation="swiglu")
    parts = bank.matrices(1)
    assert {name: tuple(part.shape) for name, part in parts.items()} == {
        "gate": (6, 4),
        "up": (6, 4),
        "down": (4, 6),
    }
    with torch.no_grad():
        parts["up"].fill_(2.0)
    assert (bank.up[1, 6:] == 2.0).all()
    assert not (bank.up[1, :6] == 2.0).any()
    assert FeedForwardExperts(4, 6, 3).matrices(0).keys() == {"up", "down"}


@pytest.mark.parametrize("bias", [True, False, (True, False), (False, True)])
@pytest.mark.parametrize("block", [Mlp, SwiGLU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_upcycling_a_block_of_timm_gives_that_block_in_every_expert(block, bias, dtype):
    torch.manual_seed(0)
    dense = block(6, 10, bias=bias).to(dtype)
    if block is Mlp:
        bank = FeedForwardExperts.from_dense(dense.fc1, dense.fc2, 3)
    else:
        bank = FeedForwardExperts.from_dense(dense.fc1_x, dense.fc2, 3, gate=dense.fc1_g)
    x = torch.randn(7, 6, dtype=dtype)
    for index in range(3):
        torch.testing.assert_close(bank.expert(index, x), dense(x), rtol=0, atol=1e-6)
        assert torch.equal(bank.down[index], dense.fc2.weight)
    assert bank.up.dtype == dtype
    assert (bank.up_bias is None, bank.down_bias is None) == (
        (dense.fc1 if block is Mlp else dense.fc1_g).bias is None,
        dense.fc2.bias is None,
    )
    # The weights sum to one, so that the layer is the dense block until the experts part.
    layer = MoE(Router(LinearScorer(6, 3), TopK(2)), bank).to(dtype)
    torch.testing.assert_close(layer(x).y, dense(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", FeedForwardExperts.backends)
@pytest.mark.parametrize("bias", [(True, False), (False, True)])
def test_a_bias_on_one_map_alone_is_added_or_refused_by_every_back_end(backend, bias):
    torch.manual_seed(0)
    dense = Mlp(8, 16, bias=bias)
    bank = FeedForwardExperts.from_dense(dense.fc1, dense.fc2, 3, backend=backend)
    layer, x = MoE(Router(LinearScorer(8, 3), TopK(2)), bank), torch.randn(40, 8)
    if backend == "grouped":
        with pytest.raises(ValueError, match="it adds no biases"):
            layer(x)
    else:
        torch.testing.assert_close(layer(x).y, dense(x), rtol=0, atol=1e-6)


def test_upcycled_experts_are_copies_that_train_apart():
    dense = Mlp(4, 8)
    before = dense.fc1.weight.detach().clone()
    bank = FeedForwardExperts.from_dense(dense.fc1, dense.fc2, 2)
    bank.expert(0, torch.randn(3, 4)).sum().backward()
    assert dense.fc1.weight.grad is None
    with torch.no_grad():
        bank.up -= bank.up.grad
    assert torch.equal(dense.fc1.weight, before)
    assert torch.equal(bank.up[1], before)
    assert not torch.equal(bank.up[0], before)


def test_maps_that_do_not_fit_together_are_not_upcycled():
    up, down = nn.Linear(4, 8), nn.Linear(8, 4)
    with pytest.raises(ValueError, match=r"up maps 4 to 8: a \(5, 8\) weight must be \(4, 8\)"):
        FeedForwardExperts.from_dense(up, nn.Linear(8, 5), 2)
    with pytest.raises(ValueError, match=r"up maps 4 to 8: a \(9, 4\) weight must be \(8, 4\)"):
        FeedForwardExperts.from_dense(up, down, 2, gate=nn.Linear(4, 9))
    with pytest.raises(ValueError, match="gate and up must both have a bias or both have none"):
        FeedForwardExperts.from_dense(up, down, 2, gate=nn.Linear(4, 8, bias=False))


def test_per_expert_keys_hold_the_weights_of_that_expert():
    torch.manual_seed(0)
    bank = FeedForwardExperts(3, 5, 2, activation="swiglu", bias=True)
    state = bank.per_expert(SWIGLU)
    assert len(state) == 12
    assert torch.equal(state["experts.1.gate_proj.weight"], bank.up[1, :5])
    assert torch.equal(state["experts.1.up_proj.weight"], bank.up[1, 5:])
    assert torch.equal(state["experts.0.down_proj.weight"], bank.down[0])
    assert torch.equal(state["experts.0.gate_proj.bias"], bank.up_bias[0, :5])
    assert torch.equal(state["experts.0.up_proj.bias"], bank.up_bias[0, 5:])
    assert torch.equal(state["experts.1.down_proj.bias"], bank.down_bias[1])
    state["experts.0.down_proj.weight"].zero_()
    assert bank.down[0].abs().min() > 0


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    dim=st.integers(1, 6),
    hidden=st.integers(1, 6),
    experts=st.integers(1, 12),
    swiglu=st.booleans(),
    bias=st.booleans(),
)
def test_a_round_trip_through_a_per_expert_checkpoint_is_exact(dim, hidden, experts, swiglu, bias):
    activation = "swiglu" if swiglu else "gelu"
    first, second = (FeedForwardExperts(dim, hidden, experts, activation, bias) for _ in range(2))
    names = {
        part: pattern
        for part, pattern in SWIGLU.items()
        if (swiglu or "gate" not in part) and (bias or "bias" not in part)
    }
    second.load_per_expert(first.per_expert(names), names)
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name


def test_a_checkpoint_of_linear_layers_loads_as_those_layers():
    torch.manual_seed(0)
    dense = nn.ModuleDict(
        {"experts": nn.ModuleList([SwiGLU(3, 5, bias=False).double() for _ in range(4)])}
    ).requires_grad_(False)
    names = {
        "gate": "experts.{e}.fc1_g.weight",
        "up": "experts.{e}.fc1_x.weight",
        "down": "experts.{e}.fc2.weight",
    }
    bank = FeedForwardExperts(3, 5, 4, activation="swiglu").double()
    bank.load_per_expert(dense.state_dict(), names)
    x = torch.randn(6, 3).double()
    for index, expert in enumerate(dense["experts"]):
        torch.testing.assert_close(bank.expert(index, x), expert(x), rtol=0, atol=1e-12)
    assert bank.up.requires_grad


def damaged(change: str) -> dict[str, torch.Tensor]:
    state = FeedForwardExperts(3, 5, 2).per_expert(GELU)
    match change:
        case "missing":
            del state["experts.1.w2"]
        case "unmatched":
            state["experts.2.w1"] = torch.zeros(5, 3)
        case "transposed":
            state["experts.1.w2"] = state["experts.1.w2"].T
        case "quantised":
            state["experts.1.w2"] = state["experts.1.w2"].to(torch.int8)
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "the checkpoint lacks experts.1.w2"),
        ("unmatched", "no expert takes experts.2.w1"),
        ("transposed", r"experts.1.w2 is torch.float32 of shape \(5, 3\), not floats of \(3, 5\)"),
        ("quantised", r"experts.1.w2 is torch.int8"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_of_it_loaded(change, message):
    bank = FeedForwardExperts(3, 5, 2)
    before = {name: value.clone() for name, value in bank.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        bank.load_per_expert(damaged(change), GELU)
    for name, value in bank.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_many_missing_keys_fit_one_line():
    with pytest.raises(ValueError, match=r"lacks experts.0.w1 and 3 more$"):
        FeedForwardExperts(3, 5, 2).load_per_expert({}, GELU)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"up": "{e}.w1"}, "names for up do not fit parts down, up"),
        (GELU | {"gate": "{e}.w3"}, "names for down, gate, up do not fit parts down, up"),
        (GELU | {"up": "experts.w1"}, "'experts.w1' of up gives the key 'experts.w1' a second time"),
        (GELU | {"up": "experts.{e}.w2"}, "gives the key 'experts.0.w2' a second time"),
    ],
)
def test_names_must_name_every_part_and_tell_keys_apart(names, message):
    bank = FeedForwardExperts(3, 5, 2)
    with pytest.raises(ValueError, match=message):
        bank.per_expert(names)
    with pytest.raises(ValueError, match=message):
        bank.load_per_expert(bank.per_expert(GELU), names)

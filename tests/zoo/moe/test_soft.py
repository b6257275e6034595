"""Soft MoE: by hand, against the formulas in float64, masks, and what may not depend on what."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from zoo.moe import FeedForwardExperts, RouterStats, balance_loss
from zoo.moe.expert_list import ExpertList, ZeroExpert
from zoo.moe.lowrank import LowRankExperts
from zoo.moe.soft import SoftMoE, mix

LOGITS = torch.tensor([[0.0, 0.0], [0.0, torch.tensor(3.0).log()]]).reshape(1, 2, 2, 1)
X = torch.tensor([[[4.0], [8.0]]])


def once_and_twice(rows):
    """Experts x and 2x."""
    assert [tuple(part.shape) for part in rows] == [(1, 1), (1, 1)]
    return [rows[0], 2 * rows[1]]


def soft(slots: int = 2, experts: int = 3, bias: bool = True, dim: int = 6) -> SoftMoE:
    torch.manual_seed(0)
    layer = SoftMoE(FeedForwardExperts(dim, 8, experts, bias=bias), dim, slots)
    nn.init.constant_(layer.scale, 3.0)
    return layer


def by_formula(run: SoftMoE, x: Tensor) -> Tensor:
    """Equations 1 to 3 for one sequence (P, D) in float64, slot by slot, with a layer in float64."""
    x = x.double()
    directions = x / x.norm(dim=1, keepdim=True)
    y = torch.zeros(len(x), run.experts.dim_out, dtype=torch.float64)
    phi = run.slots / run.slots.norm(dim=2, keepdim=True)
    power = (run.scale * torch.einsum("pd,esd->pes", directions, phi)).exp()
    for expert in range(phi.shape[0]):
        for slot in range(phi.shape[1]):
            dispatch = power[:, expert, slot] / power[:, expert, slot].sum()
            combine = power[:, expert, slot] / power.sum(dim=(1, 2))
            y = y + combine[:, None] * run.experts.expert(expert, (dispatch @ x)[None])
    return y


def test_two_tokens_and_two_slots_by_hand():
    # Slots 4/2 + 8/2 = 6 and 4/4 + 8·3/4 = 7; answers 6 and 14; mixed 1/2, 1/2 and 1/4, 3/4.
    y = mix(X, LOGITS, once_and_twice)
    torch.testing.assert_close(y, torch.tensor([[[10.0], [12.0]]]), rtol=0, atol=12e-6)


@pytest.mark.parametrize("garbage", [8.0, float("nan"), float("inf")])
def test_a_masked_token_enters_no_slot_by_hand(garbage):
    x, logits = X.clone(), LOGITS.clone()
    x[0, 1], logits[0, 1] = garbage, garbage
    x.requires_grad_()
    logits.requires_grad_()
    y = mix(x, logits, once_and_twice, torch.tensor([[True, False]]))
    torch.testing.assert_close(y, torch.tensor([[[6.0], [0.0]]]), rtol=0, atol=1e-6)
    assert y[0, 1].item() == 0.0
    y.sum().backward()
    assert torch.equal(x.grad[0, 1], torch.zeros(1))
    assert torch.equal(logits.grad[0, 1], torch.zeros(2, 1))
    assert x.grad.isfinite().all()
    assert logits.grad.isfinite().all()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(tokens=st.integers(1, 7), slots=st.integers(1, 3), experts=st.integers(1, 4), seed=st.integers(0, 99))
def test_the_layer_follows_the_formulas_of_the_paper(tokens, slots, experts, seed):
    layer = soft(slots, experts)
    torch.manual_seed(seed)
    x = torch.randn(tokens, 6)
    torch.testing.assert_close(
        layer(x).y.double(), by_formula(copy.deepcopy(layer).double(), x), rtol=0, atol=2e-6
    )


def test_gradients_follow_the_formulas_too():
    layer = soft()
    x = torch.randn(5, 6)
    layer(x).y.square().sum().backward()
    exact = copy.deepcopy(layer).double()
    exact.zero_grad()
    by_formula(exact, x).square().sum().backward()
    for (name, parameter), reference in zip(layer.named_parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.double(), reference.grad, rtol=0, atol=1e-5)
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("shape", [(5, 6), (2, 5, 6), (2, 3, 5, 6)])
def test_sequences_in_any_leading_shape_are_computed_apart(shape):
    layer = soft()
    x = torch.randn(shape)
    out = layer(x)
    assert out.y.shape == x.shape
    alone = torch.stack([layer(sequence).y for sequence in x.reshape(-1, 5, 6)])
    torch.testing.assert_close(out.y.reshape(-1, 5, 6), alone, rtol=0, atol=1e-6)
    assert out.routing.index.shape == (x.numel() // 6, 3)


def test_another_sequence_changes_nothing_but_a_token_of_the_same_one_does():
    layer = soft()
    x = torch.randn(2, 5, 6)
    before = layer(x).y
    other = x.clone()
    other[1] = float("nan")
    assert torch.equal(layer(other).y[0], before[0])
    other = x.clone()
    other[0, 4] += 1.0
    assert (layer(other).y[0, :4] - before[0, :4]).abs().min() > 0
    assert layer.depends_on_batch


def test_permuting_the_tokens_permutes_the_rows():
    layer = soft()
    x, order = torch.randn(7, 6), torch.randperm(7)
    torch.testing.assert_close(layer(x[order]).y, layer(x).y[order], rtol=0, atol=1e-6)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(mask=st.lists(st.booleans(), min_size=1, max_size=8), garbage=st.sampled_from([1e30, float("nan")]))
def test_any_mask_equals_leaving_the_tokens_out(mask, garbage):
    layer, kept = soft(), torch.tensor(mask)
    x = torch.randn(len(mask), 6)
    expected, gradients = torch.zeros(len(mask), 6), {}
    expected[kept] = layer(x[kept]).y
    expected.square().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    dirty = torch.where(kept[:, None], x, garbage).requires_grad_()
    out = layer(dirty, kept)
    torch.testing.assert_close(out.y, expected, rtol=0, atol=1e-6)
    assert torch.equal(out.y[~kept], torch.zeros_like(out.y[~kept]))
    out.y.square().sum().backward()
    assert torch.equal(dirty.grad[~kept], torch.zeros_like(x[~kept]))
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=1e-5)
    assert int(out.routing.counts().sum()) == 3 * int(kept.sum())


def test_a_sequence_without_real_tokens_gives_zeros_beside_one_that_has_some():
    layer = soft()
    x = torch.randn(2, 4, 6)
    x[1] = float("nan")
    mask = torch.tensor([[True] * 4, [False] * 4])
    y = layer(x, mask).y
    torch.testing.assert_close(y[0], layer(x[0]).y, rtol=0, atol=1e-6)
    assert torch.equal(y[1], torch.zeros(4, 6))
    y.sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("shape", [(0, 6), (3, 0, 6), (0, 4, 6)])
def test_no_tokens_cost_nothing_and_give_zero_gradients(shape):
    layer = soft()
    out = layer(torch.zeros(shape))
    assert out.y.shape == shape
    assert out.routing.counts().tolist() == [0, 0, 0]
    out.y.sum().backward()
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_the_routing_holds_the_combine_weight_of_each_expert():
    layer = soft(slots=2)
    x = torch.randn(2, 4, 6)
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[1, 2:] = False
    routing = layer(x, mask).routing
    rows = x[mask]
    logits = 3.0 * torch.einsum(
        "td,esd->tes",
        nn.functional.normalize(rows, dim=-1),
        nn.functional.normalize(layer.slots, dim=-1),
    )
    combine = logits.flatten(1).softmax(1).reshape(6, 3, 2).sum(2)
    flat = mask.flatten()
    torch.testing.assert_close(routing.weight[flat], combine, rtol=0, atol=1e-6)
    torch.testing.assert_close(routing.probs[flat], combine, rtol=0, atol=1e-6)
    torch.testing.assert_close(routing.logits[flat], logits.logsumexp(2), rtol=0, atol=1e-6)
    assert torch.equal(routing.index, torch.arange(3).expand(8, 3))
    assert torch.equal(routing.valid, flat[:, None].expand(8, 3))
    assert torch.equal(routing.weight[~flat], torch.zeros(2, 3))
    stats = RouterStats.of(routing)
    assert int(stats.tokens) == 6
    assert stats.counts.tolist() == [6, 6, 6]
    balance_loss(routing).backward()
    assert layer.slots.grad.isfinite().all()


def test_only_the_direction_of_tokens_and_slots_sets_the_logits():
    layer = soft()
    x = torch.randn(5, 6)
    before = layer(x).routing.probs
    with torch.no_grad():
        layer.slots *= 7.0
    torch.testing.assert_close(layer(100 * x).routing.probs, before, rtol=0, atol=1e-6)
    with torch.no_grad():
        layer.scale.zero_()
    out = layer(x)
    torch.testing.assert_close(out.routing.probs, torch.full((5, 3), 1 / 3))
    # Without a scale all slots see the mean, and every token gets the mean answer.
    mean = layer.experts.every(x.mean(0, keepdim=True)).mean(0)
    torch.testing.assert_close(out.y, mean.expand(5, 6), rtol=0, atol=1e-6)


def test_a_zero_token_and_a_huge_one_give_finite_gradients():
    layer = soft()
    x = torch.stack([torch.zeros(6), torch.full((6,), 1e15), torch.randn(6)]).requires_grad_()
    layer(x).y.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["list", "lowrank"])
def test_any_token_bank_of_any_width_will_do(kind):
    torch.manual_seed(0)
    bank = (
        ExpertList([nn.Linear(6, 4), ZeroExpert(4)], 4) if kind == "list" else LowRankExperts(6, 4, 2, rank=2)
    )
    if kind == "lowrank":
        nn.init.normal_(bank.u)
    layer = SoftMoE(bank, 6, slots=3)
    x = torch.randn(3, 5, 6)
    y = layer(x).y
    assert y.shape == (3, 5, 4)
    for sequence, answer in zip(x, y, strict=True):
        torch.testing.assert_close(
            answer.double(), by_formula(copy.deepcopy(layer).double(), sequence), rtol=0, atol=2e-6
        )


def test_logits_stay_in_fp32_under_autocast():
    layer = soft()
    x = torch.randn(2, 5, 6)
    plain = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = layer(x)
    assert torch.equal(mixed.routing.probs, plain.routing.probs)
    assert mixed.y.dtype == torch.float32
    torch.testing.assert_close(mixed.y, plain.y, rtol=2e-2, atol=2e-2)
    half = copy.deepcopy(layer).bfloat16()(x.bfloat16())
    assert half.y.dtype == half.routing.weight.dtype == torch.bfloat16
    assert half.routing.probs.dtype == torch.float32
    torch.testing.assert_close(half.y.float(), plain.y, rtol=2e-2, atol=2e-2)


def test_sizes_and_masks_are_checked():
    bank = FeedForwardExperts(6, 8, 2)
    with pytest.raises(ValueError, match="slots=0"):
        SoftMoE(bank, 6, slots=0)
    with pytest.raises(ValueError, match="dim=0"):
        SoftMoE(bank, 0)
    with pytest.raises(ValueError, match=r"a mask of shape \(5,\) does not fit tokens \(2, 5\)"):
        SoftMoE(bank, 6)(torch.randn(2, 5, 6), torch.ones(5, dtype=torch.bool))


def test_a_soft_layer_compiles_as_one_graph():
    layer = soft()
    x, mask = torch.randn(2, 5, 6), torch.rand(2, 5) < 0.6
    compiled = torch.compile(lambda x, mask: layer(x, mask).y, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, mask), layer(x, mask).y, rtol=0, atol=1e-6)


def test_no_parameter_is_a_scalar_which_fully_shard_would_refuse():
    assert all(parameter.ndim for parameter in SoftMoE(FeedForwardExperts(4, 8, 3), 4).parameters())

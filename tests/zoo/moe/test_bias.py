"""The loss-free selection bias: where it acts, how it moves, and that no precision rounds it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from zoo.moe.bias import SelectionBias
from zoo.moe.gates import SigmoidGate
from zoo.moe.router import Router
from zoo.moe.scorers import LinearScorer
from zoo.moe.selectors import TopK


class Given(nn.Module):
    """A scorer whose tokens are the logits."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, x, context=None):
        return x


def biased(*values: float, **options) -> SelectionBias:
    bias = SelectionBias(len(values), **options)
    bias.bias.copy_(torch.tensor(values))
    return bias


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_the_choice_sees_the_bias_and_the_weights_do_not(scale):
    router = Router(Given(3), TopK(2), SigmoidGate(scale=scale), bias=biased(-0.3, 0.0, 0.2))
    logits = torch.tensor([[0.6, 0.5, 0.4]]).logit().requires_grad_()
    routing = router(logits)
    # Biased scores (0.3, 0.5, 0.6), but weights 0.4 / 0.9 and 0.5 / 0.9.
    assert routing.index.tolist() == [[2, 1]]
    expected = scale * torch.tensor([[0.4444444, 0.5555556]])
    torch.testing.assert_close(routing.weight, expected, rtol=0, atol=1e-6)
    plain = Router(Given(3), TopK(2), SigmoidGate(scale=scale))(logits)
    assert plain.index.tolist() == [[0, 1]]
    assert torch.equal(routing.probs, plain.probs)
    assert torch.equal(routing.logits, plain.logits)


def test_an_expert_that_is_off_is_not_chosen_however_large_its_bias():
    router = Router(Given(3), TopK(2), SigmoidGate(), bias=biased(0.0, 9.0, 0.0))
    routing = router(torch.randn(7, 3), enabled=torch.tensor([True, False, True]))
    assert routing.counts().tolist() == [7, 0, 7]


@pytest.mark.parametrize(
    ("counts", "centre", "expected"),
    [
        ([6, 2, 0, 4], False, [-0.1, 0.1, 0.1, -0.1]),
        ([6, 2, 0, 4], True, [-0.1, 0.1, 0.1, -0.1]),
        ([9, 1, 1, 1], False, [-0.1, 0.1, 0.1, 0.1]),
        ([9, 1, 1, 1], True, [-0.15, 0.05, 0.05, 0.05]),
        ([4, 4, 4, 4], True, [0.0, 0.0, 0.0, 0.0]),
        ([0, 0, 0, 0], True, [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_an_update_moves_against_the_load_by_hand(counts, centre, expected):
    bias = SelectionBias(4, rate=0.1, centre=centre)
    bias.update(torch.tensor(counts))
    torch.testing.assert_close(bias.bias, torch.tensor(expected), rtol=0, atol=1e-7)
    bias.update(torch.tensor(counts))
    torch.testing.assert_close(bias.bias, 2 * torch.tensor(expected), rtol=0, atol=1e-7)


@pytest.mark.parametrize("centre", [False, True])
def test_counts_beyond_the_whole_numbers_of_fp32_move_exactly(centre):
    bias = SelectionBias(4, rate=0.1, centre=centre)
    bias.update(torch.full((4,), 2**25 + 1))
    assert bias.bias.tolist() == [0.0] * 4
    bias.update(torch.tensor([2**40, 2**40, 2**40 + 1, 2**40 - 1]))
    torch.testing.assert_close(bias.bias, torch.tensor([0.0, 0.0, -0.1, 0.1]), rtol=0, atol=1e-7)


@pytest.mark.parametrize("centre", [False, True])
def test_an_expert_that_is_off_keeps_its_bias_and_is_no_part_of_the_mean(centre):
    bias = biased(0.0, 0.0, 0.5, 0.0, rate=0.1, centre=centre)
    bias.update(torch.tensor([5, 3, 0, 1]), enabled=torch.tensor([True, True, False, True]))
    # The mean of the others is 3; with the third among them it would be 2.25, and expert 1 would fall.
    expected = torch.tensor([-0.1, 0.0, 0.5, 0.1])
    torch.testing.assert_close(bias.bias, expected, rtol=0, atol=1e-7)


def test_centring_changes_no_choice():
    torch.manual_seed(0)
    free, centred = SelectionBias(8, rate=0.1, centre=False), SelectionBias(8, rate=0.1)
    x = torch.randn(50, 8)
    for _ in range(20):
        counts = torch.randint(0, 50, (8,))
        free.update(counts)
        centred.update(counts)
        chosen = [Router(Given(8), TopK(3), SigmoidGate(), bias=bias)(x).index for bias in (free, centred)]
        assert torch.equal(*chosen)
    assert abs(centred.bias.mean()) < 1e-6 < abs(free.bias.mean())


def test_the_bias_evens_out_a_skewed_load():
    torch.manual_seed(0)
    bias = SelectionBias(4, rate=0.005)
    router = Router(Given(4), TopK(2), SigmoidGate(), bias=bias)
    x = torch.randn(400, 4) + torch.tensor([2.0, 0.0, 0.0, -2.0])
    before = router(x).counts()
    for _ in range(200):
        bias.update(router(x).counts())
    after = router(x).counts()
    assert before.max() - before.min() > 250
    assert after.max() - after.min() < 30


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_pass_moves_nothing(training):
    bias = biased(0.1, -0.2, 0.3, 0.0)
    router = Router(LinearScorer(5, 4), TopK(2), SigmoidGate(), bias=bias).train(training)
    before = copy.deepcopy(router.state_dict())
    routing = router(torch.randn(9, 5))
    with torch.no_grad():
        router(torch.randn(9, 5))
    routing.weight.sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in router.state_dict().items())


CASTS = {
    "bfloat16": lambda module: module.bfloat16(),
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "to dtype": lambda module: module.to(torch.bfloat16),
    "to device and dtype": lambda module: module.to("cpu", torch.float16),
    "type": lambda module: module.type(torch.bfloat16),
}


@pytest.mark.parametrize("cast", CASTS)
def test_the_bias_is_an_fp32_buffer_under_every_precision(cast):
    router = Router(LinearScorer(5, 3), TopK(2), SigmoidGate(), bias=biased(0.1, 1.0001, -0.3))
    value = router.bias.bias.clone()
    CASTS[cast](router)
    assert router.scorer.out.weight.dtype != torch.float32
    assert router.bias.bias.dtype == torch.float32
    assert torch.equal(router.bias.bias, value)
    router.bias.update(torch.tensor([3, 0, 0]))
    assert router.bias.bias.dtype == torch.float32
    assert "bias" in dict(router.bias.named_buffers())
    # A step of 1e-3 is below the spacing of bf16 at 1.
    assert 0.0 < (router.bias.bias - value)[1] < 1e-3


def test_the_bias_travels_in_the_state_dict_and_no_optimiser_sees_it():
    router = Router(LinearScorer(5, 3), TopK(2), SigmoidGate(), bias=biased(0.1, 1.0001, -0.3))
    assert set(router.state_dict()) == {"scorer.out.weight", "bias.bias"}
    assert [name for name, _ in router.named_parameters()] == ["scorer.out.weight"]
    assert not router.bias.bias.requires_grad
    other = Router(LinearScorer(5, 3), TopK(2), SigmoidGate(), bias=SelectionBias(3)).bfloat16()
    other.load_state_dict(router.state_dict())
    assert other.bias.bias.dtype == torch.float32
    assert torch.equal(other.bias.bias, router.bias.bias)


def test_a_deep_copy_moves_by_itself():
    bias = biased(0.1, 0.2)
    twin = copy.deepcopy(bias)
    twin.update(torch.tensor([1, 0]))
    torch.testing.assert_close(bias.bias, torch.tensor([0.1, 0.2]), rtol=0, atol=0)
    assert not torch.equal(twin.bias, bias.bias)
    assert torch.equal(copy.deepcopy(twin).bfloat16().bias, twin.bias)


def test_a_bias_built_without_memory_gets_it_later():
    with torch.device("meta"):
        bias = SelectionBias(3)
    assert bias.bias.is_meta
    bias = bias.bfloat16().to_empty(device="cpu")
    bias.load_state_dict(biased(0.1, 1.0001, -0.3).state_dict())
    assert bias.bias.dtype == torch.float32
    assert torch.equal(bias.bias, torch.tensor([0.1, 1.0001, -0.3]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SelectionBias(0), "num_experts=0 >= 1"),
        (lambda: SelectionBias(3, rate=0.0), "rate=0.0 > 0"),
        (lambda: SelectionBias(3).update(torch.zeros(4)), r"counts \(4,\) do not fit a bias of \(3,\)"),
        (lambda: Router(Given(4), TopK(2), bias=SelectionBias(3)), "the bias is of 3 experts, not of 4"),
    ],
)
def test_what_does_not_fit_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()

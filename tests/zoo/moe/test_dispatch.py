"""Three ways to execute a token bank, one answer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zoo.moe import FeedForwardExperts, LinearScorer, MoE, Router, Routing, TopK
from zoo.moe.dispatch import DENSE_UP_TO, choose, dispatch

BACKENDS = ("reference", "dense", "sorted")


def routing(
    index: Tensor, experts: int, weight: Tensor | None = None, valid: Tensor | None = None
) -> Routing:
    """A hand-made routing of T tokens."""
    weight = torch.ones(index.shape) if weight is None else weight
    valid = torch.ones(index.shape, dtype=torch.bool) if valid is None else valid
    uniform = torch.full((len(index), experts), 1 / experts)
    return Routing(index=index, weight=weight, valid=valid, probs=uniform, logits=uniform.log())


def closeness(a: Tensor, b: Tensor) -> float:
    """Largest difference in units of the larger of one and the largest value."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1.0))


def run(layer: MoE, backend: str, x: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Output and all gradients under a back end."""
    layer.experts.backend = backend
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x, mask).y
    y.float().square().sum().backward()
    return {"y": y.detach(), "x": x.grad, **{name: p.grad.clone() for name, p in layer.named_parameters()}}


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 4, 2), (64, 8, 2), (200, 3, 3), (37, 16, 5)])
@pytest.mark.parametrize("masked", [False, True])
def test_back_ends_agree_in_values_and_gradients(activation, tokens, experts, k, masked):
    torch.manual_seed(tokens)
    layer = MoE(Router(LinearScorer(8, experts), TopK(k)), FeedForwardExperts(8, 16, experts, activation))
    x = torch.randn(tokens, 8)
    mask = torch.rand(tokens) < 0.7 if masked else None
    reference = run(layer, "reference", x, mask)
    for backend in ("dense", "sorted", "auto"):
        for name, value in run(layer, backend, x, mask).items():
            assert closeness(value, reference[name]) <= 1e-6, (backend, name)


def test_back_ends_agree_in_bf16():
    torch.manual_seed(0)
    layer = MoE(Router(LinearScorer(8, 4), TopK(2)), FeedForwardExperts(8, 16, 4)).bfloat16()
    x = torch.randn(50, 8).bfloat16()
    reference = run(layer, "reference", x, None)
    for backend in ("dense", "sorted"):
        for name, value in run(layer, backend, x, None).items():
            assert value.dtype == torch.bfloat16
            assert closeness(value.float(), reference[name].float()) <= 2e-2, (backend, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_a_weight_is_what_its_expert_said(backend):
    # Without hidden non-linearity: experts 7·(e + 1) on x = 7, weights 5/7 on expert 2 and 2/7 on expert 1.
    class Scaling(FeedForwardExperts):
        def _activate(self, hidden):
            return hidden

    bank = Scaling(1, 1, 3)
    with torch.no_grad():
        bank.up.copy_(torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1))
        bank.down.fill_(1.0)
    weight = torch.tensor([[5 / 7, 2 / 7]], requires_grad=True)
    y = dispatch(bank, torch.tensor([[7.0]]), routing(torch.tensor([[2, 1]]), 3, weight), backend)
    torch.testing.assert_close(y, torch.tensor([[19.0]]), rtol=0, atol=2e-6)
    y.sum().backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[21.0, 14.0]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_expert_gets_exact_zeros(backend):
    torch.manual_seed(0)
    bank = FeedForwardExperts(8, 16, 3)
    x = torch.randn(6, 8, requires_grad=True)
    y = dispatch(bank, x, routing(torch.zeros(6, 1, dtype=torch.int64), 3), backend)
    torch.testing.assert_close(y, bank.expert(0, x), rtol=0, atol=1e-6)
    y.square().sum().backward()
    for parameter in (bank.up, bank.down):
        assert parameter.grad[0].abs().max() > 0
        assert torch.equal(parameter.grad[1:], torch.zeros_like(parameter.grad[1:]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_choices_that_are_not_valid_do_not_count(backend):
    torch.manual_seed(0)
    bank = FeedForwardExperts(4, 8, 3)
    x = torch.randn(2, 4)
    valid = torch.tensor([[True, False], [False, False]])
    y = dispatch(bank, x, routing(torch.tensor([[1, 2], [0, 1]]), 3, torch.full((2, 2), 0.5), valid), backend)
    torch.testing.assert_close(y[0], 0.5 * bank.expert(1, x[0]), rtol=0, atol=1e-6)
    assert torch.equal(y[1], torch.zeros(4))


def test_counts_and_dense_weight_of_a_routing():
    valid = torch.tensor([[True, True], [True, False]])
    record = routing(torch.tensor([[2, 0], [2, 1]]), 4, torch.tensor([[0.75, 0.25], [0.5, 0.5]]), valid)
    assert record.num_experts == 4
    assert record.counts().tolist() == [1, 0, 2, 0]
    assert record.dense_weight().tolist() == [[0.25, 0.0, 0.75, 0.0], [0.0, 0.0, 0.5, 0.0]]


def test_small_work_runs_dense_large_work_sorted_and_a_wish_is_obeyed():
    assert choose("auto", DENSE_UP_TO // 4, 4) == "dense"
    assert choose("auto", DENSE_UP_TO // 4 + 1, 4) == "sorted"
    assert choose("reference", 10_000, 4) == "reference"
    assert "backend=sorted" in repr(FeedForwardExperts(4, 8, 2, backend="sorted"))

"""Gates: mixing weights by hand, their sums and their gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.moe.gates import SigmoidGate, SoftmaxGate, UnweightedGate

GATES = [
    SoftmaxGate(),
    SoftmaxGate(renormalize=False),
    SigmoidGate(),
    SigmoidGate(renormalize=False, scale=2.5),
    UnweightedGate(),
]
LOGITS = torch.tensor([[1.0, 2.0, 5.0]]).log()


def weigh(gate, logits, index, valid=None):
    return gate(logits, gate.scores(logits), torch.as_tensor(index), valid)


@pytest.mark.parametrize(
    ("gate", "index", "weight", "gradient"),
    [
        # Experts that answer 7, 14 and 21; the gradient is that of the mixed answer.
        (SoftmaxGate(), [[2, 1]], [5 / 7, 2 / 7], [0.0, -10 / 7, 10 / 7]),
        (SoftmaxGate(renormalize=False), [[2, 1]], [5 / 8, 2 / 8], None),
        (SoftmaxGate(renormalize=False), [[2]], [5 / 8], [-1.640625, -3.28125, 4.921875]),
        (SoftmaxGate(), [[2]], [1.0], [0.0, 0.0, 0.0]),
    ],
)
def test_softmax_weights_and_their_gradient_by_hand(gate, index, weight, gradient):
    logits = LOGITS.clone().requires_grad_()
    weights = weigh(gate, logits, index)
    torch.testing.assert_close(weights, torch.tensor([weight]), rtol=0, atol=1e-6)
    (weights * torch.tensor([7.0, 14.0, 21.0])[torch.tensor(index)]).sum().backward()
    if gradient is not None:
        torch.testing.assert_close(logits.grad, torch.tensor([gradient]), rtol=0, atol=3e-6)


def test_sigmoid_weights_by_hand():
    logits = torch.tensor([[0.6, 0.5, 0.4]]).logit()
    index = [[2, 1]]
    for scale in (1.0, 2.5):
        weight = weigh(SigmoidGate(scale=scale), logits, index)
        expected = scale * torch.tensor([[0.4444444, 0.5555556]])
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-6)
    weight = weigh(SigmoidGate(renormalize=False, scale=10.0), logits, index)
    torch.testing.assert_close(weight, torch.tensor([[4.0, 5.0]]), rtol=0, atol=1e-6)


def test_the_distribution_of_a_sigmoid_gate_is_its_scores_over_their_sum():
    gate = SigmoidGate()
    probs = gate.probs(gate.scores(torch.tensor([[0.6, 0.5, 0.4], [0.2, 0.2, 0.1]]).logit()))
    expected = torch.tensor([[0.4, 1 / 3, 4 / 15], [0.4, 0.4, 0.2]])
    torch.testing.assert_close(probs, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("gate", GATES, ids=repr)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(rows=st.integers(0, 9), experts=st.integers(1, 6), data=st.data())
def test_weights_are_zero_where_invalid_and_sum_as_their_gate_says(gate, rows, experts, data):
    k = data.draw(st.integers(1, experts))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    logits = 4 * torch.randn(rows, experts)
    index = torch.rand(rows, experts).argsort(-1)[:, :k]
    valid = torch.rand(rows, k) < 0.6
    weight = weigh(gate, logits, index, valid)
    assert weight.shape == (rows, k)
    assert torch.equal(weight[~valid], torch.zeros(int((~valid).sum())))
    assert (weight[valid] > 0).all()
    if gate.renormalize:
        total = weight.sum(-1)[valid.any(-1)]
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-6)
    assert torch.equal(weigh(gate, logits, index), weigh(gate, logits, index, torch.ones_like(valid)))
    probs = gate.probs(gate.scores(logits)).sum(-1)
    torch.testing.assert_close(probs, torch.ones(rows), rtol=0, atol=1e-6)


@pytest.mark.parametrize("gate", GATES, ids=repr)
@pytest.mark.parametrize("level", [-200.0, 0.0, 200.0])
def test_rows_without_a_valid_choice_and_extreme_logits_have_finite_gradients(gate, level):
    logits = torch.tensor(
        [[0.0, 1.0, -torch.inf], [1.0, 0.0, 2.0], [level, level, level + 1]]
    ).requires_grad_()
    valid = torch.tensor([[True, False], [False, False], [True, True]])
    index = torch.tensor([[0, 2], [2, 0], [1, 2]])
    scores = gate.scores(logits)
    (1e6 * gate(logits, scores, index, valid).square().sum() + gate.probs(scores).square().sum()).backward()
    assert logits.grad.isfinite().all()
    if gate.renormalize:
        weight = weigh(gate, logits.detach(), index, valid)
        assert torch.equal(weight[1], torch.zeros(2))


@pytest.mark.parametrize("gate", GATES, ids=repr)
def test_experts_that_were_not_chosen_get_a_gradient_only_through_a_softmax_over_all(gate):
    logits = torch.randn(4, 5, requires_grad=True)
    index = torch.tensor([[1, 3]]).expand(4, 2)
    (weigh(gate, logits, index) * torch.tensor([1.0, 3.0])).sum().backward()
    through_all = isinstance(gate, SoftmaxGate) and not gate.renormalize
    assert bool((logits.grad[:, [0, 2, 4]] != 0).all()) == through_all
    assert bool((logits.grad[:, [0, 2, 4]] == 0).all()) != through_all


def test_an_unweighted_gate_weighs_one_and_gives_the_router_a_zero_gradient_and_not_none():
    logits = torch.randn(4, 5, requires_grad=True)
    valid = torch.tensor([[True, False]]).expand(4, 2)
    weight = weigh(UnweightedGate(), logits, torch.tensor([[1, 3]]).expand(4, 2), valid)
    assert weight.tolist() == [[1.0, 0.0]] * 4
    weight.sum().backward()
    assert torch.equal(logits.grad, torch.zeros(4, 5))

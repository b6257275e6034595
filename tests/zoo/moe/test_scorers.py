"""Scorers: the linear one, and the one with memory."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from zoo.moe import Context, LinearScorer, RecurrentScorer


def recurrent(**options) -> RecurrentScorer:
    torch.manual_seed(0)
    return RecurrentScorer(6, 4, 5, **options)


def test_linear_scorer_is_one_product():
    scorer = LinearScorer(6, 4, bias=True)
    x = torch.randn(2, 3, 6)
    assert torch.equal(scorer.out.bias, torch.zeros(4))
    torch.testing.assert_close(scorer(x), x @ scorer.out.weight.T)
    assert LinearScorer(6, 4).out.bias is None


def test_recurrent_scorer_against_its_equations_step_by_step():
    scorer = recurrent()
    cell = nn.GRUCell(5, 5)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(cell, name).data = getattr(scorer.gru, f"{name}_l0").data
    x = torch.randn(3, 7, 6)
    state, states = torch.zeros(3, 5), []
    for patch in range(7):
        state = cell(F.relu(scorer.norm(scorer.project(x[:, patch]))), state)
        states.append(state)
    expected = torch.stack(states, dim=1)
    torch.testing.assert_close(scorer.states(x), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(scorer(x), scorer.out(F.relu(scorer.inner(expected))), rtol=0, atol=1e-6)


def test_order_matters_to_what_comes_after_and_the_future_to_nothing():
    scorer = recurrent()
    x = torch.randn(1, 7, 6)
    swapped = x[:, [1, 0, 2, 3, 4, 5, 6]]
    assert (scorer(x)[:, 6] - scorer(swapped)[:, 6]).abs().max() > 1e-4
    changed = x.clone()
    changed[:, 5:] += 1.0
    assert torch.equal(scorer(x)[:, :5], scorer(changed)[:, :5])
    assert (scorer(x)[:, 5:] - scorer(changed)[:, 5:]).abs().max() > 1e-4


def test_a_sequence_is_scored_without_regard_to_its_batch_mates():
    scorer = recurrent()
    x = torch.randn(4, 3, 7, 6)
    whole = scorer(x)
    assert whole.shape == (4, 3, 7, 4)
    torch.testing.assert_close(scorer(x[2, 1]), whole[2, 1], rtol=0, atol=1e-6)
    others = torch.randn_like(x)
    others[2, 1] = x[2, 1]
    torch.testing.assert_close(scorer(others)[2, 1], whole[2, 1], rtol=0, atol=1e-6)


def test_nothing_is_carried_from_call_to_call():
    scorer = recurrent()
    x = torch.randn(2, 7, 6)
    first = scorer(x)
    scorer(torch.randn(2, 7, 6))
    assert torch.equal(scorer(x), first)


def test_a_memory_rewrites_the_states_before_they_are_scored():
    class Shift(nn.Module):
        def forward(self, states, context):
            return states + context.features[..., None, :]

    x, features = torch.randn(2, 7, 6), torch.randn(2, 5)
    scorer, plain = recurrent(memory=Shift()), recurrent()
    torch.testing.assert_close(scorer(x, Context(features=torch.zeros(2, 5))), plain(x))
    expected = plain.out(F.relu(plain.inner(plain.states(x) + features[:, None])))
    torch.testing.assert_close(scorer(x, Context(features=features)), expected)


def test_every_weight_of_the_scorer_learns():
    scorer = recurrent()
    scorer(torch.randn(3, 7, 6)).square().sum().backward()
    for name, parameter in scorer.named_parameters():
        assert parameter.grad.abs().max() > 0, name

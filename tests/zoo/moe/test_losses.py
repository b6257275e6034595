"""Auxiliary losses against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from zoo.moe import Routing, balance_loss, z_loss


def routing(
    probs: Tensor, index: Tensor, mask: Tensor | None = None, logits: Tensor | None = None
) -> Routing:
    valid = torch.ones(index.shape, dtype=torch.bool)
    if mask is not None:
        valid = valid & mask[:, None]
    weight = probs.detach().gather(1, index)
    logits = probs.detach().log() if logits is None else logits
    return Routing(index=index, weight=weight, valid=valid, probs=probs, logits=logits, mask=mask)


def four_tokens() -> tuple[Tensor, Tensor]:
    """Probabilities of two experts, and the best expert of each token."""
    probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.7, 0.3]], requires_grad=True)
    return probs, probs.argmax(-1, keepdim=True)


def test_balance_by_hand():
    probs, index = four_tokens()
    loss = balance_loss(routing(probs, index))
    assert loss.item() == pytest.approx(1.1, abs=1e-6)
    loss.backward()
    torch.testing.assert_close(probs.grad, torch.tensor([0.375, 0.125]).expand(4, 2), rtol=0, atol=1e-6)


def test_balance_leaves_masked_tokens_out():
    probs, index = four_tokens()
    mask = torch.tensor([True, True, True, False])
    loss = balance_loss(routing(probs, index, mask))
    assert loss.item() == pytest.approx(9.4 / 9, abs=1e-6)
    loss.backward()
    assert probs.grad[3].tolist() == [0.0, 0.0]
    assert probs.grad[:3].abs().min() > 0
    for garbage in (1e30, math.nan):
        other = torch.cat([probs.detach()[:3], torch.full((1, 2), garbage)])
        assert torch.equal(balance_loss(routing(other, index, mask)), loss.detach())


def test_balance_of_two_choices_is_one_when_uniform_and_two_by_the_other_convention():
    record = routing(torch.full((2, 4), 0.25), torch.tensor([[0, 1], [2, 3]]))
    assert balance_loss(record).item() == pytest.approx(1.0, abs=1e-6)
    assert balance_loss(record, convention="hf").item() == pytest.approx(2.0, abs=1e-6)


LOGITS = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])


def test_z_by_hand():
    index = torch.zeros(2, 1, dtype=torch.int64)
    assert z_loss(routing(LOGITS.softmax(-1), index, logits=LOGITS)).item() == pytest.approx(
        1.2011325, abs=1e-6
    )
    mask = torch.tensor([True, False])
    record = routing(LOGITS.softmax(-1), index, mask, LOGITS)
    assert z_loss(record).item() == pytest.approx(0.4804530, abs=1e-6)


def test_z_of_experts_that_are_off_is_that_of_the_others():
    off = torch.cat([LOGITS, torch.full((2, 1), -torch.inf)], dim=1).requires_grad_()
    loss = z_loss(routing(off.softmax(-1), torch.zeros(2, 1, dtype=torch.int64), logits=off))
    assert loss.item() == pytest.approx(1.2011325, abs=1e-6)
    loss.backward()
    assert off.grad[:, 2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("loss", [balance_loss, z_loss])
def test_no_real_token_costs_nothing(tokens, loss):
    logits = torch.zeros(tokens, 2, requires_grad=True)
    index = torch.zeros(tokens, 1, dtype=torch.int64)
    value = loss(routing(logits.softmax(-1), index, torch.zeros(tokens, dtype=torch.bool), logits))
    assert value.item() == 0.0
    (gradient,) = torch.autograd.grad(value, logits, allow_unused=True, materialize_grads=True)
    assert torch.equal(gradient, torch.zeros(tokens, 2))

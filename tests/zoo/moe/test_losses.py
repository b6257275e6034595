"""Auxiliary losses against values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zoo.moe import Capacity, LinearScorer, PerSample, Router, Routing, SigmoidGate, SoftmaxGate, TopK
from zoo.moe.losses import (
    PriceBalance,
    balance_loss,
    cost_loss,
    entropy_loss,
    importance_loss,
    kl_loss,
    mean_probs,
    z_loss,
)

Loss = Callable[[Routing], Tensor]


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


def test_balance_sees_the_choices_that_a_capacity_dropped():
    torch.manual_seed(0)
    router = Router(LinearScorer(4, 2), [TopK(1), Capacity(1.0)], SoftmaxGate(renormalize=False))
    with torch.no_grad():
        router.scorer.out.weight.copy_(torch.tensor([[1.0], [0.0]]).expand(2, 4))
    found = router(torch.ones(4, 4))
    assert found.counts().tolist() == [2, 0]
    assert found.counts(dropped=True).tolist() == [4, 0]
    assert balance_loss(found).item() == pytest.approx(2 * torch.tensor(4.0).sigmoid().item(), abs=1e-6)
    assert balance_loss(found, "hf").item() == balance_loss(found).item()


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


# -- the other prices ---------------------------------------------------------------------------------------------


def by_hand(potential: str, new_weight: float, held: list[float]) -> PriceBalance:
    """A price balance whose average stands at ``held``."""
    loss = PriceBalance(len(held), potential, new_weight)  # type: ignore[arg-type]
    loss.mean.copy_(torch.tensor(held))
    return loss


def test_counts_of_the_whole_step_set_the_price_of_its_parts():
    probs, index = four_tokens()
    first, second = routing(probs[:2], index[:2]), routing(probs[2:], index[2:])
    step = first.counts() + second.counts()
    parts = (balance_loss(first, counts=step) + balance_loss(second, counts=step)) / 2
    assert parts.item() == pytest.approx(1.1, abs=1e-6)
    assert balance_loss(first).item() == pytest.approx(2 * 0.75)  # its own choices all fell on the first
    parts.backward()
    torch.testing.assert_close(probs.grad, torch.tensor([0.375, 0.125]).expand(4, 2), rtol=0, atol=1e-6)
    twice = balance_loss(first, convention="hf", counts=step)
    assert twice.item() == pytest.approx(balance_loss(first, counts=step).item())  # K = 1


def test_importance_and_divergence_by_hand():
    probs, index = four_tokens()  # mean (0.6, 0.4)
    record = routing(probs, index)
    assert mean_probs(record).tolist() == pytest.approx([0.6, 0.4])
    assert importance_loss(record).item() == pytest.approx(0.04, abs=1e-6)
    expected = 0.6 * math.log(1.2) + 0.4 * math.log(0.8)
    assert kl_loss(record).item() == pytest.approx(expected, abs=1e-6)
    importance_loss(record).backward()
    torch.testing.assert_close(probs.grad, torch.tensor([0.6, 0.4]).expand(4, 2), rtol=0, atol=1e-6)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(tokens=st.integers(1, 9), experts=st.integers(1, 6), seed=st.integers(0, 99))
def test_importance_loss_is_a_squared_coefficient_of_variation(tokens, experts, seed):
    torch.manual_seed(seed)
    probs = torch.randn(tokens, experts).softmax(-1)
    importance = probs.sum(0)
    squared = importance.var(correction=0) / importance.mean().square()
    loss = importance_loss(routing(probs, probs.argmax(-1, keepdim=True)))
    torch.testing.assert_close(loss, squared, rtol=1e-5, atol=1e-6)


def test_entropy_loss_falls_as_decisions_become_more_even():
    index = torch.zeros(2, 1, dtype=torch.int64)
    rows = torch.tensor([[0.5, 0.5], [0.75, 0.25]])
    expected = (math.log(0.5) + 0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / 2
    assert entropy_loss(routing(rows, index)).item() == pytest.approx(expected, abs=1e-6)
    sharp, even = torch.eye(2), torch.full((2, 2), 0.5)
    assert entropy_loss(routing(sharp, index)).item() == 0.0
    assert entropy_loss(routing(even, index)).item() == pytest.approx(-math.log(2))
    assert kl_loss(routing(sharp, index)).item() == 0.0  # sharp decisions may be even in the mean
    logits = torch.tensor([[1.0, 0.0]], requires_grad=True)
    entropy_loss(routing(logits.softmax(-1), index[:1])).backward()
    assert logits.grad[0, 0] > 0 > logits.grad[0, 1]


def test_cost_by_hand():
    probs, index = four_tokens()
    costs = torch.tensor([2.0, 0.5])
    loss = cost_loss(routing(probs, index), costs)
    assert loss.item() == pytest.approx(1.4, abs=1e-6)
    loss.backward()
    torch.testing.assert_close(probs.grad, (costs / 4).expand(4, 2), rtol=0, atol=1e-6)


def test_prices_by_hand():
    probs, index = four_tokens()
    record = routing(probs, index)  # mean (0.6, 0.4), average after the step (0.3, 0.7)
    square, entropy = (by_hand(potential, 0.5, [0.0, 1.0]) for potential in ("square", "entropy"))
    assert square(record).item() == pytest.approx(4 * (0.3 * 0.6 + 0.7 * 0.4), abs=1e-6)
    expected = 0.6 * (math.log(0.6) + 1) + 0.4 * (math.log(1.4) + 1)
    assert entropy(record).item() == pytest.approx(expected, abs=1e-6)
    square(record).backward()
    torch.testing.assert_close(probs.grad, torch.tensor([0.3, 0.7]).expand(4, 2), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("potential", "own"), [("entropy", kl_loss), ("square", importance_loss)])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(tokens=st.integers(1, 9), experts=st.integers(1, 6), off=st.booleans(), seed=st.integers(0, 99))
def test_a_price_without_memory_has_the_gradient_of_its_potential(potential, own, tokens, experts, off, seed):
    torch.manual_seed(seed)
    values = torch.randn(tokens, experts)
    if off and experts > 1:
        values[:, 0] = -torch.inf
    gradients = []
    for loss in (PriceBalance(experts, potential), own):
        logits = values.clone().requires_grad_()
        probs = logits.softmax(-1)
        record = routing(probs, probs.argmax(-1, keepdim=True), logits=logits)
        gradients.append(torch.autograd.grad(loss(record), (probs, logits)))
    on = values[0] > -torch.inf
    torch.testing.assert_close(gradients[0][0][:, on], gradients[1][0][:, on], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients[0][1], gradients[1][1], rtol=1e-6, atol=1e-6)


def test_a_call_moves_no_average_and_an_update_does():
    probs, index = four_tokens()
    loss = PriceBalance(2, new_weight=0.25)
    first = loss(routing(probs, index))
    assert torch.equal(loss(routing(probs, index)), first)
    assert loss.mean.tolist() == [0.5, 0.5]
    loss.update(mean_probs(routing(probs, index)))
    assert loss.mean.tolist() == pytest.approx([0.525, 0.475])
    assert not loss.mean.requires_grad
    first.backward()  # an update between forward and backward spoils nothing
    loss.update(torch.zeros(2))
    assert loss.mean.tolist() == pytest.approx([0.525, 0.475])


def test_prices_remember_so_that_uneven_batches_may_be_even_on_average():
    loss = PriceBalance(2, "square", new_weight=0.1)
    first, second = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.1, 0.9]])
    index = torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(20):
        loss.update(mean_probs(routing(first, index)))
        loss.update(mean_probs(routing(second, index)))
    even = loss(routing(first, index)).item()
    assert even == pytest.approx(2.0, abs=0.1)
    assert PriceBalance(2, "square")(routing(first, index)).item() == pytest.approx(4 * 0.82)


def test_the_average_is_saved_and_stays_in_fp32():
    loss = PriceBalance(3, new_weight=0.5).bfloat16()
    loss.update(torch.tensor([0.7, 0.2, 0.1]))
    assert loss.mean.dtype == torch.float32
    assert not list(loss.parameters())
    again = PriceBalance(3)
    again.load_state_dict(loss.state_dict())
    assert torch.equal(again.mean, loss.mean)
    assert str(loss) == "PriceBalance(num_experts=3, potential=entropy, new_weight=0.5)"


@pytest.mark.parametrize("weight", [0.0, -1.0, 1.1, math.nan])
def test_senseless_weights_of_the_newest_step_are_refused(weight):
    with pytest.raises(ValueError, match=f"new_weight={weight}"):
        PriceBalance(2, new_weight=weight)


def test_senseless_sizes_and_potentials_are_refused():
    with pytest.raises(ValueError, match="num_experts=0"):
        PriceBalance(0)
    with pytest.raises(ValueError, match="potential='l2'"):
        PriceBalance(2, "l2")  # type: ignore[arg-type]
    record = routing(*four_tokens())
    with pytest.raises(ValueError, match=r"costs \(3,\) do not fit 2 experts"):
        cost_loss(record, torch.ones(3))
    with pytest.raises(ValueError, match=r"counts \(\) do not fit 2 experts"):
        balance_loss(record, counts=torch.tensor(1))
    with pytest.raises(ValueError, match=r"probabilities \(3,\) do not fit an average of \(2,\)"):
        PriceBalance(2).update(torch.ones(3))


# -- every loss ---------------------------------------------------------------------------------------------------

COSTS = torch.tensor([1.0, 2.0, 0.5, 3.0])
LOSSES: dict[str, Loss] = {
    "balance": balance_loss,
    "balance of a step": lambda record: balance_loss(record, counts=torch.tensor([4, 1, 0, 1])),
    "importance": importance_loss,
    "kl": kl_loss,
    "entropy": entropy_loss,
    "cost": lambda record: cost_loss(record, COSTS),
    "z": z_loss,
    "entropy prices": by_hand("entropy", 0.5, [0.4, 0.3, 0.2, 0.1]),
    "square prices": by_hand("square", 0.5, [0.4, 0.3, 0.2, 0.1]),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


@every_loss
@pytest.mark.parametrize("garbage", [1e30, math.nan, math.inf, -math.inf])
def test_what_stands_in_masked_tokens_changes_no_bit(loss: Loss, garbage: float):
    torch.manual_seed(0)
    router, x = Router(LinearScorer(5, 4), TopK(2)), torch.randn(6, 5)
    mask = torch.tensor([True, True, True, False, True, True])
    outcomes = []
    for fill in (0.0, garbage):
        tokens = torch.where(mask[:, None], x, fill).requires_grad_()
        value = loss(router(tokens, mask))
        outcomes.append((value, *torch.autograd.grad(value, (tokens, *router.parameters()))))
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other)
        assert torch.isfinite(one).all()
    assert torch.equal(outcomes[1][1][3], torch.zeros(5))
    assert outcomes[1][2].abs().max() > 0
    torch.testing.assert_close(loss(router(x[mask])), outcomes[0][0])


@every_loss
def test_masked_rows_of_a_record_are_never_read(loss: Loss):
    torch.manual_seed(0)
    clean, index = torch.randn(3, 4), torch.tensor([[0], [1], [0]])
    values = []
    for fill in (0.0, math.nan):
        logits = torch.cat([clean[:2], torch.full((1, 4), fill)]).requires_grad_()
        probs = logits.detach().softmax(-1).requires_grad_()
        value = loss(routing(probs, index, torch.tensor([True, True, False]), logits))
        gradients = torch.autograd.grad(value, (probs, logits), allow_unused=True, materialize_grads=True)
        assert all(torch.equal(gradient[2], torch.zeros(4)) for gradient in gradients)
        values.append(value)
    assert torch.equal(values[0], values[1])


@every_loss
@pytest.mark.parametrize(("tokens", "fill"), [(0, 0.0), (3, 0.0), (3, math.nan)])
def test_no_real_token_costs_nothing(loss: Loss, tokens: int, fill: float):
    logits = torch.full((tokens, 4), fill, requires_grad=True)
    index = torch.zeros(tokens, 1, dtype=torch.int64)
    probs = logits.detach().softmax(-1).requires_grad_()
    value = loss(routing(probs, index, torch.zeros(tokens, dtype=torch.bool), logits))
    assert value.item() == 0.0
    for gradient in torch.autograd.grad(value, (probs, logits), allow_unused=True, materialize_grads=True):
        assert torch.equal(gradient, torch.zeros(tokens, 4))


@every_loss
def test_no_token_and_no_mask_costs_nothing(loss: Loss):
    router = Router(LinearScorer(5, 4), TopK(2))
    value = loss(router(torch.zeros(0, 5)))
    assert value.item() == 0.0
    value.backward()
    assert torch.equal(router.scorer.out.weight.grad, torch.zeros(4, 5))


@pytest.mark.parametrize("gate", [None, SigmoidGate()])
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "balance of a step"])
def test_experts_that_are_off_do_not_count(name: str, gate: SigmoidGate | None):
    """Four experts of which two are off cost what two experts cost."""
    torch.manual_seed(0)
    x, on = torch.randn(6, 5), torch.tensor([True, False, True, False])
    four, two = (Router(LinearScorer(5, experts), TopK(2), gate) for experts in (4, 2))
    two.scorer.out.weight.data.copy_(four.scorer.out.weight[on])
    small = {
        "cost": lambda record: cost_loss(record, COSTS[on]),
        "entropy prices": by_hand("entropy", 0.5, [2 / 3, 1 / 3]),
        "square prices": by_hand("square", 0.5, [2 / 3, 1 / 3]),
    }
    whole, part = LOSSES[name](four(x, enabled=on)), small.get(name, LOSSES[name])(two(x))
    torch.testing.assert_close(whole, part)
    whole.backward()
    part.backward()
    torch.testing.assert_close(four.scorer.out.weight.grad[on], two.scorer.out.weight.grad)
    assert torch.equal(four.scorer.out.weight.grad[~on], torch.zeros(2, 5))


@every_loss
def test_groups_count_decisions(loss: Loss):
    """Three samples of which one is padding altogether: two decisions, however long the samples are."""
    torch.manual_seed(0)
    router = Router(LinearScorer(5, 4), TopK(2), groups=PerSample())
    rows = torch.randn(2, 5)
    x = torch.cat([rows, torch.full((1, 5), math.nan)])[:, None].expand(3, 4, 5)
    mask = torch.tensor([[True] * 4, [True, False, False, False], [False] * 4])
    alone = Router(router.scorer, TopK(2))
    torch.testing.assert_close(loss(router(x, mask)), loss(alone(rows)))


@every_loss
def test_gradients_of_even_and_of_one_sided_decisions_are_finite(loss: Loss):
    index = torch.zeros(3, 1, dtype=torch.int64)
    for first in (0.0, 200.0):
        logits = torch.tensor([[first, 0.0, 0.0, 0.0]] * 3, requires_grad=True)
        loss(routing(logits.softmax(-1), index, logits=logits)).backward()
        assert torch.isfinite(logits.grad).all()


@every_loss
def test_autocast_changes_no_bit(loss: Loss):
    torch.manual_seed(0)
    record = Router(LinearScorer(5, 4), TopK(2))(torch.randn(6, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = loss(record)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, loss(record))

"""Field banks: idle experts, shapes, and the pool that grows; and what every bank shares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from zoo.moe import (
    Context,
    ExpertBank,
    ExpertPool,
    FieldExperts,
    LinearScorer,
    MoE,
    Router,
    Routing,
    TopK,
)


class Smooth(nn.Module):
    """A field expert that looks along the sequence, and counts its calls."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.map = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.calls = 0

    def forward(self, x, context=None):
        self.calls += 1
        return self.norm(self.map(x) + x.mean(-2, keepdim=True))


def to_first_two(tokens: int, experts: int) -> Routing:
    """Every token to experts 0 and 1, weights 3/4 and 1/4."""
    index = torch.tensor([[0, 1]]).expand(tokens, 2)
    weight = torch.tensor([[0.75, 0.25]]).expand(tokens, 2)
    uniform = torch.full((tokens, experts), 1 / experts)
    valid = torch.ones(tokens, 2, dtype=torch.bool)
    return Routing(index=index, weight=weight, valid=valid, probs=uniform, logits=uniform.log())


def smooth_bank(experts: int = 4, skip_idle: bool = True) -> FieldExperts:
    torch.manual_seed(0)
    return FieldExperts([Smooth(6) for _ in range(experts)], skip_idle=skip_idle)


def pool(slots: int = 4, base: int = 2, seed: int = 0) -> ExpertPool:
    torch.manual_seed(seed)
    return ExpertPool([Smooth(6) for _ in range(slots)], base=base)


def test_an_empty_bank_is_refused_and_a_bank_must_say_how_it_mixes():
    with pytest.raises(ValueError, match="at least one expert"):
        FieldExperts([])
    with pytest.raises(TypeError, match="ExpertBank does not say how to mix"):
        ExpertBank(2)(torch.zeros(1, 2), to_first_two(1, 2))
    with pytest.raises(TypeError, match="ExpertBank does not expose its matrices"):
        ExpertBank(2).matrices(0)


def test_a_field_bank_mixes_per_position():
    bank = smooth_bank()
    x = torch.randn(2, 5, 6)
    y = bank(x, to_first_two(10, 4))
    torch.testing.assert_close(y, 0.75 * bank.experts[0](x) + 0.25 * bank.experts[1](x))


def test_skipping_idle_experts_changes_nothing_but_the_work():
    x = torch.randn(2, 5, 6)
    results = []
    for skip in (True, False):
        bank = smooth_bank(skip_idle=skip)
        y = bank(x, to_first_two(10, 4))
        y.square().sum().backward()
        assert [expert.calls for expert in bank.experts] == ([1, 1, 0, 0] if skip else [1, 1, 1, 1])
        results.append((y.detach(), {name: p.grad for name, p in bank.named_parameters()}))
    (y, gradients), (y_all, gradients_all) = results
    assert torch.equal(y, y_all)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_all[name]), name


def test_idle_experts_get_zero_gradients_and_not_none():
    bank = smooth_bank()
    bank(torch.randn(2, 5, 6), to_first_two(10, 4)).square().sum().backward()
    for expert in (0, 1):
        assert bank.experts[expert].map.weight.grad.abs().max() > 0
    for expert in (2, 3):
        for name, parameter in bank.experts[expert].named_parameters():
            assert parameter.grad is not None, name
            assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_idle_experts_get_zero_gradients_in_evaluation_too():
    bank = smooth_bank().eval()
    bank(torch.randn(2, 5, 6), to_first_two(10, 4)).sum().backward()
    assert torch.equal(bank.experts[3].map.weight.grad, torch.zeros(6, 6))


def test_experts_may_differ_in_kind_and_need_no_parameters():
    class Twice(nn.Module):
        def forward(self, x, context=None):
            return 2 * x

    bank = FieldExperts([Twice(), Smooth(6), Twice()])
    x = torch.randn(3, 6)
    y = bank(x, to_first_two(3, 3))
    torch.testing.assert_close(y, 1.5 * x + 0.25 * bank.experts[1](x))


class Answers(nn.Module):
    """A field expert that answers with what it was given."""

    def __init__(self, answer) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x, context=None):
        return self.answer


def test_field_experts_see_the_context_and_x_with_zeros_at_masked_positions():
    class Total(nn.Module):
        def forward(self, x, context=None):
            return x.sum(-2, keepdim=True).expand_as(x) + context.features

    features = torch.randn(1, 3, 2)
    routing = replace(to_first_two(3, 2), mask=torch.tensor([True, False, True]))
    routing = replace(routing, valid=routing.valid & routing.mask[:, None])
    x = torch.tensor([[[1.0, 2.0], [float("nan"), 7.0], [3.0, 4.0]]])
    y = FieldExperts([Total(), Total()])(x, routing, Context(features=features))
    expected = torch.tensor([4.0, 6.0]) + features
    torch.testing.assert_close(y[:, [0, 2]], expected[:, [0, 2]])
    assert torch.equal(y[:, 1], torch.zeros(1, 2))


def test_field_experts_find_the_mask_in_the_context():
    class Mean(nn.Module):
        def forward(self, x, context=None):
            real = context.mask[..., None]
            return ((x * real).sum(-2, keepdim=True) / real.sum(-2, keepdim=True)).expand_as(x)

    x = torch.tensor([[[1.0], [9.0], [3.0]]])
    routing = replace(to_first_two(3, 2), mask=torch.tensor([True, False, True]))
    routing = replace(routing, valid=routing.valid & routing.mask[:, None])
    assert FieldExperts([Mean(), Mean()])(x, routing).flatten().tolist() == [2.0, 0.0, 2.0]


def test_a_slot_whose_weights_nothing_draws_is_not_switched_on():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    bank = ExpertPool([nn.Identity(), Bare()], base=1)
    with pytest.raises(ValueError, match="slot 1: Bare itself has parameters but no reset_parameters"):
        bank.enable(1, seed=0)
    assert not bank.enabled[1]


def test_an_answer_of_another_shape_is_refused_and_not_broadcast():
    x = torch.randn(2, 5, 6)
    for shape in ((2, 5, 1), (5, 6), (2, 5, 3)):
        bank = FieldExperts([Smooth(6), Answers(torch.zeros(shape))])
        with pytest.raises(ValueError, match="expert 1 answers with shape") as error:
            bank(x, to_first_two(10, 2))
        assert str(shape) in str(error.value)
        assert "(2, 5, 6)" in str(error.value)


def test_answers_may_be_wider_than_x_even_where_nothing_was_chosen():
    answers = torch.randn(2, 5, 9)
    for bank in (
        FieldExperts([Answers(answers), Answers(2 * answers)], dim_out=9),
        ExpertPool([Answers(answers), Answers(2 * answers)], base=2, dim_out=9),
    ):
        routing, x = to_first_two(10, 2), torch.randn(2, 5, 6)
        torch.testing.assert_close(bank(x, routing), 1.25 * answers)
        nothing = replace(routing, valid=torch.zeros_like(routing.valid))
        assert torch.equal(bank(x, nothing), torch.zeros(2, 5, 9))
    with pytest.raises(ValueError, match="dim_out=0"):
        FieldExperts([Smooth(6)], dim_out=0)


def test_a_field_bank_exposes_the_matrices_of_an_expert_as_views():
    bank = smooth_bank()
    assert bank.matrices(2).keys() == {"map.weight"}
    with torch.no_grad():
        bank.matrices(2)["map.weight"].fill_(3.0)
    assert (bank.experts[2].map.weight == 3.0).all()
    assert not (bank.experts[1].map.weight == 3.0).any()


def test_a_pool_starts_with_its_base_and_routes_to_nothing_else():
    layer = MoE(Router(LinearScorer(6, 4), TopK(2)), pool())
    assert layer.experts.enabled.tolist() == [True, True, False, False]
    out = layer(torch.randn(3, 5, 6))
    assert out.routing.counts().tolist() == [15, 15, 0, 0]
    assert [expert.calls for expert in layer.experts.experts] == [1, 1, 0, 0]
    out.y.sum().backward()
    assert torch.equal(layer.experts.experts[3].map.weight.grad, torch.zeros(6, 6))
    assert torch.equal(layer.router.scorer.out.weight.grad[2:], torch.zeros(2, 6))


def test_a_slot_that_is_switched_on_is_routed_to():
    layer = MoE(Router(LinearScorer(6, 4, bias=True), TopK(2)), pool())
    layer.experts.enable(2, seed=7)
    with torch.no_grad():
        layer.router.scorer.out.bias[2] = 10.0
    assert layer(torch.randn(3, 5, 6)).routing.counts()[2] == 15


def test_fresh_weights_come_from_seed_and_slot_alone():
    first, second = pool(seed=0), pool(seed=1)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.fill_(3.0)
    torch.manual_seed(0)
    first.enable(3, seed=7)
    torch.manual_seed(99)
    torch.rand(5)
    second.enable(2, seed=5)
    second.enable(3, seed=7)
    for a, b in zip(first.experts[3].parameters(), second.experts[3].parameters(), strict=True):
        assert torch.equal(a, b)
    other_seed, other_slot = pool(), pool()
    other_seed.enable(3, seed=8)
    other_slot.enable(2, seed=7)
    assert not torch.equal(first.experts[3].map.weight, other_seed.experts[3].map.weight)
    assert not torch.equal(first.experts[3].map.weight, other_slot.experts[2].map.weight)


def test_switching_on_leaves_the_other_slots_and_the_random_state_alone():
    bank = pool()
    before = {name: value.clone() for name, value in bank.state_dict().items()}
    state = torch.get_rng_state()
    bank.enable(2, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in bank.state_dict().items():
        if not name.startswith("experts.2.") and name != "enabled":
            assert torch.equal(value, before[name]), name
    assert not torch.equal(bank.experts[2].map.weight, before["experts.2.map.weight"])
    assert bank.enabled.tolist() == [True, True, True, False]


def test_a_slot_switched_off_and_on_again_is_as_fresh_as_the_first_time():
    bank = pool()
    bank.enable(2, seed=7)
    fresh = bank.experts[2].map.weight.detach().clone()
    with torch.no_grad():
        bank.experts[2].map.weight.zero_()
    bank.disable(2)
    assert bank.enabled.tolist() == [True, True, False, False]
    bank.enable(2, seed=7)
    assert torch.equal(bank.experts[2].map.weight, fresh)


def test_base_slots_stay_and_a_slot_is_switched_on_once():
    bank = pool()
    with pytest.raises(ValueError, match="slot 1 is one of the 2 base experts"):
        bank.disable(1)
    bank.enable(2, seed=0)
    with pytest.raises(ValueError, match="slot 2 is switched on already"):
        bank.enable(2, seed=0)
    for base in (0, 5):
        with pytest.raises(ValueError, match=f"base={base} must lie in 1..4"):
            pool(base=base)


def test_the_topology_is_part_of_the_state_dict():
    grown, fresh = pool(), pool(seed=1)
    grown.enable(3, seed=0)
    fresh.load_state_dict(grown.state_dict(), strict=True)
    assert fresh.enabled.tolist() == [True, True, False, True]
    x = torch.randn(2, 5, 6)
    assert torch.equal(fresh(x, to_first_two(10, 4)), grown(x, to_first_two(10, 4)))
    without = {name: value for name, value in grown.state_dict().items() if name != "enabled"}
    with pytest.raises(RuntimeError, match="enabled"):
        fresh.load_state_dict(without, strict=True)

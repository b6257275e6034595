"""The router as a whole: its stages in order, masks, precision, replay, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zoo.moe.bias import SelectionBias
from zoo.moe.gates import SigmoidGate, SoftmaxGate, UnweightedGate
from zoo.moe.groups import PerSequence
from zoo.moe.router import Router
from zoo.moe.routing import Choices, Context
from zoo.moe.scorers import CosineScorer, FeatureScorer, IdentityScorer, LinearScorer, RecurrentScorer
from zoo.moe.selectors import Capacity, Dense, ExpertChoice, Fixed, RelativeThreshold, TopK
from zoo.moe.transforms import Temperature

ROUTERS = {
    "plain": lambda: Router(LinearScorer(8, 5), TopK(2)),
    "softmax first": lambda: Router(LinearScorer(8, 5), TopK(1), SoftmaxGate(renormalize=False)),
    "sigmoid": lambda: Router(LinearScorer(8, 5), TopK(3), SigmoidGate(scale=2.0), bias=SelectionBias(5)),
    "threshold": lambda: Router(CosineScorer(8, 5, width=3), [RelativeThreshold(0.8), TopK(2)]),
    "dense": lambda: Router(LinearScorer(8, 5), Dense(), transform=Temperature(0.5)),
    "capacity": lambda: Router(LinearScorer(8, 5), [TopK(2), Capacity(0.8, eval_factor=0.8)]),
    "experts choose": lambda: Router(LinearScorer(8, 5), ExpertChoice(factor=1.0), SoftmaxGate(False)),
    "unweighted": lambda: Router(LinearScorer(8, 5), Fixed([3, 0]), UnweightedGate()),
    "recurrent": lambda: Router(RecurrentScorer(8, 5, 6), TopK(2)),
}
every = pytest.mark.parametrize("kind", ROUTERS)
MASK = torch.tensor([[True, True, False, True], [False, False, False, False], [True, False, True, True]])


def build(kind: str) -> Router:
    torch.manual_seed(0)
    router = ROUTERS[kind]()
    for parameter in router.parameters():
        nn.init.normal_(parameter)
    return router


def same(one, other) -> bool:
    names = ("index", "weight", "valid", "probs", "logits")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


def test_the_stages_follow_each_other_by_hand():
    # Scores of three experts: logits (2, 4, 6) / 2 behind the temperature; the bias lifts the first over the third.
    scorer = LinearScorer(3, 3)
    nn.init.eye_(scorer.out.weight)
    bias = SelectionBias(3)
    bias.bias.copy_(torch.tensor([1.0, 0.0, 0.0]))
    router = Router(scorer, TopK(2), SigmoidGate(renormalize=False), transform=Temperature(2.0), bias=bias)
    routing = router(torch.tensor([[2.0, 4.0, 6.0]]))
    assert routing.logits.tolist() == [[1.0, 2.0, 3.0]]
    sigmoid = torch.tensor([1.0, 2.0, 3.0]).sigmoid()
    assert routing.index.tolist() == [[0, 2]]
    torch.testing.assert_close(routing.weight, sigmoid[None, [0, 2]], rtol=0, atol=1e-6)
    torch.testing.assert_close(routing.probs, (sigmoid / sigmoid.sum())[None], rtol=0, atol=1e-6)


@every
def test_shapes_types_and_sums(kind):
    routing = build(kind)(torch.randn(2, 3, 4, 8), torch.rand(2, 3, 4) < 0.7)
    assert routing.index.shape == routing.weight.shape == routing.valid.shape
    assert routing.probs.shape == routing.logits.shape == (24, 5)
    assert (routing.index.dtype, routing.valid.dtype) == (torch.int64, torch.bool)
    torch.testing.assert_close(routing.probs.sum(-1), torch.ones(24), rtol=0, atol=1e-6)
    assert torch.equal(routing.weight[~routing.valid], torch.zeros(int((~routing.valid).sum())))
    assert all(len(set(row)) == len(row) for row in routing.index.tolist())


@every
@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")])
def test_nothing_of_a_masked_token_leaks(kind, garbage):
    router = build(kind)
    clean = torch.randn(3, 4, 8)
    results = []
    for values in (clean, torch.where(MASK[..., None], clean, garbage)):
        router.zero_grad()
        x = values.clone().requires_grad_()
        routing = router(x, MASK)
        real = routing.mask
        (routing.weight.square().sum() + routing.probs[real].square().sum()).backward()
        assert torch.equal(x.grad[~MASK], torch.zeros(6, 8))
        assert not routing.valid[~real].any()
        results.append((routing, [parameter.grad.clone() for parameter in router.parameters()]))
    (one, gradients), (other, others) = results
    assert same(one, other)
    assert all(torch.equal(*pair) for pair in zip(gradients, others, strict=True))


def test_what_stands_in_the_context_of_a_masked_token_is_of_no_account():
    x, mask = torch.randn(2, 3, 8), torch.tensor([[True, False, True], [True, True, False]])
    features = torch.randn(2, 3, 6)
    features[~mask] = torch.nan
    router = Router(FeatureScorer(LinearScorer(6, 5)), TopK(2))
    routing = router(x, mask, Context(features=features))
    routing.weight[:, 0].sum().backward()
    assert router.scorer.scorer.out.weight.grad.isfinite().all()
    clean = torch.where(mask[..., None], features, 3.0)
    assert torch.equal(router(x, mask, Context(features=clean)).weight, routing.weight)
    ids = torch.where(mask, 1, -100)
    tagged = Router(IdentityScorer(8, 5, 2), TopK(2))
    tagged(x, mask, Context(ids=ids))
    with pytest.raises(ValueError, match=r"lie in -100..1"):
        tagged(x, None, Context(ids=ids))


@every
def test_a_mask_of_real_tokens_alone_changes_not_a_bit(kind):
    router, x = build(kind), torch.randn(3, 4, 8)
    assert same(router(x), router(x, torch.ones(3, 4, dtype=torch.bool)))
    assert same(router(x), router(x, enabled=torch.ones(5, dtype=torch.bool)))


@every
@pytest.mark.parametrize("shape", [(2, 0, 8), (0, 3, 8), (0, 8)])
def test_no_tokens_give_an_empty_routing_and_zero_gradients(kind, shape):
    router = build(kind)
    routing = router(torch.zeros(shape))
    assert routing.index.shape[0] == 0
    assert routing.counts().tolist() == [0] * 5
    (routing.weight.sum() + routing.probs.sum()).backward()
    for name, parameter in router.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


@every
def test_an_expert_that_is_off_gets_nothing(kind):
    router, on = build(kind), torch.tensor([True, True, False, True, True])
    routing = router(torch.randn(3, 4, 8), MASK, enabled=on)
    assert routing.counts()[2] == 0
    assert torch.equal(routing.probs[:, 2], torch.zeros(12))
    assert torch.equal(routing.logits[:, 2], torch.full((12,), -torch.inf))
    (routing.weight.square().sum() + routing.probs.square().sum()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in router.parameters())


@every
def test_the_batch_matters_only_where_the_router_says_so(kind):
    router, x = build(kind), torch.randn(12, 1, 8)
    whole = router(x).dense_weight()
    alone = torch.cat([router(x[row : row + 1]).dense_weight() for row in range(12)])
    assert router.depends_on_batch == (kind in ("capacity", "experts choose"))
    assert torch.allclose(whole, alone, rtol=0, atol=1e-6) != router.depends_on_batch


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_choices_of_bf16_tokens_under_autocast_are_those_of_fp32(weights):
    torch.manual_seed(0)
    router = Router(LinearScorer(32, 64), TopK(8)).to(weights)
    fine = Router(LinearScorer(32, 64), TopK(8))
    fine.load_state_dict(router.state_dict())
    x = torch.randn(4096, 32).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = router(x)
        coarse = nn.functional.linear(x, router.scorer.out.weight)
    exact = fine(x.float())
    assert mixed.probs.dtype == mixed.logits.dtype == torch.float32
    assert mixed.weight.dtype == torch.bfloat16
    assert torch.equal(mixed.index, exact.index)
    assert torch.equal(mixed.weight, exact.weight.bfloat16())
    # The control: a product in bf16 takes other experts for some tokens.
    rounded = coarse.float().topk(8).indices.sort().values
    assert not torch.equal(rounded, exact.index.sort().values)


@every
def test_autocast_changes_no_bit(kind):
    router, x = build(kind), torch.randn(3, 4, 8)
    plain = router(x, MASK)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(router(x, MASK), plain)
        # And what follows the router is under autocast again.
        assert nn.functional.linear(x, torch.randn(2, 8)).dtype == torch.bfloat16


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_whole_router_in_another_precision(kind, dtype):
    router = build(kind).to(dtype)
    routing = router(torch.randn(3, 4, 8).to(dtype), MASK)
    fine = torch.float64 if dtype == torch.float64 else torch.float32
    assert routing.probs.dtype == routing.logits.dtype == fine
    assert routing.weight.dtype == dtype
    routing.weight.float().square().sum().backward()


def test_the_derivatives_are_those_of_finite_differences():
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    for kind in ("plain", "softmax first", "sigmoid", "threshold", "dense"):
        router = build(kind).double()
        assert torch.autograd.gradcheck(lambda x, router=router: router(x).dense_weight(), x)


def test_a_bias_that_no_selector_looks_at_is_refused():
    for selector in (ExpertChoice(1.0), RelativeThreshold(0.5), Dense()):
        with pytest.raises(ValueError, match="a selection bias moves the choice of TopK"):
            Router(LinearScorer(8, 4), selector, SoftmaxGate(False), bias=SelectionBias(4))


def test_one_fixed_expert_with_weight_one_is_refused_as_one_best_is():
    with pytest.raises(ValueError, match="renormalised weights trains no router"):
        Router(LinearScorer(8, 4), Fixed([1]))
    assert Router(LinearScorer(8, 4), Fixed([1]), SoftmaxGate(False)).num_experts == 4


def test_a_router_runs_without_memory():
    with torch.device("meta"):
        router = Router(LinearScorer(8, 4), TopK(2))
        assert router(torch.randn(3, 8)).weight.shape == (3, 2)


def test_an_expert_that_is_off_takes_no_part_in_a_capacity_under_a_bias():
    """Four tokens, two experts on: two places each; counted with the two that are off it would be one."""
    router = Router(
        LinearScorer(8, 4), [TopK(1), Capacity(1.0)], SoftmaxGate(False), bias=SelectionBias(4)
    ).train()
    enabled = torch.tensor([True, True, False, False])
    routing = router(torch.ones(4, 8), enabled=enabled)
    assert routing.counts().max() == 2


@settings(max_examples=25, deadline=None, derandomize=True)
@given(experts=st.integers(2, 20), rows=st.integers(1, 60), k=st.integers(1, 4), seed=st.integers(0, 99))
def test_ties_go_to_the_lowest_index_through_the_whole_router(experts, rows, k, seed):
    class Given(nn.Module):
        num_experts = experts

        def forward(self, x, context=None):
            return x

    k = min(k, experts)
    torch.manual_seed(seed)
    logits = torch.randint(0, 3, (rows, experts)).float()
    index = Router(Given(), TopK(k), SoftmaxGate(renormalize=False))(logits).index.tolist()
    assert index == [
        sorted(range(experts), key=lambda e, row=row: (-row[e], e))[:k] for row in logits.tolist()
    ]


def test_six_equal_logits_take_the_first_two():
    scorer = LinearScorer(4, 6)
    nn.init.zeros_(scorer.out.weight)
    assert Router(scorer, TopK(2))(torch.randn(3, 4)).index.tolist() == [[0, 1]] * 3


def test_logits_keep_apart_what_a_softmax_rounds_to_one_probability():
    class Given(nn.Module):
        num_experts = 3

        def forward(self, x, context=None):
            return x

    logits = torch.tensor([[-200.0, -199.0, 0.0]])
    routing = Router(Given(), TopK(2))(logits)
    assert routing.probs[0, 0] == routing.probs[0, 1] == 0.0
    assert routing.index.tolist() == [[2, 1]]


@every
@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=st.integers(0, 99), masked=st.booleans())
def test_a_replay_is_equal_to_the_bit(kind, seed, masked):
    router = build(kind)
    torch.manual_seed(seed)
    x, mask = torch.randn(3, 4, 8), MASK if masked else None
    routing = router(x, mask)
    again = router(x, mask, Context(choices=routing.choices()))
    assert same(again, routing)
    assert again.dropped is None


def test_a_replay_takes_the_recorded_set_with_the_weights_of_the_present_router():
    router, x = build("plain"), torch.randn(6, 8)
    index = torch.tensor([[4, 0]]).expand(6, 2)
    valid = torch.tensor([[True, True]] * 5 + [[True, False]])
    routing = router(x, context=Context(choices=Choices(index=index, valid=valid)))
    assert torch.equal(routing.index, index)
    assert torch.equal(routing.valid, valid)
    expected = (x @ router.scorer.out.weight.T)[:, [4, 0]].softmax(-1)
    torch.testing.assert_close(routing.weight[:5], expected[:5], rtol=0, atol=1e-6)
    assert routing.weight[5].tolist() == [1.0, 0.0]
    routing.weight[:5, 0].sum().backward()
    moved = router.scorer.out.weight.grad.abs().sum(-1) > 0
    assert moved.tolist() == [True, False, False, False, True]


def test_a_replay_may_be_of_another_width_and_in_int32():
    choices = Choices(index=torch.tensor([[1, 2, 3]] * 4, dtype=torch.int32), valid=torch.ones(4, 3).bool())
    routing = build("plain")(torch.randn(4, 8), context=Context(choices=choices))
    assert routing.index.dtype == torch.int64
    assert routing.index.tolist() == [[1, 2, 3]] * 4


@pytest.mark.parametrize("kind", ["plain", "sigmoid", "experts choose"])
def test_what_is_masked_or_off_now_stays_out_of_a_replay(kind):
    router, x = build(kind), torch.randn(3, 4, 8)
    choices = router(x).choices()
    on = torch.tensor([True, True, False, True, True])
    routing = router(x, MASK, Context(choices=choices), enabled=on)
    expected = choices.valid & MASK.reshape(-1, 1) & on[choices.index]
    assert torch.equal(routing.valid, expected)
    assert routing.weight.isfinite().all()
    assert torch.equal(routing.weight[~expected], torch.zeros(int((~expected).sum())))


def test_a_replay_of_groups_has_one_row_for_each_decision():
    torch.manual_seed(0)
    router, x = Router(LinearScorer(8, 5), TopK(2), groups=PerSequence()), torch.randn(3, 4, 8)
    routing = router(x, MASK)
    assert same(router(x, MASK, Context(choices=routing.choices())), routing)
    with pytest.raises(ValueError, match="do not fit 3 decisions"):
        router(x, MASK, Context(choices=routing.per_token().choices()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"index": torch.zeros(3, 2, dtype=torch.int64)}, r"index \(3, 2\) and valid \(4, 2\)"),
        (
            {"valid": torch.ones(4, 1, dtype=torch.bool)},
            r"valid \(4, 1\), torch.int64 and torch.bool, do not fit 4 decisions",
        ),
        ({"valid": torch.ones(4, 2)}, "torch.float32, do not fit"),
        (
            {"index": torch.zeros(8, dtype=torch.int64), "valid": torch.ones(8, dtype=torch.bool)},
            r"index \(8,\)",
        ),
        ({"index": torch.tensor([[0, 5]] * 4)}, "name experts 0..5, not 0..4"),
        ({"index": torch.tensor([[-1, 3]] * 4)}, "name experts -1..3, not 0..4"),
    ],
)
def test_choices_that_do_not_fit_are_refused(change, words):
    router, x = build("plain"), torch.randn(4, 8)
    choices = replace(router(x).choices(), **change)
    with pytest.raises(ValueError, match=words):
        router(x, context=Context(choices=choices))


@pytest.mark.parametrize("kind", ["plain", "sigmoid", "threshold", "dense", "capacity", "experts choose"])
def test_a_router_compiles_as_one_graph_and_so_does_its_replay(kind):
    router, x = build(kind), torch.randn(3, 4, 8)
    torch.compiler.reset()
    compiled = torch.compile(router, backend="eager", fullgraph=True)
    routing = router(x, MASK)
    assert same(compiled(x, MASK), routing)
    assert same(compiled(x, MASK, Context(choices=routing.choices())), routing)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Router(LinearScorer(4, 3), TopK(4)), r"top_k=4 must lie in 1..num_experts=3"),
        (lambda: Router(LinearScorer(4, 3), [Dense(), TopK(4)]), r"top_k=4 must lie in 1..num_experts=3"),
        (lambda: Router(LinearScorer(4, 3), TopK(1)), r"top_k=1 .* renormalize=False"),
        (lambda: Router(LinearScorer(4, 3), TopK(1), SigmoidGate()), r"top_k=1 .* renormalize=False"),
        (lambda: Router(LinearScorer(4, 3), [TopK(2), TopK(1)]), r"top_k=1 .* renormalize=False"),
        (lambda: Router(LinearScorer(4, 3), []), "at least one selector"),
        (
            lambda: Router(LinearScorer(4, 3), Fixed([0, 3])),
            r"Fixed\(experts=\[0, 3\]\) names experts beyond 0..2",
        ),
        (lambda: Router(LinearScorer(4, 3), TopK(2), bias=SelectionBias(4)), "of 4 experts, not of 3"),
    ],
)
def test_a_router_that_makes_no_sense_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_one_expert_alone_may_be_renormalised():
    routing = Router(LinearScorer(4, 1), TopK(1))(torch.randn(3, 4))
    assert torch.equal(routing.weight, torch.ones(3, 1))

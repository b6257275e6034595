"""Scorers: what logits they give, and that they are exact, near even at the start, and all of them learn."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.moe.router import Router
from zoo.moe.routing import Context
from zoo.moe.scorers import (
    BlendScorer,
    CosineScorer,
    FeatureScorer,
    IdentityScorer,
    LinearScorer,
    RecurrentScorer,
)
from zoo.moe.selectors import TopK

DIM, EXPERTS, IDS = 32, 8, 3
SCORERS = {
    "linear": lambda: LinearScorer(DIM, EXPERTS),
    "biased": lambda: LinearScorer(DIM, EXPERTS, bias=True),
    "cosine": lambda: CosineScorer(DIM, EXPERTS),
    "low cosine": lambda: CosineScorer(DIM, EXPERTS, width=16),
    "hidden": lambda: IdentityScorer(DIM, EXPERTS, IDS),
    "logit": lambda: IdentityScorer(DIM, EXPERTS, IDS, "logit"),
    "both": lambda: IdentityScorer(DIM, EXPERTS, IDS, "both"),
    "none": lambda: IdentityScorer(DIM, EXPERTS, IDS, "none"),
    "feature": lambda: FeatureScorer(LinearScorer(DIM, EXPERTS)),
    "logits": lambda: BlendScorer([LinearScorer(DIM, EXPERTS), CosineScorer(DIM, EXPERTS)], [1.0, 2.0]),
    "probs": lambda: BlendScorer(
        [LinearScorer(DIM, EXPERTS), CosineScorer(DIM, EXPERTS)], [0.25, 0.75], on="probs"
    ),
    "recurrent": lambda: RecurrentScorer(DIM, EXPERTS, 16),
}
EXACT = sorted(set(SCORERS) - {"recurrent"})
every = pytest.mark.parametrize("kind", SCORERS)
exact = pytest.mark.parametrize("kind", EXACT)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return SCORERS[kind]()


def data(*leading: int) -> tuple[torch.Tensor, Context]:
    generator = torch.Generator().manual_seed(1)
    x, features = torch.randn(2, *leading, DIM, generator=generator)
    return x, Context(features=features, ids=torch.randint(IDS, leading, generator=generator))


@every
def test_any_leading_shape_is_scored_row_by_row(kind):
    scorer = build(kind)
    x, context = data(2, 3, 5)
    logits = scorer(x, context)
    assert scorer.num_experts == EXPERTS
    assert logits.shape == (2, 3, 5, EXPERTS)
    part = Context(features=context.features[1, 2], ids=context.ids[1, 2])
    torch.testing.assert_close(scorer(x[1, 2], part), logits[1, 2], rtol=0, atol=1e-6)


@every
def test_routing_starts_near_even(kind):
    probs = build(kind)(*data(16, 16)).softmax(-1)
    entropy = -(probs * probs.log()).sum(-1) / math.log(EXPERTS)
    assert entropy.mean() > 0.9
    assert probs.mean((0, 1)).sub(1 / EXPERTS).abs().max() < 0.05


@every
def test_every_weight_learns(kind):
    scorer = build(kind)
    x, context = data(3, 7)
    (scorer(x, context) * torch.randn(EXPERTS)).sum().backward()
    for name, parameter in scorer.named_parameters():
        assert parameter.grad.abs().max() > 0, name


@exact
def test_weights_of_half_precision_are_raised_and_not_the_tokens_rounded(kind):
    half = build(kind).bfloat16()
    whole = build(kind).bfloat16().float()
    x, context = data(4, 5)
    assert half(x, context).dtype == torch.float32
    assert torch.equal(half(x, context), whole(x, context))
    rounded = Context(features=context.features.bfloat16(), ids=context.ids)
    exact = Context(features=rounded.features.float(), ids=context.ids)
    assert torch.equal(half(x.bfloat16(), rounded), whole(x.bfloat16().float(), exact))


@exact
def test_doubles_stay_doubles(kind):
    scorer, fine = build(kind), build(kind).double()
    x, context = data(4, 5)
    logits = fine(x.double(), Context(features=context.features.double(), ids=context.ids))
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits.float(), scorer(x, context), rtol=0, atol=1e-5)


@exact
def test_a_scorer_compiles_as_one_graph(kind):
    scorer = build(kind)
    x, context = data(4, 5)
    torch.compiler.reset()
    compiled = torch.compile(scorer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, context), scorer(x, context))


def test_a_linear_scorer_is_one_product():
    scorer = LinearScorer(6, 4, bias=True)
    x = torch.randn(2, 3, 6)
    assert torch.equal(scorer.out.bias, torch.zeros(4))
    torch.testing.assert_close(scorer(x), x @ scorer.out.weight.T)
    assert LinearScorer(6, 4).out.bias is None


def test_in_fp32_a_linear_scorer_runs_the_product_and_nothing_else():
    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            ran[function.overloadpacket.__name__] += 1
            return function(*args, **(kwargs or {}))

    scorer, x, ran = LinearScorer(6, 4), torch.randn(5, 6), Counter()
    with Count():
        scorer(x)
    assert ran == {"t": 1, "mm": 1}


def test_cosines_by_hand():
    scorer = CosineScorer(2, 2, scale=2.0)
    scorer.directions.data = torch.tensor([[1.0, 0.0], [0.0, 7.0]])
    # (3, 4) has the cosines 3/5 and 4/5 with the two axes; its length is of no account.
    for length in (1.0, 1e-3, 1e3):
        logits = scorer(length * torch.tensor([[3.0, 4.0]]))
        torch.testing.assert_close(logits, torch.tensor([[1.2, 1.6]]), rtol=0, atol=1e-6)


def test_cosines_in_the_projected_space_against_torch():
    scorer = build("low cosine").double()
    x = torch.randn(9, DIM, dtype=torch.float64)
    projected = x @ scorer.project.weight.T
    expected = 2.0 * F.cosine_similarity(projected[:, None], scorer.directions[None], dim=-1)
    torch.testing.assert_close(scorer(x), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("width", [None, 16])
def test_a_token_of_zeros_has_even_logits_and_tame_gradients(width):
    scorer = CosineScorer(DIM, EXPERTS, width)
    x = torch.zeros(2, DIM)
    x[1, 0] = 1.0
    x.requires_grad_()
    logits = scorer(x)
    assert torch.equal(logits[0], torch.zeros(EXPERTS))
    (logits * torch.randn(EXPERTS)).sum().backward()
    for gradient in (x.grad, *(parameter.grad for parameter in scorer.parameters())):
        assert gradient.isfinite().all()
        assert gradient.abs().max() < 100.0


def test_the_scale_stays_within_its_bounds_and_can_come_back():
    scorer = CosineScorer(DIM, EXPERTS, scale=3.0, limit=10.0)
    torch.testing.assert_close(scorer.scale, torch.tensor([3.0]))
    for far in (-15.0, 15.0):
        scorer.scale_logit.data.fill_(far)
        assert 0.0 < scorer.scale.item() <= 10.0
        (gradient,) = torch.autograd.grad(scorer.scale.sum(), scorer.scale_logit)
        assert gradient.item() > 0.0


def test_a_tag_shifts_the_token_and_the_logits_by_hand():
    scorer = IdentityScorer(2, 2, 2, "both")
    with torch.no_grad():
        scorer.content.out.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
        scorer.hidden.copy_(torch.tensor([[0.0, 0.0], [10.0, 1.0]]))
        scorer.logit.copy_(torch.tensor([[0.5, 0.0], [0.0, 100.0]]))
    x = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    # Tag 0: (1, 1 + 4) + (0.5, 0); tag 1: x + u = (11, 3), so (11, 17) + (0, 100).
    assert scorer(x, Context(ids=torch.tensor([0, 1]))).tolist() == [[1.5, 5.0], [11.0, 117.0]]


@pytest.mark.parametrize("signal", ["hidden", "logit", "both", "none"])
def test_an_identity_scorer_starts_as_the_linear_one_and_has_only_what_its_signal_needs(signal):
    x, context = data(4, 5)
    torch.manual_seed(0)
    scorer = IdentityScorer(DIM, EXPERTS, IDS, signal)
    assert torch.equal(scorer(x, context), build("linear")(x))
    assert (scorer.hidden is not None) == (signal in ("hidden", "both"))
    assert (scorer.logit is not None) == (signal in ("logit", "both"))


def test_a_tag_on_the_token_is_a_tag_on_the_logits_in_function():
    x, context = data(4, 5)
    hidden, logit = build("hidden"), build("logit")
    nn.init.normal_(hidden.hidden)
    logit.logit.data = hidden.content(hidden.hidden).detach()
    torch.testing.assert_close(hidden(x, context), logit(x, context), rtol=0, atol=1e-5)


def test_a_tag_that_did_not_occur_has_a_zero_gradient():
    scorer = build("both")
    scorer(torch.randn(4, DIM), Context(ids=torch.tensor([0, 2, 2, 0]))).square().sum().backward()
    for table in (scorer.hidden, scorer.logit):
        assert table.grad.abs().sum(-1).gt(0).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (None, r"integers of shape \(2, 3\), not None"),
        (torch.zeros(2, dtype=torch.int64), r"shape \(2, 3\), not torch.int64 of shape \(2,\)"),
        (torch.zeros(2, 3), r"not torch.float32"),
        (torch.tensor([[0, 1, 2], [0, 3, 0]]), r"lie in 0..3, not in 0..2"),
        (torch.tensor([[0, 1, 2], [0, -1, 0]]), r"lie in -1..2, not in 0..2"),
    ],
)
def test_tags_that_do_not_fit_are_refused(ids, words):
    with pytest.raises(ValueError, match=words) as error:
        build("hidden")(torch.randn(2, 3, DIM), Context(ids=ids))
    assert "\n" not in str(error.value)
    if ids is None:
        with pytest.raises(ValueError, match="not None"):
            build("logit")(torch.randn(2, 3, DIM))


def test_no_tokens_have_no_tags():
    empty = Context(ids=torch.zeros(0, dtype=torch.int64), features=torch.zeros(0, DIM))
    for kind in EXACT:
        assert build(kind)(torch.zeros(0, DIM), empty).shape == (0, EXPERTS)


def test_a_feature_scorer_sees_the_features_and_not_the_tokens():
    scorer = FeatureScorer(LinearScorer(7, 4))
    x, features = torch.randn(2, 3, 5, requires_grad=True), torch.randn(2, 3, 7)
    routing = Router(scorer, TopK(2))(x, context=Context(features=features))
    torch.testing.assert_close(routing.logits, scorer.scorer(features).reshape(6, 4))
    routing.logits.sum().backward()
    assert x.grad is None


@pytest.mark.parametrize("features", [None, torch.randn(2, 7), torch.randn(3, 2, 7)])
def test_features_that_do_not_fit_are_refused(features):
    with pytest.raises(ValueError, match=r"context.features must be of shape \(2, 3, '...'\), not"):
        FeatureScorer(LinearScorer(7, 4))(torch.randn(2, 3, 5), Context(features=features))


class Table(nn.Module):
    """A scorer that answers the same logits whatever it sees."""

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.num_experts = len(logits)
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, x, context=None):
        return self.logits.expand(*x.shape[:-1], -1)


def test_blends_by_hand():
    # Distributions (1/4, 3/4) and (1/2, 1/2).
    first, second = Table(0.0, math.log(3.0)), Table(1.0, 1.0)
    x = torch.zeros(1, 5)
    logits = BlendScorer([first, second], [2.0, 0.5])(x)
    torch.testing.assert_close(logits, torch.tensor([[0.5, 2 * math.log(3.0) + 0.5]]), rtol=0, atol=1e-6)
    probs = BlendScorer([first, second], [0.25, 0.75], on="probs")(x).exp()
    torch.testing.assert_close(probs, torch.tensor([[0.4375, 0.5625]]), rtol=0, atol=1e-6)


def test_a_blend_of_distributions_survives_logits_that_no_exponential_does():
    first, second = Table(0.0, 1e4), Table(1e4, 0.0)
    logits = BlendScorer([first, second], [0.25, 0.75], on="probs")(torch.zeros(1, 5))
    torch.testing.assert_close(logits.exp(), torch.tensor([[0.75, 0.25]]), rtol=0, atol=1e-6)
    # Of the third expert neither leaves anything, but its logarithm.
    first, second = Table(0.0, 0.0, -1e4), Table(0.0, 0.0, -1e4)
    logits = BlendScorer([first, second], [0.25, 0.75], on="probs")(torch.zeros(1, 5))
    expected = torch.tensor([[-math.log(2.0), -math.log(2.0), -1e4 - math.log(2.0)]])
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    logits.square().sum().backward()
    assert first.logits.grad.isfinite().all()
    assert second.logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LinearScorer(0, 3), "dim=0 must be at least 1"),
        (lambda: RecurrentScorer(4, 3, 0), "hidden=0 must be at least 1"),
        (lambda: CosineScorer(4, 3, width=0), "width=0 must be at least 1"),
        (lambda: CosineScorer(4, 3, scale=0.0), "scale=0.0 must lie between 0 and limit=100.0"),
        (lambda: CosineScorer(4, 3, scale=5.0, limit=4.0), "scale=5.0 must lie between 0 and limit=4.0"),
        (lambda: IdentityScorer(4, 3, 0), "num_ids=0 must be at least 1"),
        (lambda: IdentityScorer(4, 3, 2, "token"), "signal='token' must be"),
        (lambda: BlendScorer([], []), r"one number of experts, not of \[\]"),
        (lambda: BlendScorer([Table(0.0), Table(0.0, 1.0)], [1.0, 1.0]), r"not of \[1, 2\]"),
        (lambda: BlendScorer([Table(0.0)], [1.0, 1.0]), r"weights=\[1.0, 1.0\] must be 1 positive"),
        (lambda: BlendScorer([Table(0.0)], [-1.0]), r"weights=\[-1.0\] must be 1 positive"),
        (lambda: BlendScorer([Table(0.0)], [math.nan]), r"weights=\[nan\] must be 1 positive"),
        (lambda: BlendScorer([Table(0.0)], [0.5], on="probs"), "must sum to 1, not to 0.5"),
        (lambda: BlendScorer([Table(0.0)], [1.0], on="odds"), "on='odds' must be"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def recurrent(**options) -> RecurrentScorer:
    torch.manual_seed(0)
    return RecurrentScorer(6, 4, 5, **options)


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


def test_a_recurrent_scorer_of_half_precision_takes_fp32_tokens():
    assert recurrent().bfloat16()(torch.randn(2, 7, 6)).shape == (2, 7, 4)

"""The layer as a whole: hand-computed values, shapes, masks, and what may not depend on what."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from zoo.moe import (
    Context,
    Dense,
    ExpertBank,
    ExpertPool,
    FeedForwardExperts,
    FieldExperts,
    Fixed,
    LinearScorer,
    MoE,
    RecurrentScorer,
    Router,
    RouterStats,
    SoftmaxGate,
    TopK,
)
from zoo.moe.expert_list import ExpertList, ZeroExpert
from zoo.moe.layer import GatedShared
from zoo.moe.lowrank import LowRankExperts
from zoo.moe.selectors import first_largest

BACKENDS = FeedForwardExperts.backends
ANY_BANK = ("reference", "dense", "sorted")


class Table(nn.Module):
    """A scorer that answers the same logits whatever it sees."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.num_experts = logits.shape[-1]
        self.logits = nn.Parameter(logits)

    def forward(self, x, context=None):
        return self.logits.expand(*x.shape[:-1], -1)


class Times(nn.Module):
    """An expert of either scope, x → factor · x."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x, context=None):
        return self.factor * x


class Mapped(nn.Module):
    """A field expert that is one linear map."""

    def __init__(self, dim: int, dim_out: int | None = None) -> None:
        super().__init__()
        self.map = nn.Linear(dim, dim_out or dim)

    def forward(self, x, context=None):
        return self.map(x)


def scaling(kind: str, factors: Sequence[float]) -> ExpertBank:
    """Experts x → factor · x on one-wide tokens, as a field bank or as a list on a back end."""
    experts = [Times(factor) for factor in factors]
    return FieldExperts(experts) if kind == "field" else ExpertList(experts, 1, backend=kind)


def feed_forward(experts: int = 5, k: int = 2, dim: int = 8, backend: str = "auto", seed: int = 0) -> MoE:
    torch.manual_seed(seed)
    scorer = LinearScorer(dim, experts)
    nn.init.normal_(scorer.out.weight)
    return MoE(Router(scorer, TopK(k)), FeedForwardExperts(dim, 16, experts, backend=backend))


def grads(layer: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}


LOGITS = torch.tensor([1.0, 2.0, 5.0]).log()


@pytest.mark.parametrize("bank", [*ANY_BANK, "field"])
@pytest.mark.parametrize(
    ("k", "renormalize", "index", "weight", "y", "gradient"),
    [
        (2, True, [2, 1], [5 / 7, 2 / 7], 19.0, [0.0, -10 / 7, 10 / 7]),
        (2, False, [2, 1], [5 / 8, 2 / 8], 16.625, None),
        (1, False, [2], [5 / 8], 13.125, [-1.640625, -3.28125, 4.921875]),
    ],
)
def test_top_k_softmax_by_hand(bank, k, renormalize, index, weight, y, gradient):
    # One token x = 7, experts x, 2x and 3x, probabilities 1/8, 2/8 and 5/8.
    scorer = Table(LOGITS.clone())
    layer = MoE(Router(scorer, TopK(k), SoftmaxGate(renormalize)), scaling(bank, [1.0, 2.0, 3.0]))
    out = layer(torch.tensor([[7.0]]))
    assert out.routing.index.tolist() == [index]
    torch.testing.assert_close(out.routing.weight, torch.tensor([weight]), rtol=0, atol=1e-6)
    torch.testing.assert_close(out.routing.probs, torch.tensor([[0.125, 0.25, 0.625]]), rtol=0, atol=1e-6)
    torch.testing.assert_close(out.y, torch.tensor([[y]]), rtol=0, atol=2e-6)
    out.y.sum().backward()
    if gradient is not None:
        torch.testing.assert_close(scorer.logits.grad, torch.tensor(gradient), rtol=0, atol=3e-6)
    if renormalize:
        assert scorer.logits.grad[0] == 0.0


def test_one_expert_with_weight_one_is_refused_because_its_router_would_not_learn():
    with pytest.raises(ValueError, match=r"top_k=1 .* use renormalize=False"):
        Router(LinearScorer(4, 3), TopK(1), SoftmaxGate(renormalize=True))
    # The function under it: weight 1, output 21, and no gradient for the logits.
    logits = LOGITS.clone().requires_grad_()
    weight = SoftmaxGate(True)(logits[None], logits.softmax(-1)[None], torch.tensor([[2]]), None)
    (21.0 * weight).sum().backward()
    assert weight.item() == 1.0
    assert logits.grad.tolist() == [0.0, 0.0, 0.0]


def test_more_choices_than_experts_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"top_k=4 must lie in 1..num_experts=3"):
        Router(LinearScorer(4, 3), TopK(4))
    with pytest.raises(ValueError, match="scores 3 experts, the bank holds 4"):
        MoE(Router(LinearScorer(4, 3), TopK(2)), FeedForwardExperts(4, 8, 4))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(2, 3, 8), (6, 8), (2, 1, 3, 2, 8)])
def test_any_leading_shape_gives_the_rows_of_the_flat_layer(backend, shape):
    layer = feed_forward(backend=backend)
    x = torch.randn(shape)
    out = layer(x)
    assert out.y.shape == x.shape
    torch.testing.assert_close(out.y.reshape(-1, 8), layer(x.reshape(-1, 8)).y, rtol=0, atol=1e-6)
    assert out.routing.index.shape == (x.numel() // 8, 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_of_two_ragged_rows(backend):
    layer = feed_forward(backend=backend)
    x = torch.randn(2, 3, 8, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    out = layer(x, mask)
    assert out.y.shape == (2, 3, 8)
    assert torch.equal(out.y[~mask], torch.zeros(3, 8))
    torch.testing.assert_close(out.y[mask], layer(x[mask]).y, rtol=0, atol=1e-6)
    assert int(out.routing.counts().sum()) == 3 * 2
    out.y.square().sum().backward()
    assert torch.equal(x.grad[~mask], torch.zeros(3, 8))
    assert x.grad[mask].abs().sum(-1).min() > 0


@pytest.mark.parametrize("backend", ["reference", "sorted"])
def test_real_tokens_are_bit_equal_to_being_run_without_the_masked_ones(backend):
    # Whole numbers, whose sums are exact in any order: what is left is what the layer does with them.
    torch.manual_seed(0)
    experts = ExpertList([nn.Linear(8, 8) for _ in range(5)], 8, backend=backend)
    layer = MoE(Router(LinearScorer(8, 5), TopK(2)), experts)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randint(-3, 4, parameter.shape).float())
    x = torch.randint(-3, 4, (2, 3, 8)).float()
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert torch.equal(layer(x, mask).y[mask], layer(x[mask]).y)


@pytest.mark.parametrize(
    ("channels_dim", "shape"), [(1, (2, 8, 3, 4)), (-3, (2, 8, 3, 4)), (0, (8, 5)), (-2, (3, 8, 2))]
)
def test_the_width_may_stand_anywhere(channels_dim, shape):
    layer = feed_forward()
    image = torch.randn(shape)
    mask = torch.rand(image.movedim(channels_dim, -1).shape[:-1]) < 0.7
    by_image = MoE(layer.router, layer.experts, channels_dim=channels_dim)(image, mask)
    by_token = layer(image.movedim(channels_dim, -1), mask)
    assert by_image.y.shape == image.shape
    assert torch.equal(by_image.y, by_token.y.movedim(-1, channels_dim))
    assert torch.equal(by_image.routing.index, by_token.routing.index)


def wider(kind: str) -> ExpertBank:
    """Four banks of three experts, 8 wide in and 5 wide out."""
    match kind:
        case "list":
            return ExpertList([nn.Linear(8, 5) for _ in range(3)], 5)
        case "lowrank":
            bank = LowRankExperts(8, 5, 3, rank=2)
            nn.init.normal_(bank.u)
            return bank
        case "pool":
            return ExpertPool([Mapped(8, 5) for _ in range(3)], base=2, dim_out=5)
    return FieldExperts([Mapped(8, 5) for _ in range(3)], dim_out=5)


@pytest.mark.parametrize("kind", ["list", "lowrank", "field", "pool"])
@pytest.mark.parametrize("channels_dim", [1, -1])
def test_answers_may_have_another_width_than_the_tokens(kind, channels_dim):
    torch.manual_seed(0)
    layer = MoE(
        Router(LinearScorer(8, 3), TopK(2)), wider(kind), shared=nn.Linear(8, 5), channels_dim=channels_dim
    )
    tokens = torch.randn(2, 3, 4, 8)
    out = layer(tokens.movedim(-1, channels_dim))
    y = out.y.movedim(channels_dim, -1)
    assert y.shape == (2, 3, 4, 5)
    rows, expected = tokens.reshape(-1, 8), layer.shared(tokens).reshape(-1, 5)
    weight = out.routing.dense_weight()
    for index in range(3):
        answer = (
            layer.experts.expert(index, rows)
            if kind in ("list", "lowrank")
            else layer.experts.experts[index](rows)
        )
        expected = expected + weight[:, index, None] * answer
    torch.testing.assert_close(y.reshape(-1, 5), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mask", [torch.ones(2, 3, 1), torch.ones(6), torch.ones(3, 2), torch.ones(3)])
def test_a_mask_of_another_shape_is_refused_with_both_shapes(mask):
    with pytest.raises(ValueError, match="a mask of shape") as error:
        feed_forward()(torch.randn(2, 3, 8), mask.bool())
    assert str(tuple(mask.shape)) in str(error.value)
    assert "(2, 3)" in str(error.value)


def test_a_mask_that_is_not_bool_is_refused():
    with pytest.raises(ValueError, match=r"dtype torch.bool, not torch.float32"):
        feed_forward()(torch.randn(2, 3, 8), torch.ones(2, 3))


def test_field_experts_see_nothing_of_what_the_context_holds_at_masked_positions():
    class Around(nn.Module):
        def forward(self, x, context=None):
            return x + context.features.sum(-2, keepdim=True) + context.ids.sum()

    layer = MoE(Router(LinearScorer(2, 2), TopK(2)), FieldExperts([Around(), Around()]))
    x, mask = torch.randn(1, 3, 2), torch.tensor([[True, False, True]])
    features = torch.tensor([[[1.0, 2.0], [float("nan"), 5.0], [3.0, 4.0]]])
    y = layer(x, mask, Context(features=features, ids=torch.tensor([[1, 999, 2]]))).y
    torch.testing.assert_close(y[:, [0, 2]], x[:, [0, 2]] + torch.tensor([4.0, 6.0]) + 3)


@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("bank", [*BACKENDS, "field"])
@pytest.mark.parametrize("recurrent", [False, True])
def test_nothing_of_a_masked_token_leaks(garbage, bank, recurrent):
    torch.manual_seed(0)
    scorer = RecurrentScorer(8, 4, 6) if recurrent else LinearScorer(8, 4)
    experts = (
        FieldExperts([Mapped(8) for _ in range(4)])
        if bank == "field"
        else FeedForwardExperts(8, 16, 4, backend=bank)
    )
    layer = MoE(Router(scorer, TopK(2)), experts, shared=GatedShared(nn.Linear(8, 8), 8))
    mask = torch.tensor([[True, False, True], [False, True, True]])
    clean = torch.randn(2, 3, 8)
    results = []
    for values in (clean, torch.where(mask[..., None], clean, garbage)):
        layer.zero_grad()
        x = values.clone().requires_grad_()
        out = layer(x, mask)
        out.y.square().sum().backward()
        assert torch.equal(x.grad[~mask], torch.zeros(2, 8))
        results.append((out.y.detach(), {"x": x.grad, **grads(layer)}))
    (y, gradient), (y_garbage, gradient_garbage) = results
    assert torch.equal(y, y_garbage)
    assert torch.equal(y[~mask], torch.zeros(2, 8))
    for name, value in gradient.items():
        assert torch.equal(value, gradient_garbage[name]), name


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 40),
    experts=st.integers(2, 6),
    backend=st.sampled_from(BACKENDS),
    seed=st.integers(0, 99),
)
def test_permuting_the_tokens_permutes_the_rows(tokens, experts, backend, seed):
    layer = feed_forward(experts=experts, backend=backend, seed=seed)
    x = torch.randn(tokens, 8)
    order = torch.randperm(tokens)
    torch.testing.assert_close(layer(x[order]).y, layer(x).y[order], rtol=0, atol=1e-6)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=30),
    k=st.integers(2, 4),
    backend=st.sampled_from(BACKENDS),
)
def test_any_mask_equals_leaving_the_tokens_out(mask, k, backend):
    layer = feed_forward(k=k, backend=backend)
    x, kept = torch.randn(len(mask), 8), torch.tensor(mask)
    out = layer(x, kept)
    expected = torch.zeros(len(mask), 8)
    expected[kept] = layer(x[kept]).y
    torch.testing.assert_close(out.y, expected, rtol=0, atol=1e-6)
    assert int(out.routing.counts().sum()) == k * int(kept.sum())
    assert torch.equal(out.routing.valid, kept[:, None].expand(-1, k))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_alone_gives_the_row_it_gives_in_a_batch(backend):
    layer = feed_forward(backend=backend).eval()
    x = torch.randn(33, 8)
    whole = layer(x)
    for row in (0, 17, 32):
        alone = layer(x[row : row + 1])
        assert torch.equal(alone.routing.index[0], whole.routing.index[row])
        torch.testing.assert_close(alone.y[0], whole.y[row], rtol=0, atol=1e-6)
    assert not layer.router.depends_on_batch


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_expert_and_one_choice_is_that_expert(backend):
    layer = feed_forward(experts=1, k=1, backend=backend)
    x = torch.randn(9, 8, requires_grad=True)
    y = layer(x).y
    torch.testing.assert_close(y, layer.experts.expert(0, x), rtol=0, atol=1e-6)
    (by_layer,) = torch.autograd.grad(y.square().sum(), x)
    (by_expert,) = torch.autograd.grad(layer.experts.expert(0, x).square().sum(), x)
    torch.testing.assert_close(by_layer, by_expert, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bank", [*BACKENDS, "field"])
def test_no_tokens_and_no_real_tokens_cost_nothing_and_give_zero_gradients(bank):
    experts = (
        FieldExperts([Mapped(8), Mapped(8)])
        if bank == "field"
        else FeedForwardExperts(8, 16, 2, backend=bank)
    )
    layer = MoE(Router(LinearScorer(8, 2), TopK(2)), experts)
    for x, mask in ((torch.zeros(0, 8), None), (torch.randn(5, 8), torch.zeros(5, dtype=torch.bool))):
        layer.zero_grad(set_to_none=True)
        out = layer(x, mask)
        assert torch.equal(out.y, torch.zeros_like(x))
        assert out.routing.counts().tolist() == [0, 0]
        out.y.sum().backward()
        for name, gradient in grads(layer).items():
            assert torch.equal(gradient, torch.zeros_like(gradient)), name


def test_shared_expert_is_added_unweighted_to_real_tokens():
    layer = feed_forward()
    shared = nn.Linear(8, 8)
    x, mask = torch.randn(4, 8), torch.tensor([True, True, True, False])
    y = MoE(layer.router, layer.experts, shared=shared)(x, mask).y
    torch.testing.assert_close(y[:3], layer(x).y[:3] + shared(x)[:3], rtol=0, atol=1e-6)
    assert torch.equal(y[3], torch.zeros(8))


@pytest.mark.parametrize("backend", ANY_BANK)
def test_zero_identity_threefold_and_shared_experts_by_hand(backend):
    # x = 2; equal weights on identity and 3x give 1 + 3, the shared identity adds 2, or half of it behind its gate.
    experts = ExpertList([ZeroExpert(1), nn.Identity(), Times(3.0)], 1, backend=backend)
    router = Router(Table(torch.zeros(3)), Fixed([1, 2]))
    x = torch.tensor([[2.0]])
    shares = {None: 4.0, nn.Identity(): 6.0, GatedShared(nn.Identity(), 1): 5.0}
    for shared, expected in shares.items():
        assert MoE(router, experts, shared=shared)(x).y.tolist() == [[expected]]
    out = MoE(Router(Table(torch.tensor([9.0, 9.0, 0.0])), Fixed([0, 1])), experts)(x)
    assert out.y.tolist() == [[1.0]]
    assert RouterStats.of(out.routing).counts.tolist() == [1, 1, 0]


def test_the_shared_gate_is_a_learned_sigmoid_of_the_token():
    gate = GatedShared(nn.Identity(), 2)
    x = torch.tensor([[1.0, 2.0]])
    gate(x).sum().backward()
    # d/dw of sigmoid(w · x) · (1 + 2) at w = 0 is x · 3 / 4.
    torch.testing.assert_close(gate.weight.grad, torch.tensor([0.75, 1.5]))
    with torch.no_grad():
        gate.weight.copy_(torch.tensor([torch.tensor(3.0).log(), 0.0]))
    torch.testing.assert_close(gate(x), torch.tensor([[0.75, 1.5]]))
    with pytest.raises(ValueError, match="dim=0"):
        GatedShared(nn.Identity(), 0)


def test_the_shared_gate_stays_in_fp32_under_autocast():
    torch.manual_seed(0)
    gate = GatedShared(nn.Identity(), 64)
    nn.init.normal_(gate.weight)
    x = torch.randn(50, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = gate(x)
    assert torch.equal(mixed, gate(x))


def test_a_shared_expert_of_another_width_is_refused_and_not_broadcast():
    layer = feed_forward()
    with pytest.raises(ValueError, match=r"the shared expert answers \(4, 1\), the bank \(4, 8\)"):
        MoE(layer.router, layer.experts, shared=nn.Linear(8, 1))(torch.randn(4, 8))


def test_every_expert_under_the_dense_selector():
    torch.manual_seed(0)
    layer = MoE(Router(LinearScorer(8, 3), Dense()), FeedForwardExperts(8, 16, 3))
    x = torch.randn(5, 8)
    out = layer(x)
    expected = torch.einsum("te,etd->td", out.routing.probs, layer.experts.every(x))
    torch.testing.assert_close(out.y, expected, rtol=0, atol=1e-6)
    assert out.routing.counts().tolist() == [5, 5, 5]


def test_a_layer_called_twice_gives_two_independent_outputs():
    layer = feed_forward()
    first, second = torch.randn(4, 8), torch.randn(4, 8)
    before = layer(first)
    y = before.y.clone()
    layer(second)
    assert torch.equal(before.y, y)
    assert torch.equal(layer(first).y, y)


def test_the_router_stays_in_fp32_under_autocast():
    torch.manual_seed(0)
    scorer = LinearScorer(32, 64)
    router = Router(scorer, TopK(8))
    x = torch.randn(4096, 32).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = router(x)
        coarse = scorer(x)
    plain = router(x.float())
    assert mixed.probs.dtype == mixed.logits.dtype == torch.float32
    assert torch.equal(mixed.index.sort().values, plain.index.sort().values)
    # The control: a bf16 product under the same selection takes other experts for some tokens.
    assert not torch.equal(first_largest(coarse.float(), 8).sort().values, plain.index.sort().values)


@pytest.mark.parametrize("bank", [*BACKENDS, "field"])
def test_the_output_keeps_the_dtype_of_the_tokens_under_autocast(bank):
    experts = (
        FieldExperts([Mapped(8), Mapped(8)])
        if bank == "field"
        else FeedForwardExperts(8, 16, 2, backend=bank)
    )
    layer = MoE(Router(LinearScorer(8, 2), TopK(2)), experts)
    x = torch.randn(6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x).y
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, layer(x).y, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_whole_layer_in_another_precision(dtype):
    layer = feed_forward(k=5)
    x = torch.randn(6, 8)
    expected = layer(x).y
    out = layer.to(dtype)(x.to(dtype))
    assert out.y.dtype == dtype
    assert out.routing.probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(out.y.float(), expected, rtol=5e-2, atol=2e-2)


class Output(nn.Module):
    """Only the tensor of a layer's answer."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x).y


@pytest.mark.parametrize("bank", ["token", "field", "pool"])
def test_a_layer_exports_and_compiles_as_one_graph(bank):
    torch.manual_seed(0)
    experts = {
        "token": lambda: FeedForwardExperts(8, 16, 4),
        "field": lambda: FieldExperts([Mapped(8) for _ in range(4)]),
        "pool": lambda: ExpertPool([Mapped(8) for _ in range(4)], base=3),
    }[bank]()
    module = Output(MoE(Router(LinearScorer(8, 4), TopK(2)), experts)).eval()
    example, other = torch.randn(300, 8), torch.randn(300, 8)
    exported = torch.export.export(module, (example,)).module()
    torch.testing.assert_close(exported(other), module(other), rtol=0, atol=1e-6)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(other), module(other), rtol=0, atol=1e-6)

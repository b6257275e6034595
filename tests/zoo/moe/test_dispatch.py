"""Execution of token banks: several ways, one answer; and what none of them may do to its inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.moe import ExpertChoice, FeedForwardExperts, LinearScorer, MoE, Router, Routing, SoftmaxGate
from zoo.moe.expert_list import ExpertList

BACKENDS = FeedForwardExperts.backends
GENERAL = tuple(backend for backend in BACKENDS if backend != "grouped")
"""The back ends that run in any precision, with any widths and with biases; grouped products do not."""

every_backend = pytest.mark.parametrize("backend", BACKENDS)
with_and_without_biases = pytest.mark.parametrize(
    ("backend", "bias"),
    [*((backend, False) for backend in BACKENDS), *((backend, True) for backend in GENERAL)],
)


def made(index: Tensor, experts: int, weight: Tensor | None = None, valid: Tensor | None = None) -> Routing:
    """A hand-made routing of T tokens."""
    weight = torch.ones(index.shape) if weight is None else weight
    valid = torch.ones(index.shape, dtype=torch.bool) if valid is None else valid
    uniform = torch.full((len(index), experts), 1 / experts)
    return Routing(index=index, weight=weight, valid=valid, probs=uniform, logits=uniform.log())


def drawn(
    tokens: int, experts: int, k: int, dropped: float = 0.0, dtype: torch.dtype = torch.float32
) -> Routing:
    """A random routing whose weights are a leaf that learns."""
    generator = torch.Generator().manual_seed(tokens)
    index = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :k]
    valid = torch.rand(tokens, k, generator=generator) >= dropped
    weight = torch.rand(tokens, k, generator=generator).to(dtype).requires_grad_()
    return made(index, experts, weight, valid)


def feed_forward(
    backend: str, activation: str = "swiglu", experts: int = 5, bias: bool | None = None
) -> FeedForwardExperts:
    """A bank, by default with biases where the back end knows them."""
    torch.manual_seed(0)
    bias = backend in GENERAL if bias is None else bias
    return FeedForwardExperts(8, 16, experts, activation, bias, backend)


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))


def run(
    bank: FeedForwardExperts, x: Tensor, routing: Routing, upstream: Tensor | None = None
) -> dict[str, Tensor]:
    """Output and all gradients, by name; those of weights that do not learn are left out."""
    x = x.detach().requires_grad_()
    y = bank(x, routing)
    leaves = {"x": x, "weight": routing.weight, **dict(bank.named_parameters())}
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(y, leaves.values(), torch.ones_like(y) if upstream is None else upstream)
    return {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """Agreement to a share of the largest value, and at least of one."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        wanted = b[name].float()
        assert value.shape == wanted.shape, name
        if value.numel():
            error = (value.float() - wanted).abs().max() / wanted.abs().max().clamp_min(1.0)
            assert float(error) <= tolerance, (name, float(error))


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Equality to the bit."""
    assert a.keys() == b.keys()
    assert all(torch.equal(value, b[name]) for name, value in a.items())


# Agreement


@with_and_without_biases
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize(
    ("count", "experts", "k", "dropped"), [(1, 4, 2, 0), (200, 3, 3, 0), (300, 16, 5, 0.3)]
)
def test_back_ends_agree_in_values_and_gradients(backend, activation, bias, count, experts, k, dropped):
    routing = drawn(count, experts, k, dropped)
    upstream = tokens(count, seed=2)
    expected = run(feed_forward("reference", activation, experts, bias), tokens(count), routing, upstream)
    assert_close(
        run(feed_forward(backend, activation, experts, bias), tokens(count), routing, upstream), expected
    )


@with_and_without_biases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache", [None, 64, 1 << 12], ids="cache={}".format)
def test_back_ends_agree_under_uneven_loads(backend, bias, dtype, cache, monkeypatch):
    # Idle experts at both ends and in the middle, neighbours alike and unlike, few rows and many.
    loads = [0, 100, 101, 99, 0, 3, 1, 2, 1, 0, 40, 2, 300, 1, 0]
    if cache is not None:
        # Less memory for a run, so that there are more of them, and experts cut into pieces.
        monkeypatch.setattr("zoo.moe.dispatch.fused.LARGEST", cache)
        monkeypatch.setattr("zoo.moe.dispatch.plan.CUT_ROWS", 16)
    index = torch.repeat_interleave(torch.tensor(loads))
    index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(0))].reshape(-1, 2)
    weight = torch.linspace(0.1, 1, index.numel()).reshape(index.shape).to(dtype).requires_grad_()
    x, upstream = tokens(len(index)).to(dtype), tokens(len(index), seed=2).to(dtype)
    bank = feed_forward(backend, experts=len(loads), bias=bias).to(dtype)
    expected = run(
        feed_forward("reference", experts=len(loads), bias=bias).to(dtype).float(),
        x.float(),
        made(index, len(loads), weight.detach().float().requires_grad_()),
        upstream.float(),
    )
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    assert_close(run(bank, x, made(index, len(loads), weight), upstream), expected, tolerance)


@every_backend
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_back_ends_agree_in_bf16(backend, activation):
    routing = drawn(200, 5, 2, 0.1, torch.bfloat16)
    bank = feed_forward(backend, activation).bfloat16()
    x, upstream = tokens(200).bfloat16(), tokens(200, seed=2).bfloat16()
    exact = feed_forward("reference", activation, bias=backend in GENERAL).bfloat16().float()
    weight = routing.weight.detach().float().requires_grad_()
    expected = run(exact, x.float(), made(routing.index, 5, weight, routing.valid), upstream.float())
    result = run(bank, x, routing, upstream)
    assert {value.dtype for value in result.values()} == {torch.bfloat16}
    assert_close(result, expected, 2e-2)


@pytest.mark.parametrize("backend", GENERAL)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_finite_differences(backend, activation, bias):
    torch.manual_seed(0)
    bank = FeedForwardExperts(3, 2, 3, activation, bias, backend).double()
    routing = drawn(4, 3, 2, 0.2, torch.float64)
    names = [name for name, _ in bank.named_parameters()]

    def call(x: Tensor, weight: Tensor, *parameters: Tensor) -> Tensor:
        record = made(routing.index, 3, weight, routing.valid)
        return torch.func.functional_call(bank, dict(zip(names, parameters, strict=True)), (x, record))

    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, (x, routing.weight, *bank.parameters()))


@every_backend
def test_the_gradient_of_a_weight_is_what_its_expert_said(backend):
    # gelu leaves large numbers alone, so expert e maps 7 to 7·(e + 1); weights 5/7 on expert 2 and 2/7 on expert 1.
    bank = FeedForwardExperts(4, 4, 3, backend=backend)
    with torch.no_grad():
        bank.up.copy_(torch.eye(4).expand(3, 4, 4))
        bank.down.copy_(torch.eye(4) * torch.tensor([1.0, 2.0, 3.0])[:, None, None])
    weight = torch.tensor([[5 / 7, 2 / 7]], requires_grad=True)
    y = bank(torch.tensor([[7.0, 0.0, 0.0, 0.0]]), made(torch.tensor([[2, 1]]), 3, weight))
    torch.testing.assert_close(y, torch.tensor([[19.0, 0.0, 0.0, 0.0]]), rtol=0, atol=2e-6)
    y.sum().backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[21.0, 14.0]]), rtol=0, atol=1e-6)


@every_backend
def test_choices_that_are_not_valid_do_not_count(backend):
    bank = feed_forward(backend, experts=3)
    x = tokens(2)
    valid = torch.tensor([[True, False], [False, False]])
    # What stands at a choice that does not count must not matter either.
    weight = torch.tensor([[0.5, float("nan")], [float("inf"), 0.5]])
    y = bank(x, made(torch.tensor([[1, 2], [0, 1]]), 3, weight, valid))
    torch.testing.assert_close(y[0], 0.5 * bank.expert(1, x[:1])[0], rtol=0, atol=1e-6)
    assert torch.equal(y[1], torch.zeros(8))


@every_backend
@pytest.mark.parametrize("biased", ["up", "down"])
def test_a_bias_on_one_of_the_two_maps_alone_is_added_or_refused(backend, biased):
    torch.manual_seed(0)
    up, down = torch.nn.Linear(8, 16, biased == "up"), torch.nn.Linear(16, 8, biased == "down")
    bank = FeedForwardExperts.from_dense(up, down, 5, backend=backend)
    x, routing = tokens(30), drawn(30, 5, 2)
    if backend not in GENERAL:
        with pytest.raises(ValueError, match="bias"):
            bank(x, routing)
        return
    result = run(bank, x, routing)
    bank.backend = "reference"
    assert_close(result, run(bank, x, routing))
    torch.testing.assert_close(
        result["y"], routing.weight.sum(-1, keepdim=True) * down(F.gelu(up(x))), rtol=0, atol=2e-6
    )


# Which one runs


@every_backend
def test_a_wish_is_obeyed_and_shown(backend):
    bank = feed_forward(backend)
    assert bank.ran is None
    bank(tokens(6), drawn(6, 5, 2))
    assert bank.ran == backend
    assert f"backend={backend}," in repr(bank)


@pytest.mark.parametrize(
    ("backend", "called"), [("reference", {"expert"}), ("dense", {"blend"}), ("sorted", {"each"})]
)
def test_a_back_end_runs_the_part_of_the_bank_that_it_names(backend, called):
    calls = set()

    class Watched(FeedForwardExperts):
        def expert(self, index, rows):
            calls.add("expert")
            return super().expert(index, rows)

        def each(self, rows):
            calls.add("each")
            return super().each(rows)

        def blend(self, rows, weight):
            calls.add("blend")
            return super().blend(rows, weight)

    Watched(8, 16, 5, backend=backend)(tokens(6), drawn(6, 5, 2))
    assert calls == called


def test_auto_runs_dense_where_the_bank_prefers_it_and_shows_what_ran(monkeypatch):
    bank = feed_forward("auto")
    monkeypatch.setattr(bank, "prefers_dense", lambda count, choices: count * choices <= 6)
    assert "backend=auto," in repr(bank)
    bank(tokens(3), drawn(3, 5, 2))
    assert bank.ran == "dense"
    assert "backend=auto (ran dense)," in repr(bank)
    bank(tokens(4), drawn(4, 5, 2))
    assert bank.ran == "fused"
    assert "backend=auto (ran fused)," in repr(bank)


def test_a_list_of_modules_is_sorted_by_auto():
    bank = ExpertList([torch.nn.Linear(8, 8) for _ in range(5)], 8)
    bank(tokens(4), drawn(4, 5, 2))
    assert bank.ran == "sorted"


def test_a_feed_forward_bank_prefers_dense_for_little_surplus_work():
    bank = feed_forward("auto")
    assert bank.prefers_dense(1, 1)
    assert not bank.prefers_dense(10**6, 4)
    # Where every token visits every expert there is nothing to sort, but much to keep.
    assert bank.prefers_dense(2**23 // (5 * 8 * 16), 5)
    assert not bank.prefers_dense(2**23 // (5 * 8 * 16) + 1, 5)


def test_experts_that_are_listed_but_not_chosen_do_not_count_as_visited():
    """Expert choice lists every expert for every token, and most do not count."""
    layer = MoE(
        Router(LinearScorer(8, 8), ExpertChoice(1.0), SoftmaxGate(False)), FeedForwardExperts(8, 64, 8)
    )
    layer(torch.randn(600, 8))
    assert layer.experts.ran == "fused"
    layer(torch.randn(20, 8))
    assert layer.experts.ran == "dense"


def test_a_large_expert_is_not_summed_in_half_precision(monkeypatch):
    """In pieces of 16 rows the sums over 4096 rows would be rounded 256 times."""
    monkeypatch.setattr("zoo.moe.dispatch.fused.LARGEST", 64)
    monkeypatch.setattr("zoo.moe.dispatch.plan.CUT_ROWS", 16)
    torch.manual_seed(0)
    bank = FeedForwardExperts(8, 16, 1, backend="fused").bfloat16()
    exact = FeedForwardExperts(8, 16, 1, backend="reference").double()
    exact.load_state_dict({name: value.double() for name, value in bank.state_dict().items()})
    x, upstream = torch.randn(4096, 8).bfloat16(), torch.rand(4096, 8).bfloat16()
    index = torch.zeros(4096, 1, dtype=torch.int64)
    bank(x, made(index, 1, torch.ones(4096, 1).bfloat16())).backward(upstream)
    exact(x.double(), made(index, 1, torch.ones(4096, 1).double())).backward(upstream.double())
    for mine, wanted in zip(bank.parameters(), exact.parameters(), strict=True):
        error = (mine.grad.double() - wanted.grad).abs().max() / wanted.grad.abs().max()
        assert float(error) < 0.01


def test_an_expert_of_nan_reaches_only_the_tokens_that_chose_it():
    """Experts 0 and 1 share a padded run: expert 1's padding stands for no token."""
    bank = FeedForwardExperts(8, 16, 2, backend="fused")
    with torch.no_grad():
        bank.down[1].fill_(float("nan"))
        bank.up[1].fill_(float("nan"))
    x = torch.randn(5, 8, requires_grad=True)
    y = bank(x, made(torch.tensor([[0], [0], [0], [1], [1]]), 2, torch.ones(5, 1)))
    y.sum().backward()
    assert y[:3].isfinite().all()
    assert x.grad[:3].isfinite().all()
    assert y[3:].isnan().all()


def test_a_back_end_that_a_bank_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"backend='loop' must be one of auto, reference, dense, sorted"):
        FeedForwardExperts(8, 16, 5, backend="loop")


@pytest.mark.parametrize(
    ("dim", "hidden", "bias", "dtype", "reason"),
    [
        (6, 8, False, torch.float32, "dim=6"),
        (8, 6, False, torch.float32, "hidden=6"),
        (12, 8, False, torch.bfloat16, "dim=12"),
        (8, 8, True, torch.float32, "bias"),
        (8, 8, False, torch.float64, "float64"),
    ],
)
def test_grouped_products_say_what_they_cannot_do_and_auto_avoids_them(dim, hidden, bias, dtype, reason):
    bank = FeedForwardExperts(dim, hidden, 5, bias=bias, backend="grouped").to(dtype)
    x, routing = torch.randn(60, dim, dtype=dtype), drawn(60, 5, 2, dtype=dtype)
    with pytest.raises(ValueError, match=reason):
        bank(x, routing)
    bank.backend = "auto"
    assert bank(x, routing).isfinite().all()
    assert bank.ran in GENERAL


# Uneven loads


@with_and_without_biases
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_one_expert_for_all_equals_that_expert_and_idle_ones_get_exact_zeros(backend, activation, bias):
    bank = feed_forward(backend, activation, 3, bias)
    x = tokens(6).requires_grad_()
    y = bank(x, made(torch.full((6, 1), 1), 3))
    torch.testing.assert_close(y, bank.expert(1, x), rtol=0, atol=1e-6)
    y.square().sum().backward()
    for parameter in bank.parameters():
        assert parameter.grad[1].abs().max() > 0
        assert torch.equal(parameter.grad[[0, 2]], torch.zeros_like(parameter.grad[[0, 2]]))


@every_backend
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("count", [0, 3])
def test_without_a_single_choice_answers_and_gradients_are_zeros(backend, activation, count):
    bank = feed_forward(backend, activation)
    x = tokens(count).requires_grad_()
    routing = drawn(count, 5, 2, dropped=1.0)
    y = bank(x, routing)
    assert torch.equal(y, torch.zeros(count, 8))
    y.sum().backward()
    for leaf in (x, routing.weight, *bank.parameters()):
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@every_backend
def test_any_leading_shape_is_the_same_rows(backend):
    bank = feed_forward(backend)
    routing = drawn(6, 5, 2)
    assert torch.equal(bank(tokens(6).reshape(2, 1, 3, 8), routing).reshape(6, 8), bank(tokens(6), routing))
    assert bank(tokens(0).reshape(2, 0, 8), drawn(0, 5, 2)).shape == (2, 0, 8)


# Layout and what needs a gradient


@every_backend
def test_the_layout_of_the_tokens_does_not_matter(backend):
    bank, routing, x = feed_forward(backend), drawn(30, 5, 2), tokens(30)
    expected = run(bank, x, routing)
    assert_close(run(bank, x.T.contiguous().T, routing), expected)
    assert_close(run(bank, x.repeat_interleave(2, 0)[::2], routing), expected)
    repeated = x[:1].expand(30, 8)
    assert_close(run(bank, repeated, routing), run(bank, repeated.contiguous(), routing))


@every_backend
def test_the_layout_of_the_upstream_gradient_does_not_matter(backend):
    bank, routing, x = feed_forward(backend), drawn(30, 5, 2), tokens(30)
    # The gradient of a sum is one number, expanded.
    assert_close(
        run(bank, x, routing, torch.ones(()).expand(30, 8)), run(bank, x, routing, torch.ones(30, 8))
    )
    upstream = tokens(30, seed=2)
    assert_close(run(bank, x, routing, upstream.T.contiguous().T), run(bank, x, routing, upstream))


@with_and_without_biases
@pytest.mark.parametrize(
    "fixed", ["x", "weight", "up", "down", "biases", "experts", "experts x", "experts weight"]
)
def test_what_needs_no_gradient_gets_none_and_changes_nothing_else(backend, bias, fixed):
    expected = run(feed_forward(backend, bias=bias), tokens(30), drawn(30, 5, 2))
    bank, routing, x = feed_forward(backend, bias=bias), drawn(30, 5, 2), tokens(30).requires_grad_()
    leaves = {"x": x, "weight": routing.weight, **dict(bank.named_parameters())}
    parts = {"biases": ["up_bias", "down_bias"], "experts": list(dict(bank.named_parameters()))}
    frozen = {name for part in fixed.split() for name in parts.get(part, [part])} & leaves.keys()
    for name in frozen:
        leaves[name].requires_grad_(False)
    bank(x, routing).sum().backward()
    for name, leaf in leaves.items():
        if name in frozen:
            assert leaf.grad is None
        else:
            assert_close({name: leaf.grad}, {name: expected[name]})


@every_backend
def test_without_anything_that_learns_there_is_no_graph(backend):
    bank, routing = feed_forward(backend).requires_grad_(False), drawn(30, 5, 2)
    routing.weight.requires_grad_(False)
    assert not bank(tokens(30), routing).requires_grad
    learning = feed_forward(backend)
    with torch.no_grad():
        y = learning(tokens(30), routing)
    assert not y.requires_grad
    torch.testing.assert_close(y, bank(tokens(30), routing), rtol=0, atol=1e-6)


@every_backend
def test_inputs_parameters_and_the_upstream_gradient_are_left_as_they_are(backend):
    bank, routing, x, upstream = feed_forward(backend), drawn(30, 5, 2), tokens(30), tokens(30, seed=2)
    # The input may be what another layer kept for its own backward pass.
    x = x.requires_grad_()
    inputs = [x, upstream, routing.weight, routing.index, routing.valid, *bank.parameters()]
    before = [tensor.detach().clone() for tensor in inputs]
    versions = [tensor._version for tensor in inputs]
    y = bank(x, routing)
    answer = y.detach().clone()
    y.backward(upstream)
    assert [tensor._version for tensor in inputs] == versions
    assert all(torch.equal(tensor, old) for tensor, old in zip(inputs, before, strict=True))
    assert torch.equal(y, answer)


@every_backend
def test_a_second_backward_pass_through_the_same_graph_gives_the_same(backend):
    bank, routing, x = feed_forward(backend), drawn(30, 5, 2), tokens(30).requires_grad_()
    y, upstream = bank(x, routing), tokens(30, seed=2)
    leaves = [x, routing.weight, *bank.parameters()]
    first = torch.autograd.grad(y, leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(y, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_backend
def test_gradients_add_up_over_calls(backend):
    bank = feed_forward(backend)
    parts = [run(bank, tokens(9, seed=seed), drawn(9, 5, 2)) for seed in (1, 2)]
    for seed in (1, 2):
        bank(tokens(9, seed=seed), drawn(9, 5, 2)).sum().backward()
    for name, parameter in bank.named_parameters():
        assert_close({name: parameter.grad}, {name: parts[0][name] + parts[1][name]})


# Precision and repeatability


@every_backend
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_autocast_multiplies_in_bf16_and_the_tokens_keep_their_dtype(backend, activation):
    bank, routing, x = feed_forward(backend, activation), drawn(60, 5, 2), tokens(60).requires_grad_()
    expected = run(bank, x, routing)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = bank(x, routing)
    assert y.dtype == torch.float32
    leaves = {"x": x, "weight": routing.weight, **dict(bank.named_parameters())}
    result = dict(zip(leaves, torch.autograd.grad(y.sum(), leaves.values()), strict=True))
    assert {gradient.dtype for gradient in result.values()} == {torch.float32}
    result["y"] = y.detach()
    assert_close(result, expected, 2e-2)
    # Not for nothing: fp32 products would agree far better.
    assert float((result["y"] - expected["y"]).abs().max()) > 1e-4


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_call_gives_the_same_bits(backend, dtype):
    bank, routing = feed_forward(backend).to(dtype), drawn(300, 5, 3, 0.1, dtype)
    x, upstream = tokens(300).to(dtype), tokens(300, seed=2).to(dtype)
    assert_same(run(bank, x, routing, upstream), run(bank, x, routing, upstream))


def test_uneven_loads_are_multiplied_without_padding_and_even_ones_with(monkeypatch):
    calls = []
    grouped_mm = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *given, **more: calls.append(1) or grouped_mm(*given, **more))
    bank = FeedForwardExperts(8, 16, 4, backend="fused")
    for loads, products in (([6, 6, 6, 6], 0), ([6, 200, 6, 6], 2)):
        calls.clear()
        index = torch.repeat_interleave(torch.tensor(loads))[:, None]
        with torch.no_grad():
            bank(tokens(len(index)), made(index, 4, torch.ones(len(index), 1)))
        assert len(calls) == products


@pytest.mark.parametrize("gradients", [False, True])
def test_activations_are_kept_for_a_backward_pass_alone(gradients):
    shapes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.new_empty.default:
                shapes.append(tuple(args[1]))
            return func(*args, **(kwargs or {}))

    bank, routing = FeedForwardExperts(8, 16, 5, backend="fused"), drawn(30, 5, 2)
    with torch.set_grad_enabled(gradients), Watch():
        bank(tokens(30), routing)
    assert ((60, 16) in shapes) == gradients

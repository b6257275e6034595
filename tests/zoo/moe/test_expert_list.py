"""A bank of any modules: kinds, widths, idle experts, and the back ends against a loop in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from zoo.moe import LinearScorer, MoE, Router, RouterStats, Routing, TopK
from zoo.moe.expert_list import ExpertList, ZeroExpert

BACKENDS = ExpertList.backends


class Counted(nn.Module):
    """A small network that counts its calls, and the rows of the last one."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, dim))
        self.calls = self.rows = 0

    def forward(self, rows: Tensor) -> Tensor:
        assert len(rows) > 0
        self.calls, self.rows = self.calls + 1, len(rows)
        return self.net(rows)


def mixed_bank(backend: str = "auto") -> ExpertList:
    """Two networks of different width, a copy, and nothing."""
    torch.manual_seed(0)
    return ExpertList([Counted(6, 3), nn.Identity(), ZeroExpert(6), Counted(6, 17)], 6, backend=backend)


def routing_of(index: Tensor, weight: Tensor, experts: int, valid: Tensor | None = None) -> Routing:
    uniform = torch.full((len(index), experts), 1 / experts)
    valid = torch.ones_like(index, dtype=torch.bool) if valid is None else valid
    return Routing(index=index, weight=weight, valid=valid, probs=uniform, logits=uniform.log())


def by_loop(bank: ExpertList, x: Tensor, routing: Routing) -> Tensor:
    """The definition, token by token."""
    answers = []
    for row, index, weight, valid in zip(x, routing.index, routing.weight, routing.valid, strict=True):
        answer = torch.zeros(bank.dim_out, dtype=x.dtype)
        for expert, share, counts in zip(index.tolist(), weight, valid.tolist(), strict=True):
            if counts:
                answer = answer + share * bank.experts[expert](row[None])[0]
        answers.append(answer)
    return torch.stack(answers)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 12),
    k=st.integers(1, 4),
    backend=st.sampled_from(BACKENDS),
    seed=st.integers(0, 99),
)
def test_back_ends_agree_with_a_loop_in_float64_in_outputs_and_gradients(tokens, k, backend, seed):
    bank = mixed_bank(backend)
    torch.manual_seed(seed)
    index = torch.stack([torch.randperm(4)[:k] for _ in range(tokens)])
    valid = torch.rand(tokens, k) < 0.7
    results = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(seed + 1)
        x = torch.randn(tokens, 6).to(dtype).requires_grad_()
        weight = torch.rand(tokens, k).to(dtype).requires_grad_()
        routing = routing_of(index, weight, 4, valid)
        run = copy.deepcopy(bank).to(dtype)
        y = run(x, routing) if dtype == torch.float32 else by_loop(run, x, routing)
        # A sum of nothing has no gradient at all.
        (y.square().sum() + 0.0 * sum(p.sum() for p in (x, weight, *run.parameters()))).backward()
        results.append([y.detach(), x.grad, weight.grad, *(p.grad for p in run.parameters())])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(
            ours.double(), reference, rtol=0, atol=2e-6 * max(1, reference.abs().max())
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_idle_experts_get_zero_gradients_and_are_not_called_without_rows(backend):
    bank = mixed_bank(backend)
    bank(torch.randn(5, 6), routing_of(torch.zeros(5, 1).long(), torch.ones(5, 1), 4)).sum().backward()
    assert bank.experts[0].net[0].weight.grad.abs().max() > 0
    for name, parameter in bank.experts[3].named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name
    assert bank.experts[3].calls == (1 if backend == "dense" else 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_give_no_rows_and_zero_gradients(backend):
    bank = mixed_bank(backend)
    y = bank(torch.zeros(0, 6), routing_of(torch.zeros(0, 2).long(), torch.zeros(0, 2), 4))
    assert y.shape == (0, 6)
    y.sum().backward()
    for name, parameter in bank.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_the_sorted_back_end_gives_each_expert_its_own_rows_alone():
    bank = mixed_bank("sorted")
    index = torch.tensor([[0, 3], [1, 3], [3, 2]])
    bank(torch.randn(3, 6), routing_of(index, torch.full((3, 2), 0.5), 4))
    assert [(bank.experts[e].calls, bank.experts[e].rows) for e in (0, 3)] == [(1, 1), (1, 3)]


class Products(torch.overrides.TorchFunctionMode):
    """Counts matrix products."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function in (nn.functional.linear, torch.matmul, torch.einsum, Tensor.__matmul__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_zero_expert_costs_no_product_and_counts_as_a_choice(backend):
    bank = ExpertList([ZeroExpert(6), ZeroExpert(6), nn.Linear(6, 6)], 6, backend=backend)
    routing = routing_of(torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5, requires_grad=True), 3)
    x = torch.randn(4, 6)
    with Products() as products:
        y = bank(x, routing)
    # The dense way runs every expert: the linear one, and it alone.
    assert products.count == (1 if backend == "dense" else 0)
    assert torch.equal(y, torch.zeros(4, 6))
    y.sum().backward()
    assert torch.equal(routing.weight.grad, torch.zeros(4, 2))
    assert RouterStats.of(routing).counts.tolist() == [4, 4, 0]


def test_a_zero_expert_may_answer_with_another_width_and_keeps_the_dtype():
    answer = ZeroExpert(3)(torch.full((2, 5), float("nan"), dtype=torch.float64))
    assert torch.equal(answer, torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="dim=0"):
        ZeroExpert(0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("width", "shape"), [(1, r"\(2, 1\)"), (7, r"\(2, 7\)")])
def test_an_answer_of_the_wrong_width_names_its_expert(backend, width, shape):
    bank = ExpertList([nn.Identity(), nn.Linear(6, width)], 6, backend=backend)
    routing = routing_of(torch.tensor([[1], [1]]), torch.ones(2, 1), 2)
    with pytest.raises(ValueError, match=rf"expert 1 answers with shape {shape}, not \(2, 6\)"):
        bank(torch.randn(2, 6), routing)


def test_a_list_is_refused_without_experts_or_width():
    with pytest.raises(ValueError, match="at least one expert"):
        ExpertList([], 6)
    with pytest.raises(ValueError, match="dim_out=0"):
        ExpertList([nn.Identity()], 0)


def test_matrices_are_the_parameters_with_two_dimensions_themselves():
    bank = mixed_bank()
    assert bank.matrices(3)["net.0.weight"] is bank.experts[3].net[0].weight
    assert {name: tuple(part.shape) for name, part in bank.matrices(0).items()} == {
        "net.0.weight": (3, 6),
        "net.2.weight": (6, 3),
    }
    assert bank.matrices(1) == bank.matrices(2) == {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_under_autocast_experts_of_either_precision_mix(backend):
    bank = mixed_bank(backend)
    layer = MoE(Router(LinearScorer(6, 4), TopK(3)), bank)
    x = torch.randn(8, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x).y
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, layer(x).y, rtol=2e-2, atol=2e-2)


def test_a_list_compiles_as_one_graph():
    layer = MoE(
        Router(LinearScorer(6, 3), TopK(2)), ExpertList([nn.Linear(6, 6), nn.Identity(), ZeroExpert(6)], 6)
    )
    x = torch.randn(200, 6)
    compiled = torch.compile(lambda x: layer(x).y, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x).y, rtol=0, atol=1e-6)
    assert layer.experts.ran == "sorted"

"""Low-rank experts: the formula by hand, both starts, and the back ends against a loop in float64."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.moe import LinearScorer, MoE, Router, Routing, SigmoidGate, TopK
from zoo.moe.lowrank import LowRankExperts

BACKENDS = LowRankExperts.backends


def random_bank(
    dim: int = 6, dim_out: int = 5, experts: int = 4, rank: int = 2, backend: str = "auto", scale: float = 1.0
) -> LowRankExperts:
    torch.manual_seed(0)
    bank = LowRankExperts(dim, dim_out, experts, rank, scale, backend)
    for parameter in bank.parameters():
        nn.init.normal_(parameter)
    return bank


def random_routing(tokens: int, experts: int, k: int, dtype: torch.dtype = torch.float32) -> Routing:
    index = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)])
    weight = torch.rand(tokens, k).to(dtype).requires_grad_()
    uniform = torch.full((tokens, experts), 1 / experts)
    valid = torch.rand(tokens, k) < 0.8
    return Routing(index=index, weight=weight, valid=valid, probs=uniform, logits=uniform.log())


def filled(bank: LowRankExperts, u, s, v) -> LowRankExperts:
    with torch.no_grad():
        for parameter, value in ((bank.u, u), (bank.s, s), (bank.v, v)):
            parameter.copy_(torch.tensor(value))
    return bank


def test_one_expert_of_rank_one_by_hand():
    # V x = 1 + 2, times s = 9, along (1, 2).
    bank = filled(LowRankExperts(2, 2, 1, rank=1), [[[1.0], [2.0]]], [[3.0]], [[[1.0, 1.0]]])
    assert bank.expert(0, torch.tensor([[1.0, 2.0]])).tolist() == [[9.0, 18.0]]
    scaled = filled(LowRankExperts(2, 2, 1, rank=1, scale=0.5), [[[1.0], [2.0]]], [[3.0]], [[[1.0, 1.0]]])
    assert scaled.expert(0, torch.tensor([[1.0, 2.0]])).tolist() == [[4.5, 9.0]]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 12),
    k=st.integers(1, 4),
    scale=st.sampled_from([1.0, 0.25]),
    backend=st.sampled_from(BACKENDS),
    seed=st.integers(0, 99),
)
def test_back_ends_agree_with_a_loop_in_float64_in_outputs_and_gradients(tokens, k, scale, backend, seed):
    bank = random_bank(backend=backend, scale=scale)
    results = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(seed)
        run = copy.deepcopy(bank).to(dtype)
        routing = random_routing(tokens, 4, k, dtype)
        x = torch.randn(tokens, 6).to(dtype).requires_grad_()
        if dtype == torch.float32:
            y = run(x, routing)
        else:
            rows = []
            for row, index, weight, valid in zip(
                x, routing.index, routing.weight, routing.valid, strict=True
            ):
                parts = [
                    w * scale * run.u[e] @ torch.diag(run.s[e]) @ run.v[e] @ row
                    for e, w in zip(index, weight, strict=True)
                ]
                rows.append(torch.stack(parts)[valid].sum(0))
            y = torch.stack(rows)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, routing.weight.grad, *(p.grad for p in run.parameters())])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(
            ours.double(), reference, rtol=0, atol=2e-6 * max(1, reference.abs().max())
        )


def test_one_each_every_and_blended_experts_agree():
    bank = random_bank(scale=2.0)
    x = torch.randn(7, 6)
    every = bank.every(x)
    assert every.shape == (4, 7, 5)
    for index, answer in enumerate(bank.each([x, x[:2], x[:0], x[3:4]])):
        torch.testing.assert_close(every[index], bank.expert(index, x))
        torch.testing.assert_close(
            answer, bank.expert(index, x)[3:4] if index == 3 else every[index, : len(answer)]
        )
    weight = torch.rand(7, 4)
    torch.testing.assert_close(bank.blend(x, weight), torch.einsum("ne,enf->nf", weight, every))


class Largest(TorchDispatchMode):
    """Watches the size of the largest tensor that an operation makes."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.size = max(self.size, result.numel())
        return result


def test_blending_forms_no_answers_of_single_experts():
    bank = random_bank(dim=32, dim_out=48, experts=8, rank=1)
    x, weight = torch.randn(100, 32), torch.rand(100, 8)
    with torch.no_grad(), Largest() as blended:
        bank.blend(x, weight)
    with torch.no_grad(), Largest() as apart:
        bank.every(x)
    assert blended.size == 100 * 48
    assert apart.size == 8 * 100 * 48


def test_the_lora_start_answers_zero_and_only_u_learns_first():
    torch.manual_seed(0)
    bank = LowRankExperts(64, 8, 3, rank=4)
    assert torch.equal(bank.u, torch.zeros(3, 8, 4))
    assert torch.equal(bank.s, torch.ones(3, 4))
    largest = bank.v.abs().amax(dim=(1, 2))
    assert (largest > 0.93 / math.sqrt(64)).all()
    assert (largest <= 1 / math.sqrt(64)).all()
    assert not torch.equal(bank.v[0], bank.v[1])
    x = torch.randn(20, 64)
    y = bank.blend(x, torch.full((20, 3), 1 / 3))
    assert torch.equal(y, torch.zeros(20, 8))
    (y - 1).square().sum().backward()
    assert bank.u.grad.abs().max() > 0
    assert torch.equal(bank.v.grad, torch.zeros_like(bank.v))


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7)])
@pytest.mark.parametrize("rank", [1, 3])
def test_the_split_of_a_weight_equals_one_by_hand(shape, rank):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    principal, bank = LowRankExperts.from_weight(weight, 3, rank)
    u, s, v = np.linalg.svd(weight.double().numpy(), full_matrices=False)
    kept = (u[:, :-rank] * s[:-rank]) @ v[:-rank]
    np.testing.assert_allclose(principal.numpy(), kept, rtol=0, atol=1e-5)
    for index in range(3):
        parts = {name: part.detach().numpy() for name, part in bank.matrices(index).items()}
        np.testing.assert_allclose(parts["s"], s[-rank:], rtol=0, atol=1e-5)
        rest = (parts["u"] * parts["s"]) @ parts["v"]
        np.testing.assert_allclose(rest, (u[:, -rank:] * s[-rank:]) @ v[-rank:], rtol=0, atol=1e-5)
        # Unit directions, the largest entry of each u positive: the signs of a decomposition are not unique.
        np.testing.assert_allclose(np.linalg.norm(parts["v"], axis=1), 1, atol=1e-5)
        assert (parts["u"][np.abs(parts["u"]).argmax(0), np.arange(rank)] > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_expert_beside_the_principal_part_is_the_frozen_weight(dtype):
    torch.manual_seed(0)
    frozen = nn.Linear(9, 6, bias=False, dtype=dtype)
    before = frozen.weight.detach().clone()
    principal, bank = LowRankExperts.from_weight(frozen.weight, 4, 2)
    assert not principal.requires_grad
    assert principal.dtype == bank.u.dtype == dtype
    assert torch.equal(frozen.weight, before)
    x = torch.randn(5, 9, dtype=dtype)
    for index in range(4):
        torch.testing.assert_close(x @ principal.T + bank.expert(index, x), frozen(x), rtol=0, atol=1e-5)
    # So is any mixture whose weights sum to one, and none whose weights do not.
    layer = MoE(Router(LinearScorer(9, 4), TopK(3)), bank).to(dtype)
    torch.testing.assert_close(x @ principal.T + layer(x).y, frozen(x), rtol=0, atol=1e-5)
    twice = MoE(Router(LinearScorer(9, 4), TopK(3), SigmoidGate(scale=2.0)), bank).to(dtype)
    assert (x @ principal.T + twice(x).y - frozen(x)).abs().max() > 1e-2


def test_a_split_at_full_rank_leaves_nothing_frozen():
    weight = torch.randn(4, 6)
    principal, bank = LowRankExperts.from_weight(weight, 2, 4)
    torch.testing.assert_close(principal, torch.zeros(4, 6), rtol=0, atol=1e-6)
    torch.testing.assert_close(bank.expert(1, torch.eye(6)).T, weight, rtol=0, atol=1e-5)


def test_a_split_does_not_depend_on_the_random_state():
    weight = torch.randn(5, 5)
    states = [LowRankExperts.from_weight(weight, 2, 2)[1].state_dict() for _ in range(2)]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])
        assert torch.equal(value[0], value[1])


@pytest.mark.parametrize("rank", [0, 5])
def test_a_rank_beyond_the_weight_is_refused(rank):
    with pytest.raises(ValueError, match=rf"rank={rank} must lie in 1..min\(dim=6, dim_out=4\)"):
        LowRankExperts.from_weight(torch.randn(4, 6), 2, rank)
    with pytest.raises(ValueError, match=rf"rank={rank} must lie in 1..min\(dim=6, dim_out=4\)"):
        LowRankExperts(6, 4, 2, rank)


def test_a_weight_that_is_no_matrix_is_refused():
    with pytest.raises(ValueError, match=r"a weight of shape \(4, 6, 1, 1\) is no matrix"):
        LowRankExperts.from_weight(torch.randn(4, 6, 1, 1), 2, 1)


def test_the_matrices_of_an_expert_are_views():
    bank = random_bank()
    parts = bank.matrices(2)
    assert {name: tuple(part.shape) for name, part in parts.items()} == {"u": (5, 2), "s": (2,), "v": (2, 6)}
    with torch.no_grad():
        for part in parts.values():
            part.fill_(1.0)
    assert (bank.u[2] == 1).all()
    assert bank.expert(2, torch.ones(1, 6)).tolist() == [[12.0] * 5]
    assert not (bank.u[1] == 1).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_idle_experts_get_zero_gradients(backend):
    bank = random_bank(backend=backend)
    routing = random_routing(9, 4, 1)
    routing.index.fill_(1)
    bank(torch.randn(9, 6), routing).square().sum().backward()
    for name, parameter in bank.named_parameters():
        assert parameter.grad[1].abs().max() > 0, name
        assert torch.equal(parameter.grad[[0, 2, 3]], torch.zeros_like(parameter[[0, 2, 3]])), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_give_no_rows_and_zero_gradients(backend):
    bank = random_bank(backend=backend)
    none = torch.zeros(0, 2)
    routing = Routing(
        index=none.long(), weight=none, valid=none.bool(), probs=torch.zeros(0, 4), logits=torch.zeros(0, 4)
    )
    y = bank(torch.zeros(0, 6), routing)
    assert y.shape == (0, 5)
    y.sum().backward()
    for name, parameter in bank.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_dense_is_preferred_for_few_ranks_or_little_work():
    bank = LowRankExperts(768, 768, 32, rank=4)
    # 128 ranks: too many for two choices, few for eight, and any number for a handful of tokens.
    assert not bank.prefers_dense(tokens=4096, choices=2)
    assert bank.prefers_dense(tokens=4096, choices=8)
    assert bank.prefers_dense(tokens=64, choices=2)
    assert LowRankExperts(768, 768, 16, rank=4).prefers_dense(tokens=4096, choices=2)


def test_a_low_rank_layer_compiles_as_one_graph():
    layer = MoE(Router(LinearScorer(6, 4), TopK(2)), random_bank())
    x = torch.randn(200, 6)
    compiled = torch.compile(lambda x: layer(x).y, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x).y, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_is_close_to_full(backend):
    bank = random_bank(backend=backend)
    layer = MoE(Router(LinearScorer(6, 4), TopK(4)), bank)
    x = torch.randn(8, 6)
    expected = layer(x).y
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = layer(x).y
    half = layer.bfloat16()(x.bfloat16()).y
    for y, dtype in ((mixed, torch.float32), (half, torch.bfloat16)):
        assert y.dtype == dtype
        assert (y.float() - expected).abs().max() <= 2e-2 * max(1, expected.abs().max())

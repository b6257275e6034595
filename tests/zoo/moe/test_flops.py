"""What a forward pass costs: by hand, and the same for every way to execute it."""

from __future__ import annotations

import dataclasses
import json
import warnings

import pytest
import torch
from torch import nn

from zoo.moe import (
    Dense,
    ExpertBank,
    ExpertPool,
    FeedForwardExperts,
    FieldExperts,
    Fixed,
    LinearScorer,
    MoE,
    PerSample,
    Router,
    SoftmaxGate,
    TopK,
)
from zoo.moe.expert_list import ExpertList, ZeroExpert
from zoo.moe.flops import cost
from zoo.moe.lowrank import LowRankExperts
from zoo.moe.soft import SoftMoE
from zoo.moe.twin import DenseFeedForward, DenseMixture

D, H, E, T = 4, 6, 5, 7
ROUTER = 2 * T * D * E


def layer(experts=E, k=2, shared=None, **bank):
    torch.manual_seed(0)
    return MoE(Router(LinearScorer(D, experts), TopK(k)), FeedForwardExperts(D, H, experts, **bank), shared)


class Mapped(nn.Module):
    def __init__(self, width=D):
        super().__init__()
        self.map = nn.Linear(width, width)

    def forward(self, x, context=None):
        return self.map(x)


def field(chosen, experts=3, **options):
    router = Router(LinearScorer(D, experts), Fixed(chosen), SoftmaxGate(renormalize=False))
    return MoE(router, FieldExperts([Mapped() for _ in range(experts)], **options))


@pytest.mark.parametrize(
    ("activation", "bias", "weights", "flops"),
    [
        ("gelu", False, 2 * D * H, 4 * D * H),
        ("gelu", True, 2 * D * H + H + D, 4 * D * H),
        ("swiglu", False, 3 * D * H, 6 * D * H),
        ("swiglu", True, 3 * D * H + 2 * H + D, 6 * D * H),
    ],
)
def test_feed_forward_experts_cost_what_is_worked_out_by_hand(activation, bias, weights, flops):
    found = cost(layer(activation=activation, bias=bias), torch.randn(T, D))
    assert found.parameters_total == D * E + E * weights
    assert found.parameters_active == pytest.approx(D * E + 2 * weights)
    assert found.flops == ROUTER + 2 * T * flops
    assert found.flops_total == ROUTER + E * T * flops
    assert found.flops_by_part == {"router": ROUTER, "experts": 2 * T * flops, "other": 0}


def test_a_shared_expert_is_active_for_every_token():
    found = cost(layer(shared=DenseFeedForward(D, 3)), torch.randn(T, D))
    assert found.parameters_active == pytest.approx(D * E + 2 * 2 * D * H + 2 * D * 3)
    assert found.flops_by_part == {"router": ROUTER, "experts": 2 * T * 4 * D * H, "other": T * 4 * D * 3}


@pytest.mark.parametrize("backend", FeedForwardExperts.backends)
def test_the_back_end_changes_no_count(backend):
    x, mask = torch.randn(T, D), torch.arange(T) != 3
    auto, forced = layer(bias=True), layer(bias=True, backend=backend)
    assert cost(forced, x, mask) == cost(auto, x, mask)
    assert forced.experts.backend == backend


def test_masked_tokens_count_in_the_router_alone():
    mask = torch.tensor([True, False, True, True, False, True, True])
    found = cost(layer(), torch.full((T, D), torch.nan).masked_fill(mask[:, None], 1.0), mask=mask)
    assert found.flops_by_part == {"router": ROUTER, "experts": 2 * 5 * 4 * D * H, "other": 0}
    assert found.flops_total == ROUTER + E * 5 * 4 * D * H
    assert found.parameters_active == pytest.approx(D * E + 2 * 2 * D * H)


def test_no_valid_token_uses_no_expert():
    found = cost(layer(), torch.randn(T, D), torch.zeros(T, dtype=torch.bool))
    assert (found.parameters_active, found.flops, found.flops_total) == (D * E, ROUTER, ROUTER)


def test_one_decision_per_sample_counts_all_tokens_that_follow_it():
    router = Router(LinearScorer(D, E), TopK(2), groups=PerSample())
    found = cost(MoE(router, FeedForwardExperts(D, H, E)), torch.randn(3, T, D))
    assert found.flops_by_part == {"router": 2 * 3 * D * E, "experts": 2 * 3 * T * 4 * D * H, "other": 0}
    assert found.parameters_active == pytest.approx(D * E + 2 * 2 * D * H)


def test_an_idle_field_expert_costs_nothing_and_is_not_active():
    one = D * D + D
    found = cost(field([0, 2]), torch.randn(T, D))
    assert found.parameters_total == D * 3 + 3 * one
    assert found.parameters_active == D * 3 + 2 * one
    assert found.flops_by_part == {"router": 2 * T * D * 3, "experts": 2 * 2 * T * D * D, "other": 0}
    assert found.flops_total == 2 * T * D * 3 + 3 * 2 * T * D * D


def test_a_field_bank_that_skips_nothing_is_active_in_full():
    found = cost(field([0, 2], skip_idle=False), torch.randn(T, D))
    assert found.parameters_active == found.parameters_total
    assert found.flops == found.flops_total


def test_experts_of_modules_count_by_their_own_sizes():
    wide, narrow = DenseFeedForward(D, 8), DenseFeedForward(D, 2)
    bank = ExpertList([wide, ZeroExpert(D), narrow], D)
    router = Router(LinearScorer(D, 3), Fixed([0, 1]), SoftmaxGate(renormalize=False))
    found = cost(MoE(router, bank), torch.randn(T, D))
    assert found.parameters_total == D * 3 + 2 * D * 8 + 2 * D * 2
    assert found.parameters_active == pytest.approx(D * 3 + 2 * D * 8)
    assert found.flops_by_part == {"router": 2 * T * D * 3, "experts": T * 4 * D * 8, "other": 0}
    assert found.flops_total == found.flops + T * 4 * D * 2


def test_low_rank_experts_count_as_chosen_whatever_is_fastest():
    bank = LowRankExperts(D, 3, E, rank=2)
    moe = MoE(Router(LinearScorer(D, E), TopK(2)), bank)
    moe(torch.randn(T, D))
    assert bank.ran == "dense"
    found = cost(moe, torch.randn(T, D))
    assert found.parameters_active == pytest.approx(D * E + 2 * 2 * (D + 3 + 1))
    assert found.flops_by_part["experts"] == 2 * T * 2 * 2 * (D + 3)
    assert found.flops_total == ROUTER + E * T * 2 * 2 * (D + 3)


def test_tokens_weigh_the_experts_that_they_visit():
    bank = ExpertList([DenseFeedForward(D, 8), DenseFeedForward(D, 2)], D)
    moe = MoE(Router(LinearScorer(D, 2), TopK(1), SoftmaxGate(renormalize=False)), bank)
    with torch.no_grad():
        moe.router.scorer.out.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]))
    x = torch.randn(4, D)
    x[:, 0] = torch.tensor([1.0, -1.0, 1.0, 1.0])
    # Three of four tokens visit the wide one.
    found = cost(moe, x)
    assert found.parameters_active == pytest.approx(D * 2 + 0.75 * 2 * D * 8 + 0.25 * 2 * D * 2)
    assert found.flops_by_part["experts"] == 3 * 4 * D * 8 + 1 * 4 * D * 2


class Network(nn.Module):
    """Two layers, one of which runs twice, between two maps."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(3, D, bias=False)
        self.once = layer(experts=4, k=1 + 1)
        self.twice = field([0])
        self.outward = nn.Linear(D, 2)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        x = self.once(self.inward(x)).y
        x = self.twice(self.twice(x).y).y
        return self.outward(self.dropout(x))


def test_a_network_adds_up_its_layers_and_all_else():
    found = cost(Network(), torch.randn(T, 3))
    one, other = D * D + D, 3 * D + 2 * D + 2
    assert found.parameters_total == other + (D * 4 + 4 * 2 * D * H) + (D * 3 + 3 * one)
    assert found.parameters_active == pytest.approx(other + (D * 4 + 2 * 2 * D * H) + (D * 3 + one))
    parts = {
        "router": 2 * T * D * 4 + 2 * 2 * T * D * 3,
        "experts": 2 * T * 4 * D * H + 2 * 2 * T * D * D,
        "other": 2 * T * 3 * D + 2 * T * D * 2,
    }
    assert found.flops_by_part == parts
    assert found.flops == sum(parts.values())
    assert found.flops_total == found.flops + 2 * T * 4 * D * H + 2 * 2 * 2 * T * D * D


def test_the_calls_of_a_layer_share_its_active_parameters():
    moe = layer(experts=4, k=2)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = moe

        def forward(self, x, y):
            return self.moe(x).y.sum() + self.moe(y).y.sum()

    once, both = cost(moe, torch.randn(T, D)), cost(Twice(), torch.randn(T, D), torch.randn(3, D))
    assert both.parameters_active == pytest.approx(once.parameters_active)
    assert both.flops * T == once.flops * (T + 3)


def test_what_two_experts_share_counts_once():
    shared = Mapped()
    moe = MoE(Router(LinearScorer(D, 2), Dense()), FieldExperts([shared, shared]))
    found = cost(moe, torch.randn(T, D))
    assert found.parameters_total == found.parameters_active == D * 2 + D * D + D
    assert found.flops_by_part["experts"] == 2 * 2 * T * D * D


def test_a_layer_within_an_expert_is_a_part_of_that_expert():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = layer(experts=3, k=2)

        def forward(self, x, context=None):
            return self.moe(x).y

    moe = field([0], experts=2)
    moe.experts.experts[0] = Inner()
    moe.experts.experts[1] = Inner()
    inner = cost(layer(experts=3, k=2), torch.randn(T, D))
    found = cost(moe, torch.randn(T, D))
    assert found.parameters_active == D * 2 + inner.parameters_total
    assert found.flops_by_part == {"router": 2 * T * D * 2, "experts": inner.flops, "other": 0}
    assert found.flops_total == found.flops + inner.flops


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3)])
def test_recurrent_networks_do_not_hide(kind, gates, device):
    network = kind(3, D, num_layers=2, bidirectional=True, batch_first=True).to(device)
    weights = 2 * gates * D * (3 + D) + 2 * gates * D * (2 * D + D)
    assert cost(network, torch.randn(2, 5, 3, device=device)).flops == 2 * 2 * 5 * weights


def test_attention_does_not_hide():
    block = nn.TransformerEncoderLayer(D, 2, H, batch_first=True)
    # Four maps of D x D, two products of queries, keys and values, and the feed-forward network.
    assert cost(block, torch.randn(2, 5, D)).flops == 2 * 10 * (4 * D * D + 2 * 5 * D + 2 * D * H)


@pytest.mark.parametrize(("a", "b"), [((8, 4), (3, 4, 12)), ((3, 8, 4), (4, 12))])
def test_grouped_products_count(a, b):
    class Grouped(nn.Module):
        def forward(self):
            ends = torch.tensor([1, 4, 8 if len(a) == 2 else 12], dtype=torch.int32)
            return torch.nn.functional.grouped_mm(torch.randn(a), torch.randn(b), offs=ends)

    assert cost(Grouped()).flops == 2 * 8 * 4 * 12


def test_products_added_in_place_count():
    class Added(nn.Module):
        def forward(self):
            torch.zeros(5, 7).addmm_(torch.randn(5, 3), torch.randn(3, 7))
            return torch.zeros(2, 5, 7).baddbmm_(torch.randn(2, 5, 3), torch.randn(2, 3, 7))

    assert cost(Added()).flops == 3 * 2 * 5 * 3 * 7


def test_the_twin_is_active_in_full():
    bank = ExpertPool([Mapped() for _ in range(3)], base=2)
    found = cost(DenseMixture(bank), torch.randn(T, D))
    assert found.parameters_total == found.parameters_active == 3 * (D * D + D) + 3
    assert found.flops == found.flops_total == 3 * 2 * T * D * D


def test_a_layer_that_mixes_tokens_is_active_in_full():
    found = cost(SoftMoE(FeedForwardExperts(D, H, E), D), torch.randn(2, T, D))
    assert found.parameters_active == found.parameters_total
    # Logits, dispatch and combine, and E slots per sequence through the experts.
    assert found.flops == found.flops_total == 3 * 2 * 2 * T * E * D + 2 * E * 4 * D * H


def test_modes_back_ends_and_hooks_are_as_before():
    network = Network()
    network.train()
    network.outward.eval()
    network.once(torch.randn(T, D))
    before = [(module.training, dict(module._forward_hooks), str(module)) for module in network.modules()]
    fast = torch.backends.mha.get_fastpath_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cost(network, torch.randn(T, 3))
    with pytest.raises(RuntimeError):
        cost(network, torch.randn(T, 5))
    assert [(m.training, dict(m._forward_hooks), str(m)) for m in network.modules()] == before
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert torch.is_grad_enabled()


def test_it_runs_in_evaluation_mode_without_gradients():
    seen = []
    network = nn.Linear(3, 3).train()
    hook = network.register_forward_hook(lambda m, _, y: seen.append((m.training, y.requires_grad)))
    cost(network, torch.randn(2, 3))
    hook.remove()
    assert seen == [(False, False)]


def test_a_bank_of_another_kind_is_refused():
    class Odd(ExpertBank):
        def forward(self, x, routing, context=None):
            return x

    with pytest.raises(TypeError, match="no rule to count a Odd"):
        cost(MoE(Router(LinearScorer(D, 3), Dense()), Odd(3)), torch.randn(T, D))


def test_a_cost_can_be_written_down():
    found = cost(layer(), torch.randn(T, D))
    assert json.loads(json.dumps(dataclasses.asdict(found)))["flops"] == found.flops


def test_inputs_that_require_gradients_are_counted_like_others():
    layer, x = nn.Linear(D, 3), torch.randn(4, D, requires_grad=True)
    assert cost(layer, x).flops == 2 * 4 * D * 3

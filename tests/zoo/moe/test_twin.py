"""Dense twins: one wide feed-forward network, or all experts under one constant mixture."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zoo.moe import Dense, ExpertPool, FeedForwardExperts, FieldExperts, LinearScorer, MoE, Router, TopK
from zoo.moe.expert_list import ExpertList, ZeroExpert
from zoo.moe.flops import cost
from zoo.moe.lowrank import LowRankExperts
from zoo.moe.twin import DenseFeedForward, DenseMixture

D, H, E, T = 6, 5, 3, 7


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(D, D)

    def forward(self, x, context=None):
        return self.map(x)


def low_rank():
    bank = LowRankExperts(D, 4, E, rank=2)
    nn.init.normal_(bank.u)
    return bank


def listed():
    wide = nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, 4))
    return ExpertList([nn.Linear(D, 4), ZeroExpert(4), wide], 4)


BANKS = {
    "gelu": lambda: FeedForwardExperts(D, H, E),
    "swiglu": lambda: FeedForwardExperts(D, H, E, "swiglu", bias=True),
    "low rank": low_rank,
    "list": listed,
}


def test_all_field_experts_run_under_one_constant_mixture():
    torch.manual_seed(0)
    bank = ExpertPool([Mapped() for _ in range(3)], base=2)
    twin = DenseMixture(bank)
    x = torch.randn(2, 5, D)
    outputs = torch.stack([expert(x) for expert in bank.experts])
    torch.testing.assert_close(twin(x), outputs.mean(0), rtol=0, atol=1e-6)
    with torch.no_grad():
        twin.mixing.copy_(torch.tensor([1.0, 2.0, 5.0]).log())
    weight = torch.tensor([0.125, 0.25, 0.625])
    torch.testing.assert_close(twin(x), torch.einsum("e,ebpd->bpd", weight, outputs), rtol=0, atol=1e-6)


def test_field_experts_of_another_width_give_the_twin_theirs():
    class Wide(nn.Module):
        def forward(self, x, context=None):
            return torch.cat([x, x], -1)

    x = torch.randn(2, 3, 4)
    twin = DenseMixture(FieldExperts([Wide(), Wide()], dim_out=8))
    torch.testing.assert_close(twin(x), torch.cat([x, x], -1))


@pytest.mark.parametrize("kind", BANKS)
def test_all_token_experts_run_under_one_constant_mixture(kind):
    torch.manual_seed(0)
    bank = BANKS[kind]()
    twin = DenseMixture(bank)
    x = torch.randn(2, 5, D)
    with torch.no_grad():
        twin.mixing.copy_(torch.tensor([1.0, 2.0, 5.0]).log())
    outputs = torch.stack([bank.expert(index, x.reshape(-1, D)) for index in range(E)])
    expected = torch.einsum("e,enf->nf", torch.tensor([0.125, 0.25, 0.625]), outputs)
    torch.testing.assert_close(twin(x), expected.reshape(2, 5, -1), rtol=0, atol=1e-6)
    assert twin(x[:0]).shape == (0, 5, bank.dim_out)


@pytest.mark.parametrize("kind", BANKS)
def test_the_mixture_learns(kind):
    torch.manual_seed(0)
    twin = DenseMixture(BANKS[kind]())
    twin(torch.randn(T, D)).square().sum().backward()
    for name, parameter in twin.named_parameters():
        assert parameter.grad.abs().max() > 0, name


def test_a_constant_mixture_is_a_dense_layer_with_a_constant_router():
    torch.manual_seed(0)
    bank = BANKS["gelu"]()
    layer = MoE(Router(LinearScorer(D, E, bias=True), Dense()), bank)
    twin = DenseMixture(bank)
    with torch.no_grad():
        layer.router.scorer.out.weight.zero_()
        layer.router.scorer.out.bias.copy_(twin.mixing.normal_())
    x = torch.randn(4, T, D)
    torch.testing.assert_close(twin(x), layer(x).y, rtol=0, atol=1e-6)


def test_the_twin_has_the_experts_and_one_number_each_and_no_router():
    bank = ExpertPool([Mapped() for _ in range(3)], base=2)
    twin = DenseMixture(bank)
    assert set(twin.state_dict()) == {"mixing", *(f"experts.{key}" for key in bank.experts.state_dict())}
    twin(torch.randn(4, D)).square().sum().backward()
    for name, parameter in twin.named_parameters():
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_a_dense_feed_forward_network_is_what_it_says(activation, bias):
    torch.manual_seed(0)
    network = DenseFeedForward(D, H, activation, bias)
    x = torch.randn(2, T, D)
    hidden = x @ network.up.weight.T + (network.up.bias if bias else 0)
    if activation == "swiglu":
        hidden = hidden[..., :H] * torch.sigmoid(hidden[..., :H]) * hidden[..., H:]
    else:
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5))
    expected = hidden @ network.down.weight.T + (network.down.bias if bias else 0)
    torch.testing.assert_close(network(x), expected, rtol=0, atol=1e-6)
    assert (network.down.bias is not None) == bias


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_it_starts_as_an_expert_does(activation):
    torch.manual_seed(0)
    network = DenseFeedForward(64, 256, activation, bias=True)
    bank = FeedForwardExperts(64, 256, 1, activation, bias=True)
    for mine, theirs in (
        (network.up.weight, bank.up),
        (network.up.bias, bank.up_bias),
        (network.down.weight, bank.down),
        (network.down.bias, bank.down_bias),
    ):
        assert mine.shape == theirs.shape[1:]
        assert mine.abs().max().item() == pytest.approx(theirs.abs().max().item(), rel=0.05)
        assert mine.std().item() == pytest.approx(theirs.std().item(), rel=0.2)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize(
    ("backend", "bias"),
    # Grouped products add no biases.
    [
        (name, bias)
        for name in FeedForwardExperts.backends
        for bias in (False, True)
        if name != "grouped" or not bias
    ],
)
def test_one_expert_and_one_choice_equal_the_dense_network(backend, activation, bias):
    torch.manual_seed(0)
    dim, hidden = 8, 12
    layer = MoE(
        Router(LinearScorer(dim, 1), TopK(1)),
        FeedForwardExperts(dim, hidden, 1, activation, bias=bias, backend=backend),
    )
    network = DenseFeedForward(dim, hidden, activation, bias)
    bank = layer.experts
    pairs = [(network.up.weight, bank.up), (network.down.weight, bank.down)]
    if bias:
        pairs += [(network.up.bias, bank.up_bias), (network.down.bias, bank.down_bias)]
    with torch.no_grad():
        for mine, theirs in pairs:
            mine.copy_(theirs[0])
    x = torch.randn(5, dim)
    torch.testing.assert_close(layer(x).y, network(x), rtol=0, atol=1e-6)
    layer(x).y.square().sum().backward()
    network(x).square().sum().backward()
    for mine, theirs in pairs:
        torch.testing.assert_close(theirs.grad[0], mine.grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shared", [None, 4])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_twin_of_k_experts_has_their_active_flops_up_to_the_routers(activation, shared):
    k, x = 2, torch.randn(T, D)
    beside = None if shared is None else DenseFeedForward(D, shared, activation)
    layer = MoE(Router(LinearScorer(D, E), TopK(k)), FeedForwardExperts(D, H, E, activation), shared=beside)
    sparse, dense = cost(layer, x), cost(DenseFeedForward(D, k * H + (shared or 0), activation), x)
    assert dense.flops == sparse.flops - sparse.flops_by_part["router"]
    assert dense.parameters_active == pytest.approx(sparse.parameters_active - E * D)


def test_it_serves_as_the_shared_expert_of_a_layer():
    torch.manual_seed(0)
    shared = DenseFeedForward(D, H)
    layer = MoE(Router(LinearScorer(D, E), TopK(2)), FeedForwardExperts(D, H, E), shared=shared)
    x = torch.randn(T, D)
    expected = F.linear(F.gelu(F.linear(x, shared.up.weight)), shared.down.weight)
    expected = expected + layer.experts(x, layer.router(x))
    torch.testing.assert_close(layer(x).y, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 0, "hidden": 3}, "dim=0 and hidden=3"),
        ({"dim": 3, "hidden": 0}, "dim=3 and hidden=0"),
        ({"dim": 3, "hidden": 3, "activation": "relu"}, "activation='relu'"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DenseFeedForward(**settings)

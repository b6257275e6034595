"""Activation checkpointing: the same counts and gradients as without."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zoo.moe import (
    FeedForwardExperts,
    FieldExperts,
    LinearScorer,
    MoE,
    Router,
    RouterStats,
    TopK,
    balance_loss,
    z_loss,
)
from zoo.moe.expert_list import ExpertList
from zoo.nn import checkpoint

D, E, T = 8, 4, 12


class Mapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(D, D)

    def forward(self, x, context=None):
        return self.map(x).relu()


def feed_forward(backend):
    # Grouped products add no biases.
    return lambda: FeedForwardExperts(D, 12, E, "swiglu", bias=backend != "grouped", backend=backend)


BANKS = {
    **{backend: feed_forward(backend) for backend in ("auto", *FeedForwardExperts.backends)},
    "list": lambda: ExpertList([nn.Linear(D, D) for _ in range(E)], D, backend="sorted"),
    "field": lambda: FieldExperts([Mapped() for _ in range(E)]),
}


class Calls(nn.Module):
    """A layer, and how often it ran."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.calls = layer, 0

    def forward(self, x, mask=None):
        self.calls += 1
        return self.layer(x, mask)


def run(bank, call):
    torch.manual_seed(0)
    layer = Calls(MoE(Router(LinearScorer(D, E), TopK(2)), BANKS[bank](), shared=nn.Linear(D, D)))
    torch.manual_seed(1)
    x, mask = torch.randn(T, D, requires_grad=True), torch.arange(T) % 5 != 0
    out = call(layer, x, mask=mask)
    (out.y.square().sum() + balance_loss(out.routing) + z_loss(out.routing)).backward()
    gradients = {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    return layer.calls, out, RouterStats.of(out.routing), gradients


@pytest.mark.parametrize("bank", BANKS)
def test_counts_and_all_gradients_equal_those_without(bank):
    calls, plain, stats, expected = run(bank, lambda layer, x, mask: layer(x, mask))
    recalls, out, restats, found = run(bank, checkpoint)
    # The second run was there: it is what is paid for the memory.
    assert (calls, recalls) == (1, 2)
    torch.testing.assert_close(out.y, plain.y, rtol=0, atol=0)
    assert torch.equal(restats.counts, stats.counts)
    assert int(restats.tokens) == T - 3
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None, name
        torch.testing.assert_close(
            found[name], gradient, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert expected["layer.router.scorer.out.weight"].abs().max() > 0


def test_dropout_draws_the_same_both_times():
    def run(call):
        torch.manual_seed(0)
        x = torch.ones(1000, requires_grad=True)
        y = call(nn.Dropout(0.5), x)
        y.sum().backward()
        return y.detach(), x.grad

    y, gradient = run(checkpoint)
    assert torch.equal(y, gradient)
    assert 300 < int((y > 0).sum()) < 700


def test_the_re_entrant_variant_cannot_be_asked_for():
    with pytest.raises(TypeError, match="use_reentrant"):
        checkpoint(nn.Linear(2, 2), torch.randn(1, 2), use_reentrant=True)

"""Conservation laws of gradient flow: quantities that a right backward pass leaves alone, whatever the data.

Under gradient flow every SwiGLU neuron i keeps ‖down[:, i]‖² − ‖up[i, :]‖², with ``up`` the linear branch, behind any
gate; and every gate that a common shift of the logits does not move keeps Σ_e W[e] of a linear router. Steps of size lr
leave the first law by O(lr) at a fixed flow time lr · steps, because each step errs by O(lr²). A gradient that is wrong
by a factor breaks the law at any lr.

Reference: conservation laws of gradient flow for modern architectures (arXiv 2606.17816), which claims the second law
for normalised sigmoids as well; a test below shows that they break it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from zoo.moe import (
    Dense,
    FeedForwardExperts,
    LinearScorer,
    MoE,
    Router,
    SigmoidGate,
    SoftmaxGate,
    TopK,
)

FLOW_TIME = 5.0
PRECISION = {"grouped": torch.float32}
"""The precision of back ends that do not run in doubles."""


def small_layer(
    backend: str = "sorted",
    dtype: torch.dtype = torch.float64,
    selector: nn.Module | None = None,
    gate: nn.Module | None = None,
) -> MoE:
    """Four SwiGLU experts of width 8 behind a linear router."""
    torch.manual_seed(0)
    scorer = LinearScorer(8, 4)
    nn.init.normal_(scorer.out.weight, std=0.5)
    bank = FeedForwardExperts(8, 4, 4, "swiglu", backend=backend)
    return MoE(Router(scorer, selector if selector is not None else TopK(2), gate), bank).to(dtype)


def descend(layer: MoE, lr: float) -> None:
    """Plain gradient descent on a random regression for a fixed flow time."""
    generator = torch.Generator().manual_seed(1)
    parameters = list(layer.parameters())
    x, y = torch.randn(2, 32, 8, generator=generator, dtype=torch.float64).to(parameters[0].dtype)
    for _ in range(round(FLOW_TIME / lr)):
        gradients = torch.autograd.grad((layer(x).y - y).square().mean(), parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-lr)


def squares(bank: FeedForwardExperts) -> tuple[Tensor, Tensor]:
    """Per neuron (E, H): ‖down‖² − ‖up‖², which is conserved, and ‖down‖² − ‖gate‖², which is not."""
    down = bank.down.detach().square().sum(1)
    gate, up = bank.up.detach().square().sum(2).chunk(2, dim=1)
    return down - up, down - gate


def drift(make: Callable[[], MoE], lr: float) -> tuple[float, float]:
    """Mean change of the two quantities of :func:`squares` along a descent."""
    layer = make()
    before = squares(layer.experts)
    descend(layer, lr)
    law, control = ((a - b).abs().mean() for a, b in zip(squares(layer.experts), before, strict=True))
    return float(law), float(control)


def row_sum_drift(layer: MoE) -> float:
    """Largest change of Σ_e W[e] along a descent."""
    weight = layer.router.scorer.out.weight
    before = weight.detach().sum(0)
    descend(layer, 0.1)
    return float((weight.detach().sum(0) - before).abs().max())


@pytest.mark.parametrize("backend", FeedForwardExperts.backends)
def test_the_law_of_a_swiglu_neuron_errs_in_proportion_to_the_step(backend):
    dtype = PRECISION.get(backend, torch.float64)
    (coarse, moved_coarse), (fine, moved_fine) = (
        drift(lambda: small_layer(backend, dtype), lr) for lr in (0.1, 0.01)
    )
    assert 7 < coarse / fine < 14
    # The control: the gate's norm moves freely, at both steps alike, and far more.
    assert min(moved_coarse, moved_fine) > 20 * coarse
    assert 0.9 < moved_coarse / moved_fine < 1.1


def test_the_law_notices_a_gradient_that_is_wrong_by_a_hundredth():
    def wrong() -> MoE:
        layer = small_layer()
        layer.experts.down.register_hook(lambda gradient: 1.01 * gradient)
        return layer

    assert drift(wrong, 0.1)[0] / drift(wrong, 0.01)[0] < 3


@pytest.mark.parametrize("selector", [Dense(), TopK(2)], ids=repr)
@pytest.mark.parametrize(
    "backend", [backend for backend in FeedForwardExperts.backends if backend not in PRECISION]
)
def test_a_softmax_router_keeps_the_sum_of_its_rows(backend, selector):
    assert row_sum_drift(small_layer(backend, selector=selector)) <= 1e-12


@pytest.mark.parametrize("selector", [Dense(), TopK(2)], ids=repr)
def test_a_normalised_sigmoid_router_does_not_keep_the_sum_of_its_rows(selector):
    assert row_sum_drift(small_layer(selector=selector, gate=SigmoidGate())) > 1e-3


def test_a_softmax_before_the_choice_keeps_the_sum_of_its_rows_too():
    layer = small_layer(selector=TopK(1), gate=SoftmaxGate(renormalize=False))
    assert row_sum_drift(layer) <= 1e-12

"""What holds for every size, mask, number of choices and back end.

The yardstick is a loop over tokens and choices in doubles, written from the definition and differentiated by autograd:
y_t = Σ_k weight_tk · down(act(up x_t)).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from zoo.moe import (
    FeedForwardExperts,
    LinearScorer,
    MoE,
    RelativeThreshold,
    Router,
    RouterStats,
    SigmoidGate,
    SoftmaxGate,
    TopK,
    balance_loss,
    z_loss,
)

BACKENDS = (*FeedForwardExperts.backends, "auto")
quick = settings(max_examples=25, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Setting:
    """One layer and its tokens."""

    tokens: int
    dim: int
    hidden: int
    experts: int
    k: int
    activation: str
    bias: bool
    gate: str
    ratio: float | None
    masked: bool
    seed: int

    @property
    def renormalize(self) -> bool:
        return self.gate != "plain"

    def layer(self, backend: str) -> MoE:
        # Grouped products want rows of whole 16 bytes, and add no biases.
        unit = 4 if backend == "grouped" else 1
        bias = self.bias and backend != "grouped"
        torch.manual_seed(self.seed)
        scorer = LinearScorer(unit * self.dim, self.experts)
        nn.init.normal_(scorer.out.weight)
        gate = SigmoidGate() if self.gate == "sigmoid" else SoftmaxGate(self.renormalize)
        selectors = [TopK(self.k)]
        if self.ratio is not None:
            selectors.append(RelativeThreshold(self.ratio))
        bank = FeedForwardExperts(
            unit * self.dim, unit * self.hidden, self.experts, self.activation, bias, backend
        )
        return MoE(Router(scorer, selectors, gate), bank)

    def batch(self, backend: str) -> tuple[Tensor, Tensor | None]:
        unit = 4 if backend == "grouped" else 1
        generator = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(self.tokens, unit * self.dim, generator=generator)
        mask = torch.rand(self.tokens, generator=generator) < 0.6 if self.masked else None
        return x, mask


@st.composite
def any_setting(draw: st.DrawFn, thresholds: bool = True) -> Setting:
    experts = draw(st.integers(1, 6))
    k = draw(st.integers(1, min(experts, 3)))
    # One choice of several experts with renormalised weights is refused.
    gates = ["plain"] if k == 1 and experts > 1 else ["renormalised", "plain", "sigmoid"]
    return Setting(
        tokens=draw(st.integers(0, 9)),
        dim=draw(st.integers(1, 4)),
        hidden=draw(st.integers(1, 5)),
        experts=experts,
        k=k,
        activation=draw(st.sampled_from(["gelu", "swiglu"])),
        bias=draw(st.booleans()),
        gate=draw(st.sampled_from(gates)),
        ratio=draw(st.sampled_from([None, 0.5])) if thresholds else None,
        masked=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )


def chosen_by(setting: Setting, logits: Tensor) -> tuple[list[int], Tensor]:
    """The experts of one token and their weights, from its logits (E,)."""
    best = sorted(range(setting.experts), key=lambda expert: (-logits[expert].item(), expert))[: setting.k]
    scores = logits.sigmoid() if setting.gate == "sigmoid" else logits.softmax(0)
    if setting.ratio is not None:
        best = [e for e in best if scores[e] >= setting.ratio * scores[best[0]]]
    weight = scores[best]
    return best, weight / weight.sum() if setting.renormalize else weight


def loop(setting: Setting, parameters: dict[str, Tensor], x: Tensor, mask: Tensor | None) -> Tensor:
    """The definition, token after token and choice after choice."""
    up, down = parameters["experts.up"], parameters["experts.down"]
    up_bias, down_bias = parameters.get("experts.up_bias"), parameters.get("experts.down_bias")
    rows = []
    for token in range(len(x)):
        row = 0.0 * x[token]
        if mask is None or mask[token]:
            experts, weights = chosen_by(setting, parameters["router.scorer.out.weight"] @ x[token])
            for expert, weight in zip(experts, weights, strict=True):
                hidden = up[expert] @ x[token]
                if up_bias is not None:
                    hidden = hidden + up_bias[expert]
                if setting.activation == "swiglu":
                    gate, linear = hidden.chunk(2)
                    hidden = gate * torch.sigmoid(gate) * linear
                else:
                    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
                answer = down[expert] @ hidden
                row = row + weight * (answer if down_bias is None else answer + down_bias[expert])
        rows.append(row)
    return torch.stack(rows) if rows else 0.0 * x


def assert_close(a: Tensor, b: Tensor, name: str = "") -> None:
    """The agreement that is asked of two ways to compute the same in single precision."""
    assert a.shape == b.shape, name
    a, b = a.detach(), b.detach()
    if a.numel():
        assert float((a - b).abs().max()) <= 1e-6 * max(1.0, float(b.abs().max())), name


@pytest.mark.parametrize("backend", BACKENDS)
@quick
@given(setting=any_setting())
def test_output_and_all_gradients_are_those_of_the_definition(backend, setting):
    layer = setting.layer(backend)
    x, mask = setting.batch(backend)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(setting.seed + 2))
    x.requires_grad_()
    y = layer(x, mask).y
    y.backward(upstream)

    exact = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    exact_x = x.detach().double().requires_grad_()
    exact_y = loop(setting, exact, exact_x, mask)
    exact_y.backward(upstream.double())

    assert_close(y, exact_y, "y")
    assert_close(x.grad, exact_x.grad, "x")
    for name, parameter in layer.named_parameters():
        # What the loop never touched has no gradient there and a zero one here.
        wanted = exact[name].grad
        assert_close(parameter.grad, torch.zeros_like(exact[name]) if wanted is None else wanted, name)


@pytest.mark.parametrize("backend", BACKENDS)
@quick
@given(setting=any_setting())
def test_permuted_tokens_give_permuted_answers_and_gradients(backend, setting):
    layer = setting.layer(backend)
    x, mask = setting.batch(backend)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(setting.seed))

    def answer(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        y = layer(x, mask).y
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        return y.detach(), gradient

    y, gradient = answer(x, mask)
    permuted_y, permuted_gradient = answer(x[order], None if mask is None else mask[order])
    assert_close(permuted_y, y[order], "y")
    assert_close(permuted_gradient, gradient[order], "x")


@pytest.mark.parametrize("backend", BACKENDS)
@quick
@given(setting=any_setting())
def test_a_token_alone_gets_what_it_gets_in_a_batch(backend, setting):
    layer = setting.layer(backend).eval()
    x, mask = setting.batch(backend)
    whole = layer(x, mask)
    for token in range(len(x)):
        alone = layer(x[token, None], None if mask is None else mask[token, None])
        assert_close(alone.y[0], whole.y[token], "y")
        assert torch.equal(alone.routing.index[0], whole.routing.index[token])
        assert torch.equal(alone.routing.valid[0], whole.routing.valid[token])


@pytest.mark.parametrize("backend", BACKENDS)
@quick
@given(setting=any_setting(), rubbish=st.sampled_from([0.0, 1e30, float("inf"), float("nan")]))
def test_masked_tokens_change_no_bit_of_the_others(backend, setting, rubbish):
    layer = setting.layer(backend)
    x, _ = setting.batch(backend)
    mask = torch.rand(len(x), generator=torch.Generator().manual_seed(setting.seed)) < 0.6

    def answer(x: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        x = x.clone().requires_grad_()
        out = layer(x, mask)
        gradients = torch.autograd.grad(out.y.square().sum(), [x, *layer.parameters()])
        return out.y.detach(), *gradients

    clean_y, clean_x, *clean = answer(x.masked_fill(~mask[:, None], 0.0), mask)
    y, gradient, *parameters = answer(x.masked_fill(~mask[:, None], rubbish), mask)
    assert torch.equal(y, clean_y)
    assert torch.equal(gradient, clean_x)
    assert all(torch.equal(a, b) for a, b in zip(parameters, clean, strict=True))
    assert torch.equal(y[~mask], torch.zeros_like(y[~mask]))
    assert torch.equal(gradient[~mask], torch.zeros_like(gradient[~mask]))
    # Run alone, the products have fewer rows: the same numbers, but a library may add them up in another order.
    alone_y, alone_x, *alone = answer(x[mask], None)
    assert_close(y[mask], alone_y, "y")
    assert_close(gradient[mask], alone_x, "x")
    for a, b in zip(parameters, alone, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@quick
@given(setting=any_setting(), scale=st.sampled_from([1e4, 1e-30, 0.0]))
def test_gradients_stay_finite_for_extreme_inputs(backend, setting, scale):
    layer = setting.layer(backend)
    x, mask = setting.batch(backend)
    x = (scale * x).requires_grad_()
    out = layer(x, mask)
    loss = out.y.mean() if len(x) else out.y.sum()
    (loss + balance_loss(out.routing) + z_loss(out.routing)).backward()
    assert out.y.isfinite().all()
    for gradient in (x.grad, *(parameter.grad for parameter in layer.parameters())):
        assert gradient.isfinite().all()


@quick
@given(setting=any_setting())
def test_the_weights_of_a_token_sum_to_one_or_to_less(setting):
    layer = setting.layer("reference")
    x, mask = setting.batch("reference")
    routing = layer(x, mask).routing
    total = routing.weight.sum(-1)
    real = torch.ones(len(x), dtype=torch.bool) if mask is None else mask
    assert (routing.weight >= 0).all()
    assert torch.equal(routing.weight[~routing.valid], torch.zeros_like(routing.weight[~routing.valid]))
    assert torch.equal(total[~real], torch.zeros_like(total[~real]))
    if setting.renormalize:
        assert_close(total[real], torch.ones_like(total[real]))
    else:
        assert (total[real] > 0).all()
        assert (total <= 1 + 1e-6).all()
    torch.testing.assert_close(routing.dense_weight().sum(-1), total)


@quick
@given(setting=any_setting(thresholds=False), cut=st.integers(0, 9))
def test_every_real_token_is_counted_k_times_however_the_batch_is_cut(setting, cut):
    layer = setting.layer("reference")
    x, mask = setting.batch("reference")
    real = len(x) if mask is None else int(mask.sum())
    whole = layer(x, mask).routing
    assert int(whole.counts().sum()) == setting.k * real
    assert torch.equal(whole.counts(), torch.bincount(whole.index[whole.valid], minlength=setting.experts))
    parts = [
        RouterStats.of(layer(x[part], None if mask is None else mask[part]).routing)
        for part in (slice(None, cut), slice(cut, None))
    ]
    merged, at_once = parts[0] + parts[1], RouterStats.of(whole)
    assert torch.equal(merged.counts, at_once.counts)
    assert int(merged.tokens) == int(at_once.tokens) == real
    assert int(merged.counts.sum()) == setting.k * real


@quick
@given(setting=any_setting(thresholds=False), seed=st.integers(0, 2**20))
def test_experts_that_are_off_are_never_counted(setting, seed):
    layer = setting.layer("reference")
    x, mask = setting.batch("reference")
    enabled = torch.rand(setting.experts, generator=torch.Generator().manual_seed(seed)) < 0.6
    counts = layer.router(x, mask, enabled=enabled).counts()
    real = len(x) if mask is None else int(mask.sum())
    assert int(counts.sum()) == min(setting.k, int(enabled.sum())) * real
    assert int(counts[~enabled].sum()) == 0

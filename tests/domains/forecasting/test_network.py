"""Dynamic TMoE: every mechanism acts, and the twin is the same without the router."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.domains.forecasting.network import DynamicTMoE
from zoo.domains.forecasting.network.blocks import (
    CycleProfile,
    PatchEmbedding,
    WindowScale,
    count_patches,
    patches,
    sinusoids,
)
from zoo.domains.forecasting.network.experts import (
    CyclicRelation,
    FluctuationExpert,
    IdentityExpert,
    RelatedExpert,
    SeasonalExpert,
    TrendExpert,
)
from zoo.moe import DenseMixture

L, H, C, CYCLE = 48, 12, 3, 24


def build(seed: int = 0, **options) -> DynamicTMoE:
    torch.manual_seed(seed)
    sizes = {"channels": C, "lookback": L, "horizon": H, "cycle": CYCLE, "width": 8, "patch": 8, "stride": 4}
    return DynamicTMoE(**(sizes | {"router_width": 8, "dropout": 0.0} | options))


def windows(count: int = 4, seed: int = 1, known: int = 0) -> tuple[Tensor, ...]:
    """Past (B, L, C), phase (B,), and known columns if any."""
    generator = torch.Generator().manual_seed(seed)
    past = torch.randn(count, L, C, generator=generator).cumsum(1) / 4
    phase = torch.arange(count) * 5 % CYCLE
    return (past, phase, torch.randn(count, L + H, known, generator=generator)) if known else (past, phase)


def grown(**options) -> DynamicTMoE:
    """A network with all slots on, each seated where it is chosen now and then."""
    net = build(**options)
    for pool, scorer in zip(net.pools(), net.scorers(), strict=True):
        for slot in range(pool.base, pool.num_experts):
            pool.enable(slot, seed=slot)
        with torch.no_grad():
            scorer.out.weight.mul_(4.0)
    return net


# -- instance normalisation


def test_scale_is_the_mean_and_the_biased_deviation_and_restores_exactly():
    past, _ = windows()
    scale = WindowScale.of(past)
    torch.testing.assert_close(scale.std, past.std(1, unbiased=False, keepdim=True))
    normalised = scale.normalise(past)
    torch.testing.assert_close(normalised.mean(1), torch.zeros(4, C), rtol=0, atol=1e-6)
    torch.testing.assert_close(normalised.square().mean(1), torch.ones(4, C), rtol=0, atol=1e-5)
    torch.testing.assert_close(scale.restore(normalised), past, rtol=0, atol=1e-6)


def test_a_channel_without_spread_is_zero_inside_and_its_level_outside():
    past = torch.full((1, L, C), 2.5, requires_grad=True)
    scale = WindowScale.of(past)
    assert torch.equal(scale.normalise(past), torch.zeros(1, L, C))
    assert torch.equal(scale.restore(torch.randn(1, H, C)), torch.full((1, H, C), 2.5))
    (gradient,) = torch.autograd.grad(scale.restore(scale.normalise(past)).sum(), past)
    assert torch.isfinite(gradient).all()


def test_a_constant_channel_is_forecast_as_exactly_that_constant():
    net = grown(known=1)
    torch.nn.init.normal_(net.profile.table)
    past, phase, known = windows(known=1)
    past[:, :, 1] = torch.tensor([0.1, -3.3, 0.0, 700.0])[:, None]
    y = net(past, phase, known).y
    torch.testing.assert_close(y[:, :, 1], past[:, -1:, 1].expand(4, H), rtol=1e-6, atol=0)
    assert torch.equal(y[:, :, 1], y[:, :1, 1].expand(4, H))
    assert y[:, :, 0].std(1).min() > 0


@pytest.mark.parametrize(("a", "b"), [(1.0, 100.0), (3.0, -7.0), (1e-3, 0.0), (50.0, 2.0)])
def test_forecasts_follow_level_and_scale(a, b):
    net = grown(seed=2)
    torch.nn.init.normal_(net.profile.table)
    past, phase = windows()
    expected = a * net(past, phase).y + b
    got = net(a * past + b, phase).y
    assert (got - expected).abs().max() < 2e-4 * (a * past.abs().max() + abs(b))


# -- patches, embedding, profile


@pytest.mark.parametrize(
    ("length", "patch", "stride"), [(48, 8, 4), (48, 16, 8), (96, 96, 96), (50, 7, 3), (5, 2, 1)]
)
def test_patches_against_a_loop(length, patch, stride):
    x = np.arange(2.0 * length).reshape(2, length)
    padded = np.concatenate([x, np.repeat(x[:, -1:], stride, axis=1)], axis=1)
    expected = [padded[:, at : at + patch] for at in range(0, length + stride - patch + 1, stride)]
    cut = patches(torch.tensor(x), patch, stride)
    assert cut.shape[1] == count_patches(length, patch, stride) == len(expected)
    np.testing.assert_array_equal(cut.numpy(), np.stack(expected, axis=1))


def test_embedding_against_its_equation():
    embed = PatchEmbedding(8, 4, L, 6, dropout=0.0)
    x = torch.randn(2, C, L)
    value, gate, linear = embed.maps.weight.chunk(3)
    cut = patches(x, 8, 4)
    expected = cut @ value.T + F.gelu(cut @ gate.T) * (cut @ linear.T) + sinusoids(12, 6)
    torch.testing.assert_close(embed(x), expected)
    assert embed.maps.bias is None


def test_sinusoids():
    code = sinusoids(5, 4)
    position = torch.arange(5.0)
    expected = [position.sin(), position.cos(), (position / 100).sin(), (position / 100).cos()]
    torch.testing.assert_close(code, torch.stack(expected, dim=1))
    assert sinusoids(5, 3).shape == (5, 3)


def test_profile_starts_at_the_phase_and_wraps():
    profile = CycleProfile(2, 4)
    assert torch.equal(profile.table, torch.zeros(4, 2))
    profile.table.data = torch.arange(8.0).reshape(4, 2)
    assert profile(torch.tensor([0, 3]), 5)[:, :, 0].tolist() == [[0, 2, 4, 6, 0], [6, 0, 2, 4, 6]]


def test_the_profile_is_taken_off_the_window_and_put_back_on_the_forecast():
    net = build()
    table = torch.randn(CYCLE, C)
    table = (table - table.mean(0)) / table.std(0, unbiased=False)
    net.profile.table.data = table
    seen: list[Tensor] = []
    net.embed.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    phase = torch.tensor([0, 5])
    past = 2.0 * net.profile(phase, L) + 7.0
    torch.nn.init.zeros_(net.head.weight)
    torch.nn.init.zeros_(net.head.bias)
    y = net(past, phase).y
    torch.testing.assert_close(seen[0], torch.zeros(2, C, L), rtol=0, atol=1e-5)
    torch.testing.assert_close(y, 2.0 * net.profile(phase, L + H)[:, L:] + 7.0, rtol=0, atol=1e-4)


def test_without_profile_and_relation_the_phase_has_no_say_and_with_either_it_has():
    past, phase = windows()
    for options, matters in (
        ({"profile": False, "relation": "none"}, False),
        ({"profile": True, "relation": "none"}, True),
        ({"profile": False, "relation": "all"}, True),
    ):
        net = build(**options)
        if net.profile is not None:
            torch.nn.init.normal_(net.profile.table)
        y = net(past, phase).y
        assert torch.equal(net(past, phase + CYCLE).y, y)
        assert torch.equal(net(past, phase + 1).y, y) != matters


def test_the_phase_of_a_patch_is_that_of_its_first_row():
    net = build()
    past, _ = windows(2)
    context = net.context(past, torch.tensor([0, 23]))
    assert context.phase.tolist() == [[4 * p % 24 for p in range(12)], [(23 + 4 * p) % 24 for p in range(12)]]


def test_the_signature_is_mean_and_spread_of_each_patch():
    net = build()
    past, _ = windows()
    cut = patches(past.transpose(1, 2), 8, 4)
    expected = torch.cat([cut.mean(-1), (cut - cut.mean(-1, keepdim=True)).square().mean(-1).sqrt()], dim=-1)
    torch.testing.assert_close(net.signature(past), expected)


# -- experts and router


def test_the_pool_is_four_kinds_and_drift_slots_that_cycle_three():
    net = build(drift_slots=4)
    assert net.kinds == (
        "identity", "trend", "seasonal", "fluctuation", "trend", "seasonal", "fluctuation", "trend",
    )  # fmt: skip
    (pool,) = net.pools()
    assert [type(expert) for expert in pool.experts[:4]] == [
        IdentityExpert, TrendExpert, SeasonalExpert, FluctuationExpert,
    ]  # fmt: skip
    assert all(isinstance(expert, RelatedExpert) for expert in pool.experts[4:])
    assert pool.enabled.tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize(("relation", "owners"), [("none", 0), ("drift", 3), ("all", 7)])
def test_who_owns_a_relation_between_channels(relation, owners):
    net = build(relation=relation)
    assert sum(isinstance(module, CyclicRelation) for module in net.modules()) == owners


@pytest.mark.parametrize(
    ("relation", "grow", "mixes"),
    [("none", True, False), ("drift", False, False), ("drift", True, True), ("all", False, True)],
)
def test_channels_hear_of_each_other_only_through_the_relation(relation, grow, mixes):
    net = (grown if grow else build)(relation=relation, repository=False)
    past, phase = windows()
    past.requires_grad_()
    (gradient,) = torch.autograd.grad(net(past, phase).y[:, :, 0].square().sum(), past)
    assert gradient[:, :, 0].abs().max() > 0
    assert (gradient[:, :, 1:].abs().max() > 0) == mixes


def test_a_layer_adds_a_normed_projection_of_the_mixture():
    net = build()
    (layer,) = net.layers
    past, phase = windows()
    x, context = torch.randn(4, C, 12, 8), net.context(past, phase)
    y, out = layer(x, context)
    torch.testing.assert_close(y, x + layer.norm(layer.project(out.y)))
    torch.nn.init.zeros_(layer.norm.weight)
    assert torch.equal(layer(x, context)[0], x)


def test_three_of_the_enabled_experts_share_each_patch():
    net = build()
    out = net(*windows()).moe[0].routing
    assert out.index.shape == (4 * C * 12, 3)
    assert out.valid.all()
    assert int(out.index.max()) < 4
    torch.testing.assert_close(out.weight.sum(-1), torch.ones(4 * C * 12), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("router", "remembers"), [("memory", True), ("linear", False)])
def test_the_memory_router_reads_the_patches_in_order_and_the_linear_one_does_not(router, remembers):
    net = build(router=router)
    past, phase = windows()
    layer, context = net.layers[0].mixture, net.context(past, phase)
    tokens = torch.randn(4, C, 12, 8)
    swapped = tokens[:, :, [1, 0, *range(2, 12)]]
    last = [
        layer(x, context=context).routing.logits.reshape(4, C, 12, -1)[:, :, -1, :4]
        for x in (tokens, swapped)
    ]
    assert torch.equal(last[0], last[1]) != remembers


def test_a_window_is_forecast_without_regard_to_its_batch_mates():
    net = grown(layers=2).eval()
    past, phase = windows()
    whole = net(past, phase).y
    for row in range(4):
        alone = net(past[row : row + 1], phase[row : row + 1]).y[0]
        torch.testing.assert_close(alone, whole[row], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"router": "linear"}, {"relation": "all"}, {"layers": 2}, {"dense": True}]
)
def test_every_parameter_of_what_is_on_learns_and_what_is_off_gets_zeros(options):
    net = build(known=2, top_k=4, **options)
    net(*windows(16, known=2)).y.square().sum().backward()
    off = tuple(f"experts.experts.{slot}." for slot in range(4, 7)) if not options.get("dense") else ()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        # An empty repository has nothing to fuse.
        asleep = "memory.fuse" in name or any(part in name for part in off)
        assert (parameter.grad.abs().max() == 0) == asleep, name


def test_dropout_acts_in_training_alone():
    net = build(dropout=0.3)
    past, phase = windows()
    assert not torch.equal(net(past, phase).y, net(past, phase).y)
    net.eval()
    assert torch.equal(net(past, phase).y, net(past, phase).y)


# -- dense twin


def test_the_twin_has_the_same_experts_and_a_constant_in_place_of_the_router():
    model, twin = build(layers=2), build(layers=2, dense=True)
    assert twin.pools() == twin.scorers() == []
    assert twin(*windows()).moe == []
    for ours, theirs in zip(model.layers, twin.layers, strict=True):
        assert isinstance(theirs.mixture, DenseMixture)
        experts = {name: p.shape for name, p in ours.mixture.experts.experts.named_parameters()}
        assert {name: p.shape for name, p in theirs.mixture.experts.named_parameters()} == experts
        assert theirs.mixture.mixing.shape == (7,)
    router = sum(p.numel() for layer in model.layers for p in layer.mixture.router.parameters())
    total = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in twin.parameters()) == total - router + 2 * 7
    assert not any("router" in name for name, _ in twin.named_modules())


# -- known-future columns


def test_known_columns_are_asked_for():
    with pytest.raises(ValueError, match="known"):
        build(known=1)(*windows())


def test_known_columns_reach_the_forecast_before_any_training():
    net = build(known=2)
    past, phase, known = windows(known=2)
    assert net.known.ahead.weight.abs().max() > 0
    shuffled = known[:, torch.randperm(L + H)]
    assert (net(past, phase, known).y - net(past, phase, shuffled).y).abs().max() > 1e-3


def test_a_flag_that_rises_only_in_the_horizon_is_seen():
    net = build(known=1)
    past, phase = windows()
    quiet, flagged = torch.zeros(4, L + H, 1), torch.zeros(4, L + H, 1)
    flagged[:, L + 3 :] = 1.0
    assert (net(past, phase, flagged).y - net(past, phase, quiet).y).abs().max() > 1e-3


def test_training_learns_what_known_columns_say_and_a_wrong_order_of_time_hurts():
    # The future is noise, but for a known column that tells it; the past says nothing.
    torch.manual_seed(0)
    known = torch.randn(256, L + H, 1)
    past = torch.randn(256, L, C)
    future = past.mean(1, keepdim=True) + known[:, L:] * torch.tensor([1.0, -1.0, 0.5])
    future[:, :, 1:] = future[:, :, :1]
    net, phase = build(known=1, relation="none"), torch.zeros(256, dtype=torch.int64)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for step in range(40):
        part = slice(step % 4 * 64, step % 4 * 64 + 64)
        loss = (net(past[part], phase[part], known[part]).y - future[part]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert net.known.token.weight.abs().max() > 0
    with torch.no_grad():
        right = (net(past, phase, known).y - future).square().mean()
        permuted = known[:, torch.randperm(L + H)]
        wrong = (net(past, phase, permuted).y - future).square().mean()
    assert right < 0.5 * future.var()
    assert wrong > 2 * right


def test_known_columns_reach_the_router_through_the_tokens():
    net = build(known=1)
    past, phase, known = windows(known=1)
    torch.nn.init.normal_(net.known.token.weight)
    other = known.clone()
    other[:, :L] = known[:, :L].flip(1)
    first, second = net(past, phase, known).moe[0].routing, net(past, phase, other).moe[0].routing
    assert (first.logits - second.logits)[:, :4].abs().max() > 1e-4


# -- shares


def test_shares_sum_to_one_and_leave_out_what_is_off():
    net = build(layers=2)
    forecast = net(*windows())
    shares = net.shares(forecast)
    assert shares.shape == (4, C, H, 7)
    torch.testing.assert_close(shares.sum(-1), torch.ones(4, C, H), rtol=0, atol=1e-5)
    assert torch.equal(shares[..., 4:], torch.zeros(4, C, H, 3))
    assert (shares >= 0).all()


def test_a_share_counts_patches_by_the_head_s_reach():
    net = build()
    net.head.weight.data.zero_()
    reach = net.head.weight.data.reshape(H, 12, 8)
    reach[:, 3] = 1.0  # only patch 3 speaks, but for step 0, which hears patches 3 and 7 alike
    reach[0, 7] = -1.0
    forecast = net(*windows())
    weight = forecast.moe[0].routing.dense_weight().reshape(4, C, 12, 7)
    shares = net.shares(forecast)
    torch.testing.assert_close(shares[:, :, 5], weight[:, :, 3], rtol=0, atol=1e-6)
    torch.testing.assert_close(shares[:, :, 0], (weight[:, :, 3] + weight[:, :, 7]) / 2, rtol=0, atol=1e-6)


# -- state and construction


def test_the_state_dict_rebuilds_topology_and_forecast_strictly():
    net = build(layers=2)
    net.pools()[0].enable(5, seed=0)
    net.pools()[1].enable(4, seed=0)
    net.scorers()[0].memory.write(0, torch.randn(2, 24), torch.randn(2, 8))
    with torch.no_grad():
        for scorer in net.scorers():
            scorer.out.bias[4:] = 3.0
    past, phase = windows()
    other = build(seed=9, layers=2)
    assert not torch.equal(other(past, phase).y, net(past, phase).y)
    other.load_state_dict(net.state_dict(), strict=True)
    assert [pool.enabled.tolist() for pool in other.pools()] == [
        [True] * 4 + [False, True, False], [True] * 5 + [False, False],
    ]  # fmt: skip
    assert torch.equal(other(past, phase).y, net(past, phase).y)
    with pytest.raises(RuntimeError, match="size mismatch"):
        build(layers=2, drift_slots=2).load_state_dict(net.state_dict(), strict=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch": 64}, "patch=64, lookback=48"),
        ({"stride": 9}, "stride=9, patch=8"),
        ({"stride": 0}, "stride=0"),
        ({"base": ("identity", "wavelet")}, "wavelet"),
        ({"base": ()}, "must name at least one"),
        ({"top_k": 5}, "top_k=5 must lie in 2..4"),
        ({"top_k": 1}, "top_k=1 must lie in 2..4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_their_values(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)

"""Growth: one expert of the right kind, seated where it is chosen, and nothing else touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from zoo.data.forecasting.windows import WindowBatch, Windows
from zoo.domains.forecasting.growth import GrowthSettings, forget, grow, prune, regime_windows, residuals
from zoo.domains.forecasting.network import DynamicTMoE

L, H, C = 48, 24, 3
SLOT = {"trend": 4, "seasonal": 5, "fluctuation": 6}
QUICK = GrowthSettings(windows=32, steps=8, patience=3, lr=3e-3)


def build(seed: int = 0, **options) -> DynamicTMoE:
    torch.manual_seed(seed)
    sizes = {"channels": C, "lookback": L, "horizon": H, "cycle": 24, "width": 8, "patch": 8, "stride": 4}
    return DynamicTMoE(**(sizes | {"router_width": 8, "dropout": 0.2, "layers": 2} | options))


def regime(kind: str, count: int = 32, seed: int = 0) -> WindowBatch:
    """Noise, and a pattern that only the future shows: what the residuals of any forecaster will hold."""
    generator = torch.Generator().manual_seed(seed)
    step = torch.arange(1.0, H + 1)
    pattern = {
        "trend": step / 6,
        "seasonal": 2 * torch.sin(2 * np.pi * step / 12),
        "fluctuation": 2 * torch.cos(np.pi * step),
    }[kind]
    x = 0.3 * torch.randn(count, L + H, C, generator=generator)
    x[:, L:] += pattern[:, None]
    index = torch.arange(count)
    scored = torch.ones(count, H, C, dtype=torch.bool)
    return WindowBatch(index=index, past=x[:, :L], future=x[:, L:], scored=scored, phase=index % 24)


def loss(net: DynamicTMoE, batch: WindowBatch) -> float:
    """Mean squared error without dropout."""
    training = net.training
    with torch.no_grad():
        error = (net.eval()(batch.past, batch.phase, batch.known).y - batch.future)[batch.scored]
    net.train(training)
    return float(error.square().mean())


def optimizer_after(net: DynamicTMoE, batch: WindowBatch, steps: int = 3) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        (net(batch.past, batch.phase).y - batch.future).abs().mean().backward()
        optimizer.step()
    return optimizer


def state(net: DynamicTMoE) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def fresh_optimizer(net: DynamicTMoE) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=1e-3)


@pytest.mark.parametrize("kind", ["trend", "seasonal", "fluctuation"])
@pytest.mark.parametrize("router", ["memory", "linear"])
def test_one_slot_of_the_kind_that_the_residuals_hold_is_switched_on_per_layer(kind, router):
    net, batch = build(router=router), regime(kind)
    event = grow(net, batch, QUICK, 7, fresh_optimizer(net))
    slot = SLOT[kind]
    assert (event["action"], event["kind"], event["slots"]) == ("enabled", kind, [slot, slot])
    assert event["scores"][kind] == max(event["scores"].values())
    expected = [True] * 4 + [index == slot for index in range(4, 7)]
    assert [pool.enabled.tolist() for pool in net.pools()] == [expected, expected]


@pytest.mark.parametrize("kind", ["trend", "seasonal", "fluctuation"])
def test_everything_but_the_new_expert_and_its_place_in_the_router_stays_bit_equal(kind):
    net, batch = build(), regime(kind)
    before = state(net)
    grow(net, batch, QUICK, 7, fresh_optimizer(net))
    slot = SLOT[kind]
    for name, value in net.state_dict().items():
        if f"experts.experts.{slot}." in name or name.endswith("experts.enabled"):
            continue
        same = torch.ones(len(value), dtype=torch.bool) if value.ndim else torch.tensor(True)
        if name.endswith(("scorer.out.weight", "scorer.out.bias")):
            same[slot] = False
            assert not torch.equal(value[slot], before[name][slot]), name
        assert torch.equal(value[same], before[name][same]), name


@pytest.mark.parametrize("kind", ["trend", "seasonal", "fluctuation"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_regime_is_forecast_better_and_the_new_expert_has_a_share_in_it(kind, seed):
    net, batch = build(seed), regime(kind, seed=seed)
    net.train()
    before = loss(net, batch)
    event = grow(net, batch, QUICK, seed, fresh_optimizer(net))
    after = loss(net, batch)
    assert event["loss_before"] == pytest.approx(before, rel=1e-5)
    assert event["loss_after"] == pytest.approx(after, rel=1e-5)
    assert after < before
    assert net.training
    for out in net.eval()(batch.past, batch.phase).moe:
        share = out.routing.dense_weight()[:, SLOT[kind]].mean()
        assert 0.02 < share < 0.6


def test_a_new_expert_keeps_its_place_even_where_the_network_knows_the_regime():
    net, batch = build(), regime("seasonal")
    optimizer_after(net, batch, steps=60)
    event = grow(net, batch, QUICK, 3, fresh_optimizer(net))
    for layer, out in enumerate(net.eval()(batch.past, batch.phase).moe):
        assert out.routing.dense_weight()[:, event["slots"][layer]].mean() > 0.02


def test_a_new_expert_gets_a_gradient_from_the_first_batch_on():
    net, batch = build(), regime("trend")
    grow(net, batch, QUICK, 3, fresh_optimizer(net))
    net.train()
    (net(batch.past, batch.phase).y - batch.future).abs().mean().backward()
    for pool, scorer in zip(net.pools(), net.scorers(), strict=True):
        for name, parameter in pool.experts[4].named_parameters():
            assert parameter.grad.abs().max() > 0, name
        assert scorer.out.weight.grad[4].abs().max() > 0


def test_what_the_optimiser_remembers_of_the_slot_is_cleared_and_of_the_others_kept():
    net, batch = build(), regime("trend")
    optimizer = optimizer_after(net, batch)
    names = {parameter: name for name, parameter in net.named_parameters()}
    before = {names[p]: {key: value.clone() for key, value in s.items()} for p, s in optimizer.state.items()}
    grow(net, batch, QUICK, 7, optimizer)
    after = {names[p]: s for p, s in optimizer.state.items()}
    gone = set(before) - set(after)
    assert gone == {name for name in before if ".experts.experts.4." in name}
    for name, kept in after.items():
        for key, value in kept.items():
            rows = torch.ones(value.shape[:1], dtype=torch.bool)
            if name.endswith(("scorer.out.weight", "scorer.out.bias")) and key != "step":
                rows[4] = False
                assert torch.equal(value[4], torch.zeros_like(value[4])), name
            assert torch.equal(value[rows], before[name][key][rows]) if value.ndim else True, name
    assert all(parameter.grad is None for pool in net.pools() for parameter in pool.experts[4].parameters())
    optimizer.zero_grad()
    (net(batch.past, batch.phase).y - batch.future).abs().mean().backward()
    optimizer.step()
    assert all(torch.isfinite(parameter).all() for parameter in net.parameters())


def test_forgetting_takes_only_the_layers_that_name_a_slot():
    net, batch = build(), regime("trend")
    optimizer = optimizer_after(net, batch)
    forget(optimizer, net, [None, 5])
    first, second = (next(pool.experts[5].parameters()) for pool in net.pools())
    assert first in optimizer.state
    assert second not in optimizer.state


def test_growth_is_a_function_of_network_windows_and_seed():
    batch = regime("seasonal")
    results = []
    for seed, noise in ((7, 0), (7, 1), (8, 0)):
        net = build().train()
        torch.manual_seed(noise)
        event = grow(net, batch, QUICK, seed, fresh_optimizer(net))
        results.append((event, state(net)))
    (event, first), (again, second), (_, other) = results
    assert event == again
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_layers_start_their_slots_with_different_weights():
    net = build(relation="none")
    grow(net, regime("trend"), GrowthSettings(steps=0), 7, fresh_optimizer(net))
    first, second = (pool.experts[4].net[0].weight for pool in net.pools())
    assert not torch.equal(first, second)


def test_no_expert_is_added_beyond_the_slots_of_its_kind():
    net, batch = build(drift_slots=4), regime("trend")
    slots = [grow(net, batch, QUICK, seed, fresh_optimizer(net)).get("slots") for seed in range(3)]
    assert slots == [[4, 4], [7, 7], [None, None]]
    before = state(net)
    event = grow(net, batch, QUICK, 9, fresh_optimizer(net))
    assert event["action"] == "no free slot"
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert [int(pool.enabled.sum()) for pool in net.pools()] == [6, 6]


def test_a_layer_whose_slot_is_taken_is_left_out():
    net = build()
    net.pools()[0].enable(4, seed=0)
    event = grow(net, regime("trend"), QUICK, 7, fresh_optimizer(net))
    assert event["slots"] == [None, 4]


def test_residuals_are_in_units_of_the_window_and_leave_out_what_the_file_did_not_hold():
    net, batch = build(), regime("trend", count=4)
    batch.scored[1, 5, 2] = False
    error = residuals(net.train(), batch)
    assert net.training
    y = net.eval()(batch.past, batch.phase).y
    spread = batch.past.std(1, unbiased=False)
    assert error.shape == (4, C, H)
    assert error[1, 2, 5] == 0.0
    torch.testing.assert_close(error[2, 1], (batch.future - y)[2, :, 1] / spread[2, 1], rtol=1e-5, atol=1e-5)


# -- pruning


def grown() -> DynamicTMoE:
    net = build()
    for pool in net.pools():
        for slot in (4, 5):
            pool.enable(slot, seed=0)
    return net


def test_the_drift_slot_that_idled_longest_leaves_each_layer():
    net = grown()
    idle = [[9, 9, 0, 0, 3, 5, 9], [0, 0, 0, 0, 2, 1, 9]]
    assert prune(net, idle, patience=3) == [(0, 5)]
    assert net.pools()[0].enabled.tolist() == [True] * 5 + [False] * 2
    assert net.pools()[1].enabled.tolist() == [True] * 6 + [False]


def test_of_equally_idle_slots_the_lower_leaves():
    assert prune(grown(), [[0, 0, 0, 0, 4, 4, 0], [0] * 7], patience=3) == [(0, 4)]


def test_base_experts_and_experts_that_work_stay():
    net = grown()
    assert prune(net, [[99, 99, 99, 99, 2, 2, 99]] * 2, patience=3) == []
    assert [pool.enabled.tolist() for pool in net.pools()] == [[True] * 6 + [False]] * 2


def test_a_pruned_slot_can_be_grown_again():
    net = grown()
    prune(net, [[0, 0, 0, 0, 9, 0, 0]] * 2, patience=3)
    assert grow(net, regime("trend"), QUICK, 1, fresh_optimizer(net))["slots"] == [4, 4]


# -- windows of a regime


def series(rows: int = 300, first: int = 20) -> Windows:
    values = torch.arange(float(rows))[:, None].expand(rows, C)
    return Windows(
        values=values,
        observed=torch.ones(rows, C, dtype=torch.bool),
        known=None,
        phase=torch.arange(rows) % 24,
        first=first,
        count=rows - first - L - H + 1,
        lookback=L,
        horizon=H,
    )


@pytest.mark.parametrize(
    ("start", "stop", "limit"), [(100, 250, 1000), (100, 250, 16), (0, 300, 7), (100, 172, 5)]
)
def test_regime_windows_lie_inside_the_regime_and_are_spread_over_it(start, stop, limit):
    batch = regime_windows(series(), start, stop, limit)
    first, last = batch.past[:, 0, 0], batch.future[:, -1, 0]
    assert first.min() == max(start, 20)
    assert last.max() == stop - 1
    assert len(first) == min(limit, stop - L - H - max(start, 20) + 1)
    assert int(first.diff().max() - first.diff().min()) <= 1 if len(first) > 1 else True


def test_a_regime_shorter_than_a_window_has_none():
    assert regime_windows(series(), 100, 100 + L + H - 1, 16) is None
    assert regime_windows(series(), 0, 50, 16) is None

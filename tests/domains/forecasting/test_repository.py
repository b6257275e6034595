"""The anomaly repository: what it recalls, what it leaves alone, and that reading never writes."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor, nn

from zoo.data.forecasting.windows import WindowBatch
from zoo.domains.forecasting.growth import remember, residuals
from zoo.domains.forecasting.network import DynamicTMoE
from zoo.domains.forecasting.network.repository import AnomalyRepository
from zoo.moe import Context

UNIT = torch.eye(4)


def repository(**options) -> AnomalyRepository:
    """Signatures of four numbers, states of five; three entries for each of two regimes."""
    torch.manual_seed(0)
    return AnomalyRepository(4, 5, **({"capacity": 3, "regimes": 2} | options))


def digest(module: nn.Module) -> str:
    """A hash of every parameter and buffer."""
    total = hashlib.sha256()
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        total.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def network(seed: int = 0, **options) -> DynamicTMoE:
    torch.manual_seed(seed)
    sizes = {"channels": 3, "lookback": 48, "horizon": 12, "cycle": 24, "width": 8, "patch": 8, "stride": 4}
    return DynamicTMoE(**(sizes | {"router_width": 8, "dropout": 0.1, "layers": 2} | options))


def batch(windows: int = 6) -> WindowBatch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(windows, 60, 3, generator=generator)
    scored = torch.ones(windows, 12, 3, dtype=torch.bool)
    index = torch.arange(windows)
    return WindowBatch(index=index, past=x[:, :48], future=x[:, 48:], scored=scored, phase=index % 24)


def test_an_empty_repository_changes_nothing():
    states = torch.randn(2, 3, 7, 5)
    assert torch.equal(repository()(states, Context(features=torch.randn(2, 3, 4))), states)


def test_a_known_situation_draws_the_states_to_the_stored_one_and_others_stay():
    memory = repository()
    stored = torch.randn(1, 5)
    memory.write(0, 3.0 * UNIT[:1], stored)
    states = torch.randn(2, 7, 5)
    features = torch.stack([torch.tensor([5.0, 0.5, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0, 0.0])])
    y = memory(states, Context(features=features))
    assert torch.equal(y[1], states[1])
    keep = torch.sigmoid(memory.fuse(torch.cat([states[0], stored.expand(7, 5)], dim=-1)))
    torch.testing.assert_close(y[0], keep * states[0] + (1 - keep) * stored)
    assert (y[0] - states[0]).abs().max() > 1e-2
    assert ((y[0] - stored).norm(dim=-1) < (states[0] - stored).norm(dim=-1)).all()


@pytest.mark.parametrize(("cosine", "known"), [(0.95, True), (0.85, False), (-1.0, False)])
def test_the_threshold_decides_what_is_known(cosine, known):
    memory = repository(threshold=0.9)
    memory.write(0, UNIT[:1], torch.ones(1, 5))
    feature = torch.tensor([cosine, (1 - cosine**2) ** 0.5, 0.0, 0.0])
    _, match = memory.recall(10.0 * feature)
    assert bool(match) == known


def test_the_most_similar_entry_is_recalled():
    memory = repository(threshold=0.5)
    memory.write(0, UNIT[:3], torch.arange(3.0)[:, None].expand(3, 5))
    state, match = memory.recall(torch.tensor([[0.1, 1.0, 0.0, 0.0], [0.0, 0.2, 2.0, 0.0]]))
    assert state[:, 0].tolist() == [1.0, 2.0]
    assert match.tolist() == [True, True]


def test_writing_replaces_the_block_of_its_regime_and_the_oldest_regime_goes_first():
    memory = repository()
    memory.write(0, UNIT, torch.full((4, 5), 1.0))
    assert memory.filled.tolist() == [True] * 3 + [False] * 3
    memory.write(1, UNIT[:2], torch.full((2, 5), 2.0))
    assert memory.filled.tolist() == [True] * 5 + [False]
    memory.write(2, UNIT[:1], torch.full((1, 5), 3.0))
    assert memory.filled.tolist() == [True, False, False, True, True, False]
    assert memory.states[:, 0].tolist() == [3.0, 1.0, 1.0, 2.0, 2.0, 0.0]
    # What stands in a cleared entry is not recalled: the second signature is regime 1's alone.
    assert memory.recall(UNIT[1])[0][0] == 2.0


def test_entries_are_buffers_and_the_fusion_is_learned():
    memory = repository()
    memory.write(0, UNIT[:1], torch.ones(1, 5))
    assert {name for name, _ in memory.named_buffers()} == {"signatures", "states", "filled"}
    assert not memory.states.requires_grad
    memory(torch.randn(1, 7, 5), Context(features=UNIT[:1])).square().sum().backward()
    for name, parameter in memory.fuse.named_parameters():
        assert parameter.grad.abs().max() > 0, name
    other = repository()
    other.load_state_dict(memory.state_dict(), strict=True)
    assert torch.equal(other.states, memory.states)


@pytest.mark.parametrize("threshold", [-1.0, 1.0])
def test_a_threshold_that_matches_all_or_nothing_is_refused(threshold):
    with pytest.raises(ValueError, match=f"threshold={threshold}"):
        repository(threshold=threshold)


def test_signatures_are_needed():
    with pytest.raises(ValueError, match=r"context\.features"):
        repository()(torch.randn(1, 7, 5), None)


@pytest.mark.parametrize("training", [False, True])
def test_a_forecast_never_writes(training):
    net, data = network().train(training), batch()
    remember(net, data, 1, None)
    before = digest(net)
    net(data.past, data.phase).y.sum()
    assert digest(net) == before


def forecasts(net: DynamicTMoE, past: Tensor, phase: Tensor) -> tuple[Tensor, Tensor]:
    """Forecast, and the first layer's routing logits per sequence."""
    out = net.eval()(past, phase)
    return out.y, out.moe[0].routing.logits.reshape(len(past), 3, net.num_patches, -1)


def test_remembering_changes_the_routing_of_the_sequences_it_stored_and_of_no_others():
    net, data = network(), batch()
    before, logits_before = forecasts(net, data.past, data.phase)
    picks = remember(net, data, 1, [(2, 0), (4, 1)])
    assert picks == [(2, 0), (4, 1)]
    after, logits_after = forecasts(net, data.past, data.phase)
    enabled = net.pools()[0].enabled
    moved = (logits_after - logits_before)[..., enabled].abs().amax(dim=(-1, -2)) > 0
    assert moved.nonzero().tolist() == [[2, 0], [4, 1]]
    unchanged = [window for window in range(6) if window not in (2, 4)]
    assert torch.equal(after[unchanged], before[unchanged])
    assert not torch.equal(after[2, :, 0], before[2, :, 0])


def test_the_worst_forecasts_are_remembered():
    net, data = network(), batch()
    data.future[3, :, 2] += 50.0
    data.future[0, :, 1] -= 20.0
    picks = remember(net, data, 1, None)
    assert picks[:2] == [(3, 2), (0, 1)]
    assert len(picks) == 10
    for scorer in net.scorers():
        assert scorer.memory.filled.sum() == 10
        torch.testing.assert_close(scorer.memory.signatures[10:20].norm(dim=-1), torch.ones(10))
    size = residuals(net, data).square().mean(-1)
    values = [float(size[pick]) for pick in picks]
    assert values == sorted(values, reverse=True)


def test_what_is_stored_is_the_state_after_the_last_patch_before_any_recall():
    net, data = network(), batch()
    remember(net, data, 1, [(2, 0)])
    for scorer, states in zip(net.scorers(), net.router_states(data.past, data.phase), strict=True):
        stored = scorer.memory.states[scorer.memory.capacity]
        assert stored.abs().max() > 0
        if scorer is net.scorers()[0]:
            torch.testing.assert_close(stored, states[2, 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{"repository": False}, {"router": "linear"}, {"dense": True}])
def test_networks_without_a_repository_remember_nothing(options):
    assert remember(network(**options), batch(), 1, None) == []

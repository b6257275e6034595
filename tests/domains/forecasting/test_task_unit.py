"""ForecastingTask without a trainer: losses by hand, networks by name, and the clock of growth."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning import seed_everything
from torch import Tensor

from zoo.data.forecasting.windows import WindowBatch, Windows
from zoo.domains.forecasting.network import DynamicTMoE, Forecast
from zoo.domains.forecasting.network.peers import DLinear, PatchTST
from zoo.domains.forecasting.network.repository import AnomalyRepository
from zoo.domains.forecasting.task import ForecastingTask
from zoo.moe import LinearScorer, RecurrentScorer

L, H, C = 48, 12, 2
FACTS: dict[str, Any] = {"channels": C, "lookback": L, "horizon": H}


def task(**options) -> ForecastingTask:
    settings = {"width": 8, "router_width": 8, "patch": 8, "stride": 4, "dropout": 0.0}
    made = ForecastingTask(**(settings | options))
    made.build(ForecastingTask.example_spec(**FACTS))
    return made


def batch(count: int = 4) -> WindowBatch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, L + H, C, generator=generator)
    scored = torch.ones(count, H, C, dtype=torch.bool)
    index = torch.arange(count)
    return WindowBatch(index=index, past=x[:, :L], future=x[:, L:], scored=scored, phase=index % 24)


class Answer(torch.nn.Module):
    """A network that says what it was told."""

    def __init__(self, y: Tensor) -> None:
        super().__init__()
        self.y = y

    def forward(self, past, phase, known):
        return Forecast(y=self.y)


@pytest.mark.parametrize(
    ("network", "kind", "module"),
    [
        ("dynamic_tmoe", "model", DynamicTMoE),
        ("dynamic_tmoe_dense", "twin", DynamicTMoE),
        ("dlinear", "baseline", DLinear),
        ("patchtst", "baseline", PatchTST),
    ],
)
def test_each_row_of_the_table_is_a_network_of_the_same_task(network, kind, module):
    made = task(network=network)
    assert isinstance(made.net, module)
    assert made.kind() == kind
    assert made.setting()["horizon"] == H
    assert made(batch()).y.shape == (4, H, C)
    assert made.growth == (network == "dynamic_tmoe")


def test_switches_reach_the_network():
    assert isinstance(task().net.scorers()[0], RecurrentScorer)
    assert isinstance(task().net.scorers()[0].memory, AnomalyRepository)
    assert task(repository=False).net.scorers()[0].memory is None
    assert isinstance(task(router="linear").net.scorers()[0], LinearScorer)
    assert task(profile=False).net.profile is None
    assert task(drift_slots=1).net.kinds[4:] == ("trend",)
    assert not task(drift_slots=0).growth
    assert not task(growth=False).growth
    homogeneous = task(experts=("trend",) * 4)
    assert homogeneous.net.kinds[:4] == ("trend",) * 4
    assert task(patch=999, stride=500).net.patch == L


@pytest.mark.parametrize(("loss", "value"), [("mae", 1.5), ("mse", 3.0), ("huber", 1.0)])
def test_the_loss_is_a_mean_over_scored_cells(loss, value):
    # Errors 1, 1, 1 and 3 where there was truth, and a wild one where there was none.
    made, data = task(loss=loss), batch(1)
    data.scored[:] = False
    data.scored[0, :2] = True
    error = torch.full((1, H, C), 1e6)
    error[0, :2] = torch.tensor([[1.0, -1.0], [1.0, 3.0]])
    made.net = Answer(data.future + error)
    losses = made.training_loss(data)
    assert list(losses.named) == [loss]
    assert losses.named[loss].item() == pytest.approx(value, rel=1e-5)
    assert losses.moe == []


def test_a_batch_without_any_truth_costs_nothing():
    made, data = task(), batch(1)
    data.scored[:] = False
    assert made.training_loss(data).named["mae"].item() == 0.0


def test_evaluation_keeps_index_and_sums_and_scores_their_mean():
    made, data = task(), batch(3)
    made.net = Answer(data.future + torch.tensor([1.0, 2.0, 0.0])[:, None, None])
    stats = made.evaluate(data)
    assert stats["index"].tolist() == [0, 1, 2]
    assert all(len(value) == 3 for value in stats.values())
    scored = made.score(stats)
    assert scored["mae"] == pytest.approx(1.0, rel=1e-5)
    assert scored["mse"] == pytest.approx(5 / 3, rel=1e-5)


def test_slots_that_are_off_are_no_active_parameters():
    made = task()
    total, active = made.count_parameters()
    (pool,) = made.net.pools()
    sizes = [sum(p.numel() for p in expert.parameters()) for expert in pool.experts]
    assert total == sum(p.numel() for p in made.parameters())
    assert active == total - sum(sizes[4:])
    pool.enable(5, seed=0)
    assert made.count_parameters() == (total, active + sizes[5])
    twin_total, twin_active = task(network="dynamic_tmoe_dense").count_parameters()
    assert twin_total == twin_active


def test_initial_weights_depend_on_the_global_seed_alone(monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    made = []
    for seed, draws in ((0, 0), (0, 5), (1, 0)):
        seed_everything(seed, verbose=False)
        torch.rand(draws)
        made.append(task().state_dict())
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert any(not torch.equal(made[0][name], made[2][name]) for name in made[0])


# -- the clock of growth


class Data:
    """As much of the datamodule as the clock looks at: one series of noise."""

    def __init__(self, rows: int = 600) -> None:
        self.borders = SimpleNamespace(train=(0, rows))
        self.windows = Windows(
            values=torch.randn(rows, C, generator=torch.Generator().manual_seed(0)),
            observed=torch.ones(rows, C, dtype=torch.bool),
            known=None,
            phase=torch.arange(rows) % 24,
            first=0,
            count=rows - L - H + 1,
            lookback=L,
            horizon=H,
        )

    def dataset(self, split: str) -> Windows:
        assert split == "train"
        return self.windows


def clocked(epoch: int = 1, rows: tuple[int, ...] = (200, 400), **options) -> ForecastingTask:
    """A task in the middle of a training, with change points at these rows."""
    made = task(**options)
    made.change_points = [{"row": row, "time": f"t{row}", "p_value": 0.005} for row in rows]
    made._trainer = SimpleNamespace(
        datamodule=Data(),
        optimizers=[torch.optim.AdamW(made.parameters(), lr=1e-3)],
        current_epoch=epoch,
        is_global_zero=True,
        world_size=1,
    )
    return made


def next_epoch(made: ForecastingTask) -> None:
    made._trainer.current_epoch += 1
    made.on_train_epoch_start()


def test_one_change_point_per_epoch_in_time_order_after_the_warm_up():
    made = clocked(epoch=-1, warmup_epochs=1)
    handled = []
    for _ in range(4):
        next_epoch(made)
        handled.append([event["row"] for event in made.events if "row" in event])
    assert handled == [[], [200], [200, 400], [200, 400]]
    assert [event["epoch"] for event in made.events if "row" in event] == [1, 2]
    assert {"kind", "scores", "p_value", "time", "loss_before", "loss_after"} <= set(made.events[0])
    assert sorted(made.memories) == [1, 2]


def test_each_change_fills_its_own_block_of_the_repository():
    made = clocked(epoch=0)
    memory = made.net.scorers()[0].memory
    assert not memory.filled.any()
    next_epoch(made)
    block = memory.filled.reshape(memory.regimes, memory.capacity).all(1)
    assert block.nonzero().flatten().tolist() == [1]
    next_epoch(made)
    block = memory.filled.reshape(memory.regimes, memory.capacity).all(1)
    assert block.nonzero().flatten().tolist() == [1, 2]


def test_stored_states_follow_the_weights_from_epoch_to_epoch():
    made = clocked(epoch=0, rows=(200,))
    next_epoch(made)
    memory = made.net.scorers()[0].memory
    states, signatures, picks = memory.states.clone(), memory.signatures.clone(), made.memories[1]
    with torch.no_grad():
        made.net.scorers()[0].project.weight.mul_(2.0)
    next_epoch(made)
    assert made.memories[1] == picks
    assert torch.equal(memory.signatures, signatures)
    assert not torch.equal(memory.states, states)


def test_a_change_too_near_the_next_is_logged_and_adds_nothing():
    made = clocked(epoch=0, rows=(200, 230))
    next_epoch(made)
    assert made.events[0]["action"] == "regime shorter than a window"
    assert made.net.pools()[0].enabled.tolist() == [True] * 4 + [False] * 3


def test_without_growth_the_clock_stands():
    made = clocked(growth=False)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    next_epoch(made)
    assert made.events == []
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())


def test_idle_experts_are_pruned_by_the_clock():
    made = clocked(epoch=0, rows=(), prune_patience=3)
    made.net.pools()[0].enable(5, seed=0)
    made.idle = [[0, 0, 0, 0, 0, 3, 0]]
    next_epoch(made)
    assert made.events == [{"epoch": 1, "action": "pruned", "layer": 0, "slot": 5}]
    assert made.net.pools()[0].enabled.tolist() == [True] * 4 + [False] * 3


def test_the_clock_travels_in_the_checkpoint():
    made = clocked(epoch=0)
    next_epoch(made)
    checkpoint: dict[str, Any] = {"state_dict": made.state_dict(), "hyper_parameters": dict(made.hparams)}
    made.on_save_checkpoint(checkpoint)
    other = ForecastingTask.from_checkpoint(checkpoint)
    assert other.events == made.events
    assert other.memories == made.memories
    assert other.change_points == made.change_points
    assert other.spec == made.spec
    assert torch.equal(other.net.pools()[0].enabled, made.net.pools()[0].enabled)
    assert torch.equal(other(batch()).y, made.eval()(batch()).y)

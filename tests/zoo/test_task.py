"""ZooTask with the forecasting task in it: evaluation, order, resume, refusals, and two processes as one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn

from tests.cases.commands import Done, losses, results, three_regimes, train, write
from zoo.data.forecasting.module import ForecastingData
from zoo.data.module import epoch_order
from zoo.domains.forecasting import metrics
from zoo.domains.forecasting.network import Forecast
from zoo.domains.forecasting.task import ForecastingTask
from zoo.errors import UserError
from zoo.runs import load_checkpoint
from zoo.task import Losses, derive_seed

SMALL = {"width": 8, "layers": 1, "patch": 8, "stride": 8, "router_width": 8, "dropout": 0.1, "growth": False}

Start = Callable[..., pl.Trainer]


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


@pytest.fixture
def waves(tmp_path: Path) -> Path:
    time = np.arange(240)
    return write(tmp_path / "waves.csv", a=np.sin(time / 3), b=np.cos(time / 5))


def data_of(path: Path, **settings: Any) -> ForecastingData:
    return ForecastingData(path=str(path), **({"lookback": 24, "horizon": 6, "batch_size": 32} | settings))


def trainer(folder: Path, epochs: int = 1, *callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    """A quiet trainer that keeps its last epoch and, by the task's metric, its best in a folder."""
    keep = {"dirpath": folder, "enable_version_counter": False}
    task = ForecastingTask
    best = ModelCheckpoint(filename="best", monitor=task.monitor, mode=task.monitor_mode, **keep)
    last = ModelCheckpoint(filename="last", save_on_train_epoch_end=True, **keep)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=[*callbacks, best, last],
        default_root_dir=folder,
        **(quiet | settings),
    )


class Orders(pl.Callback):
    """Keeps the sample numbers of every training epoch."""

    def __init__(self) -> None:
        self.seen: dict[int, list[int]] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.setdefault(trainer.current_epoch, []).extend(batch.index.tolist())


class Naive(nn.Module):
    """Repeats the last value."""

    def __init__(self, horizon: int) -> None:
        super().__init__()
        self.horizon = horizon
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, past: Tensor, phase: Tensor, known: Tensor | None = None) -> Forecast:
        return Forecast(y=self.scale * past[:, -1:].expand(-1, self.horizon, -1))


class NaiveTask(ForecastingTask):
    """The task with the simplest of networks."""

    def build_network(self, spec: Any) -> nn.Module:
        return Naive(spec.horizon)


def assert_equal_states(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


# -- evaluation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 4, 7, 8, 15, 64])
def test_every_window_counts_once_for_any_batch_size(tmp_path: Path, batch_size: int) -> None:
    """Three windows reach the spike; dropping a batch or averaging over batches would show."""
    values = np.where(np.arange(100) < 97, np.arange(100) % 2, 100)
    data = data_of(write(tmp_path / "spiked.csv", y=values), batch_size=batch_size)
    task = NaiveTask()
    (logged,) = trainer(tmp_path).test(task, datamodule=data, verbose=False)
    assert task.tested == task.row().n == 15
    assert task.test_metrics["mse"] == pytest.approx(2633.2, rel=1e-5)
    assert task.test_metrics["mae"] == pytest.approx(14.2, rel=1e-5)
    assert logged["test/mse"] == pytest.approx(2633.2, rel=1e-5)
    sums = [task.evaluate(batch) for batch in data.test_dataloader()]
    joined = {name: torch.cat([part[name] for part in sums]) for name in sums[0]}
    assert joined["index"].tolist() == list(range(15))
    in_units = metrics.score(joined, torch.tensor(task.spec.std))
    assert in_units["mse"] == pytest.approx(658.3, rel=1e-5)


@pytest.mark.parametrize("batch_size", [4, 64])
def test_a_row_counts_the_operations_of_one_sample(tmp_path: Path, waves: Path, batch_size: int) -> None:
    task = ForecastingTask(network="dlinear")
    trainer(tmp_path).test(task, datamodule=data_of(waves, batch_size=batch_size), verbose=False)
    # Two maps from 24 rows to 6 for each of two columns, a multiply-add counted as two.
    assert task.row().flops == 2 * 2 * 24 * 6 * 2


def test_counting_operations_records_no_routing(tmp_path: Path, waves: Path) -> None:
    task = ForecastingTask(**SMALL)
    trainer(tmp_path).test(task, datamodule=data_of(waves), verbose=False)
    # Every window has two columns of four patches, the last of which reaches beyond the window.
    assert task.routing_summary()["layer0"]["tokens"] == task.tested * 2 * 4


def test_trained_network_scores_the_same_for_any_batch_size(tmp_path: Path, waves: Path) -> None:
    task = ForecastingTask(**SMALL)
    trainer(tmp_path).fit(task, datamodule=data_of(waves))
    scores = []
    for batch_size in (1, 7, 64):
        trainer(tmp_path).test(task, datamodule=data_of(waves, batch_size=batch_size), verbose=False)
        scores.append(task.test_metrics)
    for score in scores[1:]:
        assert score == pytest.approx(scores[0], rel=1e-5)


def test_repeated_samples_are_dropped_and_order_restored() -> None:
    class Echo(ForecastingTask):
        def score(self, gathered: dict[str, Tensor]) -> dict[str, float]:
            assert gathered["index"].tolist() == [0, 1, 2, 3]
            return {"sum": float(gathered["value"].sum())}

    task = Echo()
    task._trainer = SimpleNamespace(world_size=1)  # type: ignore[assignment]
    for numbers in ([2, 0, 3], [1, 0]):
        index = torch.tensor(numbers)
        task._gathered.append({"index": index, "value": 10.0**index})
    assert task._finish_evaluation() == ({"sum": 1111.0}, 4)


# -- order, seeds and resume --------------------------------------------------------------------------------------


def test_order_of_every_epoch_is_its_own_also_after_a_resume(tmp_path: Path, waves: Path) -> None:
    seen = []
    for workers, stops in ((0, (3,)), (0, (1, 3))):
        orders, folder = Orders(), tmp_path / f"{len(stops)}"
        for stop in stops:
            start = folder / "last.ckpt"
            trainer(folder, stop, orders).fit(
                ForecastingTask(**SMALL),
                datamodule=data_of(waves, num_workers=workers, seed=4),
                ckpt_path=start if start.exists() else None,
                weights_only=True,
            )
        seen.append(orders.seen)
    count = 168 - 24 - 6 + 1
    assert seen[0] == seen[1] == {epoch: epoch_order(count, "4/0", epoch).tolist() for epoch in range(3)}


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_equals_uninterrupted_for_any_number_of_workers(
    tmp_path: Path, waves: Path, workers: int
) -> None:
    """Against one run without workers, so that neither the stop nor the workers matter."""
    whole = ForecastingTask(**SMALL)
    settings = {"limit_val_batches": 0} if workers else {}
    trainer(tmp_path / "whole", 4, **settings).fit(whole, datamodule=data_of(waves))
    for stop, start in ((2, None), (4, tmp_path / "parts" / "last.ckpt")):
        # Whatever was drawn in between must not matter.
        torch.rand(stop)
        trainer(tmp_path / "parts", stop, **settings).fit(
            ForecastingTask(**SMALL),
            datamodule=data_of(waves, num_workers=workers),
            ckpt_path=start,
            weights_only=True,
        )
    parts = load_checkpoint(tmp_path / "parts" / "last.ckpt")
    assert parts["global_step"] == 4 * 5
    assert_equal_states(parts["state_dict"], whole.state_dict())
    assert parts["lr_schedulers"] == load_checkpoint(tmp_path / "whole" / "last.ckpt")["lr_schedulers"]


def test_same_seed_same_numbers(tmp_path: Path, waves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    for seed in (0, 0, 1):
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        torch.manual_seed(len(states))  # only the seed of the run counts
        task = ForecastingTask(**SMALL)
        trainer(tmp_path).fit(task, datamodule=data_of(waves))
        states.append(task.state_dict())
    assert_equal_states(states[0], states[1])
    assert not torch.equal(states[0]["net.head.weight"], states[2]["net.head.weight"])


def test_building_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    ForecastingTask(**SMALL).build(ForecastingTask.example_spec())
    assert torch.equal(torch.rand(3), expected)


def test_derived_seeds_are_fixed() -> None:
    assert derive_seed("weights", 0) == derive_seed("weights", 0) != derive_seed("weights", 1)
    assert 0 <= derive_seed("a", 1) < 2**63


# -- checkpoints --------------------------------------------------------------------------------------------------


def test_checkpoint_alone_rebuilds_the_task(tmp_path: Path, waves: Path) -> None:
    task, data = ForecastingTask(**SMALL), data_of(waves)
    trainer(tmp_path).fit(task, datamodule=data)
    again = ForecastingTask.from_checkpoint(load_checkpoint(tmp_path / "last.ckpt"))
    assert not again.training
    assert again.spec == data.spec
    assert again.hparams == task.hparams
    batch = data.dataset("test").__getitems__([0, 5])
    with torch.no_grad():
        assert torch.equal(again(batch).y, task.eval()(batch).y)


def test_test_needs_the_checkpoint_and_data_only(tmp_path: Path, waves: Path) -> None:
    task = ForecastingTask(**SMALL)
    trainer(tmp_path).fit(task, datamodule=data_of(waves))
    trainer(tmp_path).test(task, datamodule=data_of(waves), verbose=False)
    fresh = ForecastingTask(**SMALL)
    trainer(tmp_path).test(
        fresh, datamodule=data_of(waves), ckpt_path=tmp_path / "last.ckpt", weights_only=True, verbose=False
    )
    assert fresh.row() == task.row()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lookback": 30}, "data.lookback=30, but the model was trained with 24"),
        ({"horizon": 7}, "data.horizon=7, but the model was trained with 6"),
        ({"path": "other"}, "column a is missing; the model was trained on a, b"),
        ({"path": "daily"}, "step=D, but the model was trained with h"),
    ],
)
@pytest.mark.parametrize("stage", ["fit", "test"])
def test_data_that_do_not_fit_a_checkpoint_are_refused(
    tmp_path: Path, waves: Path, stage: str, change: dict[str, Any], reason: str
) -> None:
    time = np.arange(240)
    files = {
        "other": {"x": time, "b": time},
        "daily": {"stamps": np.datetime64("2020-01-01") + time, "a": time % 7, "b": time % 5},
    }
    trainer(tmp_path, limit_train_batches=1).fit(ForecastingTask(**SMALL), datamodule=data_of(waves))
    if name := change.get("path"):
        change = {"path": str(write(tmp_path / f"{name}.csv", **files[name]))}
    data = ForecastingData(**({"path": str(waves), "lookback": 24, "horizon": 6} | change))
    run = getattr(trainer(tmp_path, 2), stage)
    with pytest.raises(UserError, match=reason) as caught:
        run(ForecastingTask(**SMALL), datamodule=data, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert "\n" not in str(caught.value)


def test_other_data_with_the_same_columns_take_the_scaler_of_the_checkpoint(
    tmp_path: Path, waves: Path
) -> None:
    task = ForecastingTask(**SMALL)
    trainer(tmp_path).fit(task, datamodule=data_of(waves))
    time = np.arange(300)
    data = data_of(write(tmp_path / "shifted.csv", b=time * 1.0, a=np.sin(time / 3) + 9))
    fresh = ForecastingTask(**SMALL)
    trainer(tmp_path).test(
        fresh, datamodule=data, ckpt_path=tmp_path / "last.ckpt", weights_only=True, verbose=False
    )
    assert data.spec == fresh.spec == replace(task.spec, name="shifted")
    assert fresh.row().data == "shifted"
    expected = (np.sin(time / 3) + 9 - task.spec.mean[0]) / task.spec.std[0]
    assert data.values[:, 0].numpy() == pytest.approx(expected, abs=1e-4)


def test_a_foreign_checkpoint_is_refused() -> None:
    with pytest.raises(UserError, match="not written by ForecastingTask"):
        ForecastingTask(**SMALL).on_load_checkpoint({"state_dict": {}})


# -- losses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_training_loss_that_is_no_number_stops_the_run(tmp_path: Path, waves: Path, value: float) -> None:
    class Failing(ForecastingTask):
        def training_loss(self, batch: Any) -> Losses:
            scale = value if self.current_epoch == 1 else 1.0
            return Losses(named={"mae": super().training_loss(batch).named["mae"] * scale})

    with pytest.raises(UserError, match=f"the training loss became {value} in epoch 1, step 5") as caught:
        trainer(tmp_path, 3).fit(Failing(**SMALL), datamodule=data_of(waves))
    assert "\n" not in str(caught.value)
    assert "lower model.lr" in str(caught.value)
    for name in ("best", "last"):
        content = load_checkpoint(tmp_path / f"{name}.ckpt")
        assert content["epoch"] == 0
        assert all(torch.isfinite(tensor).all() for tensor in content["state_dict"].values())


@pytest.mark.parametrize("epoch", [0, 1])
def test_validation_score_that_is_no_number_is_no_checkpoint(tmp_path: Path, waves: Path, epoch: int) -> None:
    class Failing(ForecastingTask):
        def score(self, gathered: dict[str, Tensor]) -> dict[str, float]:
            score = super().score(gathered)
            return {name: math.nan if self.current_epoch == epoch else value for name, value in score.items()}

    with pytest.raises(UserError, match=f"val/mse became nan in epoch {epoch}"):
        trainer(tmp_path, 3).fit(Failing(**SMALL), datamodule=data_of(waves))
    stored = [load_checkpoint(path)["epoch"] for path in tmp_path.glob("*.ckpt")]
    assert stored == [0, 0] if epoch else stored == []


def test_a_diverging_run_ends_in_one_line(tmp_path: Path, waves: Path) -> None:
    words = ["model.lr=1e30", "model.loss=mse", "model.clip=0", "trainer.max_epochs=3"]
    done = train(tmp_path, waves, *words, lookback=24, horizon=6)
    assert "became" in done.refusal
    assert not list(tmp_path.rglob("*.ckpt"))
    assert not list(tmp_path.glob("runs/forecasting/*"))


@pytest.mark.parametrize(
    ("name", "value"), [("lr", 0.0), ("lr", -1.0), ("clip", -0.5), ("weight_decay", math.nan)]
)
def test_senseless_settings_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"model.{name}={value}"):
        ForecastingTask(**{name: value})


# -- two processes ------------------------------------------------------------------------------------------------

WITNESS = """\
import hashlib
from pathlib import Path
from pytorch_lightning import Callback

class Witness(Callback):
    def on_train_end(self, trainer, pl_module):
        parts = [value.detach().contiguous().numpy().tobytes() for value in pl_module.state_dict().values()]
        digest = hashlib.sha256(b"".join(parts)).hexdigest()
        Path(f"rank{trainer.global_rank}.txt").write_text(f"{trainer.world_size} {digest}")
"""


def test_two_processes_train_and_score_as_one(tmp_path: Path, run_cli: Any) -> None:
    """With growth, on a series whose 2,040 training windows divide by the batch and whose 589 test windows do not."""
    path = write(tmp_path / "regimes.csv", y=three_regimes())
    settings = ["trainer.max_epochs=2", "model.dropout=0.0"]
    one = train(tmp_path, path, *settings, "data.batch_size=136", lookback=49).run
    (tmp_path / "witness.py").write_text(WITNESS)
    words = Path(one / "config.yaml")
    done = run_cli(
        [
            *("zoo.train", "--config", words, "allow=witness", "--trainer.callbacks+=witness.Witness"),
            *(
                "trainer.default_root_dir=two",
                "trainer.strategy=ddp",
                "trainer.devices=2",
                "data.batch_size=68",
            ),
        ]
    )
    assert done.returncode == 0, done.stderr
    two = tmp_path / Done(0, done.stdout, done.stderr).run
    ranks = [(tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1)]
    assert ranks[0] == ranks[1]
    assert ranks[0].startswith("2 ")
    assert len(list((tmp_path / "two" / "forecasting").iterdir())) == 1
    for metric in ("train/loss", "val/mse"):
        assert losses(two, metric) == pytest.approx(losses(one, metric), rel=1e-5), metric
    ours, theirs = (results(run)["dynamic_tmoe"] for run in (two, one))
    assert ours["n"] == theirs["n"] == 589
    assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-5)
    assert results(two)["naive"]["metrics"] == results(one)["naive"]["metrics"]
    # One test window stands in both shares, so that both have equally many.
    tokens, load = zip(*(routing(run) for run in (two, one)), strict=True)
    assert tokens[0] == pytest.approx(tokens[1], rel=1 / 500)
    assert load[0] == pytest.approx(load[1], abs=1e-3)
    first, second = (load_checkpoint(run / "checkpoints" / "last.ckpt")["growth"] for run in (two, one))
    assert first["change_points"] == second["change_points"]
    assert first["idle"] == second["idle"]
    assert len(first["events"]) == 1
    for event, expected in zip(first["events"], second["events"], strict=True):
        assert event["action"] == expected["action"] == "enabled"
        assert event["slots"] == expected["slots"]


def routing(run: Path) -> tuple[int, list[float]]:
    """Tokens and load of the only layer in the last routing report."""
    layer = json.loads((run / "routing.json").read_text())["layers"]["layer0"]
    return layer["tokens"], layer["load"]

"""Epoch lines, log file and routing report of a real, tiny training."""

from __future__ import annotations

import json
import logging
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zoo.callbacks import EpochLine, LogFile, RoutingReport
from zoo.callbacks.routing import tags
from zoo.pictures import load_figure

LAYERS: dict[str, dict[str, Any]] = {
    "layer0": {
        "load": [0.5, 0.5, 0.0],
        "entropy": 0.75,
        "max_violation": 0.5,
        "dead": [2],
        "share": {"calm": [0.9, 0.1, 0.0], "wild": [0.1, 0.9, 0.0]},
    }
}


class Task(LightningModule):
    """Reports the validation errors it is told to, one per epoch."""

    def __init__(self, errors: list[float]) -> None:
        super().__init__()
        self.errors = errors
        self.linear = nn.Linear(1, 1)
        self.layers: dict[str, dict[str, Any]] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.linear(batch[0]).square().mean()
        self.log("train/loss", torch.tensor(2.0), on_step=False, on_epoch=True, batch_size=2)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        error = self.errors[min(self.current_epoch, len(self.errors) - 1)]
        self.log("val/mse", torch.tensor(error), batch_size=2)

    test_step = validation_step

    def routing_summary(self) -> dict[str, dict[str, Any]]:
        return self.layers

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)


def make_trainer(folder: Path, *callbacks: Callback, epochs: int = 1, **settings: Any) -> Trainer:
    base = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "accelerator": "cpu",
    }
    return Trainer(default_root_dir=folder, max_epochs=epochs, callbacks=list(callbacks), **(base | settings))


@pytest.mark.filterwarnings("ignore")
class TestEpochLine:
    def lines(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [
            record.message.rsplit("  ", 1)[0].rstrip()
            for record in caplog.records
            if record.name == "zoo.console"
        ]

    def test_lines_mark_the_best(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        checkpoint = ModelCheckpoint(tmp_path, monitor="val/mse")
        with caplog.at_level(logging.DEBUG, "zoo.console"):
            trainer = make_trainer(tmp_path, EpochLine(), checkpoint, epochs=4)
            trainer.fit(Task([math.nan, 0.5, 0.6, 0.4]), loader(), loader())
        assert self.lines(caplog) == [
            "epoch 1/4  train 2.0000  val/mse nan",
            "epoch 2/4  train 2.0000  val/mse 0.5000 *",
            "epoch 3/4  train 2.0000  val/mse 0.6000",
            "epoch 4/4  train 2.0000  val/mse 0.4000 *",
        ]
        assert all(record.message.endswith(" s") for record in caplog.records if record.name == "zoo.console")

    def test_higher_can_be_better(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.DEBUG, "zoo.console"):
            trainer = make_trainer(
                tmp_path, EpochLine("val/mse", "max"), epochs=2, enable_checkpointing=False
            )
            trainer.fit(Task([0.5, 0.6]), loader(), loader())
        assert [line.endswith("*") for line in self.lines(caplog)] == [True, True]

    def test_a_resumed_training_remembers_its_best(self) -> None:
        first, second = EpochLine(), EpochLine()
        assert first._improves(0.4, "min")
        second.load_state_dict(first.state_dict())
        assert not second._improves(0.5, "min")
        assert second._improves(0.3, "min")

    @pytest.mark.parametrize(("watched", "level"), [(True, logging.DEBUG), (False, logging.INFO)])
    def test_level(
        self,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
        watched: bool,
        level: int,
    ) -> None:
        monkeypatch.setattr("zoo.callbacks.console.sys.stderr.isatty", lambda: watched, raising=False)
        with caplog.at_level(logging.DEBUG, "zoo.console"):
            make_trainer(tmp_path, EpochLine(), enable_checkpointing=False).fit(
                Task([0.5]), loader(), loader()
            )
        assert [record.levelno for record in caplog.records if record.name == "zoo.console"] == [level]


@pytest.mark.filterwarnings("ignore")
class TestLogFile:
    def test_keeps_what_is_logged_and_lets_go(self, tmp_path: Path) -> None:
        class Talk(Callback):
            def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
                logging.getLogger("zoo.somewhere").debug("a detail")
                warnings.warn("mind the gap", stacklevel=1)

        before = {
            name: list(logging.getLogger(name).handlers)
            for name in ("zoo", "pytorch_lightning", "py.warnings")
        }
        level = logging.getLogger("zoo").level
        trainer = make_trainer(tmp_path, Talk(), EpochLine(), LogFile(), enable_checkpointing=False)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            trainer.fit(Task([0.5]), loader(), loader())
        text = (tmp_path / "log.txt").read_text(encoding="utf-8")
        assert "DEBUG zoo: stage fit starts" in text
        assert "zoo.console: epoch 1/1  train 2.0000" in text
        assert "DEBUG zoo.somewhere: a detail" in text
        assert "mind the gap" in text
        assert before == {name: logging.getLogger(name).handlers for name in before}
        assert logging.getLogger("zoo").level == level

    def test_a_crash_is_kept_and_the_file_closed(self, tmp_path: Path) -> None:
        class Crash(Callback):
            def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
                raise RuntimeError("out of luck")

        log = LogFile()
        with pytest.raises(RuntimeError, match="out of luck"):
            make_trainer(tmp_path, Crash(), log, enable_checkpointing=False).fit(
                Task([0.5]), loader(), loader()
            )
        assert "run ended early: RuntimeError: out of luck" in (tmp_path / "log.txt").read_text(
            encoding="utf-8"
        )
        assert log._handler is None

    def test_a_second_stage_continues_the_file(self, tmp_path: Path) -> None:
        for _ in range(2):
            trainer = make_trainer(tmp_path / "unused", LogFile(str(tmp_path)), enable_checkpointing=False)
            trainer.test(Task([0.5]), loader(), verbose=False)
        assert (tmp_path / "log.txt").read_text(encoding="utf-8").count("stage test starts") == 2


@pytest.mark.filterwarnings("ignore")
class TestRoutingReport:
    def run(self, folder: Path, layers: dict[str, dict[str, Any]], **settings: Any) -> None:
        task = Task([0.5])
        task.layers = layers
        trainer = make_trainer(folder, RoutingReport(), enable_checkpointing=False, **settings)
        trainer.fit(task, loader(), loader())

    def test_files_and_logged_tags(self, tmp_path: Path) -> None:
        logger = CSVLogger(tmp_path, name="", version="")
        self.run(tmp_path, LAYERS, logger=logger)
        record = json.loads((tmp_path / "routing.json").read_text(encoding="utf-8"))
        assert record == {"split": "validation", "epoch": 0, "layers": LAYERS}
        assert (tmp_path / "routing.png").read_bytes().startswith(b"\x89PNG")
        header = (tmp_path / "metrics.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
        assert {"moe/load/layer0/2", "moe/entropy/layer0", "moe/dead/layer0"} <= set(header)

    def test_test_split_replaces_validation(self, tmp_path: Path) -> None:
        task = Task([0.5])
        task.layers = LAYERS
        make_trainer(tmp_path, RoutingReport()).test(task, loader(), verbose=False)
        assert json.loads((tmp_path / "routing.json").read_text(encoding="utf-8"))["split"] == "test"

    def test_tensors_become_numbers_and_nan_null(self, tmp_path: Path) -> None:
        layers = {
            "a": {
                "load": torch.tensor([0.25, 0.75]),
                "entropy": torch.tensor(0.5),
                "dead": 0,
                "extra": math.nan,
            }
        }
        self.run(tmp_path, layers)
        assert json.loads((tmp_path / "routing.json").read_text(encoding="utf-8"))["layers"] == {
            "a": {"load": [0.25, 0.75], "entropy": 0.5, "dead": 0, "extra": None}
        }

    def test_nothing_to_tell_leaves_no_file(self, tmp_path: Path) -> None:
        self.run(tmp_path, {})
        assert not (tmp_path / "routing.json").exists()

    def test_sanity_check_is_silent(self, tmp_path: Path) -> None:
        seen: list[int] = []

        class Counting(Task):
            def routing_summary(self) -> dict[str, dict[str, Any]]:
                seen.append(self.global_step)
                return {}

        make_trainer(tmp_path, RoutingReport(), enable_checkpointing=False).fit(
            Counting([0.5]), loader(), loader()
        )
        assert seen == [2]

    def test_tags(self) -> None:
        assert tags(LAYERS) == {
            "moe/load/layer0/0": 0.5,
            "moe/load/layer0/1": 0.5,
            "moe/load/layer0/2": 0.0,
            "moe/entropy/layer0": 0.75,
            "moe/dead/layer0": 1.0,
        }


class TestLoadFigure:
    def test_bars_and_tags(self) -> None:
        bars, heat = load_figure(LAYERS).axes
        assert [bar.get_height() for bar in bars.patches] == [0.5, 0.5, 0.0]
        assert bars.get_title(loc="left") == "layer0: entropy 0.75, 1 dead"
        assert heat.images[0].get_array().tolist() == [[0.9, 0.1, 0.0], [0.1, 0.9, 0.0]]
        assert [label.get_text() for label in heat.get_yticklabels()] == ["calm", "wild"]

    def test_mixing_weight_stands_beside_the_load(self) -> None:
        layer = {"load": [0.5, 0.5], "share": [0.75, 0.25], "entropy": 1.0, "dead": []}
        (axes,) = load_figure(
            {
                "a": layer,
            }
        ).axes
        assert [bar.get_height() for bar in axes.patches] == [0.5, 0.5, 0.75, 0.25]
        assert axes.get_title(loc="left") == "a: entropy 1.00"

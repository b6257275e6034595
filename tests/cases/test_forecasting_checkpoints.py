"""Case C11: a run that has grown is saved, reloaded by path alone, resumed, and refused where it is damaged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests.cases.commands import (
    TINY,
    Done,
    here,
    losses,
    predict,
    predictions,
    results,
    three_regimes,
    train,
    write,
)
from zoo.data.forecasting.module import ForecastingData
from zoo.domains.forecasting.task import ForecastingTask
from zoo.runs import load_checkpoint


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("series") / "regimes.csv", y=three_regimes())


@pytest.fixture(scope="module")
def whole(series: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four epochs in one go, with dropout."""
    return train(tmp_path_factory.mktemp("whole"), series, "trainer.max_epochs=4", "model.dropout=0.1").run


@pytest.fixture(scope="module")
def task(whole: Path) -> ForecastingTask:
    return ForecastingTask.from_checkpoint(load_checkpoint(whole / "checkpoints" / "last.ckpt"))


def events(run: Path, name: str = "last") -> dict[str, Any]:
    growth: dict[str, Any] = load_checkpoint(run / "checkpoints" / f"{name}.ckpt")["growth"]
    return growth


def test_resumed_equals_uninterrupted(series: Path, whole: Path, tmp_path: Path) -> None:
    """Interrupted before the epoch in which an expert is added, and after it."""
    run = train(tmp_path, series, "trainer.max_epochs=1", "model.dropout=0.1").run
    for epochs in (2, 4):
        assert here(["zoo.train", f"run={run}", f"trainer.max_epochs={epochs}"], tmp_path).status == 0
        assert len(losses(run)) == epochs
    for metric in ("train/loss", "val/mse"):
        assert losses(run, metric) == pytest.approx(losses(whole, metric), abs=1e-6), metric
    assert results(run)["dynamic_tmoe"]["metrics"] == results(whole)["dynamic_tmoe"]["metrics"]
    assert events(run) == events(whole)
    assert any(event["action"] == "enabled" for event in events(run)["events"])
    ours, theirs = (
        load_checkpoint(path / "checkpoints" / "last.ckpt")["state_dict"] for path in (run, whole)
    )
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def test_what_was_learned_comes_back_from_the_file_alone(
    series: Path, whole: Path, task: ForecastingTask
) -> None:
    data = ForecastingData(path=str(series), lookback=48, horizon=12)
    data.setup()
    assert task.spec == data.spec
    assert (task.spec.lookback, task.spec.horizon, task.spec.freq, task.spec.cycle) == (48, 12, "h", 24)
    assert task.spec.columns == ("y",)
    values = three_regimes()[:2100]
    assert task.spec.mean == pytest.approx((values.mean(),), abs=1e-5)
    assert task.spec.std == pytest.approx((values.std(),), abs=1e-5)
    assert task.events == events(whole)["events"]
    assert task.change_points == events(whole)["change_points"]
    grown = [event for event in task.events if event.get("action") == "enabled"]
    assert len(grown) == 1
    (pool,) = task.net.pools()
    pruned = {event["slot"] for event in task.events if event["action"] == "pruned"}
    assert pool.enabled.tolist() == [
        slot < 4 or (slot in grown[0]["slots"] and slot not in pruned) for slot in range(7)
    ]


def test_forecast_in_a_new_process_equals_the_one_in_this(
    series: Path, whole: Path, tmp_path: Path, run_cli
) -> None:
    """The run folder alone: the file that it was trained on is gone."""
    shutil.copytree(whole, tmp_path / "moved")
    last = write(tmp_path / "window.csv", y=three_regimes()[1500:1560])
    done = run_cli(["zoo.predict", "run=moved", "input=window.csv", "out=out", "pictures=no"])
    assert done.returncode == 0, done.stderr
    best = ForecastingTask.from_checkpoint(load_checkpoint(whole / "checkpoints" / "best.ckpt"))
    series_values = pd.read_csv(last)["y"].to_numpy()[-48:]
    past = torch.from_numpy((series_values - best.spec.mean) / best.spec.std).float()[None, :, None]
    with torch.no_grad():
        y = best.net(past, torch.tensor([12]), None).y[0, :, 0].double().numpy()
    expected = y * best.spec.std + best.spec.mean
    assert predictions(tmp_path / "out")["y"].to_numpy() == pytest.approx(expected, abs=1e-6)


def test_evaluation_of_a_reloaded_run_repeats_its_score(whole: Path, tmp_path: Path) -> None:
    mse, _ = here(["zoo.train", "test", f"run={whole}"], tmp_path).printed()
    assert mse == pytest.approx(results(whole)["dynamic_tmoe"]["metrics"]["mse"], rel=1e-2)


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A run folder to damage."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def both(copy: Path, series: Path, tmp_path: Path) -> list[Done]:
    """Prediction, test and training from a run folder; each must refuse what is wrong with it."""
    return [
        predict(tmp_path, copy, series),
        here(["zoo.train", "test", f"run={copy}"], tmp_path),
        here(["zoo.train", f"run={copy}", "trainer.max_epochs=5"], tmp_path),
    ]


def test_checkpoint_without_one_tensor_is_refused(copy: Path, series: Path, tmp_path: Path) -> None:
    for name in ("best", "last"):
        path = copy / "checkpoints" / f"{name}.ckpt"
        content = torch.load(path, weights_only=True)
        del content["state_dict"]["net.head.bias"]
        torch.save(content, path)
    for done in both(copy, series, tmp_path):
        assert "net.head.bias" in done.refusal


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "foreign", "missing"])
def test_damaged_and_foreign_files_are_refused_by_name(
    copy: Path, series: Path, tmp_path: Path, damage: str
) -> None:
    for name in ("best", "last"):
        path = copy / "checkpoints" / f"{name}.ckpt"
        if damage == "cut":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        elif damage == "text":
            path.write_text("no checkpoint\n")
        elif damage == "empty":
            path.write_bytes(b"")
        elif damage == "foreign":
            torch.save({"state_dict": {"weight": torch.zeros(3)}}, path)
        elif name == "best":
            path.unlink()
    for done in both(copy, series, tmp_path)[: 2 if damage == "missing" else 3]:
        assert "best.ckpt" in done.refusal or "last.ckpt" in done.refusal


def test_code_in_a_checkpoint_is_not_run(copy: Path, series: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    for name in ("best", "last"):
        path = copy / "checkpoints" / f"{name}.ckpt"
        torch.save(torch.load(path, weights_only=True) | {"growth": Evil()}, path)
    for done in both(copy, series, tmp_path):
        assert ".ckpt" in done.refusal
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("data.lookback=36", "data.lookback=36, but the model was trained with 48"),
        ("data.horizon=6", "data.horizon=6, but the model was trained with 12"),
        ("data.path={other}", "column y is missing"),
        ("model.width=16", "model.width=16 changes the shapes"),
    ],
)
def test_other_data_or_sizes_than_the_checkpoint_are_refused(
    copy: Path, tmp_path: Path, word: str, reason: str
) -> None:
    other = write(tmp_path / "other.csv", x=np.arange(500) % 24)
    before = (copy / "checkpoints" / "last.ckpt").read_bytes()
    for words in (["test"], []):
        done = here(["zoo.train", *words, f"run={copy}", word.format(other=other)], tmp_path)
        assert reason in done.refusal
    assert (copy / "checkpoints" / "last.ckpt").read_bytes() == before


def test_test_on_another_file_with_the_same_column(copy: Path, tmp_path: Path) -> None:
    """The score is of the other file, in the scale of the one trained on, and says so."""
    other = write(tmp_path / "other.csv", y=np.sin(np.arange(600) / 24 * 2 * np.pi) + 5)
    done = here(["zoo.train", "test", f"run={copy}", f"data.path={other}"], tmp_path)
    assert done.status == 0, done.err
    assert "forecasting · other · test" in done.out


@pytest.mark.gpu
def test_forecasts_on_cpu_and_gpu_agree(task: ForecastingTask, series: Path) -> None:
    data = ForecastingData(path=str(series), lookback=48, horizon=12)
    data.setup()
    batch = data.dataset("test").__getitems__(list(range(32)))
    with torch.no_grad():
        here_, there = task(batch).y, task.to("cuda")(batch.to("cuda")).y.cpu()
    task.to("cpu")
    assert torch.allclose(here_, there, atol=1e-4)


@pytest.mark.gpu
def test_checkpoint_written_on_a_gpu_loads_without_one(series: Path, tmp_path: Path, run_cli) -> None:
    words = [*TINY, f"data.path={series}", "data.lookback=48", "data.horizon=12", "trainer.max_epochs=1"]
    done = run_cli(["zoo.train", *words, "trainer.accelerator=gpu"])
    assert done.returncode == 0, done.stderr
    run = done.stdout.splitlines()[-1].removeprefix("run: ")
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    done = run_cli(["zoo.predict", f"run={run}", f"input={series}", "out=out", "pictures=no"], env=hidden)
    assert done.returncode == 0, done.stderr
    assert np.isfinite(predictions(tmp_path / "out")["y"]).all()

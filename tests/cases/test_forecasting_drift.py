"""Case C12: growth follows the changes that are there, no others, and nothing changes at inference."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cases.commands import TINY, Done, here, predict, stationary, three_regimes, train, write
from zoo.domains.forecasting.predict import ForecastingPredictor
from zoo.domains.forecasting.task import ForecastingTask
from zoo.runs import load_checkpoint

WINDOW = 240  # rows of a detector window over 3,000 rows
BASE, CAP = 4, 7  # experts at the start, and slots in all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drift")


@pytest.fixture(scope="module")
def series(folder: Path) -> dict[str, Path]:
    """A without a change, B with its two, and A with a change in the rows of the test part."""
    late = stationary()
    late[2700:] += 3
    return {
        "a": write(folder / "a.csv", y=stationary()),
        "b": write(folder / "b.csv", y=three_regimes()),
        "late": write(folder / "late.csv", y=late),
    }


@pytest.fixture(scope="module")
def changing(folder: Path, series: dict[str, Path]) -> Done:
    return train(folder, series["b"], "trainer.max_epochs=3")


@pytest.fixture(scope="module")
def steady(folder: Path, series: dict[str, Path]) -> Done:
    """Trained where the only change lies in the test part."""
    return train(folder, series["late"], "trainer.max_epochs=3")


def growth(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = load_checkpoint(run / "checkpoints" / "last.ckpt")["growth"]
    return content


def enabled(run: Path) -> list[int]:
    """Experts that are switched on, per layer."""
    state = load_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"]
    return [int(value.sum()) for name, value in state.items() if name.endswith(".experts.enabled")]


def drift(tmp_path: Path, run: Path, path: Path) -> dict[str, Any]:
    """The drift report of a prediction."""
    assert predict(tmp_path, run, path).status == 0
    report: dict[str, Any] = json.loads((tmp_path / "out" / "drift.json").read_text())[str(path)]
    return report


def test_change_in_the_training_rows_adds_an_expert(changing: Done) -> None:
    content = growth(changing.run)
    assert all(row < 2100 for row in (point["row"] for point in content["change_points"]))
    assert abs(content["change_points"][0]["row"] - 1000) <= WINDOW
    (event, *_) = content["events"]
    assert event["action"] == "enabled"
    assert event["epoch"] == 1
    assert event["row"] == content["change_points"][0]["row"]
    assert BASE < enabled(changing.run)[0] <= CAP


def test_every_change_point_has_its_date_score_and_p_value(
    changing: Done, series: dict[str, Path], tmp_path: Path
) -> None:
    report = drift(tmp_path, changing.run, series["b"])
    first, second = report["change_points"]
    assert (abs(first["row"] - 1000) <= WINDOW, abs(second["row"] - 2000) <= WINDOW) == (True, True)
    for point in (first, second):
        assert np.datetime64(point["time"]) == np.datetime64("2020-01-01T00") + np.timedelta64(
            point["row"], "h"
        )
        assert 0 < point["p_value"] <= 0.01
        assert point["score"] > 0
        assert point["channels"] == ["y"]
        assert point["kind"] in ("trend", "seasonal", "fluctuation")
    assert report["trained_changes"] == growth(changing.run)["change_points"]
    assert report["growth"][0]["action"] == "enabled"


def test_stationary_series_is_left_alone(steady: Done, series: dict[str, Path], tmp_path: Path) -> None:
    assert growth(steady.run)["change_points"] == []
    assert growth(steady.run)["events"] == []
    assert enabled(steady.run) == [BASE]
    report = drift(tmp_path, steady.run, series["a"])
    assert report["checks"] == 11
    assert report["flagged"] <= 0.05 * report["checks"]
    assert report["change_points"] == []


def test_change_in_the_test_part_is_reported_and_adds_nothing(
    steady: Done, series: dict[str, Path], tmp_path: Path
) -> None:
    before = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in steady.run.rglob("*.*")}
    report = drift(tmp_path, steady.run, series["late"])
    (point,) = report["change_points"]
    assert abs(point["row"] - 2700) <= WINDOW
    assert report["growth"] == report["trained_changes"] == []
    assert report["outside_training_regime"] > 0.95
    assert drift_of_a_usual_end(steady, series, tmp_path)["outside_training_regime"] < 0.95
    assert {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in before} == before


def drift_of_a_usual_end(steady: Done, series: dict[str, Path], tmp_path: Path) -> dict[str, Any]:
    again = tmp_path / "usual"
    again.mkdir()
    return drift(again, steady.run, series["a"])


def test_log_is_the_same_for_the_same_seed(
    changing: Done, series: dict[str, Path], tmp_path: Path, run_cli
) -> None:
    """In another process, as a user runs it."""
    words = [*TINY, f"data.path={series['b']}", "data.lookback=48", "data.horizon=12", "trainer.max_epochs=3"]
    done = run_cli(["zoo.train", *words])
    assert done.returncode == 0, done.stderr
    run = tmp_path / done.stdout.splitlines()[-1].removeprefix("run: ")
    assert growth(run) == growth(changing.run)
    assert "change points" in done.stderr
    assert ": enabled" in done.stderr


def test_without_growth_there_is_none_and_no_log(series: dict[str, Path], tmp_path: Path) -> None:
    run = train(tmp_path, series["b"], "trainer.max_epochs=3", "model.growth=false").run
    assert growth(run) == {"change_points": None, "events": [], "memories": {}, "idle": []}
    assert enabled(run) == [BASE]
    assert "growth" not in (run / "log.txt").read_text()
    assert "drift" not in (run / "log.txt").read_text()


def test_experts_never_exceed_the_slots(tmp_path: Path) -> None:
    """Six levels, one slot: the first change takes it, later ones find none."""
    values = stationary() + 4 * np.random.default_rng(1).permutation(6).repeat(500)
    words = ["trainer.max_epochs=5", "model.drift_slots=1", "model.prune_patience=99"]
    run = train(tmp_path, write(tmp_path / "levels.csv", y=values), *words).run
    actions = [event["action"] for event in growth(run)["events"]]
    assert len(growth(run)["change_points"]) >= 3
    assert actions.count("enabled") <= 1
    assert actions.count("no free slot") >= 2
    assert enabled(run) == [BASE + actions.count("enabled")]


def test_inference_changes_no_parameter_and_no_buffer(changing: Done, series: dict[str, Path]) -> None:
    words = {name: word.default for name, word in ForecastingPredictor.words.items()}
    predictor = ForecastingPredictor.from_run(changing.run, **words)
    before = digest(predictor.task)
    (row,) = predictor.run(predictor.read(series["b"]))
    assert np.isfinite(row.values).all()
    assert digest(predictor.task) == before


def digest(task: ForecastingTask) -> str:
    """A hash of all parameters and all buffers, stored ones or not."""
    total = hashlib.sha256()
    for name, value in [*task.named_parameters(), *task.named_buffers()]:
        total.update(name.encode() + value.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def test_test_stage_changes_nothing_either(changing: Done, series: dict[str, Path], tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in changing.run.rglob("*.ckpt")}
    assert (
        here(["zoo.train", "test", f"run={changing.run}", f"data.path={series['late']}"], tmp_path).status
        == 0
    )
    assert {path: path.read_bytes() for path in before} == before

"""Case C1: a series too short for a split is refused before training; one row more would do."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.cases.commands import TINY, Done, assert_finite_metrics, nothing_written, results, train, write

SIZES = {"lookback": 24, "horizon": 12}


def sawtooth(folder: Path, rows: int) -> Path:
    return write(folder / "short.csv", y=np.arange(rows) % 24)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (30, "the train split has 21 rows but needs 36 (lookback 24 + horizon 12)"),
        (47, "the train split has 32 rows but needs 36 (lookback 24 + horizon 12)"),
        (100, "the val split has 10 rows but needs 12 (horizon 12)"),
    ],
)
def test_too_short_for_a_split_is_refused_with_a_way_out(tmp_path: Path, rows: int, reason: str) -> None:
    line = train(tmp_path, sawtooth(tmp_path, rows), **SIZES).refusal
    assert reason in line
    assert "short.csv" in line
    assert "Use " in line
    assert "a file of at least" in line
    assert nothing_written(tmp_path)


def test_the_command_refuses_in_one_line(tmp_path: Path, run_cli) -> None:
    path = sawtooth(tmp_path, 100)
    done = run_cli(["zoo.train", *TINY, f"data.path={path}", "data.lookback=24", "data.horizon=12"])
    assert "the val split has 10 rows" in Done(done.returncode, done.stdout, done.stderr).refusal
    assert len(done.stderr.splitlines()) == 1
    assert nothing_written(tmp_path)


def test_long_enough_trains_and_counts_its_windows(tmp_path: Path) -> None:
    done = train(tmp_path, sawtooth(tmp_path, 120), "trainer.max_epochs=2", **SIZES)
    assert "windows of 24 + 12 rows: train 49, val 1, test 13" in done.out
    assert {row["n"] for row in results(done.run).values()} == {13}
    assert_finite_metrics(done.run)
    assert math.isfinite(results(done.run)["dynamic_tmoe"]["metrics"]["mse"])


@pytest.mark.parametrize("rows", [30, 100])
def test_the_way_out_is_one(tmp_path: Path, rows: int) -> None:
    """What the message proposes is enough: the length it names trains."""
    line = train(tmp_path, sawtooth(tmp_path, rows), **SIZES).refusal
    enough = int(line.split("a file of at least ")[1].split(" rows")[0].replace(",", ""))
    assert train(tmp_path, sawtooth(tmp_path, enough), "trainer.max_epochs=1", **SIZES).status == 0

"""size=smoke: every mechanism on, in seconds, above a stated floor, and the same numbers for the same seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.commands import Done, assert_finite_metrics, here, losses, results

WORDS = ("zoo.train", "domain=forecasting", "size=smoke", "rows=twin", "trainer.accelerator=cpu")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Done]]:
    """Two runs with the same words, by their folders."""
    done = []
    for name in ("first", "second"):
        folder = tmp_path_factory.mktemp(name)
        answer = here(WORDS, folder)
        done.append((folder / answer.run, answer))
    return done


def test_model_and_twin_beat_the_naive_forecasts(runs: list[tuple[Path, Done]]) -> None:
    rows = results(runs[0][0])
    assert list(rows) == ["dynamic_tmoe", "dynamic_tmoe_dense", "naive", "seasonal_naive", "ridge"]
    mse = {name: row["metrics"]["mse"] for name, row in rows.items()}
    assert max(mse["dynamic_tmoe"], mse["dynamic_tmoe_dense"]) < mse["seasonal_naive"] < mse["naive"]
    assert {row["n"] for row in rows.values()} == {800 - 24 + 1}
    assert_finite_metrics(runs[0][0])


def test_every_mechanism_is_on(runs: list[tuple[Path, Done]]) -> None:
    log = (runs[0][0] / "log.txt").read_text()
    assert "4 change points" in log
    assert "enabled" in log
    for name in ("error_by_step.png", "windows.png", "drift.png", "routing.json", "calibration.safetensors"):
        assert (runs[0][0] / name).is_file()


def test_same_seed_same_numbers(runs: list[tuple[Path, Done]]) -> None:
    first, second = (run for run, _ in runs)
    assert losses(first) == losses(second)
    assert losses(first, "val/mse") == losses(second, "val/mse")
    for name in ("dynamic_tmoe", "dynamic_tmoe_dense"):
        assert results(first)[name]["metrics"] == results(second)[name]["metrics"]

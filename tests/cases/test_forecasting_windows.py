"""Case C2: every test window counts once, whatever the batch size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cases.commands import here, results, train, write


@pytest.fixture(scope="module")
def spiked_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a series whose last windows dwarf all others."""
    folder = tmp_path_factory.mktemp("spiked")
    values = np.where(np.arange(100) < 97, np.arange(100) % 2, 100)
    path = write(folder / "spiked.csv", y=values)
    return train(folder, path, "trainer.max_epochs=1", "data.batch_size=8", lookback=24, horizon=6).run


def test_naive_scores_all_fifteen_windows(spiked_run: Path) -> None:
    naive = results(spiked_run)["naive"]
    assert naive["n"] == 15
    assert naive["metrics"]["mse"] == pytest.approx(2633.2, rel=1e-5)
    assert naive["metrics"]["mae"] == pytest.approx(14.2, rel=1e-5)


def test_trained_model_scores_the_same_for_any_batch_size(spiked_run: Path, tmp_path: Path) -> None:
    scores = {
        size: here(["zoo.train", "test", f"run={spiked_run}", f"data.batch_size={size}"], tmp_path).printed()
        for size in (1, 4, 7, 8, 15, 64)
    }
    expected = results(spiked_run)["dynamic_tmoe"]["metrics"]
    for size, (mse, mae) in scores.items():
        assert mse == pytest.approx(expected["mse"], rel=5e-4), size  # as many digits as are printed
        assert mae == pytest.approx(expected["mae"], abs=0.05), size

"""The learning rate's course, and the best checkpoint of a run that moved."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zoo.callbacks import BestCheckpoint
from zoo.domains.forecasting.task import ForecastingTask
from zoo.errors import UserError


def optimised(steps: float, schedule: str = "cosine") -> tuple[Any, Any]:
    """Optimiser and scheduler of a small task whose training has that many steps."""
    task = ForecastingTask(schedule=schedule, lr=1.0, width=8)  # type: ignore[arg-type]
    task.build(task.example_spec(channels=1))
    task._trainer = SimpleNamespace(estimated_stepping_batches=steps)
    made = task.configure_optimizers()
    return made["optimizer"], made["lr_scheduler"]["scheduler"]


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_cosine_falls_from_the_peak_to_zero() -> None:
    optimizer, scheduler = optimised(4)
    assert rates(optimizer, scheduler, 5) == pytest.approx(
        [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0]
    )


def test_a_run_that_is_continued_for_longer_follows_the_longer_curve() -> None:
    first, short = optimised(4)
    rates(first, short, 4)
    optimizer, longer = optimised(8)
    longer.load_state_dict(short.state_dict())
    optimizer.load_state_dict(first.state_dict())
    optimizer.step()
    longer.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * (1 + math.cos(math.pi * 5 / 8)))


def test_cosine_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match=r"set trainer\.max_epochs"):
        optimised(math.inf)


def test_decay_holds_two_epochs_and_falls_by_a_fifth() -> None:
    optimizer, scheduler = optimised(1, "decay")
    assert rates(optimizer, scheduler, 4) == pytest.approx([1.0, 1.0, 0.8, 0.64])


def test_the_best_score_survives_a_move_of_the_folder(tmp_path: Path) -> None:
    before = BestCheckpoint(dirpath=tmp_path / "old", filename="best", monitor="val/mse")
    state = before.state_dict() | {
        "best_model_score": torch.tensor(0.25),
        "best_model_path": str(tmp_path / "old" / "best.ckpt"),
        "best_k_models": {str(tmp_path / "old" / "best.ckpt"): torch.tensor(0.25)},
    }
    after = BestCheckpoint(dirpath=tmp_path / "new", filename="best", monitor="val/mse")
    after.load_state_dict(state)
    path = str(tmp_path / "new" / "best.ckpt")
    assert after.best_model_score == 0.25
    assert after.best_model_path == path
    assert after.best_k_models == {path: torch.tensor(0.25)}

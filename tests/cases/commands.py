"""Series of the acceptance cases, and the commands of the zoo on them, in this process or as a user runs them."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd

# The smallest model that has every mechanism: a run takes seconds.
TINY = (
    "domain=forecasting size=smoke data=csv rows=model trainer.accelerator=cpu "
    "model.width=8 model.patch=8 model.stride=8 model.router_width=8"
).split()


@dataclass(frozen=True)
class Done:
    """What a command left: exit status and what it printed."""

    status: int
    out: str
    err: str

    @property
    def run(self) -> Path:
        """The run folder, named in the last printed line."""
        assert self.status == 0, self.err
        last = self.out.splitlines()[-1]
        assert last.startswith("run: "), self.out
        return Path(last.removeprefix("run: "))

    def printed(self, name: str = "dynamic_tmoe") -> tuple[float, float]:
        """mse and mae of a row in the printed table, with the few digits that it shows."""
        assert self.status == 0, self.err
        (line,) = [line for line in self.out.splitlines() if line.startswith(f"│ {name} ")]
        cells = [cell.strip(" *").replace(",", "") for cell in line.strip("│").split("│")]
        return float(cells[2]), float(cells[3])

    @property
    def refusal(self) -> str:
        """The one line in which the command was refused."""
        assert self.status == 2, self.out + self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert self.err.splitlines()[-1] == lines[0]
        assert "Traceback" not in self.err
        return lines[0].removeprefix("error: ")


def here(words: Sequence[object], cwd: Path) -> Done:
    """Run ``["zoo.train", "domain=…", …]`` in this process, which has loaded torch already, from a folder."""
    module, *rest = map(str, words)
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ, {"COLUMNS": "160"}),
        mock.patch.object(sys, "argv", [module]),
        # The handler of an earlier command keeps that command's stream.
        mock.patch.object(logging.getLogger("zoo"), "handlers", []),
    ):
        status = __import__(module, fromlist=["main"]).main(rest)
    return Done(status, out.getvalue(), err.getvalue())


def train(cwd: Path, path: Path, *words: object, lookback: int = 48, horizon: int = 12) -> Done:
    """Train the tiny model on a file, in this process; the run folder is absolute."""
    sizes = [f"data.path={path}", f"data.lookback={lookback}", f"data.horizon={horizon}"]
    root = f"trainer.default_root_dir={cwd / 'runs'}"
    return here(["zoo.train", *TINY, root, *sizes, *words], cwd)


def predict(cwd: Path, run: Path, path: Path, *words: object, out: str = "out") -> Done:
    """Predict a file from a run, in this process, without pictures."""
    return here(
        ["zoo.predict", f"run={run}", f"input={path}", f"out={cwd / out}", "pictures=no", *words], cwd
    )


def write(path: Path, stamps: Any = None, **columns: Any) -> Path:
    """Write columns as a CSV file, hourly from 2020-01-01 unless stamps are given."""
    rows = len(next(iter(columns.values())))
    stamps = hours(rows) if stamps is None else stamps
    pd.DataFrame({"date": [str(stamp) for stamp in stamps], **columns}).to_csv(path, index=False)
    return path


def hours(rows: int) -> pd.DatetimeIndex:
    """Hourly stamps from 2020-01-01 00:00."""
    return pd.date_range("2020-01-01", periods=rows, freq="h")


def stationary(rows: int = 3000) -> np.ndarray:
    """Input A of the drift case."""
    noise = np.random.default_rng(0).standard_normal(rows)
    return np.sin(2 * np.pi * np.arange(rows) / 24) + 0.1 * noise


def three_regimes() -> np.ndarray:
    """Input B of the drift case: A with a shift from row 1000 and another amplitude, with fresh noise, from 2000."""
    time, rng = np.arange(3000), np.random.default_rng(0)
    values = np.sin(2 * np.pi * time / 24) + 0.1 * rng.standard_normal(3000)
    values[1000:2000] += 3
    values[2000:] = 3 * np.sin(2 * np.pi * time[2000:] / 24) + 0.1 * rng.standard_normal(1000)
    return values


def predictions(folder: Path) -> pd.DataFrame:
    """``predictions.csv`` of an output folder."""
    return pd.read_csv(folder / "predictions.csv")


def results(run: Path) -> dict[str, dict[str, Any]]:
    """Rows of a run's results by name."""
    return {row["name"]: row for row in json.loads((run / "results.json").read_text())["rows"]}


def losses(run: Path, metric: str = "train/loss") -> list[float]:
    """The values of a metric in ``metrics.csv``, in order of steps."""
    with (run / "metrics.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line.get(metric)]
    return [float(line[metric]) for line in sorted(lines, key=lambda line: int(line["step"]))]


def assert_finite_metrics(run: Path) -> None:
    """No loss or metric of a run is NaN or infinite."""
    with (run / "metrics.csv").open(newline="") as file:
        cells = [value for line in csv.DictReader(file) for value in line.values() if value]
    assert cells
    assert all(math.isfinite(float(cell)) for cell in cells)


def nothing_written(cwd: Path) -> bool:
    """Whether a refused command left neither a run folder nor a checkpoint."""
    return not any(cwd.rglob("*.ckpt")) and not any(path.is_dir() for path in cwd.glob("runs/*/*"))

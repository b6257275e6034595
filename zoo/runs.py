"""The run folder: its name, what it says about itself, its metrics file and its checkpoints."""

from __future__ import annotations

import csv
import json
import os
import pickle
import shlex
import shutil
import subprocess
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.loggers import Logger, TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor

from zoo.environment import hardware, versions
from zoo.errors import UserError
from zoo.files import replacing, write_text

# Processes that a strategy starts run the same command: they learn the folder's name from the first one.
_SHARED = "ZOO_RUN_FOLDER"

_SECONDS_BETWEEN_WRITES = 5.0


def is_first_process() -> bool:
    """Whether this is the process that prints and writes."""
    return int(getattr(rank_zero_only, "rank", None) or 0) == 0


def new_folder(domain: str, name: str, root: str | None) -> Path:
    """Choose the folder of a new run, ``<root>/<domain>/<time>-<name>``; it is not made yet.

    Args:
        domain: Name of the domain.
        name: What the run is of, such as ``etth1-base``.
        root: Folder of all runs; without one ``$ZOO_RUNS``, else ``runs``.
    """
    if "LOCAL_RANK" in os.environ and _SHARED in os.environ:
        return Path(os.environ[_SHARED])
    parent = Path(root or os.environ.get("ZOO_RUNS") or "runs") / domain
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    folder, count = parent / stem, 1
    while folder.exists():
        count += 1
        folder = parent / f"{stem}-{count}"
    os.environ[_SHARED] = str(folder)
    return folder


@contextmanager
def opened(folder: Path) -> Iterator[None]:
    """Make the folder for the time of a training; one that a refusal leaves without a checkpoint is taken away."""
    if not is_first_process():
        yield
        return
    fresh = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except UserError:
        if fresh and not any(folder.rglob("*.ckpt")):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def write_environment(folder: Path, words: list[str]) -> str:
    """Write ``environment.json``: command, versions, code and machine.

    Args:
        folder: The run folder.
        words: Words of the command.

    Returns:
        The commands that made the folder what it is, joined by ``&&``.
    """
    path = folder / "environment.json"
    commands: list[str] = json.loads(path.read_text(encoding="utf-8"))["commands"] if path.is_file() else []
    # A bare run=DIR only finishes what an earlier command asked for.
    if not commands or any(not word.startswith("run=") for word in words):
        commands.append(shlex.join(["python", "-m", "zoo.train", *words]))
    facts = {"commands": commands, "versions": versions(), "hardware": hardware(), "git": _commit()}
    write_text(path, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
    return " && ".join(commands)


def _commit() -> str | None:
    """The commit of the code, marked when files differ from it; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a training checkpoint: tensors and plain values, never code.

    Raises:
        UserError: The file is missing, damaged or not written by a task of the zoo.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, KeyError, OSError, pickle.UnpicklingError):
        raise UserError(f"{path}: damaged, or no checkpoint of the zoo") from None
    if not isinstance(content, dict) or "state_dict" not in content or "spec" not in content:
        raise UserError(
            f"{path}: not a checkpoint of the zoo; it holds no weights with the facts of their data"
        )
    return content


def run_loggers(folder: Path, tensorboard: bool) -> list[Logger]:
    """The loggers of a run folder: ``metrics.csv``, and TensorBoard's files where it is installed."""
    loggers: list[Logger] = [MetricsFile(folder)]
    if tensorboard and find_spec("tensorboard"):
        loggers.append(TensorBoardLogger(folder, name="", version="tensorboard", default_hp_metric=False))
    return loggers


class MetricsFile(Logger):
    """Writes ``metrics.csv``, one line per step at which something was logged.

    Unlike Lightning's own, it continues the file of a run that is resumed, less the lines of steps that the
    resumed run takes again.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._path = folder / "metrics.csv"
        self._lines: list[dict[str, Any]] | None = None
        self._written = float("-inf")

    @property
    def name(self) -> str:
        """No folder of its own: checkpoints stay in the run folder."""
        return ""

    @property
    def version(self) -> str:
        """No folder of its own."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run folder."""
        return str(self._path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: they are in ``config.yaml``."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add the metrics to the line of their step."""
        step = 0 if step is None else step
        if self._lines is None:
            self._lines = [line for line in self._read() if int(line["step"]) <= step]
        values = {key: value.item() if isinstance(value, Tensor) else value for key, value in metrics.items()}
        line = self._lines[-1] if self._lines else {"step": None}
        # What was logged twice at one step, such as the same metric of two evaluations, keeps both lines.
        if line["step"] != step or any(line.get(key, value) != value for key, value in values.items()):
            self._lines.append({"step": step})
        self._lines[-1] |= values

    @rank_zero_only
    def save(self) -> None:
        """Write the file, at most every few seconds: Lightning calls this after every line."""
        if time.monotonic() - self._written > _SECONDS_BETWEEN_WRITES:
            self._write()

    def _write(self) -> None:
        if not self._lines:
            return
        self._written = time.monotonic()
        keys = sorted({key for line in self._lines for key in line} - {"step", "epoch"})
        with replacing(self._path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, ["step", "epoch", *keys], lineterminator="\n")
            table.writeheader()
            table.writerows(self._lines)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the file at the end of a stage."""
        self._write()

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.is_file():
            return []
        with self._path.open(encoding="utf-8", newline="") as file:
            return [{key: value for key, value in line.items() if value} for line in csv.DictReader(file)]

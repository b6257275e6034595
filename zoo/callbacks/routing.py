"""The report on routing: who worked how much, in a file, a picture and the metrics of the loggers."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from zoo.files import write_text
from zoo.pictures import load_figure, save

logger = logging.getLogger("zoo.routing")


class RoutingReport(Callback):
    """Writes ``routing.json`` after every validation and test, and ``routing.png`` at the end of a fit or test.

    It asks the task for ``routing_summary()``: by layer a dict with ``load`` (shares per expert),
    ``entropy``, ``max_violation``, ``dead`` (experts without work) and ``share`` (by tag, shares per expert).
    Loggers get ``moe/load/<layer>/<expert>``, ``moe/entropy/<layer>`` and ``moe/dead/<layer>``. A task
    without the method, or with nothing to tell, leaves no report.

    Args:
        folder: Where the files go; None takes the trainer's ``default_root_dir``.
    """

    def __init__(self, folder: str | None = None) -> None:
        super().__init__()
        self.folder = folder
        self._last: tuple[str, dict[str, Any]] | None = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report on the validation split, except after the sanity check."""
        if not trainer.sanity_checking:
            self._report(trainer, pl_module, "validation")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the last validation, and warn of experts without work."""
        self._conclude(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report on the test split, over the report on validation."""
        self._report(trainer, pl_module, "test")
        self._conclude(trainer)

    def _report(self, trainer: Trainer, pl_module: LightningModule, split: str) -> None:
        summarise = getattr(pl_module, "routing_summary", None)
        # Every process asks, because the task may gather counts over them; the first one writes.
        layers = {name: _plain(entry) for name, entry in summarise().items()} if summarise else {}
        if not layers or not trainer.is_global_zero:
            return
        for target in trainer.loggers:
            target.log_metrics(tags(layers), step=trainer.global_step)
        record = {"split": split, "epoch": trainer.current_epoch, "layers": layers}
        write_text(
            self._path(trainer, "routing.json"), json.dumps(record, indent=2, ensure_ascii=False) + "\n"
        )
        self._last = split, layers

    def _conclude(self, trainer: Trainer) -> None:
        if self._last is None:
            return
        split, layers = self._last
        self._last = None
        save(load_figure(layers, f"Expert load, {split}"), self._path(trainer, "routing.png"))
        for name, entry in layers.items():
            if dead := _count(entry["dead"]):
                logger.warning(
                    "%s: %d of %d experts get no tokens (%s)", name, dead, len(entry["load"]), split
                )

    def _path(self, trainer: Trainer, name: str) -> Path:
        return Path(self.folder or trainer.default_root_dir) / name


def tags(layers: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Flatten a routing summary into the metric names that are the same in all domains."""
    flat: dict[str, float] = {}
    for name, entry in layers.items():
        flat |= {f"moe/load/{name}/{expert}": share for expert, share in enumerate(entry["load"])}
        flat[f"moe/entropy/{name}"] = entry["entropy"]
        flat[f"moe/dead/{name}"] = float(_count(entry["dead"]))
    return flat


def _count(dead: int | list[int]) -> int:
    return dead if isinstance(dead, int) else len(dead)


def _plain(value: Any) -> Any:
    """Turn tensors and arrays into what JSON holds; a number that is not finite becomes null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

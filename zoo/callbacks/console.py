"""One line per epoch where no progress bar is watched."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

logger = logging.getLogger("zoo.console")


class EpochLine(Callback):
    """Logs epoch, training loss, the selected validation metric, its best mark and the seconds of each epoch.

    The line goes to the logger ``zoo.console``: with level INFO, or DEBUG on a terminal, where Lightning's
    progress bar tells the same, so that only a log file keeps it.

    Args:
        monitor: Validation metric to show; None takes that of the checkpoint callback.
        mode: Whether lower (``"min"``) or higher (``"max"``) is better; None takes the checkpoint callback's.
    """

    def __init__(self, monitor: str | None = None, mode: str | None = None) -> None:
        super().__init__()
        self.monitor = monitor
        self.mode = mode
        self.best: float | None = None
        self._start = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Keep the best value, so that a resumed training marks no epoch worse than an earlier one."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the best value of the training that is resumed."""
        self.best = state_dict["best"]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the epoch's clock."""
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the line; validation has run by now."""
        if not trainer.is_global_zero:
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        parts = [f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"]
        loss = metrics.get("train/loss_epoch", metrics.get("train/loss"))
        if loss is not None:
            parts.append(f"train {loss:.4f}")
        checkpoint = trainer.checkpoint_callback
        monitor = self.monitor or getattr(checkpoint, "monitor", None)
        if monitor in metrics:
            mode = self.mode or str(getattr(checkpoint, "mode", "min"))
            parts.append(
                f"{monitor} {metrics[monitor]:.4f}{' *' if self._improves(metrics[monitor], mode) else '  '}"
            )
        parts.append(f"{time.perf_counter() - self._start:.1f} s")
        logger.log(logging.DEBUG if sys.stderr.isatty() else logging.INFO, "  ".join(parts))

    def _improves(self, value: float, mode: str) -> bool:
        """Keep the best value; NaN is never it."""
        sign = -1.0 if mode == "max" else 1.0
        better = value == value if self.best is None else value * sign < self.best * sign
        if better:
            self.best = value
        return better

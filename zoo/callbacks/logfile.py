"""The run's ``log.txt``."""

from __future__ import annotations

import logging
from pathlib import Path

from pytorch_lightning import Callback, LightningModule, Trainer

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LOGGERS = ("zoo", "pytorch_lightning", "py.warnings")


class LogFile(Callback):
    """Appends what the zoo and Lightning log, and Python's warnings, to ``log.txt`` in the run folder.

    Args:
        folder: Where the file is; None takes the trainer's ``default_root_dir``.
    """

    def __init__(self, folder: str | None = None) -> None:
        super().__init__()
        self.folder = folder
        self._handler: logging.FileHandler | None = None
        self._levels: dict[str, int] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Open the file on the first process."""
        if not trainer.is_global_zero or self._handler is not None:
            return
        path = Path(self.folder or trainer.default_root_dir) / "log.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handler = logging.FileHandler(path, encoding="utf-8")
        self._handler.setFormatter(logging.Formatter(_FORMAT))
        logging.captureWarnings(True)
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(self._handler)
        # The console may be quieter than the file: its own handler's level decides what it shows.
        self._levels = {"zoo": logging.getLogger("zoo").level}
        logging.getLogger("zoo").setLevel(logging.DEBUG)
        logging.getLogger("zoo").debug("stage %s starts", getattr(stage, "value", stage))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep the reason why a run ended early, and close the file."""
        if self._handler is not None:
            record = "run ended early: %s: %s"
            logging.getLogger("zoo").debug(record, type(exception).__name__, exception)
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the file."""
        self._close()

    def _close(self) -> None:
        if self._handler is None:
            return
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(self._handler)
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)
        logging.captureWarnings(False)
        self._handler.close()
        self._handler = None

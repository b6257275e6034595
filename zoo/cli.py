"""LightningCLI bound to the task and the data of one domain: parses, checks and builds; a session runs it."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from jsonargparse.typing import PositiveInt
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, Timer
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.loggers import Logger

from zoo.callbacks import BestCheckpoint, EpochLine, LogFile, RoutingReport
from zoo.errors import UserError
from zoo.parser import ZooParser
from zoo.registry import Domain, resolve
from zoo.runs import run_loggers

_TRAINER_KEYS = (
    "max_epochs max_steps accelerator devices strategy precision limit_train_batches gradient_clip_val "
    "accumulate_grad_batches callbacks logger fast_dev_run"
).split()


@contextmanager
def told_in_one_line(place: str = "") -> Iterator[None]:
    """Turn what a constructor says about a setting into a :class:`UserError`.

    Constructors of tasks, networks and Lightning refuse wrong values with ``ValueError`` or ``TypeError`` and the
    value in the text. ``ZOO_DEBUG=1`` lets them through with their traceback.
    """
    try:
        yield
    except (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException) as error:
        if os.environ.get("ZOO_DEBUG") == "1":
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{place}{': ' if place else ''}{text}") from error


class ZooCLI(LightningCLI):
    """One domain's command line.

    It parses the arguments and builds task and data module. It does not start: :meth:`build_trainer` gives the
    trainer once the run folder is known.

    Args:
        domain: The domain.
        stage: ``fit``, ``validate`` or ``test``.
        arguments: Words of the command as flags, without the stage.
        help: Print the settings (``"keys"``) or every one (``"all"``) and leave.

    Raises:
        UserError: A key is unknown or a value does not fit.
    """

    def __init__(self, domain: Domain, stage: str, arguments: list[str], help: str | None = None) -> None:
        self.domain, self.stage, self.help = domain, stage, help
        with warnings.catch_warnings():
            # Lightning warns that arguments beside a non-empty sys.argv are confusing; here they come from it.
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            super().__init__(
                resolve(domain.task),
                resolve(domain.data),
                save_config_callback=None,
                trainer_defaults={"use_distributed_sampler": False, "enable_model_summary": False},
                seed_everything_default=0,
                parser_class=ZooParser,
                auto_configure_optimizers=False,
                args=[stage, *arguments, *(["--help"] if help == "all" else [])],
            )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Only the stage at hand, so that the parsers of the others need not be built."""
        return {self.stage: LightningCLI.subcommands()[self.stage]}

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        # Checkpoints hold tensors and plain values only; nothing else in one is ever unpickled.
        parser.set_defaults({"weights_only": True})
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the keys of the run itself and the two callbacks that every training has."""
        parser.add_argument("--domain", type=str, default=self.domain.name, help="Name of the domain.")
        parser.add_argument("--size", type=str, default=self.domain.size, help="Name of the size.")
        parser.add_argument(
            "--rows", type=Literal["model", "twin", "all"] | None, help="Which rows of the table are trained."
        )
        parser.add_argument(
            "--seeds", type=PositiveInt, default=1, help="How many seeds each row is trained with."
        )
        parser.add_lightning_class_args(BestCheckpoint, "checkpoint")
        parser.add_lightning_class_args(EarlyStopping, "early_stopping")
        task: Any = self._model_class
        parser.set_defaults(
            {
                "checkpoint.monitor": task.monitor,
                "checkpoint.mode": task.monitor_mode,
                "checkpoint.filename": "best",
                "checkpoint.enable_version_counter": False,
                "early_stopping.monitor": task.monitor,
                "early_stopping.mode": task.monitor_mode,
                "early_stopping.patience": getattr(task, "patience", 5),
            }
        )

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Parse, or print the page of settings with the values they have under these words."""
        for known in (parser, *self._subcommand_parsers.values()):
            known.words = args
        super().parse_arguments(parser, args)
        if self.help:
            print(self._page())
            raise SystemExit(0)

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would let the settings inside a checkpoint overrule the command line."""

    def instantiate_classes(self) -> None:
        """Build task, data module and callbacks, and leave the trainer for later."""
        with told_in_one_line():
            self.config_init = self.parser.instantiate(self.config)
        self.datamodule = self._get(self.config_init, "data")
        self.model = self._get(self.config_init, "model")

    def _run_subcommand(self, subcommand: str) -> None:
        """Do nothing: the session decides what is run, and may run more than one stage."""

    def build_trainer(self, folder: Path, training: bool = True) -> Trainer:
        """The trainer that writes into a run folder; nothing is written yet.

        Args:
            folder: The run folder.
            training: Whether metrics, log and routing are recorded there; otherwise only the user's own
                loggers and callbacks work.

        Raises:
            UserError: Lightning refuses a setting of the trainer.
        """
        settings = self._get(self.config_init, "trainer")
        changed: dict[str, Any] = {"default_root_dir": str(folder), "logger": self._loggers(folder, training)}
        # None stays None in the saved configuration, so that a rerun decides for its own terminal.
        if settings.enable_progress_bar is None:
            changed["enable_progress_bar"] = sys.stdout.isatty()
        with told_in_one_line("trainer"):
            return Trainer(**{**settings, **changed, "callbacks": self._callbacks(training)})

    def _callbacks(self, training: bool) -> list[Callback]:
        """What every training has, and the user's own, whose early stopping stands for ours."""
        settings = self._get(self.config_init, "trainer")
        own: list[Callback] = _listed(settings.callbacks)
        callbacks: list[Callback] = []
        # Ours first: Lightning and the epoch lines take the first checkpoint callback for the one that counts.
        if settings.enable_checkpointing is not False:
            callbacks.append(self._get(self.config_init, "checkpoint"))
            # Lightning's save_last writes only when the best improves; a run must resume from its last epoch.
            last = ModelCheckpoint(
                filename="last", save_on_train_epoch_end=True, enable_version_counter=False
            )
            callbacks.append(last)
        callbacks += own
        if not any(isinstance(callback, EarlyStopping) for callback in own):
            callbacks.append(self._get(self.config_init, "early_stopping"))
        return [*callbacks, Timer(), EpochLine(), LogFile(), RoutingReport()] if training else callbacks

    def _loggers(self, folder: Path, training: bool) -> list[Logger] | bool:
        given = self._get(self.config_init, "trainer").logger
        if given is False:
            return False
        own: list[Logger] = [] if given is True else _listed(given)
        return run_loggers(folder, tensorboard=not own) + own if training else own or False

    @property
    def settings(self) -> Any:
        """The parsed configuration of the stage."""
        return self.config[self.stage]

    @property
    def task(self) -> Any:
        """The task, typed loosely because domains differ."""
        return self.model

    @property
    def data(self) -> Any:
        """The data module, typed loosely because domains differ."""
        return self.datamodule

    def dump(self) -> str:
        """The whole configuration as YAML, enough to run the command again."""
        text: str = self._parser(self.stage).dump(self.settings, skip_unset=False)
        return text

    def _page(self) -> str:
        """The settings that most people want, each with value, type and help."""
        sections: dict[str, list[str]] = {"model": [], "data": [], "trainer": []}
        for action in self._parser(self.stage)._actions:
            group, _, key = action.dest.partition(".")
            if key and group in sections and (group != "trainer" or key in _TRAINER_KEYS):
                sections[group] += _entry(action, self.settings.get(action.dest))
        title = f"Settings of domain={self.domain.name}, typed as key=value; --help_all shows every one."
        return "\n\n".join([title, *("\n".join(lines) for lines in sections.values())])


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _entry(action: argparse.Action, value: Any) -> list[str]:
    kind = str(getattr(action, "_typehint", None) or action.type or "")
    kind = re.sub(r"(?:\w+\.)+(\w+)", r"\1", re.sub(r"<class '(.+?)'>", r"\1", kind)).replace(
        "NoneType", "null"
    )
    if len(kind) > 80:
        kind = f"{kind[:77]}..."
    shown = value if isinstance(value, str) else json.dumps(value, default=str)
    if action.nargs == 0 or (kind == "" and not isinstance(value, (int, float, str))):
        return []
    text = (
        ""
        if action.help in (None, argparse.SUPPRESS)
        else re.split(r"(?<=\.)\s", str(action.help), maxsplit=1)[0]
    )
    text = " ".join(text.split())
    return [f"  {action.dest}={shown}  ({kind})", *([f"      {text}"] if text else [])]

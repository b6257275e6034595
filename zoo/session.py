"""What one training command does: fit, test the best checkpoint, the other rows and seeds, the results table."""

from __future__ import annotations

import copy
import json
import logging
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml
from pytorch_lightning import Trainer, seed_everything
from pytorch_lightning.callbacks import Timer

from zoo.cli import ZooCLI, told_in_one_line
from zoo.environment import hardware, versions
from zoo.errors import UserError
from zoo.files import write_text
from zoo.parser import allow_classes
from zoo.report import show, write_results
from zoo.results import Results, Row, combine
from zoo.resume import refuse_other_shapes, shapes
from zoo.runs import is_first_process, load_checkpoint, new_folder, opened, write_environment
from zoo.words import Words

# Settings that say what a command does around a row, not how the row is trained.
_AROUND = ("rows", "seeds", "ckpt_path")


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One training: a network with a seed, in its own folder."""

    network: str
    seed: int
    folder: Path

    @property
    def row_file(self) -> Path:
        return self.folder / "row.json"


def run(words: Words, given: list[str]) -> int:
    """Do what the words ask for.

    Args:
        words: The translated command.
        given: The words as typed, for the record.

    Returns:
        Exit status 0.

    Raises:
        UserError: A mistake of the user, before anything is written wherever that can be known.
    """
    _quieten()
    allow_classes(words.allow)
    cli = ZooCLI(words.domain, words.stage or "fit", words.arguments, help=words.help)
    if cli.stage == "fit":
        _train(cli, words, given)
    else:
        _measure(cli, words, given)
    return 0


def _train(cli: ZooCLI, words: Words, given: list[str]) -> None:
    if cli.settings.trainer.limit_val_batches == 0:
        raise UserError("trainer.limit_val_batches=0 leaves nothing to choose the best epoch by")
    folder = words.run or new_folder(words.domain.name, words.name, cli.settings.trainer.default_root_dir)
    checkpoint = _start(cli, folder, resume=words.run is not None)
    if words.run and checkpoint:
        refuse_other_shapes(cli, words.run, checkpoint)
    whole = words.stage is None
    jobs = _plan(cli, folder) if whole else [_Job(network=cli.task.network, seed=_seed(cli), folder=folder)]
    stored = _stored(jobs[0], cli)
    trainer = cli.build_trainer(folder, training=stored is None)
    _rehearse(cli, {job.network for job in jobs})
    with opened(folder), _continuable(folder):
        command = write_environment(folder, given) if is_first_process() else ""
        if stored is None:
            _fit(cli, trainer, jobs[0], checkpoint)
        if whole:
            # The main network is tested again even if it is done: the pictures are of its predictions.
            main = _test(cli, trainer, jobs[0], stored)
            rows = [main, *(_row(cli, words, job) for job in jobs[1:])]
            _finish(cli, jobs, rows, command)
    _tell(f"run: {folder}")


def _start(cli: ZooCLI, folder: Path, resume: bool) -> Path | None:
    """The checkpoint that training starts from: the one named, else the newest of a run that is resumed."""
    named = cli.settings.ckpt_path
    path = Path(named) if named else folder / "checkpoints" / "last.ckpt"
    if not named and not (resume and path.is_file()):
        return None
    load_checkpoint(path)
    return path


def _plan(cli: ZooCLI, folder: Path) -> list[_Job]:
    """All trainings of the table: the chosen network first, with its first seed in the run folder itself."""
    domain, chosen = cli.domain, cli.task.network
    rows = cli.settings.rows
    if rows is None:
        rows = "all" if cli.data.generated and chosen == domain.model else "model"
    wanted = {"model": (), "twin": (domain.model, domain.twin), "all": domain.networks}[rows]
    networks = [chosen, *(network for network in wanted if network != chosen)]
    seeds = [_seed(cli) + step for step in range(cli.settings.seeds)]
    jobs = [
        _Job(network=network, seed=seed, folder=folder / "rows" / f"{network}-seed{seed}")
        for network in networks
        for seed in seeds
    ]
    return [replace(jobs[0], folder=folder), *jobs[1:]]


def _seed(cli: ZooCLI) -> int:
    seed = cli.settings.seed_everything
    if isinstance(seed, bool):
        raise UserError(
            f"seed_everything={str(seed).lower()}: give a number, so that the run can be repeated"
        )
    return int(seed)


def _rehearse(cli: ZooCLI, networks: set[str]) -> None:
    """Read the data and build the networks without memory, so that what cannot work is refused before a start.

    What a user should know about the data is told here.
    """
    with told_in_one_line():
        cli.data.prepare_data()
        cli.data.setup("fit")
        for network in sorted(networks):
            task = copy.copy(cli.task)
            task.network = network
            shapes(task, cli.data.spec)
    for line in cli.data.notices():
        _tell(line)


def _fit(cli: ZooCLI, trainer: Trainer, job: _Job, checkpoint: Path | None) -> None:
    """Train; results of the folder that are older than its checkpoint go."""
    if is_first_process():
        for name in ("row.json", "results.json", "results.md"):
            (job.folder / name).unlink(missing_ok=True)
        write_text(job.folder / "config.yaml", cli.dump())
    # The rehearsal and the rows before must not shift the random numbers of this one.
    seed_everything(job.seed, workers=True, verbose=False)
    _tell(f"training {job.network}, seed {job.seed}")
    with _loading(checkpoint):
        trainer.fit(
            cli.task, datamodule=cli.data, ckpt_path=checkpoint, weights_only=cli.settings.weights_only
        )


def _test(cli: ZooCLI, trainer: Trainer, job: _Job, stored: Row | None = None) -> Row:
    """Test the best checkpoint and keep the row; without checkpoints (``fast_dev_run``) the network as it is."""
    best = str(job.folder / "checkpoints" / "best.ckpt") if stored else _best(trainer)
    # Read now: loading the best checkpoint adds the time that it was written at.
    seconds = stored.seconds if stored else _training_time(trainer)
    trainer.test(cli.task, datamodule=cli.data, ckpt_path=best, weights_only=True, verbose=False)
    row = replace(_own_row(cli, job.seed), seconds=seconds)
    if stored:
        return row
    if is_first_process():
        write_text(job.row_file, json.dumps(asdict(row), indent=2) + "\n")
    return row


def _training_time(trainer: Trainer) -> float:
    timer = next(item for item in trainer.callbacks if isinstance(item, Timer))  # type: ignore[attr-defined]
    return timer.time_elapsed("train")


def _best(trainer: Trainer) -> str | None:
    return getattr(trainer.checkpoint_callback, "best_model_path", None) or None


def _own_row(cli: ZooCLI, seed: int) -> Row:
    """The task's row, with what only the command knows."""
    row: Row = cli.task.row()
    return replace(row, setting={"size": cli.settings.size, **row.setting}, seeds=[seed])


def _stored(job: _Job, cli: ZooCLI) -> Row | None:
    """The row of a training that ended earlier with the same settings."""
    config = job.folder / "config.yaml"
    if not job.row_file.is_file() or not config.is_file():
        return None
    then, now = (yaml.safe_load(text) for text in (config.read_text(encoding="utf-8"), cli.dump()))
    if any(then.get(key) != now.get(key) for key in now.keys() | then.keys() if key not in _AROUND):
        return None
    return Row(**json.loads(job.row_file.read_text(encoding="utf-8")))


def _row(cli: ZooCLI, words: Words, job: _Job) -> Row:
    """The row of another network or seed, trained by the same recipe in a folder of its own."""
    own = [f"--model.network={job.network}", f"--seed_everything={job.seed}", "--rows=model", "--seeds=1"]
    other = ZooCLI(cli.domain, "fit", [*words.arguments, *own, "--ckpt_path=null"])
    if stored := _stored(job, other):
        return stored
    trainer = other.build_trainer(job.folder)
    _fit(other, trainer, job, _start(other, job.folder, resume=True))
    return _test(other, trainer, job)


def _finish(cli: ZooCLI, jobs: list[_Job], rows: list[Row], command: str) -> None:
    """Write and print the table, and draw."""
    by_network: dict[str, list[Row]] = {}
    for job, row in zip(jobs, rows, strict=True):
        by_network.setdefault(job.network, []).append(row)
    baselines = cli.task.baselines(cli.data)
    results = _results(cli, [*map(combine, by_network.values()), *baselines], command)
    if not is_first_process():
        return
    folder = jobs[0].folder
    write_results(results, folder)
    show(results)
    cli.task.calibrate(cli.data, folder)
    for picture in cli.task.draw(cli.data, folder):
        print(f"picture: {picture}")
    if missing := [network for network in cli.domain.networks if network not in by_network]:
        print(f"not trained: {', '.join(missing)}; to add them: python -m zoo.train run={folder} rows=all")


def _results(cli: ZooCLI, rows: list[Row], command: str) -> Results:
    return Results(
        domain=cli.domain.name,
        command=command,
        data=cli.data.fingerprint(),
        versions=versions(),
        hardware=hardware(),
        rows=rows,
    )


def _measure(cli: ZooCLI, words: Words, given: list[str]) -> None:
    """The stages validate and test: numbers of a checkpoint, nothing written."""
    named = cli.settings.ckpt_path
    if not named and not words.run:
        raise UserError(f"{words.stage} of what? Add run=DIR, or ckpt_path=FILE")
    path = Path(named) if named else (words.run or Path()) / "checkpoints" / "best.ckpt"
    load_checkpoint(path)
    if words.run:
        refuse_other_shapes(cli, words.run, path)
    trainer = cli.build_trainer(words.run or Path(), training=False)
    measure = trainer.validate if cli.stage == "validate" else trainer.test
    with _loading(path):
        metrics = measure(
            cli.task, datamodule=cli.data, ckpt_path=str(path), weights_only=True, verbose=False
        )
    if not is_first_process():
        return
    if cli.stage == "test":
        command = shlex.join(["python", "-m", "zoo.train", *given])
        show(_results(cli, [_own_row(cli, _seed(cli)), *cli.task.baselines(cli.data)], command))
    else:
        for name, value in sorted(metrics[0].items()):
            print(f"{name:<24} {value:.6g}")
    _tell(f"run: {words.run}" if words.run else f"checkpoint: {path}")


@contextmanager
def _loading(path: Path | None) -> Iterator[None]:
    """Tell in one line that a checkpoint is of another network, which torch tells in many."""
    try:
        yield
    except RuntimeError as error:
        if path is None or "Error(s) in loading state_dict" not in str(error):
            raise
        first = " ".join(str(error).partition("\n")[2].strip().partition("\n")[0].split())
        raise UserError(f"{path} does not fit the network of these settings: {first}") from error


@contextmanager
def _continuable(folder: Path) -> Iterator[None]:
    """Tell how to go on after an interrupt, which Lightning turns into an exit of its own."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, SystemExit) and not isinstance(stop.__context__, KeyboardInterrupt):
            raise
        if is_first_process():
            print(f"interrupted; to continue: python -m zoo.train run={folder}", file=sys.stderr)
        raise KeyboardInterrupt from None


def _tell(line: str) -> None:
    if is_first_process():
        print(line, flush=True)


def _quieten() -> None:
    """Show what the zoo says, and of Lightning only warnings that a user can act on."""
    zoo = logging.getLogger("zoo")
    if not zoo.handlers:
        handler = logging.StreamHandler()
        handler.setLevel(logging.INFO)
        zoo.addHandler(handler)
    zoo.setLevel(logging.INFO)
    zoo.propagate = False
    for name in ("pytorch_lightning", "lightning_fabric", "lightning"):
        for shown in logging.getLogger(name).handlers:
            shown.setLevel(logging.WARNING)
        if not logging.getLogger(name).handlers:
            logging.getLogger(name).setLevel(logging.WARNING)
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)


_NOISE = (
    ".*does not have many workers.*",
    "Checkpoint directory .* exists and is not empty",
    ".*LeafSpec.*",
    "Be aware that when using `ckpt_path`",
    "The dirpath has changed",
    ".*all_gather is deprecated",
)

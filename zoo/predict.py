"""Front door for users' files: ``python -m zoo.predict domain=NAME input=FILES [run=DIR] key=value ...``.

It checks the words, lets the files flow through the domain's predictor and leaves one folder with
predictions, pictures and a status for every item. Torch is loaded only after all words are checked.
"""

from __future__ import annotations

import csv
import glob
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self, TextIO

import yaml

from zoo.environment import hardware, versions
from zoo.errors import UserError
from zoo.files import write_text
from zoo.predictor import Prediction, Predictor, Word
from zoo.registry import DOMAINS, get_domain, resolve, unknown

OK, SOME_REFUSED, WRONG_WORDS, INTERRUPTED = 0, 1, 2, 130

_WORDS = {
    "domain": Word(kind=str, help="domain of the zoo; with run= it is read from the run"),
    "input": Word(
        kind=str, help="a file, several separated by commas, a folder, or a pattern such as 'in/*.csv'"
    ),
    "run": Word(kind=str, help="folder of a finished run (default: the newest of the domain under runs/)"),
    "weights": Word(kind=str, help="name of published weights"),
    "out": Word(kind=str, help="folder to make (default: predictions/<domain>/<time>)"),
    "pictures": Word(kind=bool, default=True, help="draw a picture of every prediction (default: yes)"),
}


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A checked command."""

    domain: str
    predictor: type[Predictor[Any, Any]]
    run: Path
    paths: list[Path]
    out: Path
    pictures: bool
    words: dict[str, Any]
    command: str


def main(argv: Sequence[str] | None = None) -> int:
    """Predict what the words name.

    Args:
        argv: Words of the command line; None takes the process's own.

    Returns:
        Exit status: 0 if every item was predicted, 1 if some were refused, 2 if the words were wrong,
        130 if interrupted.
    """
    typed = sys.argv[1:] if argv is None else list(argv)
    try:
        if not typed or {"-h", "--help"} & set(typed):
            print(_help(typed))
            return OK
        job = _job(typed)
        refused, total, sentences = _predict(job)
    except UserError as error:
        if os.environ.get("ZOO_DEBUG") == "1":
            raise
        print(f"error: {error}", file=sys.stderr)
        return WRONG_WORDS
    except KeyboardInterrupt:
        return INTERRUPTED
    for sentence in sentences:
        print(sentence)
    aside = f" ({refused} refused, see status.csv)" if refused else ""
    print(f"predicted {total - refused} of {total} items{aside}")
    print(f"out: {job.out}")
    return SOME_REFUSED if refused else OK


def _job(typed: Sequence[str]) -> _Job:
    """Check all words; nothing is loaded or written before."""
    texts = _split(typed)
    name = texts.get("domain") or _domain_of(texts)
    predictor: type[Predictor[Any, Any]] = resolve(get_domain(name).predictor)
    known = _WORDS | predictor.words
    for word in texts:
        if word not in known:
            raise unknown(f"word of domain={name}", word, known)
    values = {word: entry.default for word, entry in known.items()}
    values |= {word: known[word].parse(word, text) for word, text in texts.items()}
    if "input" not in texts:
        raise UserError("input= is missing: name a file, a folder or a pattern, such as input=my.csv")
    run = _run_folder(name, texts)
    job = _Job(
        domain=name,
        predictor=predictor,
        run=run,
        paths=_expand(texts["input"], predictor.suffixes),
        out=_free_folder(Path(texts.get("out") or f"predictions/{name}/{datetime.now():%Y%m%d-%H%M%S}")),
        pictures=bool(values["pictures"]),
        words={word: values[word] for word in predictor.words},
        command=shlex.join(["python", "-m", "zoo.predict", *typed]),
    )
    if "run" not in texts:
        print(f"note: predicting with the newest run, {run}; name another by run=DIR", file=sys.stderr)
    return job


def _split(typed: Sequence[str]) -> dict[str, str]:
    """Split ``key=value`` words."""
    texts: dict[str, str] = {}
    for word in typed:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise UserError(f"{word!r} is no key=value word; python -m zoo.predict --help lists them")
        if key in texts:
            raise UserError(f"{key}= is given twice: {texts[key]!r} and {value!r}")
        if not value:
            raise UserError(f"{key}= has no value")
        texts[key] = value
    return texts


def _domain_of(texts: dict[str, str]) -> str:
    """Read the domain from the run's own config, where the user did not type it."""
    if "run" not in texts:
        raise UserError(f"domain= is missing. Known: {', '.join(DOMAINS)}.")
    config = Path(texts["run"]) / "config.yaml"
    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        raise UserError(f"{config}: cannot be read; add domain=NAME or name the folder of a run") from None
    domain = content.get("domain") if isinstance(content, dict) else None
    if not isinstance(domain, str):
        raise UserError(f"{config}: names no domain; add domain=NAME")
    return domain


def _run_folder(domain: str, texts: dict[str, str]) -> Path:
    """Find the run whose network predicts: the one named, else the newest finished one of the domain."""
    if "weights" in texts:
        raise UserError(
            f"weights={texts['weights']}: published weights arrive with the hub, which is not there yet; "
            "name a run of your own by run=DIR"
        )
    if "run" not in texts:
        folder = Path(os.environ.get("ZOO_RUNS") or "runs") / domain
        finished = sorted(folder.glob("*/checkpoints/best.ckpt"))
        if not finished:
            raise UserError(
                f"no finished run under {folder}; name one by run=DIR "
                f"or make one: python -m zoo.train domain={domain}"
            )
        return finished[-1].parent.parent
    run = Path(texts["run"])
    if not (run / "checkpoints" / "best.ckpt").is_file():
        raise UserError(f"run={run}: no finished run, it holds no checkpoints/best.ckpt")
    if "domain" in texts and (run / "config.yaml").is_file() and _domain_of(texts) != domain:
        raise UserError(f"run={run}: is a run of domain={_domain_of(texts)}, not of domain={domain}")
    return run


def _expand(text: str, suffixes: tuple[str, ...]) -> list[Path]:
    """List the input files, each once, in the order given; folders and patterns in the order of names."""
    paths: dict[Path, None] = {}
    for part in [text] if Path(text).exists() else text.split(","):
        path = Path(part)
        if path.is_dir():
            entries = sorted(entry for entry in path.iterdir() if entry.is_file() and entry.name[0] != ".")
            found = [entry for entry in entries if not suffixes or entry.suffix.lower() in suffixes]
        elif path.is_file():
            found = [path]
        else:
            found = sorted(Path(match) for match in glob.glob(part, recursive=True) if Path(match).is_file())
        if not found:
            ending = f" ending in {' or '.join(suffixes)}" if suffixes and path.is_dir() else ""
            raise UserError(
                f"input={part}: no such file" if not ending else f"input={part}: no files{ending}"
            )
        paths |= dict.fromkeys(found)
    return list(paths)


def _free_folder(out: Path) -> Path:
    """Return the output folder if nothing stands there that could be mixed up with the new files."""
    if out.is_file() or not out.name or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"out={out}: exists already; name another folder or remove it")
    return out


def _predict(job: _Job) -> tuple[int, int, list[str]]:
    """Run a job; return how many items were refused, how many came, and what the domain says at the end."""
    predictor = job.predictor.from_run(job.run, **job.words)
    with _appearing(job.out) as folder:
        with _Output(folder) as output, _progress(len(job.paths)) as advance:
            items = _items(predictor, job.paths, output, advance)
            for row in predictor.run(items):
                output.add(row, predictor if job.pictures else None)
        sentences = predictor.finish(folder)
        record = {"domain": job.domain, "command": job.command, "run": str(job.run), "words": job.words}
        record |= {"versions": versions(), "hardware": hardware()}
        write_text(folder / "prediction.json", json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return output.refused, output.total, sentences


def _items(predictor: Predictor[Any, Any], paths: list[Path], output: _Output, advance: Any) -> Iterator[Any]:
    """Let the items of all files flow; a file that cannot be read is refused and the next one is opened."""
    for path in paths:
        try:
            yield from predictor.read(path)
        except (UserError, OSError) as error:
            output.add(Prediction(item=str(path), message=str(error), refused=True), None)
        advance()


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """Yield a hidden folder that becomes ``out`` when the block ends well and is removed otherwise."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f".{os.getpid()}-{out.name}")
    folder.mkdir()
    try:
        yield folder
        if out.is_dir():
            out.rmdir()
        os.replace(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _progress(files: int) -> Iterator[Any]:
    """Yield what to call after each file; it moves a bar where someone is watching."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("files", total=files)
        yield lambda: bar.advance(task)


class _Output:
    """The files of a prediction, written as the items come."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.total = 0
        self.refused = 0
        self._stems: set[str] = set()
        self._files = ExitStack()
        self._status = csv.writer(self._open("status.csv"), lineterminator="\n")
        self._status.writerow(["item", "status", "message", "outputs"])
        self._table: csv.DictWriter[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def add(self, row: Prediction, artist: Predictor[Any, Any] | None) -> None:
        """Write one prediction, with its picture if there is an artist, and tell the user its message."""
        self.total += 1
        self.refused += row.refused
        outputs = []
        if not row.refused:
            outputs = ["predictions.csv"] if row.table else []
            self._write(row)
            picture = artist.draw(row, self._stem(row.item)) if artist else None
            if picture is not None:
                outputs.append(picture.relative_to(self.folder).as_posix())
        status = "refused" if row.refused else "ok"
        self._status.writerow([row.item, status, row.message, " ".join(outputs)])
        if row.message:
            print(f"{'refused' if row.refused else 'note'}: {row.item}: {row.message}", file=sys.stderr)

    def _write(self, row: Prediction) -> None:
        """Append a prediction's lines; the first line decides the columns."""
        for line in row.table:
            if self._table is None:
                columns = ["item", *line]
                self._table = csv.DictWriter(self._open("predictions.csv"), columns, lineterminator="\n")
                self._table.writeheader()
            self._table.writerow({"item": row.item, **line})

    def _stem(self, item: str) -> Path:
        """Return a free path for the item's picture; names come from users' files and may hold anything."""
        plain = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(item).stem).strip("_")[:80] or "item"
        stem, count = plain, 1
        while stem in self._stems:
            count += 1
            stem = f"{plain}-{count}"
        self._stems.add(stem)
        return self.folder / "pictures" / stem

    def _open(self, name: str) -> TextIO:
        return self._files.enter_context((self.folder / name).open("w", encoding="utf-8", newline=""))


def _help(typed: Sequence[str]) -> str:
    """Describe the words, and with ``domain=NAME`` those of the domain."""
    texts = _split([word for word in typed if not word.startswith("-")])
    words = dict(_WORDS)
    if "domain" in texts:
        words |= resolve(get_domain(texts["domain"]).predictor).words
    lines = [f"  {name}=".ljust(16) + word.help + _choices(word) for name, word in words.items()]
    hint = (
        "" if "domain" in texts else f"\ndomains: {', '.join(DOMAINS)} (domain=NAME --help adds their words)"
    )
    usage = "usage: python -m zoo.predict domain=NAME input=FILES [run=DIR] [out=DIR] key=value ..."
    return "\n".join([usage, "", *lines]) + hint


def _choices(word: Word) -> str:
    return f" [{'|'.join(word.choices)}]" if word.choices else ""


if __name__ == "__main__":
    sys.exit(main())

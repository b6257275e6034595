"""The words of the training command, turned into the argument list of the command line behind it. No torch.

``domain=forecasting size=tiny data=etth1 model.width=32`` becomes ``--config=…/default.yaml
--config=…/model/tiny.yaml --config=…/data/etth1.yaml --model.width=32``: files first, words after them in the
order given, so that what is typed wins.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from zoo.errors import UserError
from zoo.registry import Domain, configs, get_domain, preset_path, unknown

STAGES = ("fit", "validate", "test", "predict")
ROWS = ("model", "twin", "all")
SPECIAL = ("domain", "size", "data", "run", "rows", "seeds", "allow")

_WORD = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*\+?)=(.*)\Z", re.DOTALL)
_LONE_FLAGS = ("--help", "--help_all", "--print_config")


@dataclass(frozen=True, kw_only=True)
class Words:
    """What a command line asks for.

    Attributes:
        stage: Lightning's stage, or None for the whole sequence: fit, test, results table.
        domain: The domain that all other words are about.
        name: Short name of the data and size, for the run folder.
        arguments: Argument list for ``ZooCLI``, without the stage.
        run: The run folder to continue, test or predict from.
        allow: Packages of the user's own whose classes may be named in settings.
        help: ``"keys"`` for the settings of this domain, ``"all"`` for everything, else None.
    """

    stage: str | None
    domain: Domain
    name: str
    arguments: list[str]
    run: Path | None = None
    allow: tuple[str, ...] = ()
    help: str | None = None


@dataclass(kw_only=True)
class _Parts:
    """A command line taken apart, before anything is looked up."""

    stage: str | None = None
    special: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    help: str | None = None


def translate(argv: Sequence[str]) -> Words:
    """Translate the words of a command.

    Args:
        argv: The words after ``python -m zoo.train``.

    Returns:
        The stage, the domain and the argument list.

    Raises:
        UserError: A word is malformed, doubled, unknown, or names a file or run that is not there.
    """
    parts = _take_apart(argv)
    run = _run_folder(parts)
    files = list(parts.files)
    saved = (
        _saved(run / "config.yaml") if run else next((found for found in map(_saved, files) if found), None)
    )
    if run and saved is None:
        raise UserError(f"{run / 'config.yaml'} names no domain: this is not the folder of a run")
    if saved and not run:
        files.remove(next(name for name in files if _saved(name)))
    domain = _domain(parts, saved)
    arguments = [f"--config={file}" for file in _layers(parts, domain, saved)]
    arguments += [f"--config={file}" for file in files]
    arguments += [f"--domain={domain.name}", *_labels(parts, domain, saved), *parts.arguments]
    return Words(
        stage=parts.stage,
        domain=domain,
        name=_name(parts, domain, saved),
        arguments=arguments,
        run=run,
        allow=tuple(filter(None, parts.special.get("allow", "").split(","))),
        help=parts.help,
    )


def _take_apart(argv: Sequence[str]) -> _Parts:
    """Sort the words into stage, special words, files and all others."""
    parts = _Parts()
    rest = list(argv)
    if rest and not rest[0].startswith("-") and "=" not in rest[0]:
        parts.stage = rest.pop(0)
        if parts.stage not in STAGES:
            raise unknown("stage", parts.stage, STAGES)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help", "--help_all"):
            parts.help = "all" if word == "--help_all" else parts.help or "keys"
        elif word.startswith("-"):
            _take_flag(word, rest, parts)
        elif found := _WORD.match(word):
            _take_word(found[1], found[2], parts)
        else:
            hint = f" Did you mean {word}=…?" if word in SPECIAL else ""
            raise UserError(f"expected key=value, found {word!r}.{hint}")
    return parts


def _take_word(key: str, value: str, parts: _Parts) -> None:
    if key not in SPECIAL:
        parts.arguments.append(f"--{key}={value}")
        return
    if key in parts.special:
        raise UserError(f"{key}= is given twice: {parts.special[key]!r} and {value!r}")
    if not value:
        raise UserError(f"{key}= has no value")
    parts.special[key] = value


def _take_flag(word: str, rest: list[str], parts: _Parts) -> None:
    """Join a flag with its value, which may be the next one, and set configuration files apart."""
    flag, equals, value = word.partition("=")
    if flag == "-c":
        flag = "--config"
    name = flag.removeprefix("--")
    if name in SPECIAL and name != "data":
        raise UserError(f"write {name}=… without dashes")
    if (
        not equals
        and flag not in _LONE_FLAGS
        and rest
        and not rest[0].startswith("--")
        and not _WORD.match(rest[0])
    ):
        equals, value = "=", rest.pop(0)
    if flag == "--config":
        parts.files.append(_existing(value))
    else:
        parts.arguments.append(f"{flag}{equals}{value}")


def _existing(name: str) -> str:
    if not Path(name).is_file():
        raise UserError(f"--config {name}: no such file")
    return name


def _run_folder(parts: _Parts) -> Path | None:
    """The folder after ``run=``, with what the stage needs from it."""
    if "run" not in parts.special:
        return None
    run = Path(parts.special["run"])
    if not (run / "config.yaml").is_file():
        raise UserError(f"run={run}: there is no {run / 'config.yaml'}; give the folder of a run")
    best = run / "checkpoints" / "best.ckpt"
    chosen = any(argument.startswith("--ckpt_path=") for argument in parts.arguments)
    if parts.stage in ("validate", "test") and not chosen and not best.is_file():
        raise UserError(f"run={run}: there is no {best}; train it with: python -m zoo.train fit run={run}")
    return run


def _saved(path: str | Path) -> dict[str, Any] | None:
    """The content of a configuration that a run has saved, None for any other configuration file."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not readable as YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected settings, found {type(content).__name__}")
    return content if isinstance(content.get("domain"), str) else None


def _domain(parts: _Parts, saved: dict[str, Any] | None) -> Domain:
    named = parts.special.get("domain")
    stored = saved["domain"] if saved else None
    if named is None and stored is None:
        raise UserError("say which domain: domain=NAME; python -m zoo.train --help lists them")
    if named and stored and get_domain(named).name != stored:
        raise UserError(f"domain={named} does not fit a configuration of domain {stored}")
    return get_domain(named or stored or "")


def _layers(parts: _Parts, domain: Domain, saved: dict[str, Any] | None) -> list[str]:
    """Configuration files from the most general to the most special, a saved one given as text.

    A saved configuration is complete, so it stands for default and size. Under another data preset its own
    ``data:`` part is left out: keys of the old data that the new preset does not name must not survive.
    """
    size, data = parts.special.get("size"), parts.special.get("data")
    default = str(configs(domain.name) / "default.yaml")
    data_layers = [str(preset_path(domain.name, "data", data))] if data else []
    if saved is None:
        return [default, str(preset_path(domain.name, "model", size or domain.size)), *data_layers]
    size_layers = [str(preset_path(domain.name, "model", size))] if size else []
    if not data:
        return [yaml.safe_dump(saved), *size_layers]
    kept = yaml.safe_dump({key: value for key, value in saved.items() if key != "data"})
    old_size = str(preset_path(domain.name, "model", size or saved.get("size") or domain.size))
    return [default, old_size, kept, *size_layers, *data_layers]


def _labels(parts: _Parts, domain: Domain, saved: dict[str, Any] | None) -> list[str]:
    """The words that are settings of the run itself, checked."""
    labels = []
    if "size" in parts.special or saved is None:
        labels.append(f"--size={parts.special.get('size', domain.size)}")
    rows, seeds = parts.special.get("rows"), parts.special.get("seeds")
    if parts.stage is not None and (rows or seeds):
        raise UserError(f"rows= and seeds= belong to a whole run: leave out the stage word {parts.stage}")
    if rows:
        if rows not in ROWS:
            raise unknown("rows", rows, ROWS)
        labels.append(f"--rows={rows}")
    if seeds:
        if not seeds.isdecimal() or int(seeds) < 1:
            raise UserError(f"seeds={seeds}: expected a whole number of at least 1")
        labels.append(f"--seeds={int(seeds)}")
    return labels


def _name(parts: _Parts, domain: Domain, saved: dict[str, Any] | None) -> str:
    size = parts.special.get("size") or (saved or {}).get("size") or domain.size
    return "-".join(filter(None, (parts.special.get("data"), str(size))))

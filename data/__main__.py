"""Front door of the doctor: ``python -m zoo.data check FILE [word=value …]``.

Exit status: 0 if the file can be used, 1 if something in it is refused, 2 for words that are not understood.
"""

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal, get_args, get_origin, get_type_hints

from zoo.data.examination import Report, did_you_mean
from zoo.errors import UserError

DOCTORS = {"forecasting": "zoo.data.forecasting.doctor:examine"}
"""Domain → the function that examines one file and returns a `Report`; its arguments are the words."""

_MARKS = {"ok": "green", "warning": "yellow", "refusal": "red"}


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if not words or {"-h", "--help"} & set(words):
            print(_usage(_pairs(words)[1].get("domain", "forecasting")))
            return 0 if words else 2
        report = _check(words)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _show(report)
    return 1 if report.refusals else 0


def _check(words: list[str]) -> Report:
    plain, pairs = _pairs(words)
    if plain[:1] != ["check"]:
        first = plain[0] if plain else ""
        raise UserError(
            f"unknown command {first!r}{did_you_mean(first, ['check'])}; say: check FILE [word=value …]"
        )
    if len(plain) != 2:
        raise UserError(f"check takes one FILE, not {len(plain) - 1}; say: check FILE [word=value …]")
    examine = _doctor(pairs.pop("domain", "forecasting"))
    report: Report = examine(plain[1], **_typed(examine, pairs))
    return report


def _pairs(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Part plain words from ``key=value`` words; flags are no words."""
    plain, pairs = [], {}
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key.isidentifier():
            if key in pairs:
                raise UserError(f"{key}= is given twice")
            pairs[key] = value
        elif word.startswith("-") and word not in ("-h", "--help"):
            raise UserError(f"unknown flag {word}; words are written key=value, as in fill=mask")
        else:
            plain.append(word)
    return plain, pairs


def _doctor(domain: str) -> Callable[..., Report]:
    if domain not in DOCTORS:
        hint = did_you_mean(domain, list(DOCTORS))
        raise UserError(f"no doctor for domain {domain!r}{hint}; known: {', '.join(DOCTORS)}")
    module, _, name = DOCTORS[domain].partition(":")
    function: Callable[..., Report] = getattr(import_module(module), name)
    return function


def _typed(examine: Callable[..., Report], pairs: dict[str, str]) -> dict[str, Any]:
    """Turn the texts into the types of the doctor's arguments."""
    types = get_type_hints(examine)
    known = list(inspect.signature(examine).parameters)[1:]
    typed = {}
    for key, text in pairs.items():
        if key not in known:
            raise UserError(
                f"unknown word {key}={did_you_mean(key, known)}; known: {', '.join(known)}, domain"
            )
        typed[key] = _value(key, text, types[key])
    return typed


def _value(key: str, text: str, kind: Any) -> Any:
    if get_origin(kind) is Literal and text not in get_args(kind):
        choices = get_args(kind)
        raise UserError(f"{key}={text} is not one of {', '.join(choices)}{did_you_mean(text, list(choices))}")
    if kind is int:
        try:
            return int(text)
        except ValueError as error:
            raise UserError(f"{key}={text} is not a whole number") from error
    if tuple in (get_origin(kind), *(get_origin(part) for part in get_args(kind))):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text


def _usage(domain: str) -> str:
    examine = _doctor(domain)
    lines = [
        "usage: python -m zoo.data check FILE [word=value …]",
        "",
        "Examines a data file before any training, by the code that reads it. Exit status 0: it can be used;",
        "1: it is refused, with reason and cure; 2: a word was not understood.",
        "",
        f"  domain={domain}   one of {', '.join(DOCTORS)}",
    ]
    about = _argument_lines(examine.__doc__ or "")
    for name, parameter in list(inspect.signature(examine).parameters.items())[1:]:
        default = "" if parameter.default in (None, ()) else parameter.default
        lines.append(f"  {name}={default}   {about.get(name, '')}")
    return "\n".join(lines)


def _argument_lines(docstring: str) -> dict[str, str]:
    """Read the one-line descriptions of the ``Args`` section."""
    pairs = (line.strip().partition(": ") for line in docstring.splitlines())
    return {name: text for name, colon, text in pairs if colon and name.isidentifier()}


def _show(report: Report) -> None:
    """Print a table on a terminal, plain lines elsewhere."""
    verdict = f"refused: {len(report.refusals)}, warnings: {len(report.warnings)}"
    if not sys.stdout.isatty():
        for item in report.items:
            print(f"{item.level:8} {item.topic:11} {item.text}")
        print(f"{report.path}: {verdict}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(report.path), caption=verdict, show_lines=False)
    for heading in ("", "topic", "finding"):
        table.add_column(heading, overflow="fold")
    for item in report.items:
        table.add_row(Text(item.level, style=_MARKS[item.level]), item.topic, Text(item.text))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())

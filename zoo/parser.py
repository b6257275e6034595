"""The argument parser of the command line: whole keys only, and every mistake told in one line."""

from __future__ import annotations

import argparse
import difflib
import re
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import set_parsing_settings
from pytorch_lightning.cli import LightningArgumentParser

from zoo.errors import UserError
from zoo.words import SPECIAL

_CLASSES_ALLOWED = ["zoo", "pytorch_lightning", "torch.optim", "torch.nn"]


def allow_classes(packages: tuple[str, ...]) -> None:
    """Let settings name classes of the zoo, Lightning, torch and the given packages, and no others.

    A configuration file is not a program: naming a class imports its module, which runs it. Refused modules
    are not imported. Packages come from the command line only, never from a file.

    Raises:
        UserError: A package is not a dotted name.
    """
    for package in packages:
        if not all(part.isidentifier() for part in package.split(".")):
            raise UserError(f"allow={package}: expected the name of a Python package")
    try:
        set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=[*_CLASSES_ALLOWED, *packages])
    except ValueError as error:
        raise UserError(f"allow={','.join(packages)}: {error}") from None


class ZooParser(LightningArgumentParser):
    """Lightning's parser without abbreviations, whose errors are one line with the nearest known key."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self.words: list[str] = []
        """The argument list at hand, in which the place of a mistake is looked up."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the message as a :class:`UserError`.

        Raises:
            UserError: Always, unless jsonargparse is only trying whether a value fits.
        """
        if not self.exit_on_error:
            super().error(message, ex)
        raise UserError(explain(message, self)) from ex

    def known_keys(self) -> list[str]:
        """All keys that can be set, those of the stages without the stage."""
        keys: list[str] = []
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    keys += parser.known_keys()
            elif action.option_strings and action.dest not in ("help", "config", "print_config"):
                keys.append(action.dest)
        return list(dict.fromkeys(keys))


def explain(message: str, parser: ZooParser) -> str:
    """Turn jsonargparse's text into one line that says what was expected, what came and what to type."""
    if found := re.match(r"unrecognized arguments: (?:--)?([^\s=]+)(?:=(\S*))?", message):
        return _unknown_key(found[1].removesuffix("+"), found[2], parser)
    if found := re.match(
        r"(?:Subcommand|Group|Option) .*?(?:option )?'([\w.]+)'(?: is not accepted.*)?$", message
    ):
        return _unknown_key(found[1], None, parser)
    key = found[1] if (found := re.match(r'Parser key "([\w.]+)":', message)) else ""
    where = f"{key}{_origin(key, parser.words)}: " if key else ""
    if found := re.search(r"Importing '([\w.]+)' is not allowed", message):
        package = found[1].partition(".")[0]
        return f"{where}classes of {package!r} may not be named here; if you trust that package, add allow={package}"
    if found := re.search(r"Problem with given class_path '[\w.]*?(\w+)':\s+(?!Importing)(.+)", message):
        return f"{where}{found[1]}: {_plain(found[2])}"
    if found := re.search(r"Expected a (typing\.Literal\[.+?\]|.+?)\. Got value: (.*)", message, re.DOTALL):
        return where + _mismatch([found[1]], found[2])
    if found := re.search(r"Subtypes: \[(.+)\]\n.*Given value: (.*)", message, re.DOTALL):
        return where + _mismatch(_split(found[1]), found[2])
    return where + _plain(message.removeprefix(f'Parser key "{key}":'))


def _unknown_key(key: str, value: str | None, parser: ZooParser) -> str:
    """Name the known key that was meant: one with the same last part, else the one spelt most alike."""
    known = parser.known_keys()
    leaf = key.rpartition(".")[2]
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    scope = f"{key.partition('.')[0]}." if "." in key else ""
    near = [name for name in same_leaf if name.startswith(scope)] or same_leaf
    near = near or difflib.get_close_matches(key, [*known, *SPECIAL], n=1, cutoff=0.7)
    assigned = "" if value is None else f"={value}"
    hint = f" Did you mean {' or '.join(f'{name}{assigned}' for name in near[:2])}?" if near else ""
    return f"unknown key {key!r}{_origin(key, parser.words)}.{hint}"


def _origin(key: str, words: list[str]) -> str:
    """Say which configuration file gave the key, if it was a file."""
    for word in reversed(words):
        name = word.removeprefix("--config=")
        if word.startswith((f"--{key}=", f"--{key}+=")):
            return ""
        # A saved configuration comes as text of many lines, not by name.
        if name == word or "\n" in name or not Path(name).is_file():
            continue
        content: Any = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
        for part in key.split("."):
            content = content.get(part, _MISSING) if isinstance(content, dict) else _MISSING
        if content is not _MISSING:
            return f" in {name}"
    return ""


_MISSING = object()


def _mismatch(types: list[str], value: str) -> str:
    options = [option for kind in types for option in _options(kind)]
    near = difflib.get_close_matches(repr(value), options, n=1)
    hint = f". Did you mean {near[0]}?" if near else ""
    return f"expected {' or '.join(options)}, found {_plain(value)!r}{hint}"


def _options(kind: str) -> list[str]:
    """Words of a type as a user knows them: ``<class 'int'>`` is int, a Literal is its values."""
    kind = re.sub(r"<class '(.+?)'>", r"\1", kind.strip())
    if found := re.fullmatch(r"typing\.Literal\[(.+)\]", kind):
        return _split(found[1])
    kind = re.sub(r"(?:\w+\.)+(\w+)", r"\1", kind)
    return ["null" if kind == "NoneType" else kind]


def _split(text: str) -> list[str]:
    """Split at the commas that are in no brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[(") - (character in "])")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _plain(text: str) -> str:
    """One line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:297]}..."

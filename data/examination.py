"""What an examination of a user's file found: the shared vocabulary of readers and doctors."""

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal, NoReturn

Level = Literal["ok", "warning", "refusal"]


def did_you_mean(word: str, known: list[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the nearest known word, or an empty string."""
    folded = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), list(folded), n=1)
    return f" (did you mean {folded[close[0]]!r}?)" if close else ""


def counted(number: int, noun: str) -> str:
    """Return ``"1 row"`` or ``"3 rows"``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def shortlist(items: list[str], limit: int = 5) -> str:
    """Join at most ``limit`` items by commas and say how many more there are."""
    text = ", ".join(items[:limit])
    return text if len(items) <= limit else f"{text} and {len(items) - limit} more"


@dataclass(frozen=True)
class Finding:
    """One fact about a file: ``refusal`` means that it is not read, ``warning`` that the user should know."""

    level: Level
    topic: str
    text: str


class Halt(Exception):
    """A signal within readers, never shown: reading cannot go on, the report holds the reason."""


@dataclass
class Report:
    """Findings about one file, in the order they were made.

    Attributes:
        path: the file as the user named it.
        items: the findings.
    """

    path: str
    items: list[Finding] = field(default_factory=list)

    def ok(self, topic: str, text: str) -> None:
        """Note a fact that is as it should be."""
        self.items.append(Finding("ok", topic, text))

    def warn(self, topic: str, text: str) -> None:
        """Note something that was handled, or that the user should look at."""
        self.items.append(Finding("warning", topic, text))

    def refuse(self, topic: str, text: str) -> None:
        """Note a reason not to read the file; further reasons may follow."""
        self.items.append(Finding("refusal", topic, text))

    def stop(self, topic: str, text: str) -> NoReturn:
        """Note a reason after which nothing more can be said.

        Raises:
            Halt: always.
        """
        self.refuse(topic, text)
        raise Halt

    def halt_if_refused(self) -> None:
        """End a stage.

        Raises:
            Halt: if something was refused so far.
        """
        if self.refusals:
            raise Halt

    @property
    def refusals(self) -> list[str]:
        """Texts of the refusals."""
        return self._texts("refusal")

    @property
    def warnings(self) -> list[str]:
        """Texts of the warnings."""
        return self._texts("warning")

    def _texts(self, level: Level) -> list[str]:
        return [item.text for item in self.items if item.level == level]

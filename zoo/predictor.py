"""What a domain fills in so that ``zoo.predict`` can answer for users' files: words, items, predictions.

The module of a domain's predictor imports no torch at its top, only inside ``from_run`` and what that calls:
help and wrong words are then answered at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from zoo.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Word:
    """One ``key=value`` word that a predictor understands.

    Args:
        kind: Type of the value: ``int``, ``float``, ``str`` or ``bool`` (typed as yes or no).
        help: One line for ``--help``.
        default: Value if the word is not given.
        choices: The values allowed; empty for any.
    """

    kind: type[int | float | str | bool]
    help: str
    default: int | float | str | bool | None = None
    choices: tuple[str, ...] = ()

    def parse(self, name: str, text: str) -> int | float | str | bool:
        """Turn what was typed after ``name=`` into a value.

        Raises:
            UserError: If the text is no value of the kind or none of the choices.
        """
        if self.choices and text not in self.choices:
            raise UserError(f"{name}={text} is not known; choose one of: {', '.join(self.choices)}")
        if self.kind is bool:
            if text.lower() not in _TRUTH:
                raise UserError(f"{name}={text} must be yes or no")
            return _TRUTH[text.lower()]
        try:
            return self.kind(text)
        except ValueError:
            raise UserError(f"{name}={text} must be {_NUMBERS[self.kind]}") from None


_TRUTH = {"yes": True, "true": True, "no": False, "false": False}
_NUMBERS: dict[type, str] = {int: "a whole number", float: "a number"}


@dataclass(kw_only=True)
class Prediction:
    """What came out for one item. Subclasses add what their picture needs.

    Args:
        item: Name of the item as users know it.
        table: Lines for ``predictions.csv``; every line of every prediction has the same columns.
        message: Notice for the user, or the reason of a refusal.
        refused: Whether the item could not be predicted; its table is then empty.
    """

    item: str
    table: Sequence[dict[str, object]] = field(default_factory=list)
    message: str = ""
    refused: bool = False


Item = TypeVar("Item")
Row = TypeVar("Row", bound=Prediction)


class Predictor(ABC, Generic[Item, Row]):
    """Predicts users' files with the network of a finished run. One subclass per domain.

    ``zoo.predict`` calls ``from_run`` once, then lets items flow from ``read`` through ``run`` one by one or
    in batches of the predictor's choice, so memory does not grow with the input, and calls ``finish`` at the
    end.

    Attributes:
        words: Words the domain understands, by name; ``from_run`` gets a value for each of them.
        suffixes: Endings, such as ``".csv"``, of the files taken from a folder; empty takes all.
    """

    words: ClassVar[dict[str, Word]] = {}
    suffixes: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def from_run(cls, run: Path, **words: Any) -> Self:
        """Load what a run has learned.

        Args:
            run: Folder of a finished run, with ``checkpoints/best.ckpt``.
            words: A value for each of ``words``.

        Raises:
            UserError: If the checkpoint is damaged or foreign, or a value does not fit it.
        """

    @abstractmethod
    def read(self, path: Path) -> Iterator[Item]:
        """Read the items of one file.

        Raises:
            UserError: If the file cannot be used; it is then listed as refused and the next one is read.
        """

    @abstractmethod
    def run(self, items: Iterator[Item]) -> Iterator[Row]:
        """Predict items as they come, one prediction for each, in order.

        An item that cannot be predicted is answered by a prediction with ``refused=True``; an exception ends
        the whole command.
        """

    def draw(self, row: Row, stem: Path) -> Path | None:
        """Draw a prediction for people.

        Args:
            row: What ``run`` gave.
            stem: Path of the picture without its ending; free, safe and unique.

        Returns:
            The file written, or None if there is nothing to see.
        """
        return None

    def finish(self, directory: Path) -> list[str]:
        """Write the domain's own summary files, after the last item.

        Args:
            directory: Folder that will be the output folder once all is well.

        Returns:
            Sentences to print, such as a measured coverage.
        """
        return []

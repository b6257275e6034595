"""From a file's text to a table of raw columns: separator, header, blank rows.

Nothing is guessed silently: whatever was decided is a finding in the report.
"""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from zoo.data.examination import Report, counted, did_you_mean, shortlist
from zoo.data.forecasting.textfile import Source

MAX_CELLS = 100_000_000
"""Largest table held: 0.8 GB of float64, before any window is cut."""

MISSING_WORDS = ("na", "n/a", "#n/a", "nan", "null", "none", "-", "--", "?", ".")
"""Texts that mean "no value", in any case, beside the empty cell."""

_NA_VALUES = [
    "",
    *(form(word) for word in MISSING_WORDS for form in (str.lower, str.upper, str.title)),
    "NaN",
]
# Before 3.1 pandas rounds the last bit unless told otherwise; since then the word is deprecated.
_EXACT: Any = (
    {} if tuple(map(int, pd.__version__.split(".")[:2])) >= (3, 1) else {"float_precision": "round_trip"}
)
_TIME_NAMES = ("date", "ds", "timestamp", "time", "datetime", "date_time")
_LONG_LAYOUTS = (("unique_id", "y"), ("cols", "data"))
_OPEN_QUOTE = "is not a well-formed table (a quotation mark that is never closed?)"
_SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab"}


@dataclass(kw_only=True)
class Table:
    """Raw columns of a file; row ``i`` of every member stands on line ``lines[i]`` of the file.

    Attributes:
        cells: value columns, numeric where every cell is a number, else text.
        stamps: texts of the time column.
        ids: texts of the series column of a long file, or None.
        lines: line numbers, from 1.
        time_name: name of the time column.
        value_name: for a long file the column whose values are the series; other columns are covariates.
    """

    cells: pd.DataFrame
    stamps: pd.Series
    ids: pd.Series | None
    lines: np.ndarray
    time_name: str
    value_name: str | None


@dataclass(frozen=True, kw_only=True)
class Header:
    """First line of a file and what follows from it; ``beyond`` stands for cells after the last name."""

    names: list[str]
    beyond: list[str]
    separator: str
    line: int
    time: str
    layout: tuple[str, str] | None


def parse(
    source: Source, columns: Sequence[str] | None, known_future: Sequence[str], report: Report
) -> Table:
    """Split the text into columns, drop blank rows.

    Args:
        source: the loaded file.
        columns: value columns to keep in this order (those of a long file are its ids and are kept later).
        known_future: columns to keep as well.
        report: receives what was decided.

    Raises:
        Halt: if the text is no table, has no rows, names no such column, or does not fit into memory.
    """
    header = _header(source, report)
    values = _value_columns(header, columns, known_future, report)
    _require_room(source, header, report)
    frame = _cells(source, header, report)
    lines = np.arange(len(frame)) + header.line + 1
    stamps = frame.pop(header.time).fillna("").str.strip()
    ids = frame.pop(header.layout[0]).fillna("").str.split().str.join(" ") if header.layout else None
    blank = ((stamps == "") & frame.isna().all(axis=1)).to_numpy()
    if ids is not None:
        blank = blank & (ids == "").to_numpy()
    if blank.any():
        report.warn("rows", f"{counted(int(blank.sum()), 'blank row')} dropped")
        frame, stamps, lines = frame[~blank], stamps[~blank], lines[~blank]
        ids = None if ids is None else ids[~blank]
    frame = frame[values]
    unnamed = [name for name in frame if str(name).startswith("unnamed ") and frame[name].isna().all()]
    frame = frame.drop(columns=unnamed)
    if not len(frame):
        report.stop("rows", "has a header but no rows of data")
    return Table(
        cells=frame,
        stamps=stamps,
        ids=ids,
        lines=lines,
        time_name=header.time,
        value_name=header.layout[1] if header.layout else None,
    )


def _header(source: Source, report: Report) -> Header:
    start, sample = _sample(source, report)
    try:
        rows = {mark: list(csv.reader(sample, delimiter=mark, skipinitialspace=True)) for mark in _SEPARATORS}
    except csv.Error:
        report.stop("rows", _OPEN_QUOTE)
    usable = [mark for mark in _SEPARATORS if len(rows[mark][0]) > 1]
    if not usable:
        report.stop(
            "separator", f"line {start} has one column only; separators known are comma, semicolon and tab"
        )
    mark = max(usable, key=lambda m: (sum(len(r) == len(rows[m][0]) for r in rows[m]), len(rows[m][0])))
    report.ok("separator", _SEPARATORS[mark])
    names = [" ".join(name.split()) for name in rows[mark][0]]
    if any(cell != cell.strip() for cell in sample[0].split(mark)):
        report.ok("header", "spaces around column names trimmed")
    if all(_is_number(name) or _looks_dated(name) for name in names if name):
        report.stop("header", f"line {start} holds values where column names are expected; add a header line")
    return _named(names, max(map(len, rows[mark])), mark, start, report)


def _sample(source: Source, report: Report) -> tuple[int, list[str]]:
    """Return the number of the header's line, and that line with some after it."""
    head = source.raw[:1_000_000].decode(source.encoding, errors="ignore")
    text = io.StringIO(head, newline=None).read().split("\n")
    if len(source.raw) > 1_000_000 and len(text) > 2:
        text = text[:-1]  # the last line of the sample is cut off
    skipped = ("#", "sep=")  # comments, and the separator line that Excel writes
    start = next(
        (i for i, line in enumerate(text) if line.strip().strip(" ,;\t") and not line.startswith(skipped)),
        None,
    )
    if start is None:
        report.stop("file", "is empty")
    if text[start].count('"') % 2:
        report.stop("header", f"line {start + 1} has a quotation mark that is never closed")
    return start + 1, [line for line in text[start : start + 20] if line.strip()]


def _named(names: list[str], width: int, mark: str, line: int, report: Report) -> Header:
    """Settle the time column and the layout; name what has no name, and cells beyond the header."""
    known = [name for name in names if name.lower() in _TIME_NAMES]
    layout = next((pair for pair in _LONG_LAYOUTS if set(pair) <= set(names)), None)
    names = [name or f"unnamed {i + 1}" for i, name in enumerate(names)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        report.stop("header", f"column names occur twice: {shortlist(twice)}; rename them")
    garbled = [name for name in names if re.search("[ÂÃ][\u0080-\u00bf]|\ufffd", name)]
    if garbled:
        report.warn("encoding", f"column names look wrongly encoded: {shortlist(garbled)}")
    time = known[0] if known else names[0]
    if layout and time in layout:
        report.stop(
            "header", f"long layout ({layout[0]}, ds, {layout[1]}) without a date column; add one named ds"
        )
    beyond = [f"beyond {i + 1}" for i in range(len(names), width)]
    return Header(names=names, beyond=beyond, separator=mark, line=line, time=time, layout=layout)


def _value_columns(
    header: Header, columns: Sequence[str] | None, known_future: Sequence[str], report: Report
) -> list[str]:
    taken = {header.time, *(header.layout[:1] if header.layout else ())}
    present = [name for name in header.names if name not in taken]
    if header.layout or columns is None:
        return present
    wanted = list(dict.fromkeys([*columns, *known_future]))
    require_known(wanted, present, report)
    return wanted


def require_known(wanted: Sequence[str], present: list[str], report: Report) -> None:
    """Refuse column names that the file does not have.

    Raises:
        Halt: with the nearest name for each.
    """
    unknown = [name for name in wanted if name not in present]
    if unknown:
        hints = [f"{name!r}{did_you_mean(name, present)}" for name in unknown]
        report.stop("columns", f"no column {shortlist(hints)}; the file has {shortlist(present, 12)}")


def _require_room(source: Source, header: Header, report: Report) -> None:
    rows = source.raw.count(b"\n")
    if rows * len(header.names) > MAX_CELLS:
        report.stop(
            "size",
            f"about {rows:,} rows x {len(header.names):,} columns are more than the {MAX_CELLS:,} cells that are"
            " held in memory; make a file of fewer rows or columns",
        )


def _cells(source: Source, header: Header, report: Report) -> pd.DataFrame:
    texts = [header.time, *(header.layout[:1] if header.layout else ())]
    try:
        frame = pd.read_csv(
            io.BytesIO(source.raw),
            sep=header.separator,
            header=None,
            names=[*header.names, *header.beyond],
            skiprows=header.line,
            index_col=False,
            encoding=source.encoding,
            dtype=dict.fromkeys(texts, str),
            na_values={name: _NA_VALUES for name in [*header.names, *header.beyond] if name not in texts},
            keep_default_na=False,
            skip_blank_lines=False,  # so that row numbers are line numbers
            skipinitialspace=True,
            low_memory=False,
            **_EXACT,
        )
    except pd.errors.EmptyDataError:
        report.stop("rows", "has a header but no rows of data")
    except pd.errors.ParserError as error:
        found = re.search(r"line (\d+), saw (\d+)", str(error))
        if found:
            report.stop("rows", _too_wide(int(found[1]), int(found[2]), len(header.names)))
        report.stop("rows", _OPEN_QUOTE)
    extra = np.argwhere(frame[header.beyond].notna().to_numpy())
    if extra.size:
        row, column = extra[0]
        report.stop(
            "rows",
            _too_wide(header.line + 1 + int(row), len(header.names) + 1 + int(column), len(header.names)),
        )
    return frame.drop(columns=header.beyond)


def _too_wide(line: int, cells: int, names: int) -> str:
    return (
        f"line {line} has {cells} cells but the header {names} (a decimal comma, or an unquoted separator?)"
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _looks_dated(text: str) -> bool:
    return re.match(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}", text) is not None

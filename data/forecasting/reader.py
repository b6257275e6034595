"""CSV file → `Series`: the one way users' tables are read, for training, prediction and the doctor."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pandas as pd

from zoo.data.examination import Halt, Report, counted, did_you_mean, shortlist
from zoo.data.forecasting.cells import StampText, filled, report_missing, report_oddities, to_numbers
from zoo.data.forecasting.frequency import (
    cycle_length,
    find_frequency,
    full_grid,
    is_clock_change,
    normal_frequency,
    report_gaps,
)
from zoo.data.forecasting.series import Series
from zoo.data.forecasting.table import MAX_CELLS, Table, parse, require_known
from zoo.data.forecasting.textfile import load
from zoo.data.forecasting.timestamps import parse_stamps, stamp_texts
from zoo.errors import UserError

Fill = Literal["none", "mask", "linear", "last"]
Aggregate = Literal["none", "mean", "last"]


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How to read a file; the defaults refuse whatever would have to be invented.

    Attributes:
        columns: value columns to keep, in this order; all by default.
        known_future: columns known ahead of time; rows at the end may have these alone.
        fill: rows and cells without a value: ``none`` refuses; ``mask`` and ``last`` hold the last value;
            ``linear`` draws a line to the next one. They stay unobserved, hence unscored, under each.
        aggregate: rows with the same stamp: ``none`` refuses, ``mean`` averages, ``last`` takes the last in
            the file.
        date_format: strptime format of the dates where it cannot be told.
        freq: pandas offset alias of the step where it cannot be told.

    Raises:
        UserError: for a word that is none of these.
    """

    columns: tuple[str, ...] | None = None
    known_future: tuple[str, ...] = ()
    fill: Fill = "none"
    aggregate: Aggregate = "none"
    date_format: str | None = None
    freq: str | None = None

    def __post_init__(self) -> None:
        for word, value, known in (
            ("fill", self.fill, get_args(Fill)),
            ("aggregate", self.aggregate, get_args(Aggregate)),
        ):
            if value not in known:
                hint = did_you_mean(str(value), list(known))
                raise UserError(f"{word}={value} is not one of {', '.join(known)}{hint}")


def read_series(
    path: str | Path,
    *,
    columns: Sequence[str] | None = None,
    known_future: Sequence[str] = (),
    fill: Fill = "none",
    aggregate: Aggregate = "none",
    date_format: str | None = None,
    freq: str | None = None,
) -> Series:
    """Read a CSV file (wide ``date,a,b`` or long ``unique_id,ds,y``) as a regular series.

    The words are those of `ReadOptions`. Separators ``,`` ``;`` and tab, UTF-8, UTF-16 and Windows-1252, and
    gzip are recognised. Rows may stand in any order.

    Raises:
        UserError: one line naming the file and every reason found, with place and cure: dates that cannot be
            read or are ambiguous, duplicates, gaps, missing values, cells that are no numbers.
    """
    options = ReadOptions(
        columns=None if columns is None else tuple(columns),
        known_future=tuple(known_future),
        fill=fill,
        aggregate=aggregate,
        date_format=date_format,
        freq=freq,
    )
    series, report = inspect_file(path, options)
    if series is None:
        raise UserError(f"{path}: {'; '.join(report.refusals)}")
    return series


def inspect_file(path: str | Path, options: ReadOptions) -> tuple[Series | None, Report]:
    """Read as `read_series` does, keeping every finding; the series is None if something is refused."""
    report = Report(str(path))
    try:
        return _read(path, options, report), report
    except Halt:
        return None, report


def _read(path: str | Path, options: ReadOptions, report: Report) -> Series:
    source = load(path, report)
    table = parse(source, options.columns, options.known_future, report)
    numbers = to_numbers(table, report)
    stamps = parse_stamps(table.stamps, table.lines, options.date_format, report)
    report.halt_if_refused()
    frame = _unique(_ordered(numbers, stamps.time, table, report), table, stamps.zone, options, report)
    frame, known_future = _wide(frame, table, options, report)
    frame, freq = _regular(frame, stamps.zone, options, report)
    history = _history(frame, known_future, report)
    due = np.ones(frame.shape, dtype=bool)
    due[history:, ~frame.columns.isin(known_future)] = False
    seen = frame.where(due, 0.0)[frame.index.isin(stamps.time)]
    report_missing(seen, _stamper(seen, stamps.zone), report, options.fill)
    report_oddities(frame, _stamper(frame, stamps.zone), report)
    report.halt_if_refused()
    complete = filled(frame, options.fill).where(due)
    return Series(
        name=source.path.name.split(".")[0],
        path=str(path),
        sha256=source.sha256,
        time=_times(frame.index),
        values=complete.to_numpy(dtype=np.float64),
        observed=frame.notna().to_numpy(),
        columns=tuple(map(str, frame.columns)),
        known_future=known_future,
        freq=freq,
        zone=stamps.zone,
        history=history,
        notices=tuple(report.warnings),
    )


def _stamper(frame: pd.DataFrame, zone: str | None) -> StampText:
    time = _times(frame.index)
    return lambda row: stamp_texts(time[row : row + 1], zone, brief=True)[0]


def _times(index: pd.Index) -> np.ndarray:
    times = index.to_numpy()
    return times.astype("datetime64[ns]") if times.dtype.kind == "M" else times.astype(np.int64)


def _ordered(numbers: pd.DataFrame, time: np.ndarray, table: Table, report: Report) -> pd.DataFrame:
    """Index by time (and id) and sort; rows of one stamp keep their order in the file."""
    frame = numbers.set_axis(pd.Index(time, name="time"))
    if table.ids is None:
        disordered = bool(
            (np.diff(time) < 0 if time.dtype.kind != "M" else np.diff(time.view("i8")) < 0).any()
        )
    else:
        frame = frame.set_index(pd.Index(table.ids.to_numpy(dtype=object), name="id"), append=True)
        groups = pd.Series(time).groupby(table.ids.to_numpy(dtype=object))
        disordered = not groups.is_monotonic_increasing.all()
    if disordered:
        report.warn("order", "rows sorted by date")
    else:
        report.ok("order", "rows in time order")
    return frame.iloc[np.argsort(time, kind="stable")]


def _unique(
    frame: pd.DataFrame, table: Table, zone: str | None, options: ReadOptions, report: Report
) -> pd.DataFrame:
    """Refuse or merge rows of the same stamp (and id)."""
    again = frame.index.duplicated()
    if not again.any():
        report.ok("duplicates", "none")
        return frame
    twice = _times(frame.index.get_level_values("time")[again])
    first = stamp_texts(twice[:1], zone, brief=True)[0]
    text = f"{counted(twice.size, 'duplicate stamp')}, first {first}"
    if table.ids is not None:
        text += f" of {frame.index.get_level_values('id')[again][0]}"
    if options.aggregate != "none":
        report.warn("duplicates", f"{text}, merged ({options.aggregate})")
        levels = list(range(frame.index.nlevels))
        groups = frame.groupby(level=levels, sort=False)
        return groups.mean() if options.aggregate == "mean" else groups.last()
    if zone is None and twice.dtype.kind == "M" and any(is_clock_change(stamp) for stamp in twice):
        text += " (ambiguous: clocks go back here; write stamps with UTC offsets)"
    report.refuse("duplicates", f"{text}; aggregate=mean or aggregate=last merges them")
    return frame[~again]


def _wide(
    frame: pd.DataFrame, table: Table, options: ReadOptions, report: Report
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Give a long frame one column per id, check the names of known-future columns.

    The value column of id ``a`` becomes ``a``, any other column ``x`` becomes ``a.x``.
    """
    known = list(options.known_future)
    if table.ids is None:
        require_known(known, list(frame.columns), report)
    else:
        ids = list(dict.fromkeys(table.ids))
        if len(ids) * frame.index.get_level_values("time").nunique() > MAX_CELLS:
            report.stop("size", f"{len(ids):,} series are too many to hold side by side; split the file")
        covariates = [name for name in frame.columns if name != table.value_name]
        frame = pd.DataFrame(frame.unstack("id"))
        pairs = zip(frame.columns.get_level_values(0), frame.columns.get_level_values(1), strict=True)
        frame.columns = pd.Index([i if name == table.value_name else f"{i}.{name}" for name, i in pairs])
        frame = frame[[*ids, *(f"{i}.{name}" for i in ids for name in covariates)]]
        known = [
            full
            for name in known
            for full in ([f"{i}.{name}" for i in ids] if name in covariates else [name])
        ]
        wanted = list(dict.fromkeys([*(options.columns or frame.columns), *known]))
        require_known(wanted, list(frame.columns), report)
        frame = frame[wanted]
    if len(known) == frame.shape[1]:
        report.stop("columns", "every column is declared known_future; leave at least one to forecast")
    report.ok(
        "columns", f"{len(frame):,} rows x {frame.shape[1]:,} columns: {shortlist(list(frame.columns), 8)}"
    )
    return frame, tuple(known)


def _regular(
    frame: pd.DataFrame, zone: str | None, options: ReadOptions, report: Report
) -> tuple[pd.DataFrame, str]:
    """Find the step; put empty rows into gaps if they may be filled."""
    time = _times(frame.index)
    if options.freq is None:
        freq = find_frequency(time, zone, report)
    else:
        freq = normal_frequency(options.freq, time.dtype.kind != "M", report)
    grid = full_grid(time, zone, freq, report)
    report_gaps(time, grid, zone, options.fill, report)
    first, last = stamp_texts(time[[0, -1]], zone, brief=True)
    cycle = cycle_length(freq)
    report.ok(
        "frequency", f"{described(freq)}, {first} to {last}" + (f", cycle {cycle} steps" if cycle > 1 else "")
    )
    if options.fill == "none" or grid.size == time.size:
        return frame, freq
    if grid.size * frame.shape[1] > MAX_CELLS:
        report.stop("gaps", f"filling the gaps would give {grid.size:,} rows, more than can be held")
    return frame.reindex(pd.Index(grid, name="time")), freq


def described(freq: str) -> str:
    """Name a frequency in words a person reads, with the alias: ``business days (B)``."""
    words = {
        "B": "business days",
        "D": "days",
        "h": "hours",
        "W": "weeks",
        "MS": "month starts",
        "ME": "month ends",
    }
    word = words.get(freq.split("-")[0])
    return f"step: {word} ({freq})" if word else f"step {freq}"


def _history(frame: pd.DataFrame, known_future: tuple[str, ...], report: Report) -> int:
    """Count the rows up to the last one that has a target."""
    if not known_future:
        return len(frame)
    rows = np.flatnonzero(frame.drop(columns=list(known_future)).notna().any(axis=1).to_numpy())
    if not rows.size:
        report.stop("missing", "no row has a value to forecast from")
    history = int(rows[-1]) + 1
    if history < len(frame):
        report.ok(
            "future", f"{counted(len(frame) - history, 'row')} at the end with known-future values only"
        )
    return history

"""From raw columns to float64: what is a number, what is missing, what looks wrong."""

import re
from collections.abc import Callable

import numpy as np
import pandas as pd

from zoo.data.examination import Report, counted, shortlist
from zoo.data.forecasting.table import MISSING_WORDS, Table

SENTINELS = tuple(
    sign * value for value in (99.99, 999, 999.9, 9999, 99999, 32768, 999999) for sign in (-1, 1)
)
"""Numbers that instruments write for "no value"; only suspected where they stand far outside the rest."""

StampText = Callable[[int], str]
"""Gives the stamp of a row as text for a message."""


def to_numbers(table: Table, report: Report) -> pd.DataFrame:
    """Turn every value column into float64 (NaN = no value).

    Cells that are no numbers are refused, naming column, line, value and cure; flags become 0 and 1.
    """
    cells = table.cells
    numbers, words = {}, []
    for name in cells.columns:
        column = cells[name]
        if column.dtype == bool:
            words.append(str(name))
            numbers[name] = column.to_numpy(dtype=np.float64)
        elif column.dtype.kind in "iuf":
            numbers[name] = column.to_numpy(dtype=np.float64)
        else:
            numbers[name] = _from_text(column, table.lines, report)
    if words:
        report.warn("columns", f"true/false read as 1/0 in {shortlist(words)}")
    if not numbers:
        report.stop("columns", f"has no column of values beside {table.time_name!r}")
    return pd.DataFrame(numbers, index=cells.index)


def _from_text(column: pd.Series, lines: np.ndarray, report: Report) -> np.ndarray:
    text = column.astype("object").map(lambda cell: str(cell).strip(), na_action="ignore")
    text = text.mask(text.str.lower().isin(MISSING_WORDS) | (text == ""))
    valid = pd.to_numeric(text, errors="coerce").notna()
    bad = np.flatnonzero(~valid & text.notna())
    if bad.size:
        value = text.iloc[bad[0]]
        more = f" ({bad.size:,} such cells)" if bad.size > 1 else ""
        report.refuse(
            "numbers",
            f"column {column.name!r}, line {lines[bad[0]]}: {shown(value)} is not a number{more}:"
            f" {_cure(value)}",
        )
    return text.where(valid).to_numpy().astype(np.float64)  # float() of a text is exact to the last bit


def shown(text: str, limit: int = 40) -> str:
    """Quote a cell for a message, on one line and cut to ``limit`` characters."""
    return repr(text if len(text) <= limit else text[:limit] + "…")


def _cure(value: str) -> str:
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?", value):
        return f"a thousands separator (write {value.replace(',', '')}) or a decimal comma (write a point)"
    if re.fullmatch(r"[+-]?\d{1,3}([ .'\u2019\u00a0\u202f]\d{3})+(,\d+)?", value):
        return "remove the thousands separators and write a decimal point"
    if re.fullmatch(r"[+-]?\d*,\d+", value):
        return f"a decimal comma; write {value.replace(',', '.')}"
    if re.match(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}", value):
        return "a second date column; leave it out by naming the others in columns="
    if re.fullmatch(r"[^\d+-]?\s?[+-]?[\d.,]*\d\s?[^\d\s]{1,8}", value) or re.fullmatch(
        r"[$€£¥]\s?[\d.,]+", value
    ):
        return "remove the unit"
    return "empty the cell, or leave the column out by naming the others in columns="


def report_missing(values: pd.DataFrame, stamp: StampText, report: Report, fill: str) -> None:
    """Refuse missing and infinite values, or with a fill policy note how many cells it fills.

    Args:
        values: cells in time order, NaN where there is none; rows that may lack values are cut off already.
        stamp: text of a row's stamp.
        report: receives one finding per kind, naming column, count and first stamp.
        fill: the policy; ``none`` refuses.
    """
    infinite = _listed(values, np.isinf(values.to_numpy()), "infinite", stamp)
    if infinite:
        report.refuse("numbers", f"infinite values: {shortlist(infinite)}; empty the cells and use fill=mask")
    nothing = np.isnan(values.to_numpy())
    empty = nothing.all(axis=0)
    missing = _listed(values, nothing & ~empty, "missing", stamp)
    if empty.any():
        names = [str(name) for name in values.columns[empty]]
        report.refuse(
            "missing", f"columns without any value: {shortlist(names)}; leave them out with columns="
        )
    if missing and fill == "none":
        report.refuse(
            "missing", f"missing values: {shortlist(missing)}; fill=mask keeps them out of every score"
        )
    elif missing:
        ahead = "; linear looks ahead, so scores on this file do too" if fill == "linear" else ""
        report.warn(
            "missing", f"missing values filled ({fill}) and never scored: {shortlist(missing)}{ahead}"
        )
    elif not empty.any():
        report.ok("missing", "no missing values")


def _listed(values: pd.DataFrame, mask: np.ndarray, word: str, stamp: StampText) -> list[str]:
    """Describe a mask column by column: ``a (2 missing, first 2020-01-07 06:00)``."""
    listed = []
    for c in np.flatnonzero(mask.any(axis=0)):
        rows = np.flatnonzero(mask[:, c])
        first = "first " if rows.size > 1 else ""
        listed.append(f"{values.columns[int(c)]} ({rows.size:,} {word}, {first}{stamp(int(rows[0]))})")
    return listed


def filled(values: pd.DataFrame, fill: str) -> pd.DataFrame:
    """Give every empty cell a value.

    ``mask`` and ``last`` hold the last value, ``linear`` draws a line to the next one (and so looks ahead);
    cells before the first value take the first value.
    """
    inner = values.interpolate(method="linear", limit_area="inside") if fill == "linear" else values
    return inner.ffill().bfill()


def report_oddities(values: pd.DataFrame, stamp: StampText, report: Report) -> None:
    """Warn of constant columns and of sentinel values; both are read as they stand."""
    constant = [str(name) for name in values if values[name].nunique() == 1]
    if constant:
        report.warn(
            "constants", f"constant {'column' if len(constant) == 1 else 'columns'}: {shortlist(constant)}"
        )
    for name in values:
        column = values[name].to_numpy()
        for sentinel in _sentinels(column):
            rows = np.flatnonzero(column == sentinel)
            report.warn(
                "sentinels",
                f"{name}: {sentinel:g} in {counted(rows.size, 'cell')}, first {stamp(int(rows[0]))}, looks like"
                " a mark for no value; if so, empty the cells and use fill=mask",
            )


def _sentinels(column: np.ndarray) -> list[float]:
    """Return sentinels at an end of the column, farther from the rest than the rest is wide."""
    column = column[np.isfinite(column)]
    extremes = {column.min(), column.max()} if column.size else set()
    found = []
    for value in extremes.intersection(SENTINELS):
        rest = column[column != value]
        if rest.size and np.abs(rest - value).min() > max(np.ptp(rest), 1e-12):
            found.append(float(value))
    return sorted(found)

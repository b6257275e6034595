"""The doctor: what the reader finds in a file, and what would hurt a training on it."""

from pathlib import Path

import numpy as np

from zoo.data.examination import Report, counted, shortlist
from zoo.data.forecasting.reader import Aggregate, Fill, ReadOptions, inspect_file
from zoo.data.forecasting.series import Series
from zoo.data.forecasting.splits import ratio_borders, require_windows
from zoo.errors import UserError

_FAR = 10.0
"""Interquartile ranges beyond the quartiles from which a value is called an outlier."""

_WEEKDAY_F = 5.0
"""F statistic (6 and many degrees of freedom) below which a weekday tells nothing."""


def examine(
    path: str | Path,
    lookback: int = 96,
    horizon: int = 96,
    columns: tuple[str, ...] | None = None,
    known_future: tuple[str, ...] = (),
    fill: Fill = "none",
    aggregate: Aggregate = "none",
    date_format: str | None = None,
    freq: str | None = None,
) -> Report:
    """Examine a CSV file as `read_series` would read it, and add what matters for training.

    Args:
        path: the file.
        lookback: input rows of a window.
        horizon: forecast rows of a window.
        columns: value columns to keep, in this order; all by default.
        known_future: columns known ahead of time.
        fill: how to fill gaps and missing values: none (refuse), mask, linear, last.
        aggregate: how to merge rows of one stamp: none (refuse), mean, last.
        date_format: strptime format of the dates, as %d/%m/%Y.
        freq: step of the series as a pandas offset alias, as h, 15min, D, B.

    Raises:
        UserError: for words that are no policy; what is wrong with the file is in the report.
    """
    if lookback < 1 or horizon < 1:
        raise UserError(f"lookback={lookback} and horizon={horizon} must be at least 1")
    options = ReadOptions(
        columns=columns,
        known_future=known_future,
        fill=fill,
        aggregate=aggregate,
        date_format=date_format,
        freq=freq,
    )
    series, report = inspect_file(path, options)
    if series is not None:
        _outliers(series, report)
        _repeats(series, report)
        _weekdays(series, report)
        _length(series, lookback, horizon, report)
    return report


def _outliers(series: Series, report: Report) -> None:
    values = series.values[: series.history]
    low, high = np.percentile(values, (25, 75), axis=0)
    width = high - low
    far = (values < low - _FAR * width) | (values > high + _FAR * width)
    far &= (width > 0) & series.observed[: series.history]
    listed = []
    for c in np.flatnonzero(far.any(axis=0)):
        row = int(np.flatnonzero(far[:, c])[0])
        stamp = series.format_time(series.time[row : row + 1])[0]
        listed.append(f"{series.columns[c]} ({far[:, c].sum():,}, first {values[row, c]:g} at {stamp})")
    if listed:
        report.warn("outliers", f"values over {_FAR:g} interquartile ranges away: {shortlist(listed)}")
    else:
        report.ok("outliers", "none")


def _repeats(series: Series, report: Report) -> None:
    values = series.values[: series.history]
    repeated = int((np.diff(values, axis=0) == 0).all(axis=1).sum())
    share = repeated / max(len(values) - 1, 1)
    text = f"{counted(repeated, 'row')} equal to the row before in every column ({share:.1%})"
    if share > 0.01:
        report.warn("repeats", f"{text}; a sensor that stood still, or values filled before?")
    else:
        report.ok("repeats", text)


def _weekdays(series: Series, report: Report) -> None:
    """Warn where daily dates look invented: they begin with a year and the weekday tells nothing.

    Prices of business days stamped with consecutive days are the common case.
    """
    if series.freq != "D" or series.history < 365:
        return
    first = series.time[0].astype("datetime64[D]")
    if first != first.astype("datetime64[Y]"):
        return
    moves = np.abs(np.diff(series.values[: series.history], axis=0))
    days = series.phase()[1 : series.history]
    groups = [moves[days == day] for day in range(7)]
    between = sum(len(g) * (g.mean(axis=0) - moves.mean(axis=0)) ** 2 for g in groups) / 6
    within = sum(((g - g.mean(axis=0)) ** 2).sum(axis=0) for g in groups) / (len(moves) - 7)
    if (between < _WEEKDAY_F * within).all():
        report.warn(
            "dates",
            "daily dates from 1 January on whose weekday tells nothing: invented, or renumbered business days?",
        )


def _length(series: Series, lookback: int, horizon: int, report: Report) -> None:
    borders = ratio_borders(series.history)
    try:
        require_windows(borders, lookback, horizon)
    except UserError as error:
        report.refuse("length", str(error))
        return
    report.ok("length", borders.describe(lookback, horizon))

"""From date texts to stamps: one format for the whole column, offsets kept true, nothing guessed silently.

Stamps with UTC offsets become UTC; stamps without stay the wall clock they were; whole numbers stay an index.
"""

import re
from dataclasses import dataclass
from datetime import UTC, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pandas as pd

from zoo.data.examination import Report, counted, shortlist
from zoo.data.forecasting.cells import shown

EXAMPLE_ZONES = (
    *(f"Europe/{city}" for city in ("Amsterdam", "London", "Athens")),
    *(f"America/{city}" for city in ("New_York", "Chicago", "Denver", "Los_Angeles", "Halifax", "Santiago")),
    *("Australia/Sydney", "Australia/Adelaide", "Pacific/Auckland", "Asia/Jerusalem", "America/St_Johns"),
)
"""One zone per daylight-saving rule in wide use, tried when a file's offsets change."""

_OFFSET = r" ?(?:Z|UTC|GMT|[+-]\d\d(?::?\d\d)?)$"
_TIMED_OFFSET = r":\d\d(?:[.,]\d+)?" + _OFFSET  # a bare "-01" at the end may be a day
_DATE_SHAPES = (
    (r"\d{4}([-/.])\d{1,2}\1\d{1,2}", ("%Y{0}%m{0}%d",)),
    (r"\d{1,2}([-/.])\d{1,2}\1\d{4}", ("%d{0}%m{0}%Y", "%m{0}%d{0}%Y")),
    (r"\d{1,2}([- /])[A-Za-z]{3,}\1\d{4}", ("%d{0}%b{0}%Y", "%d{0}%B{0}%Y")),
    (r"\d{4}([-/.])\d{1,2}", ("%Y{0}%m",)),
)
_TIME_SHAPES = (
    (r"", ""),
    (r"\d{1,2}:\d{2}", "%H:%M"),
    (r"\d{1,2}:\d{2}:\d{2}", "%H:%M:%S"),
    (r"\d{1,2}:\d{2}:\d{2}\.\d+", "%H:%M:%S.%f"),
    (r"\d{1,2}:\d{2}[AaPp][Mm]", "%I:%M%p"),
    (r"\d{1,2}:\d{2} [AaPp][Mm]", "%I:%M %p"),
    (r"\d{1,2}:\d{2}:\d{2}[AaPp][Mm]", "%I:%M:%S%p"),
    (r"\d{1,2}:\d{2}:\d{2} [AaPp][Mm]", "%I:%M:%S %p"),
)
_DIGIT_FORMATS = {6: "%Y%m", 8: "%Y%m%d", 10: "%Y%m%d%H", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
_EPOCH_UNITS = {10: "s", 13: "ms", 16: "us", 19: "ns"}


@dataclass(frozen=True)
class Stamps:
    """Stamps of a column.

    Attributes:
        time: datetime64[ns] (UTC if there is a zone, else wall clock) or int64.
        zone: IANA name, ``UTC`` or ``+02:00``; None for wall clock and whole numbers.
    """

    time: np.ndarray
    zone: str | None


def zone_info(zone: str) -> tzinfo:
    """Return the zone of an IANA name, ``UTC`` or an offset like ``+02:00``."""
    if zone == "UTC":
        return UTC
    if zone[0] in "+-":
        sign = -1 if zone[0] == "-" else 1
        return timezone(sign * timedelta(hours=int(zone[1:3]), minutes=int(zone[4:6])))
    return ZoneInfo(zone)


def to_wall(time: np.ndarray, zone: str | None) -> pd.DatetimeIndex:
    """Turn UTC stamps into the wall clock of their zone; without a zone they are wall clock already."""
    index = pd.DatetimeIndex(time)
    return index if zone is None else index.tz_localize("UTC").tz_convert(zone_info(zone)).tz_localize(None)


def from_wall(wall: pd.DatetimeIndex, zone: str | None) -> np.ndarray:
    """Turn wall clock into UTC; an hour that occurs twice is its first, one that is skipped moves forward."""
    if zone is not None:
        local = wall.tz_localize(
            zone_info(zone), ambiguous=np.ones(len(wall), dtype=bool), nonexistent="shift_forward"
        )
        wall = local.tz_convert("UTC").tz_localize(None)
    return wall.to_numpy().astype("datetime64[ns]")


def stamp_texts(time: np.ndarray, zone: str | None, *, brief: bool = False) -> list[str]:
    """Write stamps as ISO text in their zone: ``2022-10-30 02:00:00+01:00``.

    Args:
        time: stamps, or whole numbers.
        zone: the zone of the file.
        brief: for people: without seconds where they are zero.
    """
    if time.dtype.kind != "M":
        return [str(int(t)) for t in time]
    index = pd.DatetimeIndex(time)
    if zone is not None:
        index = index.tz_localize("UTC").tz_convert(zone_info(zone))
    texts = [stamp.isoformat(sep=" ") for stamp in index]
    if not brief:
        return texts
    texts = [re.sub(r"( \d\d:\d\d):00(?=$|[+-])", r"\1", text) for text in texts]
    return texts


def whole_days(time: np.ndarray) -> bool:
    """Tell whether every stamp is a midnight."""
    return bool((time == time.astype("datetime64[D]")).all())


def parse_stamps(text: pd.Series, lines: np.ndarray, date_format: str | None, report: Report) -> Stamps:
    """Read a column of date texts.

    Args:
        text: the texts, trimmed; the name of the series is the column's name.
        lines: line of each text in the file.
        date_format: strptime format of the whole column, or None to find it.
        report: receives the format found, or the reason to refuse.

    Raises:
        Halt: on a text that is no date in the format of the others, or where day and month are ambiguous.
    """
    empty = np.flatnonzero((text == "").to_numpy())
    if empty.size:
        report.stop("dates", f"line {lines[empty[0]]} has no date ({counted(empty.size, 'such row')})")
    if date_format is not None:
        return _by_format(text, lines, date_format, report)
    if text.str.fullmatch(r"[+-]?\d+(?:\.0+)?").all():
        return _whole_numbers(text, report)
    text = text.str.replace(r"\s+", " ", regex=True)
    timed = text.str.contains(_TIMED_OFFSET, regex=True).to_numpy()
    if timed.any() and not timed.all():
        row = int(np.flatnonzero(timed != timed[0])[0])
        report.stop(
            "dates",
            f"line {lines[row]}: {shown(text.iloc[row])} has {'a' if timed[row] else 'no'} UTC offset, unlike"
            " the rows before it; write all stamps one way",
        )
    if not timed.all():
        return Stamps(_by_shape(text, lines, report), None)
    wall = _by_shape(text.str.replace(_OFFSET, "", regex=True), lines, report)
    return _with_offsets(text, wall, lines, report)


def _whole_numbers(text: pd.Series, report: Report) -> Stamps:
    """Tell compact dates (20200131), epoch times and plain indexes apart by the number of digits."""
    digits = text.str.replace(r"\.0+$", "", regex=True)
    lengths = digits.str.len().unique()
    width = int(lengths[0]) if len(lengths) == 1 else 0
    if width in _DIGIT_FORMATS:
        dates = pd.to_datetime(digits, format=_DIGIT_FORMATS[width], errors="coerce")
        if dates.notna().all() and dates.dt.year.between(1800, 2200).all():
            report.ok("dates", f"format {_DIGIT_FORMATS[width]}")
            return Stamps(_nanoseconds(dates), None)
    try:
        numbers = digits.astype("int64").to_numpy()
    except (ValueError, OverflowError):
        report.stop("dates", f"{shown(digits.iloc[0])} is too large for a whole-number index")
    if width in _EPOCH_UNITS:
        report.warn("dates", f"{width}-digit numbers read as {_EPOCH_UNITS[width]} since 1970-01-01 UTC")
        return Stamps(numbers.astype(f"datetime64[{_EPOCH_UNITS[width]}]").astype("datetime64[ns]"), "UTC")
    report.ok("dates", "whole-number index")
    return Stamps(numbers.astype(np.int64), None)


def _by_format(text: pd.Series, lines: np.ndarray, date_format: str, report: Report) -> Stamps:
    aware = "%z" in date_format
    try:
        dates = pd.to_datetime(text, format=date_format, errors="coerce", utc=True)
    except ValueError as error:
        report.stop("dates", f"date_format={date_format} is no strptime format: {error}")
    _require_parsed(text, dates, lines, date_format, report)
    report.ok("dates", f"format {date_format}")
    return Stamps(_nanoseconds(dates), "UTC" if aware else None)


def _by_shape(text: pd.Series, lines: np.ndarray, report: Report) -> np.ndarray:
    """Parse by the format that the first text has the shape of; refuse two readings that differ."""
    formats = _formats(text.iloc[0])
    if not formats:
        report.stop(
            "dates",
            f"column {text.name!r}, line {lines[0]}: {shown(text.iloc[0])} is not understood as a date; give"
            " its format, as in date_format=%d/%m/%y",
        )
    readings = {form: pd.to_datetime(text, format=form, errors="coerce", utc=True) for form in formats}
    complete = [form for form, dates in readings.items() if dates.notna().all()]
    if (
        len(complete) == 2
        and "%b" not in complete[0]
        and not readings[complete[0]].equals(readings[complete[1]])
    ):
        report.stop(
            "dates",
            f"column {text.name!r}: {shown(text.iloc[0])} … {shown(text.iloc[-1])} are ambiguous (day first or"
            f" month first?); say date_format={complete[0]} or date_format={complete[1]}",
        )
    best = complete[0] if complete else min(readings, key=lambda form: int(readings[form].isna().sum()))
    _require_parsed(text, readings[best], lines, best, report)
    report.ok("dates", "ISO 8601" if best == "ISO8601" else f"format {best}")
    return _nanoseconds(readings[best])


def _formats(text: str) -> list[str]:
    """List the strptime formats that a text may be written in."""
    for shape, dates in _DATE_SHAPES:
        found = re.match(shape, text)
        if not found:
            continue
        rest = text[found.end() :]
        mark = rest[0] if rest[:1] in ("T", " ") else ""
        for clock, form in _TIME_SHAPES:
            if re.fullmatch(clock, rest[len(mark) :]):
                formats = [date.format(found[1]) + mark + form for date in dates]
                iso = re.match(r"\d{4}-\d\d-\d\d(?![\d])", text) and "%p" not in form
                return ["ISO8601", *formats] if iso else formats
    return []


def _require_parsed(text: pd.Series, dates: pd.Series, lines: np.ndarray, form: str, report: Report) -> None:
    """Refuse texts that did not parse, or lie beyond what nanoseconds can count.

    Raises:
        Halt: naming the first such line.
    """
    far = ~dates.dt.year.between(1678, 2261).to_numpy() & dates.notna().to_numpy()
    if dates.isna().any():
        row = int(np.flatnonzero(dates.isna())[0])
        year = re.search(r"(?<!\d)\d{4}(?!\d)", text.iloc[row])
        if not (year and not 1678 <= int(year[0]) <= 2261):
            report.stop(
                "dates",
                f"column {text.name!r}, line {lines[row]}: {shown(text.iloc[row])} is not a date of the form"
                f" {'YYYY-MM-DD hh:mm:ss' if form == 'ISO8601' else form}"
                f" ({counted(int(dates.isna().sum()), 'such row')})",
            )
        far[row] = True
    if far.any():
        row = int(np.flatnonzero(far)[0])
        report.stop(
            "dates",
            f"column {text.name!r}, line {lines[row]}: {shown(text.iloc[row])} is out of range; dates from"
            " 1678 to 2261 can be read",
        )


def _nanoseconds(dates: pd.Series) -> np.ndarray:
    index = pd.DatetimeIndex(dates)
    return (index.tz_localize(None) if index.tz else index).to_numpy().astype("datetime64[ns]")


def _with_offsets(text: pd.Series, wall: np.ndarray, lines: np.ndarray, report: Report) -> Stamps:
    """Subtract the offsets, then name the zone that has exactly these offsets."""
    marks = text.str.extract(f"({_OFFSET})", expand=False).str.strip()
    minutes = marks.map({mark: _offset_minutes(mark) for mark in marks.unique()}).to_numpy()
    wrong = np.flatnonzero(np.abs(minutes) > 18 * 60)
    if wrong.size:
        report.stop(
            "dates", f"line {lines[wrong[0]]}: {shown(text.iloc[wrong[0]])} has an impossible UTC offset"
        )
    time = wall - minutes.astype("timedelta64[m]").astype("timedelta64[ns]")
    offsets = np.unique(minutes)
    if offsets.size == 1:
        sign, (hours, rest) = "-" if offsets[0] < 0 else "+", divmod(abs(int(offsets[0])), 60)
        zone = f"{sign}{hours:02d}:{rest:02d}" if offsets[0] else "UTC"
        report.ok("zone", f"offset {zone} throughout")
        return Stamps(time, zone)
    for zone in EXAMPLE_ZONES:
        try:
            if (to_wall(time, zone).to_numpy() == wall).all():
                report.ok("zone", f"offsets change as in {zone}; kept in UTC, written with their offset")
                return Stamps(time, zone)
        except ZoneInfoNotFoundError:
            continue
    report.warn(
        "zone", f"offsets {shortlist(sorted(marks.unique()))} follow no known zone; stamps are kept in UTC"
    )
    return Stamps(time, "UTC")


def _offset_minutes(mark: str) -> int:
    if mark in ("Z", "UTC", "GMT"):
        return 0
    digits = mark[1:].replace(":", "").ljust(4, "0")
    minutes = int(digits[:2]) * 60 + int(digits[2:])
    return -minutes if mark[0] == "-" else minutes

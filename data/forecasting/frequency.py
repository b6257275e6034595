"""The step of a series: found from the stamps, held against every stamp, continued into the future.

Steps of a day or more are counted on the wall clock (a local day may have 23 or 25 hours), shorter ones in
UTC.
"""

import re

import numpy as np
import pandas as pd
from pandas.tseries.frequencies import to_offset

from zoo.data.examination import Report, counted
from zoo.data.forecasting.table import MAX_CELLS
from zoo.data.forecasting.timestamps import from_wall, stamp_texts, to_wall

_OLD_ALIASES = {"H": "h", "T": "min", "S": "s", "M": "ME", "Q": "QE", "A": "YE", "Y": "YE"}
_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_WEEKDAYS = ("MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN")
_DAY = np.timedelta64(1, "D").astype("timedelta64[ns]").astype(np.int64)
_MINUTE = _DAY // 1440


def normal_frequency(freq: str, indexed: bool, report: Report) -> str:
    """Return a user's ``freq=`` word as the alias that pandas 2.2 and later understand.

    Raises:
        Halt: if it is no frequency, or not of the kind that the stamps have.
    """
    if indexed:
        if not re.fullmatch(r"[1-9]\d*", freq):
            report.stop(
                "frequency", f"freq={freq} does not fit a whole-number index; give its step, as in freq=1"
            )
        return freq
    old = re.fullmatch(r"(\d*)([HTSMQAY])(-[A-Z]{3})?", freq)
    alias = f"{old[1]}{_OLD_ALIASES[old[2]]}{old[3] or ''}" if old else freq
    try:
        return str(to_offset(alias).freqstr)
    except (ValueError, AttributeError):
        report.stop(
            "frequency", f"freq={freq} is no frequency; known are min, h, D, B, W, MS, ME, QS, YS, 15min …"
        )


def find_frequency(time: np.ndarray, zone: str | None, report: Report) -> str:
    """Infer the step of sorted, distinct stamps.

    The step is the commonest one; business days, weeks, month starts and month ends are recognised with gaps
    among them.

    Raises:
        Halt: if there are too few stamps, or no step that at least half of them keep.
    """
    if time.size < 2:
        report.stop("frequency", "has one row only, so its step is unknown; say freq=h or freq=D")
    if time.dtype.kind != "M":
        return str(_common_step(time, report))
    wall = to_wall(time, zone)
    calendar = _calendar_step(wall)
    if calendar:
        return calendar
    step = _common_step(time.astype(np.int64), report)
    if step >= _DAY:
        step = _common_step(wall.to_numpy().astype("datetime64[ns]").astype(np.int64), report)
    if step == _DAY and wall.day_of_week.max() < 5 and _days(wall).max() > 1:
        return "B"
    return _alias(step, wall[0])


def _days(wall: pd.DatetimeIndex) -> np.ndarray:
    """Return the steps in days of the calendar."""
    return np.diff(wall.to_numpy().astype("datetime64[D]")).astype(np.int64)


def _common_step(numbers: np.ndarray, report: Report) -> int:
    steps, counts = np.unique(np.diff(numbers), return_counts=True)
    if counts.max() * 2 < counts.sum():
        report.stop(
            "frequency",
            f"dates keep no regular step: the commonest covers {counts.max():,} of {counts.sum():,} steps;"
            " resample the file to one step, or say freq=",
        )
    return int(steps[counts.argmax()])


def _calendar_step(wall: pd.DatetimeIndex) -> str | None:
    """Recognise months, quarters and years, by their first or last days."""
    if _days(wall).min() < 28 or (wall - wall.normalize()).nunique() > 1:
        return None
    starts, ends = bool((wall.day == 1).all()), bool(wall.is_month_end.all())
    if not starts and not ends:
        return None
    months, counts = np.unique(np.diff(wall.year * 12 + wall.month), return_counts=True)
    step, letter, month = int(months[counts.argmax()]), "S" if starts else "E", _MONTHS[wall[0].month - 1]
    if step % 12 == 0:
        return f"{_many(step // 12)}Y{letter}-{month}"
    if step == 3:
        # pandas names quarters by a month of the cycle; ends are anchored to the last quarter of the year
        anchor = _MONTHS[(wall[0].month - 1) % 3 + (0 if starts else 9)]
        return f"Q{letter}-{anchor}"
    return f"{_many(step)}M{letter}"


def _many(number: int) -> str:
    return "" if number == 1 else str(number)


def _alias(step: int, first: pd.Timestamp) -> str:
    """Name a fixed step in nanoseconds by the largest unit that divides it."""
    if step % (7 * _DAY) == 0:
        return f"{_many(step // (7 * _DAY))}W-{_WEEKDAYS[first.day_of_week]}"
    units = (
        ("D", _DAY),
        ("h", 60 * _MINUTE),
        ("min", _MINUTE),
        ("s", _MINUTE // 60),
        ("ms", _MINUTE // 60_000),
    )
    for name, size in units:
        if step % size == 0:
            return f"{_many(step // size)}{name}"
    return f"{_many(step)}ns"


def step_length(freq: str) -> int | None:
    """Return the nanoseconds of a step shorter than a day, which is counted in UTC; None for any other."""
    offset = to_offset(freq)
    if isinstance(offset, pd.offsets.Tick) and offset.nanos < _DAY:
        return int(offset.nanos)
    return None


def continued(time: np.ndarray, zone: str | None, freq: str, steps: int) -> np.ndarray:
    """Return the ``steps`` stamps that follow the last of ``time``."""
    if time.dtype.kind != "M":
        return np.asarray(time[-1] + np.arange(1, steps + 1, dtype=np.int64) * int(freq))
    clock = None if step_length(freq) else zone
    start = to_wall(time[-1:], clock)[0]
    return from_wall(pd.date_range(start, periods=steps + 1, freq=freq)[1:], clock)


def full_grid(time: np.ndarray, zone: str | None, freq: str, report: Report) -> np.ndarray:
    """Return every stamp from the first to the last in steps of ``freq``.

    Raises:
        Halt: if a stamp lies beside the grid, or the grid is too long to hold.
    """
    if time.dtype.kind != "M":
        _require_short(int(time[-1] - time[0]) // int(freq), report)
        grid = np.arange(time[0], time[-1] + 1, int(freq), dtype=np.int64)
    else:
        step = step_length(freq)
        clock = None if step else zone
        wall = to_wall(time, clock)
        if not to_offset(freq).is_on_offset(wall[0]):
            _off_grid(time[0], zone, freq, report)
        if step:
            _require_short(int((time[-1] - time[0]).astype(np.int64)) // step, report)
        grid = from_wall(pd.date_range(wall[0], wall[-1], freq=freq), clock)
    place = np.minimum(np.searchsorted(grid, time), grid.size - 1)
    beside = np.flatnonzero(grid[place] != time)
    if beside.size:
        _off_grid(time[beside[0]], zone, freq, report, beside.size)
    return grid


def _require_short(steps: int, report: Report) -> None:
    if steps > MAX_CELLS:
        report.stop("gaps", f"first and last stamp are {steps:,} steps apart; is one of them mistyped?")


def _off_grid(stamp: np.generic, zone: str | None, freq: str, report: Report, number: int = 1) -> None:
    text = stamp_texts(np.array([stamp]), zone, brief=True)[0]
    report.stop(
        "frequency",
        f"stamp {text} is not a whole number of steps ({freq}) after the first"
        f" ({counted(number, 'such row')}); resample the file to one step, or say freq=",
    )


def report_gaps(time: np.ndarray, grid: np.ndarray, zone: str | None, fill: str, report: Report) -> None:
    """Compare stamps with the full grid; refuse gaps unless a fill policy is given.

    Args:
        time: sorted, distinct stamps.
        grid: the full grid that they lie on.
        zone: zone of the file.
        fill: the policy; ``none`` refuses.
        report: receives the first gap with its length, and how many there are.
    """
    skipped = np.diff(np.searchsorted(grid, time)) - 1
    gaps = np.flatnonzero(skipped)
    if not gaps.size:
        report.ok("gaps", "none")
        return
    before = stamp_texts(time[gaps[:1]], zone, brief=True)[0]
    text = f"gap after {before}, {counted(int(skipped[gaps[0]]), 'step')}"
    if gaps.size > 1:
        text += f" ({counted(gaps.size - 1, 'more gap')}, {skipped.sum():,} steps in all)"
    if zone is None and time.dtype.kind == "M":
        lost = time[gaps + 1] - time[gaps] - np.diff(grid[:2])
        if any(
            is_clock_change(stamp) and hours == np.timedelta64(1, "h")
            for stamp, hours in zip(time[gaps], lost, strict=True)
        ):
            text += "; this is where clocks go forward: local time zone? write stamps with UTC offsets"
    if fill == "none":
        report.refuse("gaps", f"{text}; fill=mask puts empty rows there")
    else:
        report.warn("gaps", f"{text}; filled ({fill}) and never scored")


def is_clock_change(stamp: np.datetime64) -> bool:
    """Tell whether a wall-clock stamp lies in a night when clocks are commonly changed."""
    moment = pd.Timestamp(stamp)
    return moment.day_of_week == 6 and moment.month in (3, 4, 9, 10, 11) and moment.hour < 4


def cycle_length(freq: str) -> int:
    """Return the steps of the main cycle: day for steps under a day (week for 10 min), week, or year.

    24 for hours, 96 for 15 min, 1008 for 10 min, 7 for days, 5 for business days, 52 for weeks, 12 for months,
    4 for quarters; 1 where there is none.
    """
    if freq.isdigit():
        return 1
    step = step_length(freq)
    if step == 10 * _MINUTE:
        return 1008
    if step:
        return int(_DAY // step) if step >= _MINUTE and _DAY % step == 0 else 1
    return {"D": 7, "B": 5, "W": 52, "MS": 12, "ME": 12, "QS": 4, "QE": 4}.get(freq.split("-")[0], 1)


def cycle_phase(time: np.ndarray, zone: str | None, freq: str) -> np.ndarray:
    """Return each stamp's place in the cycle of `cycle_length`, on the wall clock.

    Hour 13:00 has phase 13, Tuesday 1, March 2, whatever row the series starts at.
    """
    cycle = cycle_length(freq)
    if cycle == 1:
        return np.zeros(time.size, dtype=np.int64)
    wall = to_wall(time, zone)
    step = step_length(freq)
    if step:
        minutes = wall.hour * 60 + wall.minute + (wall.day_of_week * 1440 if cycle == 1008 else 0)
        phase = minutes // (step // _MINUTE)
    elif freq in ("D", "B"):
        phase = wall.day_of_week
    elif freq.startswith("W"):
        phase = (wall.day_of_year - 1) // 7  # day 365 falls into a 53rd week, which is counted as the first
    else:
        phase = (wall.month - 1) // (3 if freq.startswith("Q") else 1)
    return np.asarray(phase, dtype=np.int64) % cycle

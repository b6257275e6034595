"""The series that every reader returns and every consumer takes."""

from dataclasses import dataclass

import numpy as np

from zoo.data.forecasting.frequency import continued, cycle_length, cycle_phase, step_length
from zoo.data.forecasting.timestamps import stamp_texts, whole_days


@dataclass(frozen=True, kw_only=True, eq=False)
class Series:
    """A regular, ordered multivariate series.

    Attributes:
        name: name of the file without its ending.
        path: the file as the user named it.
        sha256: of the bytes on disk.
        time: ``(n,)`` datetime64[ns], UTC where there is a zone, else wall clock; int64 for whole numbers.
        values: ``(n, C)`` float64 in the file's units, empty cells filled; NaN only for targets after
            ``history``.
        observed: ``(n, C)`` bool, False where the file had no value: no truth to score against.
        columns: ``C`` names.
        known_future: those of ``columns`` that are known ahead of time; the others are targets.
        freq: pandas offset alias ("h", "15min", "B", "W-TUE", "MS"), or the step of whole numbers ("1").
        zone: IANA name, "UTC", or offset that stamps are written in; None for wall clock and whole numbers.
        history: rows that have targets; the rows after them carry known-future values only.
        notices: what was changed or looks odd, one sentence each.
    """

    name: str
    path: str
    sha256: str
    time: np.ndarray
    values: np.ndarray
    observed: np.ndarray
    columns: tuple[str, ...]
    known_future: tuple[str, ...]
    freq: str
    zone: str | None
    history: int
    notices: tuple[str, ...]

    @property
    def targets(self) -> tuple[str, ...]:
        """Columns that are forecast."""
        return tuple(name for name in self.columns if name not in self.known_future)

    def future_time(self, horizon: int) -> np.ndarray:
        """Return the ``horizon`` stamps that follow the last row with targets."""
        return continued(self.time[: self.history], self.zone, self.freq, horizon)

    def format_time(self, stamps: np.ndarray) -> list[str]:
        """Write stamps as ISO text on the clock of the file, with its UTC offset if there is one.

        Series of whole days without a zone are written as dates.
        """
        texts = stamp_texts(stamps, self.zone)
        if (
            self.zone is None
            and self.time.dtype.kind == "M"
            and not step_length(self.freq)
            and whole_days(self.time)
        ):
            return [text.removesuffix(" 00:00:00") for text in texts]
        return texts

    def steps_per_cycle(self) -> int:
        """Return the steps of the main cycle: 24 for hours, 7 for days, 12 for months, 1 without one."""
        return cycle_length(self.freq)

    def phase(self, stamps: np.ndarray | None = None) -> np.ndarray:
        """Return the place of stamps (by default those of the rows) in the cycle, ``(n,)`` int64.

        It comes from the stamps: 13:00 is 13 in an hourly series that starts at any hour.
        """
        return cycle_phase(self.time if stamps is None else stamps, self.zone, self.freq)

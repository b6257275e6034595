"""Which rows are trained on, selected on and tested on, and how many windows they give.

The rules are those of the field: ETT has fixed borders in 30-day months; any other set is cut 0.7 / 0.1 / 0.2
in time order. Borders count target rows: the inputs of a validation or test window may reach ``lookback`` rows
back into the split before, so that the number of scored windows does not depend on the lookback.
"""

from dataclasses import dataclass

from zoo.errors import UserError


@dataclass(frozen=True)
class Borders:
    """Target rows ``[start, stop)`` of the three splits."""

    train: tuple[int, int]
    val: tuple[int, int]
    test: tuple[int, int]

    def rows(self) -> dict[str, int]:
        """Return the number of rows by split, in time order."""
        spans = {"train": self.train, "val": self.val, "test": self.test}
        return {name: stop - start for name, (start, stop) in spans.items()}

    def windows(self, lookback: int, horizon: int) -> dict[str, int]:
        """Return the number of windows by split, in time order."""
        return {
            name: window_count(rows, lookback, horizon, first=name == "train")
            for name, rows in self.rows().items()
        }

    def describe(self, lookback: int, horizon: int) -> str:
        """Return the number of windows by split in words."""
        counts = ", ".join(f"{name} {count:,}" for name, count in self.windows(lookback, horizon).items())
        return f"windows of {lookback} + {horizon} rows: {counts}"


def ratio_borders(n: int) -> Borders:
    """Cut ``n`` rows: the first ``int(0.7 n)`` train, the last ``int(0.2 n)`` test, the rest validate."""
    train, test = int(0.7 * n), int(0.2 * n)
    return Borders((0, train), (train, n - test), (n - test, n))


def ett_borders(steps_per_hour: int) -> Borders:
    """Cut an ETT set: 12, 4 and 4 months of 30 days; later rows are not used."""
    month = 30 * 24 * steps_per_hour
    return Borders((0, 12 * month), (12 * month, 16 * month), (16 * month, 20 * month))


def window_count(rows_of_split: int, lookback: int, horizon: int, first: bool) -> int:
    """Return the windows of a split at stride 1, at least 0.

    Args:
        rows_of_split: target rows.
        lookback: input rows of a window.
        horizon: target rows of a window.
        first: whether no split stands before it, so that inputs take rows of its own.
    """
    return max(0, rows_of_split - horizon + 1 - (lookback if first else 0))


def require_windows(borders: Borders, lookback: int, horizon: int) -> None:
    """Check that every split has a window.

    Raises:
        UserError: naming each split that has none, its rows, the rows it needs, and what would fit.
    """
    rows = borders.rows()
    needed = {"train": lookback + horizon, "val": horizon, "test": horizon}
    short = [name for name in rows if rows[name] < needed[name]]
    if not short:
        return
    name, others = short[0], short[1:]
    parts = f"lookback {lookback} + horizon {horizon}" if name == "train" else f"horizon {horizon}"
    also = f"; {' and '.join(others)} too" if others else ""
    raise UserError(
        f"too short: the {name} split has {rows[name]:,} rows but needs {needed[name]:,} ({parts}){also}."
        f" {_way_out(rows, lookback, horizon)}"
    )


def _way_out(rows: dict[str, int], lookback: int, horizon: int) -> str:
    total = sum(rows.values())
    enough = max(total + 1, 10 * (horizon - 2), int((lookback + horizon) / 0.7) - 2)
    # Rounding lets the validation rows shrink while the file grows, with a period of ten rows.
    while not all(
        all(ratio_borders(n).windows(lookback, horizon).values()) for n in range(enough, enough + 10)
    ):
        enough += 1
    longer = f"a file of at least {enough:,} rows (this has {total:,})"
    fitting = min(rows["train"] - lookback, rows["val"], rows["test"])
    if fitting >= 1:
        return f"Use horizon={fitting} or less, or {longer}"
    if rows["train"] > horizon and min(rows["val"], rows["test"]) >= horizon:
        return f"Use lookback={rows['train'] - horizon} or less, or {longer}"
    both = min(rows["train"] // 2, rows["val"], rows["test"])
    if both >= 1:
        return f"Use lookback={rows['train'] - both} horizon={both} or less, or {longer}"
    return f"Use {longer}"

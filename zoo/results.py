"""The record of a run, ``results.json``: its rows, its fixed form, reading and writing. Imports no torch."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from zoo.errors import UserError

FILE_NAME = "results.json"


@dataclass(kw_only=True)
class Row:
    """One line of a results table: who was measured, on what, how, and what came out.

    A metric that is not finite is stored as ``None`` and the reason is added to ``notes``, so that no NaN
    ever reaches a file; a ``None`` given by the caller must have its reason, with the metric's name, in
    ``notes``.

    Args:
        name: Fixed word for the network or yardstick, as the domain's README lists it.
        kind: Place of the row in a comparison.
        data: Name of the data set.
        split: Part of the data that was measured.
        protocol: How it was measured, as the field names it.
        setting: What else a reader needs to repeat it, such as size, lookback and horizon.
        n: Number of samples measured.
        n_unit: What ``n`` counts.
        metrics: Values by name; the first is the one that findings speak about.
        units: Unit of the metrics.
        seeds: Seeds of the trainings that the values are the mean of.
        spread: Sample standard deviation over the seeds, by metric.
        parameters_total: All parameters of the network.
        parameters_active: Parameters that work for one token.
        flops: Floating-point operations of one sample's forward pass, of the experts that ran.
        seconds: Time of the training, or of the fit of a yardstick.
        notes: What a reader must know.

    Raises:
        ValueError: If a metric is ``None`` and the notes do not name it.
    """

    name: str
    kind: Literal["model", "twin", "baseline", "ablation"]
    data: str
    split: str
    protocol: str
    setting: dict[str, object]
    n: int
    n_unit: str
    metrics: dict[str, float | None]
    units: str
    seeds: list[int] = field(default_factory=list)
    spread: dict[str, float] = field(default_factory=dict)
    parameters_total: int | None = None
    parameters_active: int | None = None
    flops: int | None = None
    seconds: float | None = None
    notes: str = ""

    def __post_init__(self) -> None:
        """Turn numbers into plain finite floats, and see that every gap is explained."""
        broken = {
            name: value
            for name, value in self.metrics.items()
            if value is not None and not math.isfinite(value)
        }
        self.metrics = {
            name: None if value is None or name in broken else float(value)
            for name, value in self.metrics.items()
        }
        self.spread = {name: float(value) for name, value in self.spread.items() if math.isfinite(value)}
        if self.seconds is not None:
            self.seconds = float(self.seconds) if math.isfinite(self.seconds) else None
        self.notes = _join(
            [self.notes, *(f"{name} is {value}, not a finite number" for name, value in broken.items())]
        )
        for name, value in self.metrics.items():
            if value is None and name not in self.notes:
                raise ValueError(
                    f"row {self.name}: metric {name} is null, and its notes do not say why {name} is"
                )


@dataclass(kw_only=True)
class Results:
    """All rows of a run and what they were made with.

    Args:
        domain: Name of the domain.
        command: Command line that makes these numbers again.
        data: One ``{"name", "file", "sha256"}`` per file that was read or generated.
        versions: Package versions.
        hardware: Machine.
        rows: Model, twin, baselines, in the order they are shown.
    """

    domain: str
    command: str
    data: list[dict[str, str]]
    versions: dict[str, str]
    hardware: dict[str, str]
    rows: list[Row]


def combine(rows: Sequence[Row]) -> Row:
    """Join the rows of one network trained with several seeds into one.

    Metrics and seconds become means, ``spread`` the sample standard deviation (n - 1), seeds are joined. A
    metric that is null for one seed is null in the join: a mean over the runs that went well would be too
    good.

    Args:
        rows: Rows that differ in seeds and what follows from them only.

    Returns:
        The joined row; a single row comes back as it is.

    Raises:
        ValueError: If there are no rows, or they are of different networks, data, settings or metrics.
    """
    if not rows:
        raise ValueError("combine needs at least one row")
    first = rows[0]
    for row in rows[1:]:
        for key in ("name", "kind", "data", "split", "protocol", "setting", "n", "n_unit", "units"):
            if getattr(row, key) != getattr(first, key):
                raise ValueError(
                    f"rows to combine differ in {key}: {getattr(first, key)!r} and {getattr(row, key)!r}"
                )
        if list(row.metrics) != list(first.metrics):
            raise ValueError(
                f"rows to combine differ in metrics: {list(first.metrics)} and {list(row.metrics)}"
            )
    if len(rows) == 1:
        return first
    columns = {name: [row.metrics[name] for row in rows] for name in first.metrics}
    known = {name: _complete(values) for name, values in columns.items()}
    notes = [row.notes for row in rows]
    total, active, flops = (
        _mean_count(rows, key, notes) for key in ("parameters_total", "parameters_active", "flops")
    )
    return replace(
        first,
        metrics={name: statistics.fmean(values) if values else None for name, values in known.items()},
        spread={name: statistics.stdev(values) for name, values in known.items() if values},
        seeds=[seed for row in rows for seed in row.seeds],
        parameters_total=total,
        parameters_active=active,
        flops=flops,
        seconds=_mean(_complete([row.seconds for row in rows])),
        notes=_join(notes),
    )


def checked(results: Results) -> Results:
    """Return results whose rows passed their own checks again, whatever was changed after they were made.

    Raises:
        ValueError: If a value does not fit the form of the file, naming its place.
    """
    rows = [replace(row) for row in results.rows]
    return _results(asdict(replace(results, rows=rows)))


def encode_results(results: Results) -> str:
    """Return the text of ``results.json`` for checked results."""
    return json.dumps(asdict(results), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_results(folder: Path) -> Results:
    """Read and check the ``results.json`` of a run folder.

    Args:
        folder: The run folder, or the file itself.

    Returns:
        The run's results.

    Raises:
        UserError: If the file is missing, is no JSON or does not have the form, naming file and place.
    """
    path = folder if folder.suffix == ".json" else folder / FILE_NAME
    try:
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the folder of a finished run") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: damaged or no results file ({error}); run the test stage again") from None
    try:
        return _results(record)
    except ValueError as error:
        raise UserError(f"{path}: {error}; run the test stage again") from None


def _results(record: object) -> Results:
    """Build results from decoded JSON, checking every key and type against the dataclasses."""
    content = _matching(record, Results, "file")
    rows = [Row(**_matching(row, Row, f"rows[{index}]")) for index, row in enumerate(content["rows"])]
    return Results(**{**content, "rows": rows})


def _matching(record: Any, form: type, place: str) -> dict[str, Any]:
    """Return ``record`` if it has exactly the fields of the dataclass ``form`` with values of their types."""
    _check(record, dict, place)
    names = [entry.name for entry in fields(form)]
    for problem, keys in (
        ("is missing", set(names) - set(record)),
        ("is not known", set(record) - set(names)),
    ):
        if keys:
            raise ValueError(f"{place}: key {min(keys)} {problem}")
    hints = get_type_hints(form)
    for name in names:
        # Rows are dataclasses themselves and are matched one by one by the caller.
        hint = list[dict[str, object]] if hints[name] == list[Row] else hints[name]
        _check(record[name], hint, name if form is Results else f"{place}.{name}")
    return dict(record)


def _check(value: object, hint: Any, place: str) -> None:
    """Raise ``ValueError`` naming ``place`` unless ``value`` is of the JSON type that ``hint`` stands for."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list and isinstance(value, list):
        for index, entry in enumerate(value):
            _check(entry, arguments[0], f"{place}[{index}]")
        return
    if origin is dict and isinstance(value, dict):
        for key, entry in value.items():
            _check(entry, arguments[1], f"{place}.{key}")
        return
    if origin is Literal:
        fits = value in arguments
    else:
        fits = any(_fits(value, kind) for kind in (arguments if origin is UnionType else (origin or hint,)))
    if not fits:
        raise ValueError(f"{place}: expected {_wanted(hint)}, found {_short(value)}")


def _fits(value: object, kind: type) -> bool:
    """Say whether a JSON value is of a type; whole numbers are floats too, truth values are no numbers."""
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _wanted(hint: Any) -> str:
    """Name a type in the words of JSON."""
    if get_origin(hint) is Literal:
        return " or ".join(get_args(hint))
    if get_origin(hint) is UnionType:
        return " or ".join(_wanted(option) for option in get_args(hint))
    words = {int: "a whole number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return words.get(get_origin(hint) or hint, "null")


def _short(value: object) -> str:
    """Show a wrong value in a message without flooding it."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 40 else text[:37] + "..."


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is no JSON")


def _complete(values: Sequence[float | None]) -> list[float]:
    """Return the values if none is missing, else nothing."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _mean_count(rows: Sequence[Row], key: str, notes: list[str]) -> int | None:
    """Average a parameter count, which differs between seeds where a network grows, and note the range."""
    counts = [count for count in (getattr(row, key) for row in rows) if count is not None]
    if len(counts) != len(rows):
        return None
    if min(counts) != max(counts):
        notes.append(f"{key} is the mean of {min(counts):,} to {max(counts):,}")
    return round(statistics.fmean(counts))


def _join(notes: Iterable[str]) -> str:
    """Join notes, each once, in order."""
    return "; ".join(dict.fromkeys(note for note in notes if note))

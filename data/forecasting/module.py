"""ForecastingData: one series, three splits in time, sliding windows."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from zoo.data.forecasting.catalogue import named_set, read_named
from zoo.data.forecasting.generator import START, regimes
from zoo.data.forecasting.reader import Aggregate, Fill, read_series
from zoo.data.forecasting.series import Series
from zoo.data.forecasting.splits import Borders, ratio_borders, require_windows
from zoo.data.forecasting.windows import ForecastingSpec, Windows, whole_batch
from zoo.data.module import Split, ZooDataModule
from zoo.data.sources import locate
from zoo.errors import UserError

GENERATED = "regimes"


class ForecastingData(ZooDataModule):
    """Windows over a generated series, a public set by name, or the user's own CSV file.

    Splits follow the field: ETT sets have fixed borders, others take the first 70 % of rows for training and the
    last 20 % for testing. Inputs of validation and test windows may reach back into the rows before their split,
    targets may not. Columns are z-scored by their mean and population deviation over the training rows.

    Args:
        name: "regimes" (generated), or a public set such as "ETTh1"; ignored when ``path`` is given.
        path: CSV file of one's own.
        columns: columns to forecast; all by default.
        known_future: columns whose future is known, such as calendars or day-ahead forecasts; null takes those of a
            public set, [] none.
        lookback: rows seen.
        horizon: rows forecast.
        fill: cells without a value: "none" refuses, "mask" leaves them out of the score, "linear", "last".
        aggregate: rows with the same stamp: "none" refuses, "mean", "last".
        date_format: strptime format of the dates, where they are ambiguous.
        freq: pandas alias of the step, where it cannot be told.
        ridge_center: what the ridge yardstick takes off each window: its "mean" or its "last" value.
        rows: length of the generated series.
        batch_size: windows per step.
        num_workers: loader processes.
        seed: of the order of windows and of the generated series.
    """

    def __init__(
        self,
        *,
        name: str = GENERATED,
        path: str | None = None,
        columns: list[str] | None = None,
        known_future: list[str] | None = None,
        lookback: int = 96,
        horizon: int = 96,
        fill: Fill = "none",
        aggregate: Aggregate = "none",
        date_format: str | None = None,
        freq: str | None = None,
        ridge_center: Literal["mean", "last"] = "mean",
        rows: int = 4000,
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers, seed)
        if lookback < 1 or horizon < 1:
            raise ValueError(f"data.lookback={lookback} and data.horizon={horizon} must be at least 1")
        self.set_name, self.path = name, path
        self.columns = columns
        self.known_future = None if known_future is None else tuple(known_future)
        self.lookback, self.horizon = lookback, horizon
        self.fill, self.aggregate, self.date_format, self.freq = fill, aggregate, date_format, freq
        self.ridge_center = ridge_center
        self.rows = rows
        self.series: Series | None = None
        self._spec: ForecastingSpec | None = None

    collate = staticmethod(whole_batch)

    @property
    def generated(self) -> bool:  # type: ignore[override]
        """Whether the series is made on the fly."""
        return self.path is None and self.set_name == GENERATED

    def prepare_data(self) -> None:
        """Find or fetch the file, once per machine.

        Raises:
            UserError: no file is named, or a public set is unknown or cannot be had.
        """
        if self.path is None and self.set_name == "csv":
            raise UserError("data=csv needs data.path=FILE, the CSV file to train on")
        if self.path is None and not self.generated:
            locate(named_set(self.set_name).source, "forecasting")

    def setup(self, stage: str | None = None) -> None:
        """Read the series and cut it, once.

        Raises:
            UserError: the file cannot be trusted as it is, or a split is too short for one window.
        """
        if self.series is not None:
            return
        series = self._read()
        own = self.path is not None or self.generated
        self.borders: Borders = ratio_borders(series.history) if own else named_set(self.set_name).borders()
        try:
            require_windows(self.borders, self.lookback, self.horizon)
        except UserError as error:
            raise UserError(f"{series.path}: {error}") from None
        self.series = series
        self._fit(series)

    @property
    def spec(self) -> ForecastingSpec:
        """Columns, sizes, frequency, cycle and scaler."""
        if self._spec is None:
            raise RuntimeError("the data facts are known after setup()")
        return self._spec

    def conform(self, spec: ForecastingSpec) -> None:
        """Take a trained model's columns, order and scaler, or refuse naming what differs."""
        series = self._require_series()
        where = self.path or self.set_name
        for word, mine, theirs in (
            ("data.lookback", self.lookback, spec.lookback),
            ("data.horizon", self.horizon, spec.horizon),
            ("step", series.freq, spec.freq),
        ):
            if mine != theirs:
                raise UserError(f"{where}: {word}={mine}, but the model was trained with {theirs}")
        absent = [name for name in (*spec.columns, *spec.known) if name not in series.columns]
        if absent:
            raise UserError(
                f"{where}: column {', '.join(absent)} is missing; the model was trained on "
                f"{', '.join((*spec.columns, *spec.known))}"
            )
        self._spec = replace(spec, name=self.spec.name)
        self._scale(series, self._spec)

    def dataset(self, split: Split) -> Windows:
        """Windows of a split; "predict" serves the test windows."""
        first, count = self._range("test" if split == "predict" else split)
        return Windows(
            values=self.values,
            observed=self.observed,
            known=self.known,
            phase=self.phase,
            first=first,
            count=count,
            lookback=self.lookback,
            horizon=self.horizon,
        )

    def fingerprint(self) -> list[dict[str, str]]:
        """Name, file and sha256 of the series."""
        series = self._require_series()
        return [{"name": series.name, "file": series.path.rsplit("/", 1)[-1], "sha256": series.sha256}]

    def notices(self) -> list[str]:
        """Number of windows, what was changed in reading, and how many target cells hold no truth."""
        series = self._require_series()
        lines = [self.borders.describe(self.lookback, self.horizon), *series.notices]
        splits: tuple[Split, ...] = ("train", "val", "test")
        for split in splits:
            scored, cells = self.dataset(split).cells()
            if scored < cells:
                lines.append(f"{scored:,} of {cells:,} target cells of the {split} windows are scored")
        return [f"{series.name}: {line}" for line in lines]

    def _require_series(self) -> Series:
        if self.series is None:
            raise RuntimeError("the series is there after setup()")
        return self.series

    def _range(self, split: str) -> tuple[int, int]:
        """First input row and number of the windows whose targets lie in a split."""
        start, stop = getattr(self.borders, split)
        first = start if split == "train" else start - self.lookback
        return first, stop - first - self.lookback - self.horizon + 1

    def _read(self) -> Series:
        if self.generated:
            return _generated_series(self.rows, self.seed, self.columns, self.known_future or ())
        words: dict[str, Any] = {
            "fill": self.fill,
            "aggregate": self.aggregate,
            "date_format": self.date_format,
            "freq": self.freq,
        }
        if self.known_future is not None:
            words["known_future"] = self.known_future
        if self.columns is not None:
            words["columns"] = [*self.columns, *(self.known_future or ())]
        if self.path is not None:
            return read_series(self.path, **words)
        return replace(read_named(self.set_name, **words), name=self.set_name)

    def _fit(self, series: Series) -> None:
        """Learn the scaler from the training rows and scale the series with it."""
        start, stop = self.borders.train
        statistics = {}
        for name in series.columns:
            column = series.columns.index(name)
            rows = series.values[start:stop, column][series.observed[start:stop, column]]
            spread = float(rows.std())
            # A column that is constant up to rounding has no scale: leave it in its own units.
            constant = spread <= 1e-9 * max(1.0, abs(float(rows.mean())))
            statistics[name] = (float(rows.mean()), 1.0 if constant else spread)
        targets, known = series.targets, series.known_future
        self._spec = ForecastingSpec(
            name=series.name,
            columns=targets,
            known=known,
            lookback=self.lookback,
            horizon=self.horizon,
            freq=series.freq,
            cycle=series.steps_per_cycle(),
            zone=series.zone,
            mean=tuple(statistics[name][0] for name in targets),
            std=tuple(statistics[name][1] for name in targets),
            known_mean=tuple(statistics[name][0] for name in known),
            known_std=tuple(statistics[name][1] for name in known),
        )
        self._scale(series, self._spec)

    def _scale(self, series: Series, spec: ForecastingSpec) -> None:
        self.values, self.observed = scaled(series, spec.columns, spec.mean, spec.std)
        self.known = scaled(series, spec.known, spec.known_mean, spec.known_std)[0] if spec.known else None
        self.phase = torch.from_numpy(series.phase().astype(np.int64))


def scaled(
    series: Series, columns: tuple[str, ...], mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of a series in a model's order and scale: values (n, C) float32 and observed (n, C) bool."""
    order = [series.columns.index(name) for name in columns]
    values = (series.values[:, order] - np.array(mean)) / np.array(std)
    return torch.from_numpy(values.astype(np.float32)), torch.from_numpy(series.observed[:, order])


def _generated_series(
    rows: int, seed: int, columns: list[str] | None, known_future: tuple[str, ...]
) -> Series:
    made = regimes(rows=rows, seed=seed)
    columns = list(made.columns) if columns is None else columns
    for word, wanted, there in (
        ("columns", columns, made.columns),
        ("known_future", known_future, made.known_columns),
    ):
        if unknown := [name for name in wanted if name not in there]:
            raise UserError(
                f"data.{word}={','.join(unknown)}: the generated series offers {', '.join(there)}"
            )
    values = np.concatenate(
        [
            made.values[:, [made.columns.index(name) for name in columns]],
            made.known[:, [made.known_columns.index(name) for name in known_future]],
        ],
        axis=1,
    )
    return Series(
        name=GENERATED,
        path=GENERATED,
        sha256=hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest(),
        time=np.datetime64(START, "ns") + np.arange(len(values)) * np.timedelta64(1, "h"),
        values=values,
        observed=np.ones(values.shape, dtype=bool),
        columns=(*columns, *known_future),
        known_future=known_future,
        freq="h",
        zone=None,
        history=len(values),
        notices=(),
    )

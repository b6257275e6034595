"""ForecastingPredictor: continue a user's series, with intervals, expert shares and a drift report.

Imports no torch at its top: help and wrong words are answered at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from zoo.data.forecasting.reader import read_series
from zoo.data.forecasting.series import Series
from zoo.errors import UserError
from zoo.files import write_text
from zoo.predictor import Prediction, Predictor, Word

if TYPE_CHECKING:
    from zoo.domains.forecasting.calibration import Calibration
    from zoo.domains.forecasting.task import ForecastingTask

LEVELS = ("0.5", "0.8", "0.9", "0.95")
_HISTORY = 3  # lookbacks of history in a picture


@dataclass(kw_only=True)
class Continuation(Prediction):
    """A forecast of the rows after a series, in the units of the file.

    Attributes:
        series: what was continued.
        values: (H, C).
        radius: (H, C) half-width of the interval, or None.
        share: by expert, (H,) its share in each row; empty for networks without experts.
        drift: the drift report, JSON-ready.
    """

    series: Series | None = None
    values: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    radius: np.ndarray | None = None
    share: dict[str, np.ndarray] = field(default_factory=dict)
    drift: dict[str, Any] = field(default_factory=dict)


class ForecastingPredictor(Predictor[Series, Continuation]):
    """Continues series with the network of a finished run.

    Args:
        task: the trained task.
        calibration: of the same run.
        horizon: rows to forecast; beyond the trained horizon the network is fed its own forecasts.
        level: nominal coverage of the interval.
        reading: words of the reader.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".csv", ".txt", ".gz")
    words: ClassVar[dict[str, Word]] = {
        "horizon": Word(kind=int, help="rows to forecast; by default as many as the model was trained for"),
        "level": Word(kind=str, help="nominal coverage of the interval", default="0.9", choices=LEVELS),
        "fill": Word(
            kind=str,
            help="cells without a value: refuse them, or hold or draw a line between values",
            default="none",
            choices=("none", "mask", "linear", "last"),
        ),
        "aggregate": Word(
            kind=str, help="rows with the same stamp", default="none", choices=("none", "mean", "last")
        ),
        "date_format": Word(kind=str, help="strptime format of the dates, where they are ambiguous"),
        "freq": Word(kind=str, help="pandas alias of the step, where it cannot be told"),
    }

    def __init__(
        self,
        task: ForecastingTask,
        calibration: Calibration,
        *,
        horizon: int | None,
        level: float,
        reading: dict[str, Any],
    ) -> None:
        self.task, self.calibration = task, calibration
        self.horizon = task.spec.horizon if horizon is None else horizon
        self.level = level
        self.reading = reading
        self.reports: dict[str, dict[str, Any]] = {}
        if self.horizon < 1:
            raise UserError(f"horizon={horizon} must be at least 1")
        if self.horizon > task.spec.horizon and task.spec.known:
            raise UserError(
                f"horizon={horizon} is beyond the trained {task.spec.horizon} rows, which a model with known-future "
                f"columns ({', '.join(task.spec.known)}) cannot pass"
            )

    @classmethod
    def from_run(cls, run: Path, **words: Any) -> Self:
        """Load a run's best checkpoint and calibration."""
        from zoo.domains.forecasting import calibration
        from zoo.domains.forecasting.task import ForecastingTask
        from zoo.runs import load_checkpoint

        task = ForecastingTask.from_checkpoint(load_checkpoint(run / "checkpoints" / "best.ckpt"))
        horizon, level = words.pop("horizon"), float(words.pop("level"))
        return cls(task, calibration.read(run), horizon=horizon, level=level, reading=words)

    def read(self, path: Path) -> Iterator[Series]:
        """One series per file, with the columns that the model was trained on."""
        spec = self.task.spec
        series = read_series(
            path, columns=[*spec.columns, *spec.known], known_future=spec.known, **self.reading
        )
        if series.freq != spec.freq:
            raise UserError(
                f"{path}: the step is {series.freq}, but the model was trained on steps of {spec.freq}"
            )
        if series.history < spec.lookback:
            raise UserError(
                f"{path}: {series.history} rows are too few: the model looks back {spec.lookback} rows"
            )
        ahead = len(series.time) - series.history
        if spec.known and ahead < spec.horizon:
            first, last = series.format_time(series.future_time(spec.horizon)[[0, -1]])
            raise UserError(
                f"{path}: {', '.join(spec.known)} must be given for the {spec.horizon} rows from {first} to {last}, "
                f"with the other columns empty; {ahead} such rows are there"
            )
        yield series

    def run(self, items: Iterator[Series]) -> Iterator[Continuation]:
        """Forecast series one by one."""
        for series in items:
            yield self._continue(series)

    def draw(self, row: Continuation, stem: Path) -> Path | None:
        """History, forecast, interval and expert shares; beside it the change points."""
        from zoo.domains.forecasting.plots import drift_figure, forecast_figure
        from zoo.pictures import save

        series, spec = row.series, self.task.spec
        if series is None:
            return None
        order = [series.columns.index(name) for name in spec.columns]
        history = series.values[: series.history, order]
        recent = slice(max(0, series.history - _HISTORY * spec.lookback), series.history)
        points = [
            {**point, "date": point["time"], "type": point["kind"]} for point in row.drift["change_points"]
        ]
        made = drift_figure(series.time[: series.history], history, points, spec.columns)
        save(made, stem.with_name(f"{stem.name}-drift.png"))
        lower, upper = (
            (None, None) if row.radius is None else (row.values - row.radius, row.values + row.radius)
        )
        made = forecast_figure(
            series.time[recent],
            history[recent],
            series.future_time(self.horizon),
            row.values,
            lower,
            upper,
            spec.columns,
            expert_share=row.share or None,
            title=f"{series.name}: the next {self.horizon} rows",
        )
        return save(made, stem.with_suffix(".png"))

    def finish(self, directory: Path) -> list[str]:
        """Write drift.json and tell the coverage that the intervals had on test."""
        write_text(directory / "drift.json", json.dumps(self.reports, indent=2) + "\n")
        coverage = self.calibration.coverage.get(self.level)
        if coverage is None:
            return [self.calibration.notice or f"no {self.level:.0%} interval: too few validation windows"]
        return [
            f"{self.level:.0%} intervals, calibrated on {self.calibration.windows} validation windows, held "
            f"{coverage:.1%} of the test values"
        ]

    def _continue(self, series: Series) -> Continuation:
        values, share = self._forecast(series)
        spec = self.task.spec
        std = np.array(spec.std)
        radius = self._radius()
        stamps = series.format_time(series.future_time(self.horizon))
        table = []
        for step, stamp in enumerate(stamps):
            line: dict[str, object] = {"time": stamp}
            for place, name in enumerate(spec.columns):
                line[name] = float(values[step, place])
                if radius is not None:
                    wide = float(radius[step, place] * std[place])
                    line[f"{name}_lower"] = float(values[step, place]) - wide if np.isfinite(wide) else ""
                    line[f"{name}_upper"] = float(values[step, place]) + wide if np.isfinite(wide) else ""
            line |= {f"share_{expert}": float(part[step]) for expert, part in share.items()}
            table.append(line)
        drift = self._drift(series)
        self.reports[series.path] = drift
        notices = list(series.notices)
        if self.horizon > spec.horizon:
            notices.append(
                f"horizon {self.horizon} is beyond the trained {spec.horizon}: the network is fed its own forecasts, "
                f"and rows after {spec.horizon} have no interval"
            )
        return Continuation(
            item=series.path,
            table=table,
            message="; ".join(notices),
            series=series,
            values=values,
            radius=None if radius is None else radius * std,
            share=share,
            drift=drift,
        )

    def _by_expert(self, shares: np.ndarray) -> dict[str, np.ndarray]:
        """Columns of shares (H, E) by slot and kind, of the slots that are switched on in some layer."""
        enabled = np.any([pool.enabled.numpy() for pool in self.task.net.pools()], axis=0)  # type: ignore[union-attr, operator]
        kinds = self.task.net.kinds  # type: ignore[union-attr]
        return {f"{slot}_{kinds[slot]}": shares[:, slot] for slot in np.flatnonzero(enabled)}  # type: ignore[index]

    def _radius(self) -> np.ndarray | None:
        """Half-widths for every forecast row, z-scored; infinite where the model was not calibrated."""
        radius = self.calibration.radius.get(self.level)
        if radius is None:
            return None
        wide = np.full((self.horizon, radius.shape[1]), np.inf)
        known = min(self.horizon, len(radius))
        wide[:known] = radius[:known].numpy()
        return wide

    def _forecast(self, series: Series) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Forecast (H, C) in units of the file, and each expert's shares (H,)."""
        import torch

        from zoo.data.forecasting.module import scaled

        spec, history = self.task.spec, series.history
        past = scaled(series, spec.columns, spec.mean, spec.std)[0][history - spec.lookback : history]
        known = None
        if spec.known:
            rows = slice(history - spec.lookback, history + spec.horizon)
            known = scaled(series, spec.known, spec.known_mean, spec.known_std)[0][None, rows]
        phase = int(series.phase()[history - spec.lookback])
        parts, shares, done = [], [], 0
        with torch.no_grad():
            while done < self.horizon:
                start = torch.tensor([(phase + done) % max(spec.cycle, 1)])
                forecast = self.task.net(past[None], start, known)  # type: ignore[misc]
                parts.append(forecast.y[0])
                if forecast.moe:
                    shares.append(self.task.net.shares(forecast)[0].mean(0))  # type: ignore[union-attr, operator]
                past = torch.cat([past, forecast.y[0]])[-spec.lookback :]
                done += spec.horizon
        values = torch.cat(parts)[: self.horizon].double().numpy() * np.array(spec.std) + np.array(spec.mean)
        return values, self._by_expert(torch.cat(shares)[: self.horizon].numpy()) if shares else {}

    def _drift(self, series: Series) -> dict[str, Any]:
        """Change points of the series, and how far its last window lies outside the training rows."""
        from zoo.data.forecasting.module import scaled
        from zoo.domains.forecasting.drift import detect, patch_statistics
        from zoo.domains.forecasting.regimes import regime_distance

        spec, history = self.task.spec, series.history
        values = scaled(series, spec.columns, spec.mean, spec.std)[0][:history].double().numpy()
        report = detect(values, cycle=spec.cycle, alpha=self.task.drift_alpha)
        stamps = series.format_time(series.time[:history])
        reference = self.calibration.reference.numpy()
        outside = None
        if len(reference) > 5:
            last = patch_statistics(values[None, -spec.lookback :]).reshape(1, -1)
            outside = float(regime_distance(last, reference)[0])
        return {
            "input_rows": [stamps[-spec.lookback], stamps[-1]],
            "checks": report.checks,
            "flagged": report.flagged,
            "outside_training_regime": outside,
            "change_points": report.described(stamps, spec.columns),
            "trained_changes": self.task.change_points or [],
            "growth": self.task.events,
        }

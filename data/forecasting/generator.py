"""The embedded data set: an hourly multivariate series whose regimes begin at known rows.

Districts of a grid draw power. Demand follows the day, the week and the temperature, and news travels: what
happens in the first district reaches each further one a few hours later. The way all this adds up changes
with the regime; the last regime begins in the test rows and is one that the training rows have shown before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

START = "2022-01-03 00:00:00"  # a Monday; rows are hours
CYCLE = 24
_WEEK = 7 * CYCLE
_DELAY = 6  # hours that news takes from one district to the next
_WARMUP = 200  # rows before the first, so that slow parts and delays have settled
_MINIMUM = 1000


@dataclass(frozen=True, kw_only=True)
class Regime:
    """What is special from a row on.

    Attributes:
        begin: Part of the series before it.
        kind: Name.
        level: Added to the demand.
        amplitude: Factor of the daily profile.
        phase: Hours by which the daily profile comes later.
        noise: Factor of what cannot be foreseen.
        slope: Rise of the level per thousand rows.
    """

    begin: float
    kind: str
    level: float = 0.0
    amplitude: float = 1.0
    phase: float = 0.0
    noise: float = 1.0
    slope: float = 0.0


REGIMES = (
    Regime(begin=0.0, kind="base"),
    Regime(begin=0.2, kind="level", level=2.5),
    Regime(begin=0.36, kind="season", amplitude=1.8, phase=5.0),
    Regime(begin=0.5, kind="volatile", level=0.5, noise=3.0),
    Regime(begin=0.6, kind="trend", slope=2.0),
    Regime(begin=0.9, kind="season", level=2.0, amplitude=1.8, phase=5.0),
)


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A generated series.

    Attributes:
        values: ``(n, C)``.
        columns: Names of the C columns.
        known: Columns whose future is known, ``(n, 1)``.
        known_columns: Their names.
        change_rows: First row of each regime but the first.
        kinds: Kind of each regime, the first included.
    """

    values: Array
    columns: tuple[str, ...]
    known: Array
    known_columns: tuple[str, ...]
    change_rows: tuple[int, ...]
    kinds: tuple[str, ...]


def regimes(rows: int = 4000, channels: int = 5, seed: int = 0) -> Generated:
    """Generate the series; the same numbers for the same arguments.

    Args:
        rows: Length in hours.
        channels: Districts.
        seed: Seed of everything random.

    Raises:
        ValueError: If the series is too short to hold the regimes, or has no channel.
    """
    if rows < _MINIMUM or channels < 1:
        raise ValueError(f"need at least {_MINIMUM} rows and 1 channel, got {rows} and {channels}")
    rng = np.random.default_rng(seed)
    total = rows + _WARMUP
    hours = np.arange(-_WARMUP, rows)
    firsts = [round(regime.begin * rows) for regime in REGIMES]
    regime = np.searchsorted(firsts[1:], hours, side="right")

    temperature = 10 + 6 * np.sin(2 * np.pi * (hours - 9) / CYCLE) + 5 * _autoregressive(rng, total, 0.985)
    news = _autoregressive(rng, total, 0.93)
    values = np.stack(
        [_district(rng, hours, regime, firsts, temperature, news, number) for number in range(channels)],
        axis=1,
    )
    return Generated(
        values=values[_WARMUP:],
        columns=tuple(f"district_{number + 1}" for number in range(channels)),
        known=temperature[_WARMUP:, None],
        known_columns=("temperature",),
        change_rows=tuple(firsts[1:]),
        kinds=tuple(regime.kind for regime in REGIMES),
    )


def _district(
    rng: np.random.Generator,
    hours: NDArray[np.int64],
    regime: NDArray[np.int64],
    firsts: list[int],
    temperature: Array,
    news: Array,
    number: int,
) -> Array:
    """Demand of one district, with its own habits and its own distance from the first."""
    level, amplitude, phase, noise, slope = (
        np.array([getattr(item, name) for item in REGIMES])[regime]
        for name in ("level", "amplitude", "phase", "noise", "slope")
    )
    size, habit, comfort = rng.uniform(0.8, 1.3), rng.uniform(-2, 2), rng.uniform(11, 15)
    daily = amplitude * _profile(hours - phase - habit)
    weekend = (hours % _WEEK) >= 5 * CYCLE
    rise = slope * (hours - np.array(firsts)[regime]) / 1000
    heating = 0.2 * np.maximum(comfort - temperature, 0) + 0.1 * np.maximum(temperature - comfort - 4, 0)
    arrived = np.roll(news, number * _DELAY)  # the rows rolled in from the end fall into the warm-up
    own = _autoregressive(rng, len(hours), 0.7)
    steady = 10 + level + rise + daily * np.where(weekend, 0.5, 1.0) + heating
    return np.asarray(size * (steady + noise * (0.6 * arrived + 0.2 * own)))


def _profile(hours: Array) -> Array:
    """A day with a morning and a higher evening peak, mean zero."""
    angle = 2 * np.pi * hours / CYCLE
    return np.asarray(np.cos(angle - 4.9) + 0.6 * np.cos(2 * angle - 4.2))


def _autoregressive(rng: np.random.Generator, rows: int, memory: float) -> Array:
    """First-order autoregression of unit variance."""
    shocks = rng.standard_normal(rows) * np.sqrt(1 - memory**2)
    shocks[0] /= np.sqrt(1 - memory**2)
    out = np.empty(rows)
    last = 0.0
    for row, shock in enumerate(shocks):
        last = memory * last + shock
        out[row] = last
    return out

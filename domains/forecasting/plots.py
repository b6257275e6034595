"""Pictures of forecasts: history with forecast, windows of the test split, error by horizon, drift. No torch.

Every function takes arrays, time along the first axis, and returns a matplotlib figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import ArrayLike, NDArray

from zoo.pictures import BLUE, INK, MUTED, ORANGE, PURPLE, RED, SMALL, colour, figure, legend, tidy

MAX_COLUMNS = 8
# Width of a text above a change, as a share of the time axis.
_TEXT_SHARE = 0.09
_TYPES = {"trend": ORANGE, "seasonal": PURPLE, "fluctuation": RED}


def forecast_figure(
    time_history: ArrayLike,
    history: ArrayLike,
    time_future: ArrayLike,
    forecast: ArrayLike,
    lower: ArrayLike | None,
    upper: ArrayLike | None,
    columns: Sequence[str],
    truth: ArrayLike | None = None,
    expert_share: Mapping[str, ArrayLike] | None = None,
    title: str = "",
) -> Figure:
    """Draw history, forecast and interval of every column, and below which experts made each step.

    Args:
        time_history: (L,) dates or numbers.
        history: (L, C) values before the forecast; NaN leaves a gap.
        time_future: (H,) dates or numbers.
        forecast: (H, C) values.
        lower: (H, C) lower end of the interval, or None.
        upper: (H, C) upper end of the interval, or None.
        columns: C names; the first eight are drawn and the title counts the rest.
        truth: (H, C) what came, where it is known.
        expert_share: by expert, (H,) share in each step; all sum to one.
        title: Heading.

    Returns:
        The figure.
    """
    past, future = np.asarray(time_history), np.asarray(time_future)
    shown = min(len(columns), MAX_COLUMNS)
    if shown < len(columns):
        title = f"{title} (first {shown} of {len(columns)} columns)".strip()
    panels = shown + (expert_share is not None)
    made = figure(9.0, 0.8 + 1.9 * max(panels, 2), title)
    axes = made.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    for place in range(shown):
        _interval(axes[place], future, lower, upper, place)
        _lines(axes[place], (past, future), history, truth, place)
        predicted = np.asarray(forecast)[:, place]
        axes[place].plot(future, predicted, color=ORANGE, linewidth=1.8, label="forecast")
        axes[place].axvline(future[0], color=MUTED, linewidth=0.8, linestyle=":")
        tidy(axes[place], columns[place])
    legend(axes[0])
    if expert_share is not None:
        _experts(axes[-1], future, expert_share)
    axes[-1].set_xlabel("time", fontsize=SMALL, color=MUTED)
    _date_labels(axes[-1], past)
    return made


def drift_figure(
    time: ArrayLike, values: ArrayLike, change_points: Sequence[Mapping[str, Any]], columns: Sequence[str]
) -> Figure:
    """Draw a series with its change points.

    Args:
        time: (N,) dates or numbers.
        values: (N, C) the series.
        change_points: For each, ``row``, ``date``, ``type``, ``channels`` (names of the columns it shows in)
            and ``p_value``. In a column that a change does not show in, its line is faint.
        columns: C names; the first eight are drawn.

    Returns:
        The figure.
    """
    times, series = np.asarray(time), np.asarray(values, dtype=float)
    shown = min(len(columns), MAX_COLUMNS)
    count = len(change_points)
    title = f"{count or 'No'} change {'point' if count == 1 else 'points'}"
    if shown < len(columns):
        title += f" (first {shown} of {len(columns)} columns)"
    made = figure(9.0, 1.0 + 1.7 * max(shown, 2), title)
    axes = made.subplots(shown, 1, sharex=True, squeeze=False)[:, 0]
    for place, panel in enumerate(axes):
        panel.plot(times, series[:, place], color=BLUE, linewidth=0.9)
        tidy(panel, y=columns[place])
        panel.margins(x=0.01)
        for point in change_points:
            touched = columns[place] in point["channels"]
            style: dict[str, Any] = {"linestyle": "-" if touched else ":", "alpha": 1.0 if touched else 0.4}
            panel.axvline(times[point["row"]], color=_TYPES.get(point["type"], INK), linewidth=1.6, **style)
    _name_changes(axes[0], times, change_points)
    axes[-1].set_xlabel("time", fontsize=SMALL, color=MUTED)
    _date_labels(axes[-1], times)
    return made


def error_by_horizon_figure(errors: Mapping[str, ArrayLike], metric: str = "mse", title: str = "") -> Figure:
    """Draw how the error grows with the step ahead.

    Args:
        errors: By row of the results table, (H,) mean error of each step; the first one is drawn thick.
        metric: Name of the error.
        title: Heading.

    Returns:
        The figure.
    """
    made = figure(7.0, 4.0, title)
    axes = made.subplots()
    for place, (name, values) in enumerate(errors.items()):
        steps = np.arange(1, len(np.asarray(values)) + 1)
        style: dict[str, Any] = {"linewidth": 1.5, "linestyle": ("--", "-.", ":")[place % 3]}
        if place == 0:
            style = {"linewidth": 2.6, "zorder": 3}
        axes.plot(steps, np.asarray(values), color=colour(place), label=name, **style)
    tidy(axes, x="steps ahead", y=metric)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    legend(axes)
    return made


def windows_figure(windows: Sequence[Mapping[str, Any]], title: str = "") -> Figure:
    """Draw chosen test windows, such as best, median and worst, with the model and the yardsticks.

    Args:
        windows: For each, ``label`` (for example ``"worst, mse 1.93"``), ``history`` (L,), ``truth`` (H,) and
            ``forecasts``, by row of the results table (H,), the model first; one column of the series each.
        title: Heading.

    Returns:
        The figure, windows below each other.
    """
    made = figure(9.0, 0.7 + 2.3 * len(windows), title)
    axes = made.subplots(len(windows), 1, squeeze=False)[:, 0]
    for panel, window in zip(axes, windows, strict=True):
        history, truth = np.asarray(window["history"]), np.asarray(window["truth"])
        past, future = np.arange(1 - len(history), 1), np.arange(1, len(truth) + 1)
        _lines(panel, (past, future), history[:, None], truth[:, None], 0)
        for place, (name, values) in enumerate(window["forecasts"].items()):
            style: dict[str, Any] = {"linewidth": 1.3, "linestyle": ("--", "-.", ":")[place % 3]}
            if place == 0:
                style = {"linewidth": 2.2}
            panel.plot(future, np.asarray(values), color=colour(place + 1), label=name, **style)
        panel.axvline(0.5, color=MUTED, linewidth=0.8, linestyle=":")
        panel.margins(x=0.01)
        tidy(panel, window["label"])
    legend(axes[0])
    axes[-1].set_xlabel("steps from the end of the input", fontsize=SMALL, color=MUTED)
    return made


def _name_changes(axes: Axes, times: NDArray[Any], change_points: Sequence[Mapping[str, Any]]) -> None:
    """Write type and p-value above each change, except where the text would run into the one before."""
    room = -_TEXT_SHARE * len(times)
    for point in sorted(change_points, key=lambda entry: int(entry["row"])):
        if point["row"] - room < _TEXT_SHARE * len(times):
            continue
        room = point["row"]
        axes.annotate(
            f"{point['type']}\np = {point['p_value']:.2g}",
            (times[point["row"]], 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=SMALL,
            color=INK,
        )


def _lines(
    axes: Axes,
    times: tuple[NDArray[Any], NDArray[Any]],
    history: ArrayLike,
    truth: ArrayLike | None,
    place: int,
) -> None:
    """Draw one column's history, and what came after it if known, joined without a gap."""
    past, future = times
    values = np.asarray(history, dtype=float)[:, place]
    axes.plot(past, values, color=BLUE, linewidth=1.3, label="history")
    if truth is not None:
        came = np.asarray(truth, dtype=float)[:, place]
        joined = np.concatenate([past[-1:], future]), np.concatenate([values[-1:], came])
        axes.plot(*joined, color=INK, linewidth=1.1, alpha=0.75, label="truth")


def _interval(
    axes: Axes, future: NDArray[Any], lower: ArrayLike | None, upper: ArrayLike | None, place: int
) -> None:
    """Shade one column's interval."""
    if lower is None or upper is None:
        return
    ends = np.asarray(lower, dtype=float)[:, place], np.asarray(upper, dtype=float)[:, place]
    axes.fill_between(future, *ends, color=ORANGE, alpha=0.25, linewidth=0, label="interval")


def _experts(axes: Axes, future: NDArray[Any], share: Mapping[str, ArrayLike]) -> None:
    """Stack the experts' shares of each step."""
    colours = [colour(index) for index in range(len(share))]
    stacked = [np.asarray(values) for values in share.values()]
    axes.stackplot(future, stacked, labels=list(share), colors=colours, alpha=0.85, linewidth=0)
    tidy(axes, "share of each expert")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(loc="center left", frameon=False, fontsize=SMALL, labelcolor=INK)


def _date_labels(axes: Axes, times: NDArray[Any]) -> None:
    """Use short date labels where the axis is one of dates."""
    if np.issubdtype(times.dtype, np.datetime64):
        locator = AutoDateLocator(maxticks=8)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))

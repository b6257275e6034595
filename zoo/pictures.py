"""Pictures of one style: colours that colour-blind readers tell apart, readable type, whole files.

Figures are made with matplotlib's object interface, without the global state of ``pyplot``, so that they can
be drawn in any thread and on machines without a display.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from zoo.files import replacing

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e3e7ec"
# The palette of Okabe and Ito, without black and yellow, which are ink and too faint on white.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
PALETTE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
SMALL, NORMAL, LARGE = 9, 10, 12


def figure(width: float, height: float, title: str = "") -> Figure:
    """Return an empty figure of the given size in inches, with a title flush left."""
    made = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    if title:
        made.suptitle(title, x=0.01, ha="left", fontsize=LARGE, fontweight="bold", color=INK)
    return made


def colour(index: int) -> str:
    """Return the palette's colour of a series, an expert or a row; it repeats after six."""
    return PALETTE[index % len(PALETTE)]


def tidy(axes: Axes, title: str = "", x: str = "", y: str = "") -> None:
    """Give axes the common look: light grid behind, no frame above and right, labels that are read easily."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelcolor=INK, labelsize=SMALL)
    axes.set_title(title, loc="left", fontsize=NORMAL, color=INK)
    axes.set_xlabel(x, fontsize=SMALL, color=MUTED)
    axes.set_ylabel(y, fontsize=SMALL, color=MUTED)


def legend(axes: Axes) -> None:
    """Name everything drawn in ``axes`` in one line at the figure's foot, where it covers no data."""
    handles, labels = axes.get_legend_handles_labels()
    made = axes.get_figure(root=True)
    if made is not None and handles:
        made.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=6,
            frameon=False,
            fontsize=SMALL,
            labelcolor=INK,
        )


def save(made: Figure, path: Path, dpi: int = 120) -> Path:
    """Write a figure to ``path``, whole or not at all, in the format of its ending.

    Returns:
        The path.
    """
    with replacing(path) as temporary:
        made.savefig(temporary, dpi=dpi)
    return path


def load_figure(layers: dict[str, dict[str, Any]], title: str = "") -> Figure:
    """Draw how much work each expert of each layer did.

    Args:
        layers: By layer, ``load`` (share of the choices per expert), ``entropy``, ``dead`` (list of experts,
            or their number) and optionally ``share``: a list is the share of the mixing weight per expert, a
            dict has by tag the share of the choices per expert.
        title: Heading.

    Returns:
        One line of axes per layer: bars per expert with the even load dashed; beside them, if there are tags,
        the share of every expert by tag.
    """
    tags = {
        name: share if isinstance(share := entry.get("share"), dict) else {} for name, entry in layers.items()
    }
    tagged = any(tags.values())
    width, height = (10.0 if tagged else 6.0), max(2.2, 0.35 * max(map(len, tags.values())) + 1.2)
    made = figure(width, 0.5 + height * len(layers), title)
    grid = made.subplots(len(layers), 2 if tagged else 1, squeeze=False)
    for line, (name, entry) in zip(grid, layers.items(), strict=True):
        _bars(line[0], name, entry)
        if tagged:
            _heat(line[1], tags[name])
    legend(grid[0][0])
    return made


def _bars(axes: Axes, name: str, entry: dict[str, Any]) -> None:
    """Draw the load of one layer's experts, beside it their mixing weight if that is known."""
    series = {"choices": entry["load"]}
    if isinstance(entry.get("share"), list):
        series["mixing weight"] = entry["share"]
    experts, width = np.arange(len(entry["load"])), 0.8 / len(series)
    for place, (label, shares) in enumerate(series.items()):
        left = experts + (place - (len(series) - 1) / 2) * width
        bars = axes.bar(left, shares, width=0.92 * width, color=colour(2 * place), label=label)
        if len(experts) * len(series) <= 16:
            for text in axes.bar_label(bars, [f"{share:.0%}" for share in shares], fontsize=SMALL, padding=2):
                # The dashed line of the even load passes behind the number, not through it.
                text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    axes.axhline(1 / len(experts), color=ORANGE, linestyle="--", linewidth=1.4, label="even", zorder=1)
    dead = entry["dead"] if isinstance(entry["dead"], int) else len(entry["dead"])
    heading = f"{name}: entropy {entry['entropy']:.2f}" + (f", {dead} dead" if dead else "")
    tidy(axes, heading, "expert", "share")
    axes.set_xticks(experts if len(experts) <= 16 else experts[:: len(experts) // 8])
    axes.set_ylim(0, 1.3 * max(*(max(shares) for shares in series.values()), 1 / len(experts)))
    axes.yaxis.set_major_locator(MaxNLocator(4))


def _heat(axes: Axes, share: dict[str, Sequence[float]]) -> None:
    """Draw the share of every expert by tag as a table of shades and numbers."""
    if not share:
        axes.set_axis_off()
        return
    values = np.asarray(list(share.values()), dtype=float)
    axes.imshow(values, cmap="Blues", vmin=0, vmax=max(values.max(), 1e-9), aspect="auto")
    tidy(axes, "share by tag", "expert")
    axes.grid(visible=False)
    axes.set_yticks(np.arange(len(share)), list(share))
    axes.set_xticks(np.arange(values.shape[1]))
    for (row, column), value in np.ndenumerate(values):
        ink = "white" if value > 0.6 * values.max() else INK
        axes.text(column, row, f"{value:.0%}", ha="center", va="center", fontsize=SMALL, color=ink)

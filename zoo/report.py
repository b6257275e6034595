"""The table of a run for people: terminal, Markdown and CSV. Imports no torch.

``python -m zoo.report RUN [RUN ...] --to md|csv [--out FILE]`` prints or writes the table of finished runs.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from zoo.errors import UserError
from zoo.files import write_text
from zoo.findings import decimals, findings, is_best
from zoo.results import FILE_NAME, Results, Row, checked, combine, encode_results, read_results

if TYPE_CHECKING:
    from rich.console import Group

__all__ = [
    "Results",
    "Row",
    "combine",
    "findings",
    "main",
    "read_results",
    "render",
    "show",
    "to_csv",
    "to_markdown",
    "write_results",
]


def write_results(results: Results, folder: Path) -> Path:
    """Write ``results.json`` and ``results.md`` into a run folder, each whole or not at all.

    Args:
        results: What to write.
        folder: The run folder; made if missing.

    Returns:
        The path of ``results.json``.

    Raises:
        ValueError: If a value does not fit the form of the file, naming its place.
    """
    results = checked(results)
    path = folder / FILE_NAME
    write_text(path, encode_results(results))
    write_text(folder / "results.md", to_markdown(results))
    return path


def render(results: Results) -> Group:
    """Build the table of a run for a terminal.

    Args:
        results: What to show.

    Returns:
        What ``rich`` prints: protocol and setting, the table with the best of each metric marked, findings.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    header, lines = _table(results)
    table = Table(header_style="bold", title_justify="left")
    for column, name in enumerate(header):
        table.add_column(name, justify="right" if column else "left", no_wrap=column == 0)
    starred = {place for cells in lines for place, cell in enumerate(cells) if cell.best}
    for row, cells in zip(results.rows, lines, strict=True):
        marked = [
            Text(f"{cell.text} *", "bold green") if cell.best else Text(cell.text + "  " * (place in starred))
            for place, cell in enumerate(cells)
        ]
        marked[0] = Text(row.name, "bold" if row.kind == "model" else "")
        table.add_row(*marked)
    legend = ["* best of its column"] if any(cell.best for cells in lines for cell in cells) else []
    below = [*legend, *findings(results), *_notes(results)]
    return Group(*map(Text, _facts(results)), table, *map(Text, below))


def show(results: Results) -> None:
    """Print the table of a run to standard output; in a log file it is as wide as it needs to be."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(render(results))


def to_markdown(results: Results) -> str:
    """Return the table of a run as Markdown, with findings and all that is needed to make it again."""
    header, lines = _table(results)
    cells = [
        [f"**{cell.text}**" if cell.best else cell.text.replace("|", "\\|") for cell in line]
        for line in lines
    ]
    table = [header, ["---", *["---:"] * (len(header) - 1)], *cells]
    return "\n".join(
        [
            *(f"{line}  " for line in _facts(results)),
            "",
            *(f"| {' | '.join(line)} |" for line in table),
            "",
            *(f"- {line}" for line in [*findings(results), *_notes(results)]),
            "",
            f"Command: `{results.command}`  ",
            *(
                f"Data: {entry['name']}, {entry['file']}, sha256 `{entry['sha256']}`  "
                for entry in results.data
            ),
            f"Versions: {_words(results.versions)}  ",
            f"Hardware: {_words(results.hardware)}",
            "",
        ]
    )


def to_csv(runs: Sequence[Results]) -> str:
    """Return the rows of one or more runs as one CSV table.

    Nested values get dotted column names (``setting.horizon``, ``metrics.mse``, ``spread.mse``); every line
    also holds domain, command, versions, hardware and the sha256 of the run's files.

    Args:
        runs: Results to put below each other; columns are the union of theirs.
    """
    lines = [_flat(results, row) for results in runs for row in results.rows]
    names = dict.fromkeys(name for line in lines for name in line)
    # Columns of one group stay together even if a later run brings a new member of it.
    groups = {
        group: place for place, group in enumerate(dict.fromkeys(name.partition(".")[0] for name in names))
    }
    columns = sorted(names, key=lambda name: groups[name.partition(".")[0]])
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


@dataclass(frozen=True)
class _Cell:
    text: str
    best: bool = False


def _table(results: Results) -> tuple[list[str], list[list[_Cell]]]:
    """Return header and cells of the table, the same for every output form."""
    rows = results.rows
    metrics = list(dict.fromkeys(metric for row in rows for metric in row.metrics))
    places = {metric: decimals([row.metrics.get(metric) for row in rows]) for metric in metrics}
    varying = [name for name, values in _settings(rows).items() if len(set(values)) > 1]
    header = ["name", *varying, *metrics, "n", "seeds", "params", "active", "flops", "seconds"]
    lines = []
    for index, row in enumerate(rows):
        lines.append(
            [
                _Cell(row.name),
                *(_Cell(_settings(rows)[name][index]) for name in varying),
                *(
                    _Cell(_value(row, metric, places[metric]), is_best(row, metric, rows))
                    for metric in metrics
                ),
                _Cell(str(row.n)),
                _Cell(" ".join(map(str, row.seeds)) or "–"),
                _Cell(_count(row.parameters_total)),
                _Cell(_count(row.parameters_active)),
                _Cell(_count(row.flops)),
                _Cell("–" if row.seconds is None else f"{row.seconds:.1f}"),
            ]
        )
    return header, lines


def _settings(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return, by name, what was measured and how for every row: facts if equal, columns if not."""
    names = dict.fromkeys(name for row in rows for name in row.setting)
    plain = {
        name: [str(getattr(row, name)) for row in rows]
        for name in ("data", "split", "protocol", "n_unit", "units")
    }
    return plain | {name: [str(row.setting.get(name, "–")) for row in rows] for name in names}


def _facts(results: Results) -> list[str]:
    """Return the lines above the table: what all rows share."""
    shared = {name: values[0] for name, values in _settings(results.rows).items() if len(set(values)) == 1}
    head = [results.domain, *(shared.pop(name) for name in ("data", "split") if name in shared)]
    units = {"units": "metrics in", "n_unit": "n counts"}
    lines = [" · ".join(head)]
    if protocol := shared.pop("protocol", ""):
        lines.append(f"protocol: {protocol}")
    if shared:
        lines.append(
            "setting: " + ", ".join(f"{units.get(name, name)} {value}" for name, value in shared.items())
        )
    return lines


def _notes(results: Results) -> list[str]:
    """Return the notes that findings have not told already."""
    return [
        f"{row.name}: {row.notes}" for row in results.rows if row.notes and None not in row.metrics.values()
    ]


def _value(row: Row, metric: str, places: int) -> str:
    """Show a metric with its spread over the seeds."""
    value, spread = row.metrics.get(metric), row.spread.get(metric)
    if value is None:
        return "–"
    if spread is None:
        return f"{value:.{places}f}"
    return f"{value:.{places}f} ± {spread:.{max(places, decimals([spread]) - 2)}f}"


def _count(number: int | None) -> str:
    """Show a count of parameters or operations in three digits."""
    if number is None:
        return "–"
    for size, unit in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _words(facts: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _flat(results: Results, row: Row) -> dict[str, object]:
    """Flatten a row and its run into one CSV line."""
    line: dict[str, object] = {"domain": results.domain}
    for key, value in asdict(row).items():
        if isinstance(value, dict):
            line |= {f"{key}.{name}": "" if entry is None else entry for name, entry in value.items()}
        else:
            line[key] = (
                " ".join(map(str, value)) if isinstance(value, list) else "" if value is None else value
            )
    line["command"] = results.command
    line["data_sha256"] = " ".join(f"{entry['file']}:{entry['sha256']}" for entry in results.data)
    for group, facts in (("versions", results.versions), ("hardware", results.hardware)):
        line |= {f"{group}.{name}": value for name, value in facts.items()}
    return line


class _Parser(argparse.ArgumentParser):
    """A parser that tells a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; python -m zoo.report --help shows the usage")


def main(argv: Sequence[str] | None = None) -> int:
    """Print or write the tables of finished runs; return the exit status."""
    parser = _Parser(
        prog="python -m zoo.report", description="Show the results of finished runs.", allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument("--to", choices=("md", "csv"), default="md", help="form of the table (default: md)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write here instead of to the terminal")
    try:
        arguments = parser.parse_args(argv)
        runs = [read_results(run) for run in arguments.runs]
        text = to_csv(runs) if arguments.to == "csv" else "\n".join(map(to_markdown, runs))
        if arguments.out is None:
            sys.stdout.write(text)
        else:
            write_text(arguments.out, text)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

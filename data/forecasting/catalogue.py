"""Public data sets by name: file, licence, expected rows, split rule, defaults."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.data.examination import did_you_mean
from zoo.data.forecasting.reader import read_series
from zoo.data.forecasting.series import Series
from zoo.data.forecasting.splits import Borders, ett_borders, ratio_borders
from zoo.data.sources import SourceFile, locate
from zoo.errors import UserError

_ETT = "https://raw.githubusercontent.com/zhouhaoyi/ETDataset/1d16c8f4f943005d613b5bc962e9eeb06058cf07/ETT-small/"
_OTHERS = (
    "https://raw.githubusercontent.com/junwoopark92/Self-Supervised-Contrastive-Forecsating/"
    "e20c108114cf68d451c938712ad28dac5f83ef6e/dataset/"
)
_ETT_LICENSE = "CC BY-ND 4.0"
_EPF_LICENSE = "none stated (origin: epftoolbox benchmark)"
_UNSTATED = "none stated; see the Time-Series-Library README for the origin"


@dataclass(frozen=True, kw_only=True)
class NamedSet:
    """A public series.

    Attributes:
        name: word that users type.
        source: its file.
        rows: rows that the file must have.
        columns: value columns that it must have.
        steps_per_hour: of an ETT set, whose borders are fixed; None for the ratio rule.
        known_future: columns known ahead of time.
        lookback: default input rows.
        horizon: default target rows.
    """

    name: str
    source: SourceFile
    rows: int
    columns: int
    steps_per_hour: int | None = None
    known_future: tuple[str, ...] = ()
    lookback: int = 96
    horizon: int = 96

    def borders(self) -> Borders:
        """Return the split borders of the field for this set."""
        return ratio_borders(self.rows) if self.steps_per_hour is None else ett_borders(self.steps_per_hour)


def _ett(name: str, steps_per_hour: int, sha256: str | None = None, size: int | None = None) -> NamedSet:
    file = SourceFile(f"{name}.csv", sha256, _ETT + f"{name}.csv" if sha256 else None, _ETT_LICENSE, size)
    return NamedSet(
        name=name.lower(), source=file, rows=17_420 * steps_per_hour, columns=7, steps_per_hour=steps_per_hour
    )


def _epf(market: str, sha256: str, size: int, known_future: tuple[str, str]) -> NamedSet:
    return NamedSet(
        name=f"epf_{market.lower()}",
        source=SourceFile(f"EPF/{market}.csv", sha256, None, _EPF_LICENSE, size),
        rows=52_416,
        columns=3,
        known_future=known_future,
        lookback=168,
        horizon=24,
    )


def _by_path(name: str, rows: int, columns: int) -> NamedSet:
    return NamedSet(
        name=name, source=SourceFile(f"{name}.csv", None, None, _UNSTATED, None), rows=rows, columns=columns
    )


_SETS = (
    _ett("ETTh1", 1, "f18de3ad269cef59bb07b5438d79bb3042d3be49bdeecf01c1cd6d29695ee066", 2_589_657),
    _ett("ETTh2", 1, "a3dc2c597b9218c7ce1cd55eb77b283fd459a1d09d753063f944967dd6b9218b", 2_417_960),
    _ett("ETTm1", 4),
    _ett("ETTm2", 4),
    NamedSet(
        name="exchange",
        source=SourceFile(
            "exchange_rate.csv",
            "d55e7aa2641009814a18ba3279431b13f6d413b0eab195b9ff21988d8cf94e97",
            _OTHERS + "exchange_rate/exchange_rate.csv",
            "data licence unstated (repository: MIT)",
            630_212,
        ),
        rows=7_588,
        columns=8,
    ),
    NamedSet(
        name="ili",
        source=SourceFile(
            "national_illness.csv",
            "8594cecb98c6f2f9dc014eca11c4d5d1e38ad5ce6ed0592d4abe65b146fce395",
            _OTHERS + "illness/national_illness.csv",
            "public domain (US CDC)",
            66_653,
        ),
        rows=966,
        columns=7,
        lookback=36,
        horizon=24,
    ),
    _epf(
        "NP",
        "cbba6af8cf505d6d1fcadf87e86b6651abdae4a1adf616ee4956f6c1cd039fb8",
        1_674_177,
        ("Grid load forecast", "Wind power forecast"),
    ),
    _epf(
        "PJM",
        "58cc0ad32e22e61d9e183b0dc8201747f8c2ef822e469832c5beea8d88251cc0",
        1_960_359,
        ("System load forecast", "Zonal COMED load foecast"),
    ),
    _epf(
        "BE",
        "93ca5ab6614adef1e93e561d5fd6868588c035ea68a676c9423462113303e8ab",
        1_793_351,
        ("Generation forecast", "System load forecast"),
    ),
    _epf(
        "FR",
        "ac400691243cc3aac32a4680d5f428f720da61385277813083b9fe61e642bd0c",
        1_763_250,
        ("Generation forecast", "System load forecast"),
    ),
    _epf(
        "DE",
        "8cdf1e3f52a9c3530bb36432d5f956a287f951cff696f20478e5be069505388c",
        1_862_211,
        ("Wind power forecast", "Ampirion zonal load forecast"),
    ),
    _by_path("weather", 52_696, 21),
    _by_path("electricity", 26_304, 321),
    _by_path("traffic", 17_544, 862),
)

CATALOGUE: dict[str, NamedSet] = {item.name: item for item in _SETS}
"""Every set by the word that users type."""


def named_set(name: str) -> NamedSet:
    """Return a set by its name, in any case.

    Raises:
        UserError: if there is none, with the nearest name.
    """
    found = CATALOGUE.get(name.lower())
    if found is None:
        raise UserError(
            f"no data set {name!r}{did_you_mean(name, list(CATALOGUE))}; known: {', '.join(CATALOGUE)}"
        )
    return found


def read_named(name: str, path: str | Path | None = None, **words: Any) -> Series:
    """Read a set and check its rows and columns against what the field reports.

    Args:
        name: name of the set.
        path: the user's copy; by default it is located by `zoo.data.sources.locate`.
        words: those of `read_series`; ``known_future`` defaults to that of the set.

    Raises:
        UserError: if the file cannot be had or read, or has other rows or columns.
    """
    known = named_set(name)
    file = Path(path) if path is not None else locate(known.source, "forecasting")
    series = read_series(file, **{"known_future": known.known_future, **words})
    found, expected = (len(series.time), series.values.shape[1]), (known.rows, known.columns)
    if words.get("fill", "none") != "none":
        expected = found[0], expected[1]  # filled gaps add rows
    if words.get("columns") is not None:
        expected = expected[0], found[1]
    if found != expected:
        raise UserError(
            f"{file}: has {found[0]:,} rows x {found[1]} columns, but {known.name} has {expected[0]:,} x"
            f" {expected[1]}; read it by path as a file of your own"
        )
    return series

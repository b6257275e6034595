"""Public sets by name, checked on the real files where they are held."""

import re

import numpy as np
import pytest

from zoo.data.forecasting import catalogue
from zoo.data.forecasting.catalogue import CATALOGUE, named_set, read_named
from zoo.errors import UserError

WINDOWS = {  # at the default lookback and horizon of each set
    "etth1": (8449, 2785, 2785),
    "etth2": (8449, 2785, 2785),
    "exchange": (5120, 665, 1422),
    "ili": (617, 74, 170),
    "epf_np": (36500, 5219, 10460),
    "epf_pjm": (36500, 5219, 10460),
    "epf_be": (36500, 5219, 10460),
    "epf_fr": (36500, 5219, 10460),
    "epf_de": (36500, 5219, 10460),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_real_files_give_the_windows_of_the_field(name, real_file):
    item = named_set(name)
    series = read_named(name, real_file(f"forecasting/{item.source.name}"))
    assert series.sha256 == item.source.sha256
    assert (series.history, len(series.columns)) == (item.rows, item.columns)
    assert series.known_future == item.known_future
    assert series.targets[-1] == "OT"
    assert np.isfinite(series.values).all()
    assert series.observed.all()
    assert series.freq == {"exchange": "D", "ili": "W-TUE"}.get(name, "h")
    assert tuple(item.borders().windows(item.lookback, item.horizon).values()) == WINDOWS[name]


def test_real_files_are_located_and_verified(real_file):
    real_file("forecasting/national_illness.csv")
    assert read_named("ILI").history == 966


def test_scaler_rows_of_etth1_end_with_june_2017(real_file):
    series = read_named("etth1", real_file("forecasting/ETTh1.csv"))
    borders = named_set("etth1").borders()
    last = [series.time[stop - 1] for _, stop in (borders.train, borders.val, borders.test)]
    assert series.format_time(np.array(last)) == [
        "2017-06-25 23:00:00",
        "2017-10-23 23:00:00",
        "2018-02-20 23:00:00",
    ]
    train = series.values[: borders.train[1], series.columns.index("OT")]
    assert train.mean() == pytest.approx(17.1283, abs=1e-4)
    assert train.std() == pytest.approx(9.1765, abs=1e-4)


def test_every_download_is_pinned_and_has_a_checksum():
    for item in CATALOGUE.values():
        if item.source.url:
            assert re.search(r"/[0-9a-f]{40}/", item.source.url)
            assert re.fullmatch(r"[0-9a-f]{64}", item.source.sha256)
            assert item.source.size
            assert item.source.license


def test_names_in_any_case_and_wrong_names():
    assert named_set("ETTh1") is CATALOGUE["etth1"]
    with pytest.raises(UserError, match=re.escape("no data set 'eth1' (did you mean 'etth1'?)")):
        named_set("eth1")


def test_sets_without_address_say_where_to_put_the_file(monkeypatch, tmp_path):
    monkeypatch.setenv("ZOO_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"put it at \$ZOO_DATA/forecasting/weather.csv"):
        read_named("weather")


def test_rows_and_columns_are_checked(tmp_path, monkeypatch):
    path = tmp_path / "x.csv"
    path.write_text("date,a,b\n" + "".join(f"{i},{i},{i}\n" for i in range(30)))
    with pytest.raises(UserError, match=r"has 30 rows x 2 columns, but weather has 52,696 x 21"):
        read_named("weather", path)
    small = catalogue.NamedSet(name="small", source=named_set("weather").source, rows=30, columns=2)
    monkeypatch.setitem(CATALOGUE, "small", small)
    assert read_named("small", path).history == 30
    assert read_named("small", path, columns=["b"]).columns == ("b",)

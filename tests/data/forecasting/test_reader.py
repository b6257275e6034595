"""The CSV reader: what it accepts, what it refuses, and in which words."""

import gzip
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zoo.data.forecasting.reader import ReadOptions, inspect_file, read_series
from zoo.errors import UserError


@pytest.fixture
def write(tmp_path):
    """Return a function that writes lines to a file and gives its path."""

    def to_file(lines, name="file.csv", encoding="utf-8", newline="\n") -> Path:
        path = tmp_path / name
        path.write_bytes((newline.join(lines) + newline).encode(encoding))
        return path

    return to_file


def hours(n, start="2020-01-01"):
    return [f"{t:%Y-%m-%d %H:%M:%S}" for t in pd.date_range(start, periods=n, freq="h")]


def table(stamps, *columns, header="date,a,b", mark=","):
    cells = zip(stamps, *columns, strict=True)
    return [header.replace(",", mark), *(mark.join(map(str, row)) for row in cells)]


def refusal(path, **words):
    with pytest.raises(UserError) as caught:
        read_series(path, **words)
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- what is read -------------------------------------------------------------------------------------------


def test_wide_file_gives_every_fact(write):
    path = write(table(hours(50), np.arange(50), np.arange(50) / 4))
    series = read_series(path)
    assert (series.name, series.path, len(series.sha256)) == ("file", str(path), 64)
    assert (series.freq, series.zone, series.history, series.notices) == ("h", None, 50, ())
    assert series.time.dtype == "datetime64[ns]"
    assert series.time[1] == np.datetime64("2020-01-01T01:00")
    assert series.columns == ("a", "b")
    np.testing.assert_array_equal(series.values, np.stack([np.arange(50), np.arange(50) / 4], axis=1))
    assert series.observed.all()
    assert series.format_time(series.future_time(2)) == ["2020-01-03 02:00:00", "2020-01-03 03:00:00"]
    assert series.steps_per_cycle() == 24
    assert series.phase().tolist() == [t % 24 for t in range(50)]


def test_values_are_read_to_the_last_bit(write):
    values = np.random.default_rng(0).normal(size=200) * 10.0 ** np.arange(-100, 100)
    path = write(table(hours(200), [repr(float(v)) for v in values], header="date,a"))
    np.testing.assert_array_equal(read_series(path).values[:, 0], values)


@pytest.mark.parametrize("mark", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_separators_encodings_and_line_ends(write, mark, encoding, newline):
    path = write(
        table(hours(5), range(5), range(5), header="date,a,é", mark=mark), encoding=encoding, newline=newline
    )
    series = read_series(path)
    assert series.columns == ("a", "é")
    assert series.values.tolist() == [[i, i] for i in range(5)]
    assert series.notices == ()


def test_windows_1252_is_read_with_a_notice(write):
    series = read_series(write(table(hours(3), range(3), header="date,größe"), encoding="cp1252"))
    assert series.columns == ("größe",)
    assert series.notices == ("not UTF-8 (line 1): read as Windows-1252, check the accented letters",)


def test_garbled_names_are_noticed(write):
    series = read_series(write(table(hours(3), range(3), header="date,T (Â°C)")))
    assert series.notices == ("column names look wrongly encoded: T (Â°C)",)


def test_gzip_and_txt(tmp_path):
    lines = "\n".join(table(hours(4), range(4), range(4)))
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "y.txt").write_text(lines)
    assert read_series(tmp_path / "x.csv.gz").name == "x"
    np.testing.assert_array_equal(
        read_series(tmp_path / "x.csv.gz").values, read_series(tmp_path / "y.txt").values
    )


@pytest.mark.parametrize("name", ["date", "ds", "Timestamp", "time", "datetime", "when"])
def test_time_column_by_name_or_place(write, name):
    assert read_series(write(table(hours(4), range(4), header=f"{name},a"))).columns == ("a",)
    if name != "when":
        swapped = [f"a,{name}", *(f"{i},{stamp}" for i, stamp in enumerate(hours(4)))]
        assert read_series(write(swapped)).values[:, 0].tolist() == [0, 1, 2, 3]


def test_spaces_blank_rows_and_comma_rows(write):
    lines = table(hours(6), range(6), range(6), header="date, a load , b")
    lines[3:3] = [",,", "", " , ,"]
    series = read_series(write([*lines, ",,"]))
    assert series.columns == ("a load", "b")
    assert series.values[:, 0].tolist() == list(range(6))
    assert series.notices == ("4 blank rows dropped",)


def test_trailing_separators_make_no_column(write):
    lines = [line + "," for line in table(hours(4), range(4), header="date,a")]
    assert read_series(write(lines)).columns == ("a",)


def test_pandas_index_column_is_a_time_column(write):
    assert read_series(write(table(hours(4), range(4), header=",a"))).columns == ("a",)


def test_flags_become_numbers(write):
    series = read_series(write(table(hours(4), ["True", "False", "True", "False"], header="date,on")))
    assert series.values[:, 0].tolist() == [1, 0, 1, 0]
    assert series.notices == ("true/false read as 1/0 in on",)


def test_columns_are_kept_in_the_order_asked_for(write):
    path = write(table(hours(4), range(4), "wxyz", range(4, 8), header="date,a,text,b"))
    assert read_series(path, columns=["b", "a"]).values.tolist() == [[4, 0], [5, 1], [6, 2], [7, 3]]


def test_long_layout_gives_one_column_per_id(write):
    lines = ["unique_id,ds,y"]
    for name, start in (("north", 0), ("NA", 100)):  # the id NA is a name, not a missing value
        lines += [f"{name},{stamp},{start + i}" for i, stamp in enumerate(hours(4))]
    series = read_series(write(lines))
    assert series.columns == ("north", "NA")
    assert series.values.tolist() == [[i, 100 + i] for i in range(4)]
    assert series.notices == ()


def test_long_layout_with_known_future_column(write):
    lines = ["unique_id,ds,y,temp"]
    for name in "pq":
        lines += [f"{name},{stamp},{i if i < 3 else ''},{10 * i}" for i, stamp in enumerate(hours(5))]
    series = read_series(write(lines), known_future=["temp"])
    assert series.columns == ("p", "q", "p.temp", "q.temp")
    assert (series.known_future, series.targets, series.history) == (("p.temp", "q.temp"), ("p", "q"), 3)


def test_long_layout_refuses_a_duplicate_by_id_and_stamp(write):
    lines = ["unique_id,ds,y", *(f"{i},{stamp},1" for i in "pq" for stamp in hours(3)), f"q,{hours(2)[1]},5"]
    text = refusal(write(lines))
    assert "1 duplicate stamp, first 2020-01-01 01:00 of q" in text
    assert read_series(write(lines), aggregate="mean").values[:, 1].tolist() == [1, 3, 1]


def test_known_future_rows_after_the_history(write):
    path = write(table(hours(6), [0, 1, 2, 3, "", ""], range(6), header="date,y,forecast"))
    series = read_series(path, known_future=["forecast"])
    assert (series.history, len(series.time)) == (4, 6)
    assert np.isnan(series.values[4:, 0]).all()
    assert series.values[:, 1].tolist() == list(range(6))
    np.testing.assert_array_equal(series.future_time(2), series.time[4:])
    assert "y (2 missing, first 2020-01-01 04:00)" in refusal(path)


# --- dates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stamps", "freq"),
    [
        (["1990/1/9 0:00", "1990/1/10 0:00", "1990/1/11 0:00"], "D"),
        (["31.12.2020", "01.01.2021", "02.01.2021"], "D"),
        (["12/31/2020 11:00 PM", "1/1/2021 12:00 AM", "1/1/2021 1:00 AM"], "h"),
        (["2020-01-01T00:00:00", "2020-01-01T00:15:00", "2020-01-01T00:30:00"], "15min"),
        (["2020-01-01 00:00:00", "2020-01-01 00:00:00.500", "2020-01-01 00:00:01"], "500ms"),
        (["20200131", "20200201", "20200202"], "D"),
        (["2020-01", "2020-02", "2020-03"], "MS"),
        (["31-Jan-2020", "29-Feb-2020", "31-Mar-2020"], "ME"),
        (["2020-01-01", "2020-04-01", "2020-07-01"], "QS-JAN"),
        (["2019-12-31", "2020-03-31", "2020-06-30"], "QE-DEC"),
        (["2018-01-01", "2019-01-01", "2020-01-01"], "YS-JAN"),
        (["2020-01-07", "2020-01-14", "2020-01-21"], "W-TUE"),
        (["2020-01-02", "2020-01-03", "2020-01-06", "2020-01-07"], "B"),
        (["1577836800", "1577836860", "1577836920"], "min"),
        (["0", "1", "2"], "1"),
        (["10", "20", "30"], "10"),
        (["2001", "2002", "2003"], "1"),
    ],
)
def test_formats_and_steps(write, stamps, freq):
    series = read_series(write(table(stamps, range(len(stamps)), header="date,a")))
    assert series.freq == freq
    np.testing.assert_array_equal(
        series.future_time(1)[0] - series.time[-1] > np.zeros((), series.time.dtype.str.replace("M8", "m8")),
        True,
    )


def test_calendar_steps_continue_by_the_calendar(write):
    ends = ["2019-12-31", "2020-01-31", "2020-02-29"]
    series = read_series(write(table(ends, range(3), header="date,a")))
    assert series.format_time(series.future_time(3)) == ["2020-03-31", "2020-04-30", "2020-05-31"]
    quarters = ["2019-09-30", "2019-12-31", "2020-03-31"]
    series = read_series(write(table(quarters, range(3), header="date,a")))
    assert series.format_time(series.future_time(2)) == ["2020-06-30", "2020-09-30"]


def test_day_first_is_found_where_a_day_shows_it(write):
    days = [f"{d:%d/%m/%Y}" for d in pd.date_range("2020-01-01", periods=40)]
    series = read_series(write(table(days, range(40), header="date,a")))
    assert (np.diff(series.time) == np.timedelta64(1, "D")).all()
    assert series.time[39] == np.datetime64("2020-02-09")


def test_ambiguous_days_are_refused_and_a_format_settles_them(write):
    days = [f"{d:%d/%m/%Y}" for d in pd.date_range("2020-01-01", periods=12)]
    path = write(table(days, range(12), header="date,a"))
    text = refusal(path)
    assert "ambiguous" in text
    assert "date_format=%d/%m/%Y" in text
    assert "date_format=%m/%d/%Y" in text
    assert read_series(path, date_format="%d/%m/%Y").freq == "D"
    assert read_series(path, date_format="%m/%d/%Y").freq == "MS"


def test_one_format_for_the_whole_column(write):
    text = refusal(write(table(["13/01/2020", "14/01/2020", "01/15/2020"], range(3), header="date,a")))
    assert "line 4: '01/15/2020' is not a date of the form %d/%m/%Y" in text


@pytest.mark.parametrize(
    ("stamp", "words"),
    [
        ("yesterday", "'yesterday' is not understood as a date; give its format"),
        ("01/02/20", "give its format, as in date_format=%d/%m/%y"),
        ("0202-01-01", "line 2: '0202-01-01' is out of range; dates from 1678 to 2261"),
        ("2020-02-30", "line 2: '2020-02-30' is not a date"),
        ("", "line 2 has no date (1 such row)"),
    ],
)
def test_bad_dates_are_shown(write, stamp, words):
    assert words in refusal(write(table([stamp, "2020-01-02", "2020-01-03"], range(3), header="date,a")))


def test_wrong_date_format_word(write):
    path = write(table(hours(3), range(3), header="date,a"))
    assert "line 2: '2020-01-01 00:00:00' is not a date of the form %d.%m.%Y" in refusal(
        path, date_format="%d.%m.%Y"
    )
    assert "date_format=%Q is no strptime format" in refusal(path, date_format="%Q")


def local(start, end, zone):
    return pd.date_range(start, end, freq="h", tz=zone)


def test_mixed_offsets_are_one_hour_steps_and_the_zone_is_found(write):
    index = local("2022-10-15", "2022-11-13 23:00", "Europe/Amsterdam")
    series = read_series(write(table(map(str, index), range(len(index)), header="date,a")))
    assert (np.diff(series.time) == np.timedelta64(1, "h")).all()
    assert (series.freq, series.zone) == ("h", "Europe/Amsterdam")
    assert series.format_time(series.future_time(1)) == ["2022-11-14 00:00:00+01:00"]
    assert series.format_time(series.time) == [str(t) for t in index]
    assert series.phase()[0] == 0
    assert series.phase()[-1] == 23


def test_local_days_of_23_and_25_hours_are_daily(write):
    index = pd.date_range("2022-03-20", periods=30, freq="D", tz="America/New_York").union(
        pd.date_range("2022-03-01", periods=19, freq="D", tz="America/New_York")
    )
    series = read_series(write(table(map(str, index), range(len(index)), header="date,a")))
    assert series.freq == "D"
    assert series.zone == "America/New_York"
    assert series.format_time(series.future_time(1)) == ["2022-04-19 00:00:00-04:00"]


@pytest.mark.parametrize(
    ("mark", "zone"), [("Z", "UTC"), ("+00:00", "UTC"), ("-0330", "-03:30"), ("+05", "+05:00")]
)
def test_fixed_offsets(write, mark, zone):
    series = read_series(write(table([stamp + mark for stamp in hours(3)], range(3), header="date,a")))
    assert series.zone == zone
    assert series.format_time(series.time[:1])[0] == "2020-01-01 00:00:00" + zone.replace("UTC", "+00:00")


def test_offsets_of_no_known_zone_stay_utc(write):
    stamps = ["2020-01-01 00:00+01:00", "2020-01-01 02:00+02:00", "2020-01-01 02:00+01:00"]
    series = read_series(write(table(stamps, range(3), header="date,a")))
    assert series.zone == "UTC"
    assert series.notices == ("offsets +01:00, +02:00 follow no known zone; stamps are kept in UTC",)


def test_offsets_on_some_rows_only_are_refused(write):
    stamps = ["2020-01-01 00:00+01:00", "2020-01-01 01:00", "2020-01-01 02:00+01:00"]
    assert "line 3: '2020-01-01 01:00' has no UTC offset" in refusal(
        write(table(stamps, range(3), header="date,a"))
    )


def test_naive_hour_that_occurs_twice_is_refused_as_ambiguous(write):
    index = local("2022-10-15", "2022-11-13 23:00", "Europe/Amsterdam").tz_localize(None)
    text = refusal(write(table(map(str, index), range(len(index)), header="date,a")))
    assert "1 duplicate stamp, first 2022-10-30 02:00 (ambiguous: clocks go back here" in text


def test_naive_hour_that_is_skipped_is_a_gap_with_a_hint(write):
    index = local("2022-03-20", "2022-04-02 23:00", "Europe/Amsterdam").tz_localize(None)
    text = refusal(write(table(map(str, index), range(len(index)), header="date,a")))
    assert "gap after 2022-03-27 01:00, 1 step" in text
    assert "time zone" in text


# --- order, duplicates, gaps --------------------------------------------------------------------------------


def test_shuffled_rows_are_sorted_with_a_notice(write):
    lines = table(hours(200), range(200), np.arange(200) ** 2)
    ordered = read_series(write(lines, "ordered.csv"))
    order = np.random.default_rng(0).permutation(200)
    shuffled = read_series(write([lines[0], *(lines[1 + i] for i in order)], "shuffled.csv"))
    assert shuffled.notices == ("rows sorted by date",)
    np.testing.assert_array_equal(shuffled.time, ordered.time)
    np.testing.assert_array_equal(shuffled.values, ordered.values)


def test_duplicates_are_refused_and_can_be_merged(write):
    lines = table(hours(200), range(200), header="date,a")
    path = write([*lines[:150], "2020-01-05 04:00:00,7", *lines[150:]])
    text = refusal(path)
    assert "1 duplicate stamp, first 2020-01-05 04:00" in text
    assert "aggregate=mean" in text
    assert read_series(path, aggregate="mean").values[100, 0] == 53.5
    assert read_series(path, aggregate="last").values[100, 0] == 7
    assert (
        "1 duplicate stamp, first 2020-01-05 04:00, merged (last)"
        in read_series(path, aggregate="last").notices
    )


def test_gaps_are_refused_and_can_be_filled(write):
    lines = table(hours(200), range(200), header="date,a")
    path = write(lines[:101] + lines[106:])
    assert "gap after 2020-01-05 03:00, 5 steps" in refusal(path)
    held = read_series(path, fill="mask")
    assert len(held.time) == 200
    assert held.values[99:106, 0].tolist() == [99, 99, 99, 99, 99, 99, 105]
    assert np.flatnonzero(~held.observed[:, 0]).tolist() == [100, 101, 102, 103, 104]
    assert read_series(path, fill="linear").values[99:106, 0].tolist() == list(range(99, 106))
    assert not read_series(path, fill="linear").observed[100, 0]


def test_several_gaps_are_counted(write):
    lines = table(hours(50), range(50), header="date,a")
    text = refusal(write(lines[:11] + lines[12:21] + lines[24:]))
    assert "gap after 2020-01-01 09:00, 1 step (1 more gap, 4 steps in all)" in text


def test_stamps_beside_the_step_are_refused(write):
    stamps = [*hours(10), "2020-01-01 10:20:00"]
    text = refusal(write(table(stamps, range(11), header="date,a")))
    assert "stamp 2020-01-01 10:20 is not a whole number of steps (h) after the first" in text
    stamps = ["2020-01-01", "2020-01-04", "2020-01-05", "2020-01-11", "2020-02-03", "2020-02-05"]
    assert "no regular step" in refusal(write(table(stamps, range(6), header="date,a")))


def test_business_days_with_a_holiday_show_the_gap(write):
    days = [str(d.date()) for d in pd.bdate_range("2020-01-01", periods=30) if d.day != 20]
    text = refusal(write(table(days, range(29), header="date,a")))
    assert "gap after 2020-01-17" in text
    assert "1 step" in text
    filled = read_series(write(table(days, range(29), header="date,a")), fill="mask")
    assert (filled.freq, len(filled.time)) == ("B", 30)


def test_a_frequency_can_be_said(write):
    path = write(table(["2020-01-01"], [1], header="date,a"))
    assert "one row only" in refusal(path)
    for word, alias in (("D", "D"), ("H", "h"), ("15T", "15min"), ("B", "B")):
        assert read_series(path, freq=word).freq == alias
    assert "freq=fortnight is no frequency" in refusal(path, freq="fortnight")
    assert "is not a whole number of steps (W-SUN)" in refusal(path, freq="W")
    assert "gives its step" not in refusal(write(table([1, 2], [1, 2], header="t,a")), freq="h")


def test_mistyped_year_does_not_fill_the_memory(write):
    stamps = [
        *(f"{t:%Y-%m-%d %H:%M:%S}" for t in pd.date_range("2020-01-01", periods=5, freq="s")),
        "2230-01-01 00:00:00",
    ]
    assert "steps apart; is one of them mistyped?" in refusal(
        write(table(stamps, range(6), header="date,a")), fill="mask"
    )


# --- cells --------------------------------------------------------------------------------------------------


def test_missing_values_are_listed_by_column(write):
    a, b = np.arange(300).astype(object), np.arange(300).astype(object)
    a[[150, 151]], b[290] = "", "NaN"
    path = write(table(hours(300), a, b))
    text = refusal(path)
    assert "a (2 missing, first 2020-01-07 06:00), b (1 missing, 2020-01-13 02:00)" in text
    assert "fill=mask" in text
    series = read_series(path, fill="mask")
    assert np.isfinite(series.values).all()
    assert (~series.observed).sum(axis=0).tolist() == [2, 1]
    assert series.values[150:152, 0].tolist() == [149, 149]


@pytest.mark.parametrize("word", ["", "NA", "n/a", "NaN", "nan", "NULL", "None", "?", "-", " "])
def test_words_for_no_value(write, word):
    path = write(table(hours(4), [0, word, 2, 3], header="date,a"))
    assert "a (1 missing, 2020-01-01 01:00)" in refusal(path)


def test_cells_before_the_first_value_take_it(write):
    series = read_series(write(table(hours(4), ["", "", 5, 6], range(4))), fill="mask")
    assert series.values[:, 0].tolist() == [5, 5, 5, 6]
    assert series.observed[:, 0].tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ('"1,234"', "'1,234' is not a number: a thousands separator (write 1234) or a decimal comma"),
        ('"3,5"', "'3,5' is not a number: a decimal comma; write 3.5"),
        ("1 234", "remove the thousands separators"),
        ("12%", "remove the unit"),
        ("€12", "remove the unit"),
        ("2020-01-01", "a second date column"),
        ("broken", "'broken' is not a number: empty the cell, or leave the column out"),
        ("1_000", "'1_000' is not a number"),
    ],
)
def test_stray_text_is_refused_with_place_and_cure(write, cell, words):
    text = refusal(write(table(hours(4), [0, 1, cell, 3], range(4))))
    assert "column 'a', line 4: " in text
    assert words in text


def test_line_numbers_count_blank_lines(write):
    lines = table(hours(4), [0, 1, "x", 3], header="date,a")
    lines.insert(2, "")
    assert "line 5: 'x'" in refusal(write(lines))


def test_all_bad_columns_are_told_in_one_line(write):
    text = refusal(write(table(["soon", *hours(2)], [1, "x", 2], ["y", 1, 2])))
    assert text.count("is not a number") == 2
    assert "'soon'" in text


def test_infinite_values_are_refused(write):
    text = refusal(write(table(hours(4), [0, "inf", "-inf", 3], header="date,a")), fill="mask")
    assert "infinite values: a (2 infinite, first 2020-01-01 01:00)" in text


def test_columns_without_values_are_refused(write):
    text = refusal(write(table(hours(3), [""] * 3, [1, "", 3])))
    assert "columns without any value: a" in text
    assert "b (1 missing, 2020-01-01 01:00)" in text


def test_constants_and_sentinels_are_noticed(write):
    a = np.sin(np.arange(50.0))
    a[[7, 9]] = -9999
    notices = read_series(write(table(hours(50), a, [3] * 50))).notices
    assert "constant column: b" in notices
    assert any("a: -9999 in 2 cells, first 2020-01-01 07:00" in notice for notice in notices)


def test_an_ordinary_999_is_no_sentinel(write):
    assert read_series(write(table(hours(50), range(950, 1000), header="date,a"))).notices == ()


# --- files --------------------------------------------------------------------------------------------------


def test_files_that_are_no_tables(write, tmp_path, monkeypatch):
    assert "no such file" in refusal(tmp_path / "absent.csv")
    assert "is a folder" in refusal(tmp_path)
    assert "is empty" in refusal(write([]))
    assert "no rows of data" in refusal(write(["date,a"]))
    assert "no rows of data" in refusal(write(["date,a", ","]))
    assert "one column only" in refusal(write(["a", "1"]))
    assert "add a header line" in refusal(write(["2020-01-01,1", "2020-01-02,2"]))
    assert "column names occur twice: a" in refusal(write(["date,a,a", "2020-01-01,1,2"]))
    assert "line 3 has 4 cells but the header 3" in refusal(write(["date,a,b", "1,2,3", "2,2,3,4"]))
    late = table(range(40), range(40), header="date,a")
    late[31] += ",5"
    assert "line 32 has 3 cells but the header 2" in refusal(write(late))
    assert "never closed" in refusal(write(["date,a", *(f"{i},{i}" for i in range(30)), '31,"3', "32,4"]))
    (tmp_path / "book.xlsx").write_bytes(b"PK\x03\x04rest")
    assert "save it as CSV" in refusal(tmp_path / "book.xlsx")
    (tmp_path / "zero.csv").write_bytes(b"date,a\n1,\x002\n")
    assert "not a text file" in refusal(tmp_path / "zero.csv")
    (tmp_path / "odd.csv").write_bytes(b"date,\x81\n1,2\n")
    assert "neither UTF-8 nor Windows-1252" in refusal(tmp_path / "odd.csv")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"date,a\n1,2\n" * 99)[:-9])
    assert "damaged gzip" in refusal(tmp_path / "cut.csv.gz")
    monkeypatch.setattr("zoo.data.forecasting.table.MAX_CELLS", 10)
    text = refusal(write(table(range(40), range(40), header="date,a")))
    assert "about 41 rows x 2 columns are more than the 10 cells" in text


def test_no_value_columns(write):
    assert "no column of values beside 'date'" in refusal(write(["date,", "2020-01-01,", "2020-01-02,"]))


def test_unknown_words_and_columns(write):
    path = write(table(hours(3), range(3), header="date,load"))
    assert "no column 'laod' (did you mean 'load'?)" in refusal(path, columns=["laod"])
    assert "no column 'lod' (did you mean 'load'?)" in refusal(path, known_future=["lod"])
    assert "leave at least one to forecast" in refusal(path, known_future=["load"])
    assert (
        refusal(path, fill="maks")
        == "fill=maks is not one of none, mask, linear, last (did you mean 'mask'?)"
    )
    assert "aggregate=sum is not one of none, mean, last" in refusal(path, aggregate="sum")


# --- the cycle ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freq", "start", "cycle", "first"),
    [
        ("h", "2020-01-01 05:00", 24, 5),
        ("15min", "2020-01-01 05:00", 96, 20),
        ("10min", "2020-01-01 05:00", 1008, 2 * 144 + 30),
        ("D", "2020-01-01", 7, 2),
        ("B", "2020-01-01", 5, 2),
        ("W-WED", "2020-01-29", 52, 4),
        ("MS", "2020-03-01", 12, 2),
        ("QS-JAN", "2020-04-01", 4, 1),
        ("YS-JAN", "2020-01-01", 1, 0),
        ("s", "2020-01-01", 1, 0),
    ],
)
def test_phase_comes_from_the_stamps(write, freq, start, cycle, first):
    index = pd.date_range(start, periods=30, freq=freq)
    series = read_series(write(table(map(str, index), range(30), header="date,a")))
    assert (series.freq, series.steps_per_cycle(), series.phase()[0]) == (freq, cycle, first)
    assert series.phase().dtype == np.int64
    assert series.phase().min() >= 0
    assert series.phase().max() < cycle
    joined = np.concatenate([series.time[-1:], series.future_time(1)])
    steps = np.diff(series.phase(joined)) % cycle
    assert steps == (1 % cycle)


# --- properties ---------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(3, 40),
    freq=st.sampled_from(["h", "15min", "D", "B", "W-TUE", "MS", "ME", "QE-DEC", "7s"]),
    start=st.datetimes(pd.Timestamp("1990-01-01"), pd.Timestamp("2040-01-01")),
    seed=st.integers(0, 1000),
    shuffled=st.booleans(),
)
def test_written_series_reads_back_the_same_in_any_order(tmp_path, n, freq, start, seed, shuffled):
    rng = np.random.default_rng(seed)
    index = pd.date_range(pd.Timestamp(start).floor("s"), periods=n, freq=freq)
    if freq not in ("h", "15min", "7s"):
        index = index.normalize()
    values = rng.normal(size=(n, 2))
    rows = [f"{t},{x!r},{y!r}" for t, (x, y) in zip(index, values.tolist(), strict=True)]
    order = rng.permutation(n) if shuffled else np.arange(n)
    path = tmp_path / "p.csv"
    path.write_text("\n".join(["date,a,b", *(rows[i] for i in order)]))
    series = read_series(path, freq=freq)
    np.testing.assert_array_equal(series.time, index.to_numpy().astype("datetime64[ns]"))
    np.testing.assert_array_equal(series.values, values)
    again = [
        f"{t},{x!r},{y!r}" for t, (x, y) in zip(series.format_time(series.time), values.tolist(), strict=True)
    ]
    path.write_text("\n".join(["date,a,b", *again]))
    np.testing.assert_array_equal(read_series(path, freq=freq).time, series.time)


def test_a_real_file_is_read_fast(real_file):
    path = real_file("forecasting/ETTh1.csv")
    read_series(path)
    start = time.perf_counter()
    series = read_series(path)
    assert time.perf_counter() - start < 0.5
    assert series.values.shape == (17_420, 7)
    assert series.columns[-1] == "OT"


def test_cells_beyond_the_header_are_never_dropped(write):
    lines = table(range(40), [f"{i}," for i in range(40)], header="date,a")
    assert read_series(write(lines)).columns == ("a",)
    lines[31] = "30,30,5"
    assert "line 32 has 3 cells but the header 2" in refusal(write(lines))


CELLS = [
    "",
    "1",
    "-9999",
    "inf",
    "x",
    "1,5",
    '"',
    "2020-01-01",
    "2020-01-01 01:00+01:00",
    "13/02/2020",
    "9" * 20,
    "é",
]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.lists(st.sampled_from(CELLS) | st.text(max_size=4), max_size=4), max_size=6),
    header=st.sampled_from(["date,a", "unique_id,ds,y", "a", "", "1,2", "date,a,a"]),
    fill=st.sampled_from(["none", "mask", "linear"]),
    encoding=st.sampled_from(["utf-8", "utf-16", "cp1252"]),
)
def test_any_text_is_read_or_refused_in_one_line(tmp_path, rows, header, fill, encoding):
    path = tmp_path / "any.csv"
    path.write_bytes("\n".join([header, *map(",".join, rows)]).encode(encoding, errors="replace"))
    series, report = inspect_file(path, ReadOptions(fill=fill))
    assert (series is None) == bool(report.refusals)
    assert not any("\n" in item.text for item in report.items)
    if series is not None:
        assert np.isfinite(series.values).all()

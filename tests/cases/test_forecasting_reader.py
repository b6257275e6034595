"""Acceptance cases C1, C3, C5, C6 and C7 through ``python -m zoo.data check``."""

import numpy as np
import pandas as pd
import pytest


@pytest.fixture
def check(tmp_path, run_cli):
    """Return a function that writes stamps and columns and examines the file: exit status and output."""

    def run(stamps, *words, lookback=48, horizon=12, **columns):
        path = tmp_path / "case.csv"
        rows = zip(map(str, stamps), *columns.values(), strict=True)
        path.write_text(
            "\n".join([",".join(["date", *columns]), *(",".join(map(str, row)) for row in rows), ""])
        )
        done = run_cli(["zoo.data", "check", path, f"lookback={lookback}", f"horizon={horizon}", *words])
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout

    return run


def hours(n):
    return pd.date_range("2020-01-01", periods=n, freq="h")


@pytest.mark.parametrize(
    ("n", "words"),
    [
        (30, "the train split has 21 rows but needs 36"),
        (47, "the train split has 32 rows but needs 36"),
        (100, "the val split has 10 rows but needs 12"),
        (120, "windows of 24 + 12 rows: train 49, val 1, test 13"),
    ],
)
def test_c1_short_split(check, n, words):
    status, out = check(hours(n), lookback=24, y=np.arange(n) % 24)
    assert status == (0 if n == 120 else 1)
    assert words in out


def test_c3_missing_values(check):
    t = 2 * np.pi * np.arange(300) / 24
    a, b = np.sin(t).astype(object), np.cos(t).astype(object)
    a[[150, 151]], b[290] = "", ""
    status, out = check(hours(300), a=a, b=b)
    assert status == 1
    assert "a (2 missing, first 2020-01-07 06:00), b (1 missing, 2020-01-13 02:00)" in out
    status, out = check(hours(300), "fill=mask", a=a, b=b)
    assert status == 0
    assert "missing values filled (mask) and never scored: a (2 missing" in out


def test_c5a_duplicate_stamp(check):
    stamps = [*hours(101), *hours(200)[100:]]
    status, out = check(stamps, y=range(201))
    assert status == 1
    assert "1 duplicate stamp, first 2020-01-05 04:00" in out
    status, out = check(stamps, "aggregate=last", y=range(201))
    assert status == 0


def test_c5b_shuffled_rows(check):
    order = np.random.default_rng(0).permutation(200)
    status, out = check(hours(200)[order], y=order)
    assert status == 0
    assert "rows sorted by date" in out


def test_c5c_gap(check):
    keep = np.r_[0:100, 105:200]
    status, out = check(hours(200)[keep], y=keep)
    assert status == 1
    assert "gap after 2020-01-05 03:00, 5 steps" in out


def test_c5d_business_days(check):
    status, out = check(pd.bdate_range("2020-01-01", periods=260), y=range(260))
    assert status == 0
    assert "step: business days (B), 2020-01-01 00:00 to 2020-12-29 00:00" in out


def test_c5e_whole_number_index(check):
    status, out = check(range(200), y=range(200))
    assert status == 0
    assert "step 1, 0 to 199" in out


def test_c6_daylight_saving(check):
    index = pd.date_range("2022-10-15", "2022-11-13 23:00", freq="h", tz="Europe/Amsterdam")
    status, out = check(index, y=range(len(index)))
    assert status == 0
    assert "step: hours (h), 2022-10-15 00:00+02:00 to 2022-11-13 23:00+01:00" in out
    status, out = check(index.tz_localize(None), y=range(len(index)))
    assert status == 1
    assert "1 duplicate stamp, first 2022-10-30 02:00 (ambiguous" in out
    spring = pd.date_range("2022-03-15", "2022-04-13 23:00", freq="h", tz="Europe/Amsterdam").tz_localize(
        None
    )
    status, out = check(spring, y=range(len(spring)))
    assert status == 1
    assert "gap after 2022-03-27 01:00, 1 step; this is where clocks go forward: local time zone?" in out


def test_c7_date_text(check):
    days = [f"{day:%d/%m/%Y}" for day in pd.date_range("2020-01-01", periods=40)]
    status, out = check(days, lookback=4, horizon=2, y=range(40))
    assert status == 0
    assert "step: days (D), 2020-01-01 00:00 to 2020-02-09 00:00" in out
    status, out = check(days[:12], y=range(12))
    assert status == 1
    assert "ambiguous" in out
    assert "date_format=%d/%m/%Y" in out

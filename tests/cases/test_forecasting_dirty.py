"""Cases C3, C5 and C6 where they touch training and prediction: missing cells, odd stamps, daylight saving."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.cases.commands import (
    TINY,
    Done,
    assert_finite_metrics,
    hours,
    losses,
    nothing_written,
    predict,
    predictions,
    results,
    train,
    write,
)


@pytest.fixture(scope="module")
def holes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two waves; a is empty at rows 150 and 151 (train), b at row 290 (test)."""
    time = 2 * np.pi * np.arange(300) / 24
    a, b = np.sin(time), np.cos(time)
    a[[150, 151]] = b[290] = np.nan
    return write(tmp_path_factory.mktemp("holes") / "holes.csv", a=a, b=b)


@pytest.fixture(scope="module")
def masked(holes: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    return train(tmp_path_factory.mktemp("masked"), holes, "data.fill=mask", "trainer.max_epochs=2")


def test_missing_cells_are_refused_by_name(holes: Path, tmp_path: Path, run_cli) -> None:
    done = run_cli(["zoo.train", *TINY, f"data.path={holes}", "data.lookback=48", "data.horizon=12"])
    line = Done(done.returncode, done.stdout, done.stderr).refusal
    assert "a (2 missing, first 2020-01-07 06:00), b (1 missing, 2020-01-13 02:00)" in line
    assert "fill=" in line
    assert nothing_written(tmp_path)


def test_masked_cells_train_finite_and_are_not_scored(masked: Done) -> None:
    assert_finite_metrics(masked.run)
    assert len(losses(masked.run)) == len(losses(masked.run, "val/mse")) == 2
    # 49 windows of 12 steps and 2 columns; row 290 is a target of the last 10 windows.
    assert "1,166 of 1,176 target cells of the test windows are scored" in masked.out
    assert "missing values filled (mask) and never scored: a (2 missing" in masked.out
    rows = results(masked.run)
    assert {row["n"] for row in rows.values()} == {49}
    assert all(math.isfinite(value) for row in rows.values() for value in row["metrics"].values())


def test_unscored_cells_do_not_move_the_score(holes: Path, masked: Done) -> None:
    """The seasonal forecast of a wave errs nowhere but where a filled value stands in the place of the truth.

    Row 290 was filled by holding a value; were that cell scored, the error could not be this small.
    """
    assert results(masked.run)["seasonal_naive"]["metrics"]["mse"] < 1e-6


def test_no_forecast_from_a_file_with_holes_is_nan(holes: Path, masked: Done, tmp_path: Path) -> None:
    refused = predict(tmp_path, masked.run, holes)
    assert refused.status == 1
    assert "b (1 missing, 2020-01-13 02:00)" in refused.err
    assert "fill=" in refused.err
    assert predict(tmp_path, masked.run, holes, "fill=mask", out="filled").status == 0
    table = predictions(tmp_path / "filled")
    assert np.isfinite(table[["a", "b"]].to_numpy()).all()


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A clean file of 200 hourly rows and a run on it."""
    folder = tmp_path_factory.mktemp("steps")
    path = write(folder / "steps.csv", y=np.arange(200) % 24)
    return path, train(folder, path, "trainer.max_epochs=1", lookback=24, horizon=6).run


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([*range(101), *range(100, 200)], "1 duplicate stamp, first 2020-01-05 04:00"),
        ([*range(100), *range(105, 200)], "gap after 2020-01-05 03:00, 5 steps"),
    ],
    ids=["duplicate", "gap"],
)
def test_irregular_stamps_are_refused_by_training_and_prediction(
    steps: tuple[Path, Path], tmp_path: Path, rows: list[int], reason: str
) -> None:
    path = write(tmp_path / "odd.csv", hours(200)[rows], y=np.arange(len(rows)) % 24)
    assert reason in train(tmp_path, path, lookback=24, horizon=6).refusal
    assert nothing_written(tmp_path)
    done = predict(tmp_path, steps[1], path)
    assert done.status == 1
    assert reason in done.err


def test_duplicates_are_merged_on_request(steps: tuple[Path, Path], tmp_path: Path) -> None:
    """Row 190, inside the last window, comes twice; each policy forecasts from its own value."""
    path, run = steps
    plain = pd.read_csv(path)
    twice = pd.concat([plain, plain.loc[[190]].assign(y=100.0)])
    twice.to_csv(tmp_path / "twice.csv", index=False)
    for policy, value in (("mean", (190 % 24 + 100) / 2), ("last", 100.0)):
        plain.assign(y=plain["y"].astype(float).where(plain.index != 190, value)).to_csv(
            tmp_path / f"{policy}.csv", index=False
        )
        predict(tmp_path, run, tmp_path / "twice.csv", f"aggregate={policy}", out=f"{policy}-twice")
        predict(tmp_path, run, tmp_path / f"{policy}.csv", out=f"{policy}-once")
        once, merged = predictions(tmp_path / f"{policy}-once"), predictions(tmp_path / f"{policy}-twice")
        pd.testing.assert_frame_equal(once.drop(columns="item"), merged.drop(columns="item"))
    assert (
        predictions(tmp_path / "mean-once")["y"].tolist() != predictions(tmp_path / "last-once")["y"].tolist()
    )


def test_shuffled_rows_train_as_ordered_ones(steps: tuple[Path, Path], tmp_path: Path) -> None:
    _, run = steps
    order = np.random.default_rng(0).permutation(200)
    shuffled = write(tmp_path / "steps.csv", hours(200)[order], y=order % 24)
    done = train(tmp_path, shuffled, "trainer.max_epochs=1", lookback=24, horizon=6)
    assert "rows sorted by date" in done.out
    assert losses(done.run) == losses(run)
    assert {name: row["metrics"] for name, row in results(done.run).items()} == {
        name: row["metrics"] for name, row in results(run).items()
    }


def test_forecasts_of_business_days_have_no_weekend(tmp_path: Path) -> None:
    days = pd.bdate_range("2020-01-01", periods=260)
    path = write(tmp_path / "days.csv", [f"{day:%Y-%m-%d}" for day in days], y=np.arange(260))
    sizes = {"lookback": 10, "horizon": 5}
    run = train(tmp_path, path, "model.patch=5", "model.stride=5", "trainer.max_epochs=1", **sizes).run
    assert predict(tmp_path, run, path).status == 0
    expected = ["2020-12-30", "2020-12-31", "2021-01-01", "2021-01-04", "2021-01-05"]
    assert predictions(tmp_path / "out")["time"].tolist() == expected


def test_whole_number_index_goes_on_counting(tmp_path: Path) -> None:
    path = write(tmp_path / "counted.csv", range(200), y=np.arange(200) % 24)
    run = train(tmp_path, path, "trainer.max_epochs=1", lookback=24, horizon=6).run
    assert predict(tmp_path, run, path).status == 0
    assert predictions(tmp_path / "out")["time"].tolist() == list(range(200, 206))


@pytest.fixture(scope="module")
def amsterdam(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Thirty days of local stamps with offsets around the end of summer time, and a run on them."""
    folder = tmp_path_factory.mktemp("amsterdam")
    stamps = pd.date_range("2022-10-15", "2022-11-13 23:00", freq="h", tz="Europe/Amsterdam")
    path = write(folder / "local.csv", stamps, y=stamps.hour)
    return path, train(folder, path, "trainer.max_epochs=1", lookback=24, horizon=6).run


def test_forecast_stamps_carry_their_offset(amsterdam: tuple[Path, Path], tmp_path: Path) -> None:
    path, run = amsterdam
    assert predict(tmp_path, run, path).status == 0
    expected = pd.date_range("2022-11-14", periods=6, freq="h", tz="Europe/Amsterdam")
    assert _instants(predictions(tmp_path / "out")["time"]) == expected.tz_convert("UTC").tolist()
    assert predictions(tmp_path / "out")["time"][0].endswith("+01:00")


def test_forecast_passes_the_change_of_clocks(amsterdam: tuple[Path, Path], tmp_path: Path) -> None:
    """From a file that ends two hours before clocks go back, steps of one hour reach across."""
    path, run = amsterdam
    rows = path.read_text().splitlines()
    cut = [line for line in rows[1:] if line < "2022-10-30 01:00:00+02:00,9"]
    (tmp_path / "cut.csv").write_text("\n".join([rows[0], *cut, ""]))
    assert cut[-1].startswith("2022-10-30 01:00:00+02:00")
    assert predict(tmp_path, run, tmp_path / "cut.csv").status == 0
    stamps = _instants(predictions(tmp_path / "out")["time"])
    assert stamps == pd.date_range("2022-10-30 00:00", periods=6, freq="h", tz="UTC").tolist()


def _instants(texts: pd.Series) -> list[pd.Timestamp]:
    return pd.to_datetime(texts, utc=True).tolist()

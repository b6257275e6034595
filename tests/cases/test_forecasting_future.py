"""Case C10: the real future, continued from the end of a file, at the trained and at other horizons."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.cases.commands import here, predict, predictions, train, write


@pytest.fixture(scope="module")
def sawtooth(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Three hundred hourly rows of a sawtooth, and a run that looks back 48 rows and forecasts 12."""
    folder = tmp_path_factory.mktemp("sawtooth")
    path = write(folder / "sawtooth.csv", y=np.arange(300) % 24)
    return path, train(folder, path, "trainer.max_epochs=2").run


def test_the_command_continues_the_file(sawtooth: tuple[Path, Path], tmp_path: Path, run_cli) -> None:
    path, run = sawtooth
    words = ["domain=forecasting", f"run={run}", f"input={path}", "out=out"]
    done = run_cli(["zoo.predict", *words])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "out: out"
    table = predictions(tmp_path / "out")
    assert table["time"].tolist() == [f"2020-01-13 {hour}:00:00" for hour in range(12, 24)]
    assert np.isfinite(table["y"]).all()
    assert sorted(path.name for path in (tmp_path / "out" / "pictures").iterdir()) == [
        "sawtooth-drift.png",
        "sawtooth.png",
    ]
    shares = table.filter(like="share_").to_numpy()
    assert shares.shape == (12, 4)
    assert shares.sum(1) == pytest.approx(1, abs=1e-5)
    assert "no 90% interval: 19 validation windows, 50 are needed" in done.stdout


def test_shorter_horizon_gives_the_first_rows(sawtooth: tuple[Path, Path], tmp_path: Path) -> None:
    path, run = sawtooth
    predict(tmp_path, run, path, out="whole")
    assert predict(tmp_path, run, path, "horizon=5", out="five").status == 0
    pd.testing.assert_frame_equal(
        predictions(tmp_path / "five"), predictions(tmp_path / "whole").iloc[:5], check_exact=True
    )


def test_longer_horizon_says_that_it_recurs(sawtooth: tuple[Path, Path], tmp_path: Path) -> None:
    path, run = sawtooth
    predict(tmp_path, run, path, out="whole")
    done = predict(tmp_path, run, path, "horizon=30", out="thirty")
    assert done.status == 0
    assert "horizon 30 is beyond the trained 12: the network is fed its own forecasts" in done.err
    table = predictions(tmp_path / "thirty")
    assert table["time"].tolist() == [
        str(stamp) for stamp in pd.date_range("2020-01-13 12:00", periods=30, freq="h")
    ]
    pd.testing.assert_frame_equal(table.iloc[:12], predictions(tmp_path / "whole"), check_exact=True)
    # Recursion is what continuing a file with its own forecast gives.
    longer = write(tmp_path / "longer.csv", y=[*(np.arange(300) % 24), *table["y"][:12]])
    predict(tmp_path, run, longer, out="again")
    assert predictions(tmp_path / "again")["y"].to_numpy() == pytest.approx(table["y"][12:24], abs=1e-4)


@pytest.mark.parametrize(("rows", "status"), [(47, 1), (48, 0)])
def test_fewer_rows_than_the_lookback_are_refused(
    sawtooth: tuple[Path, Path], tmp_path: Path, rows: int, status: int
) -> None:
    path = write(tmp_path / "few.csv", y=np.arange(rows) % 24)
    done = predict(tmp_path, sawtooth[1], path)
    assert done.status == status
    if status:
        assert "47 rows are too few: the model looks back 48 rows" in done.err
        assert not (tmp_path / "out" / "predictions.csv").exists()


def test_a_bad_file_does_not_stop_a_good_one(sawtooth: tuple[Path, Path], tmp_path: Path) -> None:
    write(tmp_path / "in-a.csv", y=np.arange(10))
    write(tmp_path / "in-b.csv", y=np.arange(60) % 24)
    done = predict(tmp_path, sawtooth[1], tmp_path / "in-*.csv")
    assert done.status == 1
    assert "predicted 1 of 2 items (1 refused, see status.csv)" in done.out
    status = pd.read_csv(tmp_path / "out" / "status.csv").set_index("item")["status"]
    assert status.tolist() == ["refused", "ok"]
    assert set(predictions(tmp_path / "out")["item"]) == {str(tmp_path / "in-b.csv")}


@pytest.mark.parametrize(
    ("columns", "reason"),
    [({"x": range(60)}, "y"), ({"y": ["oops"] * 60}, "oops")],
    ids=["other column", "words for numbers"],
)
def test_unfit_columns_are_refused(
    sawtooth: tuple[Path, Path], tmp_path: Path, columns: dict[str, list], reason: str
) -> None:
    done = predict(tmp_path, sawtooth[1], write(tmp_path / "unfit.csv", **columns))
    assert done.status == 1
    assert reason in done.err
    assert "Traceback" not in done.err


def test_another_step_is_refused(sawtooth: tuple[Path, Path], tmp_path: Path) -> None:
    stamps = pd.date_range("2020-01-01", periods=60, freq="D")
    done = predict(tmp_path, sawtooth[1], write(tmp_path / "days.csv", stamps, y=range(60)))
    assert done.status == 1
    assert "the step is D, but the model was trained on steps of h" in done.err


def test_order_of_columns_and_further_columns_do_not_matter(tmp_path: Path) -> None:
    a, b = np.arange(300) % 24, np.cos(np.arange(300) / 4)
    run = train(tmp_path, write(tmp_path / "ab.csv", a=a, b=b), "trainer.max_epochs=1").run
    predict(tmp_path, run, write(tmp_path / "ab.csv", a=a, b=b), out="ab")
    predict(tmp_path, run, write(tmp_path / "ba.csv", b=b, extra=b * 3, a=a), out="ba")
    first, second = predictions(tmp_path / "ab"), predictions(tmp_path / "ba")
    pd.testing.assert_frame_equal(first.drop(columns="item"), second.drop(columns="item"))
    assert list(first.columns[:4]) == ["item", "time", "a", "b"]


def test_known_future_columns_must_reach_to_the_horizon(tmp_path: Path) -> None:
    """They are read in the horizon's rows and asked for by name and stamp where they are missing."""
    time = np.arange(312)
    y = np.where(time < 300, time % 24 + (time % 7 == 0) * 9.0, np.nan)
    table = {"y": y, "flag": (time % 7 == 0).astype(float)}
    cut = {name: values[:300] for name, values in table.items()}
    words = ["data.known_future=[flag]", "trainer.max_epochs=2"]
    run = train(tmp_path, write(tmp_path / "flag.csv", **cut), *words).run
    done = predict(tmp_path, run, tmp_path / "flag.csv")
    assert done.status == 1
    assert "flag must be given for the 12 rows from 2020-01-13 12:00:00 to 2020-01-13 23:00:00" in done.err
    assert predict(tmp_path, run, write(tmp_path / "full.csv", **table), out="full").status == 0
    other = table | {"flag": np.where(time < 300, table["flag"], 1 - table["flag"])}
    assert predict(tmp_path, run, write(tmp_path / "other.csv", **other), out="other").status == 0
    full, moved = predictions(tmp_path / "full"), predictions(tmp_path / "other")
    assert full["time"].tolist() == [f"2020-01-13 {hour}:00:00" for hour in range(12, 24)]
    assert np.abs(full["y"] - moved["y"]).max() > 1e-3
    assert "cannot pass" in predict(tmp_path, run, tmp_path / "full.csv", "horizon=13", out="more").err


def test_prediction_by_the_training_command_is_the_same(sawtooth: tuple[Path, Path], tmp_path: Path) -> None:
    path, run = sawtooth
    predict(tmp_path, run, path, out="one")
    done = here(
        ["zoo.train", "predict", f"run={run}", f"input={path}", f"out={tmp_path / 'two'}", "pictures=no"],
        tmp_path,
    )
    assert done.status == 0
    pd.testing.assert_frame_equal(predictions(tmp_path / "one"), predictions(tmp_path / "two"))
    record = json.loads((tmp_path / "two" / "prediction.json").read_text())
    assert record["run"] == str(run)

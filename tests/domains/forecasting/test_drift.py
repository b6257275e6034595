"""Change points: what is there is found, and nothing else."""

import time

import numpy as np
import pandas as pd
import pytest

from zoo.domains.forecasting.drift import ChangePoint, DriftReport, detect


def stationary(seed: int = 0, rows: int = 3000) -> np.ndarray:
    time_ = np.arange(rows)
    return np.sin(2 * np.pi * time_ / 24) + 0.1 * np.random.default_rng(seed).standard_normal(rows)


def three_regimes(seed: int = 0) -> np.ndarray:
    time_ = np.arange(3000)
    rng = np.random.default_rng(seed)
    values = np.sin(2 * np.pi * time_ / 24) + 0.1 * rng.standard_normal(3000)
    values[1000:2000] += 3
    values[2000:] = 3 * np.sin(2 * np.pi * time_[2000:] / 24) + 0.1 * rng.standard_normal(1000)
    return values


def autoregression(seed: int, rows: int = 3000, memory: float = 0.9) -> np.ndarray:
    shocks = np.random.default_rng(seed).standard_normal(rows)
    for row in range(1, rows):
        shocks[row] += memory * shocks[row - 1]
    return shocks


def scaled(values: np.ndarray) -> np.ndarray:
    table = values.reshape(len(values), -1)
    return (table - table.mean(axis=0)) / np.maximum(table.std(axis=0), 1e-9)


def noise(seed: int, channels: int = 1, rows: int = 3000) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, channels))


def test_the_inputs_are_the_ones_described():
    values = three_regimes()
    means = [values[start : start + 1000].mean() for start in (0, 1000, 2000)]
    assert means == pytest.approx([0.001, 2.998, -0.012], abs=6e-4)
    assert values[:1000].std() == pytest.approx(0.709, abs=6e-4)
    assert values[2000:].std() == pytest.approx(2.124, abs=6e-4)


def test_stationary_series_has_no_change_points():
    reports = [detect(scaled(stationary(seed)), seed=seed) for seed in range(30)]
    assert all(report.checks == 11 and report.change_points == () for report in reports)
    assert sum(report.flagged for report in reports) <= 0.05 * sum(report.checks for report in reports)
    assert detect(scaled(stationary(0))).flagged == 0


@pytest.mark.parametrize("seed", range(5))
def test_three_regimes_give_two_change_points_near_their_rows(seed):
    report = detect(scaled(three_regimes(seed)), seed=seed)
    first, second = report.change_points
    assert abs(first.row - 1000) <= 24
    assert abs(second.row - 2000) <= 24
    assert max(first.p_value, second.p_value) <= report.alpha == 0.01
    assert min(first.score, second.score) > 0.2
    assert first.kind == second.kind == "trend"
    assert report.window == 240


def test_same_seed_gives_the_same_report():
    values = scaled(three_regimes())
    assert detect(values, seed=3) == detect(values, seed=3)


@pytest.mark.parametrize(
    "make",
    [noise, lambda seed: noise(seed, channels=7), autoregression],
    ids=["noise", "noise of seven channels", "autoregression 0.9"],
)
def test_noise_is_flagged_no_more_than_one_check_in_twenty(make):
    reports = [detect(scaled(make(seed)), seed=seed) for seed in range(40)]
    assert sum(report.flagged for report in reports) <= 0.05 * sum(report.checks for report in reports)
    assert sum(len(report.change_points) for report in reports) <= 2


def test_random_walk_gives_changes_no_nearer_than_a_window():
    report = detect(scaled(autoregression(0, memory=1.0)))
    rows = [point.row for point in report.change_points]
    assert 1 <= len(rows) <= report.checks // 2 + 1
    assert min(np.diff([0, *rows])) >= report.window / 4


def test_constant_series_is_never_flagged():
    report = detect(np.zeros((3000, 3)))
    assert (report.checks, report.flagged, report.change_points) == (11, 0, ())


def test_sensor_that_gets_stuck_is_a_change():
    values = scaled(stationary())
    values[1500:] = 0.0
    (point,) = detect(values).change_points
    assert abs(point.row - 1500) <= 24


@pytest.mark.parametrize("channel", [0, 3, 6])
def test_change_in_one_of_seven_channels_names_it(channel):
    values = noise(channel, channels=7)
    values[1500:, channel] += 1.5
    (point,) = detect(scaled(values)).change_points
    assert point.channels == (channel,)
    assert abs(point.row - 1500) <= 48
    assert point.kind == "trend"


def amplitude(values, time_):
    values[1500:] += np.sin(2 * np.pi * time_[1500:] / 24)


def phase(values, time_):
    values[1500:] += np.sin(2 * np.pi * (time_[1500:] + 8) / 24) - np.sin(2 * np.pi * time_[1500:] / 24)


def volatility(values, time_):
    values[1500:] += np.random.default_rng(9).standard_normal(1500)


def slope(values, time_):
    values[1500:] += (time_[1500:] - 1500) / 300


@pytest.mark.parametrize(
    ("change", "kind"),
    [(amplitude, "seasonal"), (phase, "seasonal"), (volatility, "fluctuation"), (slope, "trend")],
)
def test_kind_of_change(change, kind):
    values = stationary()
    change(values, np.arange(3000))
    point = detect(scaled(values)).change_points[0]
    assert point.kind == kind
    assert abs(point.row - 1500) <= 240


def test_change_in_the_middle_of_a_window_is_reported_once():
    values = stationary()
    values[1320:] += 2  # windows begin at 1200 and 1440
    (point,) = detect(scaled(values)).change_points
    assert abs(point.row - 1320) <= 24


@pytest.mark.parametrize("rows", [0, 5, 100, 287])
def test_series_shorter_than_two_windows_is_not_checked(rows):
    report = detect(noise(0, rows=rows))
    assert (report.checks, report.flagged, report.change_points) == (0, 0, ())


def test_records_carry_dates_and_names():
    point = ChangePoint(row=2, score=1.0, p_value=0.001, kind="trend", channels=(1,))
    report = DriftReport(change_points=(point,), checks=5, flagged=2, window=8, alpha=0.01)
    assert report.described(["x", "y", "z"], ["a", "b"], start=10) == [
        {"row": 12, "time": "z", "score": 1.0, "p_value": 0.001, "kind": "trend", "channels": ["b"]}
    ]


def test_bad_input_is_refused_with_its_values():
    with pytest.raises(ValueError, match=r"got shape \(10,\)"):
        detect(np.zeros(10))
    broken = noise(0)
    broken[5] = np.nan
    with pytest.raises(ValueError, match="finite"):
        detect(broken)
    with pytest.raises(ValueError, match="at least 144 rows, got window=100"):
        detect(noise(0), window=100)


@pytest.mark.parametrize(("name", "most"), [("ETTh1", 8), ("ETTh2", 8)])
def test_real_series_have_a_handful_of_changes_found_in_no_time(real_file, name, most):
    table = pd.read_csv(real_file(f"forecasting/{name}.csv"))
    values = scaled(table.iloc[:8640, 1:].to_numpy(np.float64))
    begin = time.process_time()
    report = detect(values)
    assert time.process_time() - begin < 2
    assert report.checks == 11
    assert 1 <= len(report.change_points) <= most


@pytest.mark.parametrize(
    ("options", "window", "checks"),
    [
        ({"window": 500}, 480, 5),
        ({"window": 500, "patch": 12}, 480, 5),
        ({"cycle": 1}, 240, 11),
        ({"cycle": 7}, 280, 9),
        ({"cycle": 168}, 1344, 1),
    ],
    ids=str,
)
def test_windows_hold_whole_blocks(options, window, checks):
    report = detect(noise(0), **options)
    assert (report.window, report.checks) == (window, checks)
    values = scaled(noise(0) + 3 * (np.arange(3000)[:, None] >= 1500))
    assert [abs(point.row - 1500) <= window for point in detect(values, **options).change_points] == [True]

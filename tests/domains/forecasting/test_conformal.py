"""Conformal intervals: the corrected quantile, its limits, and what it covers."""

import math

import pytest
import torch

from zoo.domains.forecasting.conformal import calibrate, covered, notice, windows_needed


def test_radius_is_the_corrected_order_statistic():
    order = torch.randperm(99, generator=torch.Generator().manual_seed(0))
    residuals = (order + 1.0).reshape(99, 1, 1) * torch.tensor([[[1.0, -2.0]]])
    intervals = calibrate(residuals, 0.9)
    assert intervals.radius.tolist() == [[90.0, 180.0]]  # ceil(100 * 0.9) = 90th smallest
    assert (intervals.level, intervals.windows) == (0.9, 99)


def test_too_few_windows_give_none_and_a_notice():
    assert calibrate(torch.ones(49, 2, 1)) is None
    assert calibrate(torch.ones(50, 2, 1)) is not None
    assert notice(49) == "no 90% interval: 49 validation windows, 50 are needed"


def test_high_levels_need_more_windows():
    assert [windows_needed(level) for level in (0.8, 0.9, 0.98, 0.99)] == [50, 50, 50, 99]
    assert calibrate(torch.ones(98, 1, 1), 0.99) is None
    assert calibrate(torch.arange(99.0).reshape(99, 1, 1), 0.99).radius.item() == 98.0


def test_unobserved_cells_are_left_out_each_for_itself():
    residuals = torch.arange(1.0, 101).reshape(100, 1, 1).repeat(1, 1, 3)
    observed = torch.ones(100, 1, 3, dtype=torch.bool)
    observed[50:, 0, 1] = False  # 50 left: ceil(51 * 0.9) = 46
    observed[:, 0, 2] = False
    residuals[50:, 0, 1] = math.nan
    assert calibrate(residuals, 0.9, observed).radius.tolist() == [[91.0, 46.0, math.inf]]


def test_coverage_of_exchangeable_windows_is_nominal():
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 5.0]) * torch.tensor([[1.0], [2.0], [3.0]])
    draw = torch.randn(4000, 3, 2, generator=generator) * scale
    radius = calibrate(draw[:2000], 0.9).radius
    zero = torch.zeros(2000, 3, 2)
    parts = [covered(zero[:1500], draw[2000:3500], radius), covered(zero[1500:], draw[3500:], radius)]
    inside, counted = (sum(part[name].sum() for part in parts) for name in ("inside", "counted"))
    assert counted == 12000
    assert float(inside / counted) == pytest.approx(0.9, abs=0.015)


def test_coverage_counts_observed_targets_only():
    target = torch.tensor([[[0.5], [2.0], [0.1]]])
    observed = torch.tensor([[[True], [True], [False]]])
    sums = covered(torch.zeros(1, 3, 1), target, torch.ones(3, 1), observed)
    assert {name: value.tolist() for name, value in sums.items()} == {"inside": [[1]], "counted": [[2]]}


@pytest.mark.parametrize("level", [0.0, 1.0, 90])
def test_level_must_be_a_probability(level):
    with pytest.raises(ValueError, match=f"got {level}"):
        calibrate(torch.ones(100, 1, 1), level)

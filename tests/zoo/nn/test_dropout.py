"""Dropout by bytes: how often, how much, and when not at all."""

from __future__ import annotations

import math

import pytest
import torch

from zoo.nn import ByteDropout

N = 400_003  # no multiple of eight


def drop(p: float, x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return ByteDropout(p)(x)


@pytest.mark.parametrize("p", [0.004, 0.1, 0.3, 0.5, 0.9])
def test_rate_and_mean(p):
    y = drop(p, torch.ones(N))
    rate = round(p * 256) / 256
    assert abs(rate - p) <= 1 / 512
    bound = 5 * math.sqrt(rate * (1 - rate) / N)
    assert abs(float((y == 0).double().mean()) - rate) < bound
    assert abs(float(y.double().mean()) - 1.0) < bound / (1 - rate)
    assert torch.equal(y.unique(), torch.tensor([0.0, 256 / (256 - 256 * rate)]))


def test_elements_fall_independently_of_their_neighbours():
    kept = (drop(0.5, torch.ones(N)) > 0).double() - 0.5
    for lag in (1, 2, 4, 7, 8, 16):
        assert abs(float((kept[lag:] * kept[:-lag]).mean()) * 4) < 5 / math.sqrt(N), lag


def test_evaluation_and_p_zero_change_nothing():
    x = torch.randn(3, 5)
    assert ByteDropout(0.5).eval()(x) is x
    assert ByteDropout(0.0)(x) is x


def test_the_seed_decides():
    x = torch.randn(7, 11)
    assert torch.equal(drop(0.3, x, seed=1), drop(0.3, x, seed=1))
    assert not torch.equal(drop(0.3, x, seed=1), drop(0.3, x, seed=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 4), (1,), (3, 5, 7)])
def test_shape_and_dtype_are_kept(dtype, shape):
    y = drop(0.5, torch.ones(shape, dtype=dtype))
    assert y.shape == shape
    assert y.dtype == dtype


def test_the_gradient_is_the_mask():
    x = torch.ones(1000, requires_grad=True)
    y = drop(0.25, x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("p", [-0.1, 1.0, 2.0])
def test_a_probability_out_of_range_is_refused(p):
    with pytest.raises(ValueError, match=f"dropout={p}"):
        ByteDropout(p)

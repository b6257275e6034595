"""Maximum mean discrepancy against a double loop."""

import numpy as np

from zoo.domains.forecasting.mmd import Splits, by_group, gaussian_kernels, unbiased_mmd


def test_mmd_is_that_of_a_double_loop():
    points = np.random.default_rng(0).standard_normal((12, 3))
    kernel = np.exp(-((points[:, None] - points[None]) ** 2).sum(axis=2) / 2)
    without_self = (kernel - np.eye(12))[None]
    mmd, weight = unbiased_mmd(without_self, Splits.in_time(12, guard=3))
    expected = [naive_mmd(kernel, split) for split in range(3, 10)]
    np.testing.assert_allclose(mmd[0], expected, atol=1e-12)
    np.testing.assert_allclose(weight, [split * (12 - split) / 12 for split in range(3, 10)])
    grouped, _ = unbiased_mmd(by_group(without_self, 2), Splits.in_time(6, guard=2), per_unit=2)
    np.testing.assert_allclose(grouped[0], [naive_mmd(kernel, split) for split in (4, 6, 8)], atol=1e-12)


def test_shuffled_splits_equal_shuffled_kernels():
    points = np.random.default_rng(1).standard_normal((8, 2))
    kernel = np.exp(-((points[:, None] - points[None]) ** 2).sum(axis=2))
    splits = Splits.shuffled(8, 3, 20, np.random.default_rng(0))
    mmd, _ = unbiased_mmd((kernel - np.eye(8))[None], splits)
    for masks, found in zip(splits.masks, mmd[0], strict=True):
        order = np.argsort(-masks.sum(axis=0), kind="stable")
        shuffled = kernel[order][:, order]
        np.testing.assert_allclose(found, [naive_mmd(shuffled, split) for split in (3, 4, 5)], atol=1e-12)
    assert splits.masks[0].tolist() == [[1.0] * split + [0.0] * (8 - split) for split in (3, 4, 5)]


def naive_mmd(kernel: np.ndarray, split: int) -> float:
    before, after = range(split), range(split, len(kernel))
    total = 0.0
    for side in (before, after):
        for i in side:
            for j in side:
                if i != j:
                    total += kernel[i, j] / (len(side) * (len(side) - 1))
    for i in before:
        for j in after:
            total -= 2 * kernel[i, j] / (len(before) * len(after))
    return total


def test_kernels_are_gaussian_at_the_median_distance():
    features = np.random.default_rng(0).standard_normal((8, 2, 3))
    kernels = gaussian_kernels(features)
    scaled = (features - features.mean(axis=0)) / features.std(axis=0)
    channel = scaled[:, 1]
    squared = ((channel[:, None] - channel[None]) ** 2).sum(axis=2)
    bandwidth = np.median(squared[np.triu_indices(8, 1)])
    assert kernels.shape == (3, 8, 8)
    np.testing.assert_allclose(kernels[1] + np.eye(8), np.exp(-squared / (2 * bandwidth)), atol=1e-12)

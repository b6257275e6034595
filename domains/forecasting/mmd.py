"""Maximum mean discrepancy (MMD) of blocks of a series, for many splits and many kernels at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_FLOOR = 1e-6  # spread of a z-scored feature below which it counts as constant


def gaussian_kernels(features: Array) -> Array:
    """Gaussian kernels of each channel, and of all together, zero on the diagonal.

    Features are scaled to equal spread and squared bandwidths are median squared distances over all N blocks,
    both untouched by a shuffle, so that a permutation test of what follows stays exact.

    Args:
        features: Description of each block and channel, ``(N, C, F)``.

    Returns:
        ``(C + 1, N, N)``, the last of all channels together.
    """
    scaled = (features - features.mean(axis=0)) / np.maximum(features.std(axis=0), _FLOOR)
    dots = np.einsum("icf,jcf->cij", scaled, scaled)
    norms = np.einsum("cii->ci", dots)
    channel = np.maximum(norms[:, :, None] + norms[:, None, :] - 2 * dots, 0)
    distance = np.concatenate([channel, channel.sum(axis=0, keepdims=True)])
    upper = np.triu_indices(len(features), 1)
    bandwidth = np.maximum(np.median(distance[:, upper[0], upper[1]], axis=1), _FLOOR)
    kernels = np.exp(-distance / (2 * bandwidth[:, None, None]))
    kernels[:, range(len(features)), range(len(features))] = 0
    return np.asarray(kernels)


def by_group(kernels: Array, per_group: int) -> Array:
    """Sums over groups of ``per_group`` neighbouring blocks: ``(K, N, N)`` to ``(K, N / per_group, ...)``."""
    count, size = kernels.shape[0], kernels.shape[1] // per_group
    return np.asarray(kernels.reshape(count, size, per_group, size, per_group).sum(axis=(2, 4)))


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Ways to part N units in two, for one matrix product to try them all on every kernel."""

    masks: Array  # (..., N): 1 for the units before the border
    pairs: Array  # (..., N (N - 1) / 2): 1 for two units both before it

    @classmethod
    def of(cls, masks: Array) -> Splits:
        """The splits that these masks describe."""
        first, second = np.triu_indices(masks.shape[-1], 1)
        return cls(masks=masks, pairs=masks[..., first] * masks[..., second])

    @classmethod
    def in_time(cls, size: int, guard: int) -> Splits:
        """Every border at least ``guard`` units from both ends: ``(borders, N)``."""
        return cls.of((np.arange(size) < np.arange(guard, size - guard + 1)[:, None]).astype(np.float64))

    @classmethod
    def shuffled(cls, size: int, guard: int, count: int, rng: np.random.Generator) -> Splits:
        """The borders of the units in time, then of ``count`` shuffles: ``(1 + count, borders, N)``."""
        time = np.arange(size)
        order = np.concatenate([time[None], rng.permuted(np.tile(time, (count, 1)), axis=1)])
        return cls.of((order[:, None] < np.arange(guard, size - guard + 1)[:, None]).astype(np.float64))


def unbiased_mmd(kernels: Array, splits: Splits, per_unit: int = 1) -> tuple[Array, Array]:
    """Unbiased MMD^2 of every split.

    Args:
        kernels: Sums of kernels between units, self-similarities of blocks left out: ``(K, N, N)``.
        splits: The splits.
        per_unit: Blocks in a unit.

    Returns:
        MMD^2 ``(K, ...)``, and the weight ``m n / (m + n)`` of m against n blocks ``(...)`` that makes the
        splits comparable.
    """
    first, second = np.triu_indices(kernels.shape[-1], 1)
    own = np.einsum("kii->ki", kernels)
    before = 2 * _product(kernels[:, first, second], splits.pairs) + _product(own, splits.masks)
    against_all = _product(kernels.sum(axis=2), splits.masks)
    total = kernels.sum(axis=(1, 2)).reshape(-1, *[1] * (splits.masks.ndim - 1))
    across = against_all - before
    after = total - against_all - across
    m = splits.masks.sum(axis=-1) * per_unit
    n = kernels.shape[-1] * per_unit - m
    return before / (m * (m - 1)) + after / (n * (n - 1)) - 2 * across / (m * n), m * n / (m + n)


def _product(values: Array, masks: Array) -> Array:
    """``(K, N)`` and ``(..., N)`` to ``(K, ...)``."""
    return np.asarray(np.tensordot(values, masks, axes=(1, -1)))

"""Instance normalisation and gated patch embedding.

Shapes: B windows, L lookback, H horizon, C channels, P patches, D width, K known-future columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.moe import MoEOutput
from zoo.nn import ByteDropout


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A network's answer.

    Attributes:
        y: (B, H, C), in the scale of the input.
        moe: one output per Mixture-of-Experts layer, in order; empty for networks without.
    """

    y: Tensor
    moe: list[MoEOutput] = field(default_factory=list)


class WindowScale(NamedTuple):
    """Level and spread of each channel over its lookback, each (B, 1, C)."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, past: Tensor) -> WindowScale:
        """Measure windows (B, L, C).

        A channel without spread gets std 0 and is forecast as a constant: its level is all that is known.
        """
        mean = past.mean(1, keepdim=True)
        variance = (past - mean).square().mean(1, keepdim=True)
        # The square root's slope at 0 is infinite; the inner `where` keeps it out of the gradient.
        spread = variance > 1e-10
        std = torch.where(spread, torch.where(spread, variance, 1.0).sqrt(), 0.0)
        return cls(mean, std)

    def normalise(self, x: Tensor) -> Tensor:
        """(x - mean) / std, zero where a channel has no spread."""
        return torch.where(self.std > 0, (x - self.mean) / torch.where(self.std > 0, self.std, 1.0), 0.0)

    def restore(self, x: Tensor) -> Tensor:
        """Undo: x · std + mean, the exact inverse of :meth:`normalise` on the window itself."""
        return x * self.std + self.mean


def patches(x: Tensor, length: int, stride: int) -> Tensor:
    """Cut the last dimension into overlapping patches after repeating its last value ``stride`` times.

    (..., L) → (..., P, length) with P = (L - length) // stride + 2.
    """
    padded = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], stride)], dim=-1)
    return padded.unfold(-1, length, stride)


def count_patches(lookback: int, length: int, stride: int) -> int:
    """P of :func:`patches`."""
    return (lookback - length) // stride + 2


def sinusoids(positions: int, dim: int) -> Tensor:
    """Sine and cosine position code (positions, dim) of Vaswani et al. 2017."""
    angle = torch.arange(positions)[:, None] * torch.exp(
        torch.arange(0, dim, 2) * (-math.log(10_000.0) / dim)
    )
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :dim]


class PatchEmbedding(nn.Module):
    """token = V x + gelu(G x) · A x + position code, with bias-free maps of one patch.

    Args:
        patch: patch length.
        stride: step from patch to patch.
        lookback: L.
        dim: width D of a token.
        dropout: on the token.
    """

    position: Tensor

    def __init__(self, patch: int, stride: int, lookback: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.patch, self.stride = patch, stride
        self.maps = nn.Linear(patch, 3 * dim, bias=False)
        self.dropout = ByteDropout(dropout)
        self.register_buffer(
            "position", sinusoids(count_patches(lookback, patch, stride), dim), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """Embed normalised channels (B, C, L) as tokens (B, C, P, D)."""
        value, gate, linear = self.maps(patches(x, self.patch, self.stride)).chunk(3, dim=-1)
        token: Tensor = self.dropout(value + F.gelu(gate) * linear + self.position)
        return token


class CycleProfile(nn.Module):
    """A learned shape of one cycle per channel, taken off the window and put back on the forecast.

    Args:
        channels: C.
        cycle: phases in a cycle.

    Reference: residual cycle forecasting, CycleNet (arXiv 2409.18479), equations 1-3.
    """

    def __init__(self, channels: int, cycle: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(cycle, channels))

    def forward(self, phase: Tensor, steps: int) -> Tensor:
        """The profile (B, steps, C) that starts at each window's phase (B,)."""
        rows = phase[:, None] + torch.arange(steps, device=phase.device)
        return self.table[rows % len(self.table)]

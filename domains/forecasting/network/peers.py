"""Two well-known forecasters, small enough to read at a glance, trained beside the model as yardsticks.

Shapes: B windows, L lookback, H horizon, C channels, P patches, D width.
"""

from __future__ import annotations

import math

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.domains.forecasting.network.blocks import Forecast, WindowScale, count_patches, patches
from zoo.nn import ByteDropout

_KERNEL = 25


class DLinear(nn.Module):
    """Moving average and remainder of the window, one linear map to the horizon for each.

    Args:
        lookback: L.
        horizon: H.

    Reference: Zeng et al. 2022 (arXiv 2205.13504), section 4, shared over channels.
    """

    def __init__(self, *, lookback: int, horizon: int) -> None:
        super().__init__()
        self.trend = nn.Linear(lookback, horizon)
        self.rest = nn.Linear(lookback, horizon)
        for linear in (self.trend, self.rest):
            nn.init.constant_(linear.weight, 1 / lookback)

    def forward(self, past: Tensor, phase: Tensor, known: Tensor | None = None) -> Forecast:
        """Forecast (B, H, C) from windows (B, L, C)."""
        x = past.transpose(1, 2)
        padded = F.pad(x, (_KERNEL // 2, _KERNEL // 2), mode="replicate")
        trend = F.avg_pool1d(padded, _KERNEL, stride=1)
        return Forecast(y=(self.trend(trend) + self.rest(x - trend)).transpose(1, 2))


class PatchTST(nn.Module):
    """A Transformer over patches of each channel by itself.

    Args:
        lookback: L.
        horizon: H.
        patch: patch length.
        stride: step between patches.
        width: D.
        depth: Transformer blocks.
        dropout: in blocks and head.

    Reference: Nie et al. 2023 (arXiv 2211.14730), with pre-norm blocks.
    """

    def __init__(
        self,
        *,
        lookback: int,
        horizon: int,
        patch: int = 16,
        stride: int = 8,
        width: int = 64,
        depth: int = 2,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.patch, self.stride = patch, stride
        steps = count_patches(lookback, patch, stride)
        self.embed = nn.Linear(patch, width)
        self.position = nn.Parameter(0.02 * torch.randn(steps, width))
        self.blocks = nn.Sequential(
            *(
                Block(width, math.gcd(4, width), mlp_ratio=2.0, qkv_bias=True, proj_drop=dropout)
                for _ in range(depth)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.dropout = ByteDropout(dropout)
        self.head = nn.Linear(steps * width, horizon)

    def forward(self, past: Tensor, phase: Tensor, known: Tensor | None = None) -> Forecast:
        """Forecast (B, H, C) from windows (B, L, C)."""
        scale = WindowScale.of(past)
        cut = patches(scale.normalise(past).transpose(1, 2), self.patch, self.stride)
        tokens = self.dropout(self.embed(cut) + self.position)
        mixed = self.norm(self.blocks(tokens.flatten(0, 1))).reshape(tokens.shape)
        y: Tensor = self.head(self.dropout(mixed.flatten(2)))
        return Forecast(y=scale.restore(y.transpose(1, 2)))

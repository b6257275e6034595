"""The four kinds of temporal experts and the cyclic relation between channels.

Every expert maps tokens (B, C, P, D) to the same shape and is called as ``expert(x, context)``.

Reference: Dynamic TMoE (arXiv 2605.20678), in the corrected form described in this domain's README.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.moe import Context
from zoo.nn import ByteDropout

POOL = 13
"""Width of the trend expert's moving average, in patches; shorter sequences use the largest odd width that fits."""


class IdentityExpert(nn.Module):
    """One linear map: keeps what is already well represented."""

    def __init__(self, dim: int, num_patches: int, dropout: float) -> None:
        super().__init__()
        self.map = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Map tokens (..., P, D)."""
        y: Tensor = self.map(x)
        return y


class TrendExpert(nn.Module):
    """Moving average over patches, then a two-layer network: slow movement of the level."""

    average: Tensor

    def __init__(self, dim: int, num_patches: int, dropout: float) -> None:
        super().__init__()
        kernel = min(POOL, num_patches - (num_patches + 1) % 2)
        # The average is a fixed (P, P) matrix: rows clipped at the borders repeat the first or last patch.
        offset = torch.arange(kernel) - kernel // 2
        source = (torch.arange(num_patches)[:, None] + offset).clamp(0, num_patches - 1)
        average = torch.zeros(num_patches, num_patches).scatter_add_(
            1, source, torch.full(source.shape, 1 / kernel)
        )
        self.register_buffer("average", average, persistent=False)
        self.net = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.GELU(), ByteDropout(dropout), nn.Linear(2 * dim, dim)
        )

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Map tokens (..., P, D)."""
        y: Tensor = self.net(self.average @ x)
        return y


class SeasonalExpert(nn.Module):
    """Mixes the lowest half of the spectrum over patches, then reads it through sines and cosines.

    modes = F_M x;  modes ← W2 tanh(W1 modes);  y = W5 W4 [sin, cos](W3 F_M⁻¹ modes)

    with F_M the orthonormal real Fourier transform over the P patches, cut to its first M = P // 2 modes.
    """

    analysis: Tensor
    synthesis: Tensor

    def __init__(self, dim: int, num_patches: int, dropout: float) -> None:
        super().__init__()
        analysis, synthesis = fourier(num_patches, max(num_patches // 2, 1))
        self.register_buffer("analysis", analysis, persistent=False)
        self.register_buffer("synthesis", synthesis, persistent=False)
        self.mix = nn.Sequential(nn.Linear(2 * dim, 2 * dim), nn.Tanh(), nn.Linear(2 * dim, 2 * dim))
        self.wave = nn.Linear(dim, 2 * dim)
        self.join = nn.Linear(2 * dim, dim)
        self.out = nn.Sequential(nn.Linear(dim, dim), ByteDropout(dropout))

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Map tokens (..., P, D)."""
        real, imaginary = (self.analysis @ x).chunk(2, dim=-2)
        real, imaginary = self.mix(torch.cat([real, imaginary], dim=-1)).chunk(2, dim=-1)
        smooth = self.synthesis @ torch.cat([real, imaginary], dim=-2)
        first, second = self.wave(smooth).chunk(2, dim=-1)
        y: Tensor = self.out(self.join(torch.cat([first.sin(), second.cos()], dim=-1)))
        return y


def fourier(steps: int, modes: int) -> tuple[Tensor, Tensor]:
    """Orthonormal real Fourier transform as matrices, which beats an FFT at a dozen steps.

    Returns:
        analysis (2·modes, steps): real parts of the first modes, then their imaginary parts.
        synthesis (steps, 2·modes): back to time, all other modes taken as zero.
    """
    angle = 2 * math.pi * torch.arange(modes)[:, None] * torch.arange(steps) / steps
    analysis = torch.cat([angle.cos(), -angle.sin()]) / math.sqrt(steps)
    # Every mode but the mean (and the Nyquist mode) stands for its mirror image too.
    twice = torch.full((modes,), 2.0)
    twice[0] = 1.0
    if steps % 2 == 0 and modes > steps // 2:
        twice[steps // 2] = 1.0
    synthesis = analysis.T * twice.repeat(2)
    return analysis, synthesis


class FluctuationExpert(nn.Module):
    """Two gated convolutions over patches with a shortcut: quick, local movement."""

    def __init__(self, dim: int, num_patches: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(3 * dim, 2 * dim)
        self.second = nn.Linear(3 * dim, 2 * dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Map tokens (..., P, D)."""
        y = F.glu(self.first(neighbours(x, dilation=2)))
        y = F.glu(self.second(neighbours(y, dilation=1)))
        normed: Tensor = self.norm(y + x)
        return normed


def neighbours(x: Tensor, dilation: int) -> Tensor:
    """Each patch beside its neighbours at ± dilation, zeros outside: (..., P, D) → (..., P, 3·D).

    With a linear map on top this is a convolution of width 3, at the speed of a matrix product.
    """
    steps = x.shape[-2]
    padded = F.pad(x, (0, 0, dilation, dilation))
    return torch.cat([padded[..., i * dilation : i * dilation + steps, :] for i in range(3)], dim=-1)


class CyclicRelation(nn.Module):
    """Mixes channels by a relation that is learned per phase of the cycle and corrected by the present.

    For a patch at phase c:  R = R_c + f(S - R_c),  y = norm(R x) + x

    with R_c (C, C) learned for each phase, S the cosine similarities of the channels' tokens at this patch and f a
    two-layer network on rows.

    Args:
        channels: C.
        cycle: phases in a cycle.
        dim: width D of a token.
        dropout: inside f.
    """

    def __init__(self, channels: int, cycle: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.cycle = cycle
        self.table = nn.Parameter(torch.empty(cycle, channels, channels))
        self.correct = nn.Sequential(
            nn.Linear(channels, 2 * channels),
            nn.GELU(),
            ByteDropout(dropout),
            nn.Linear(2 * channels, channels),
        )
        self.norm = nn.LayerNorm(dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh relations, each phase as one square Xavier matrix."""
        bound = math.sqrt(3.0 / self.table.shape[-1])
        nn.init.uniform_(self.table, -bound, bound)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Mix tokens (B, C, P, D) across channels; ``context.phase`` (B, P) holds each patch's phase."""
        if context.phase is None:
            raise ValueError("the cyclic relation needs context.phase")
        learned = self.table[context.phase % self.cycle]
        tokens = x.transpose(1, 2)
        unit = F.normalize(tokens, dim=-1)
        present = unit @ unit.transpose(-1, -2)
        relation = learned + self.correct(present - learned)
        mixed: Tensor = self.norm(relation @ tokens)
        return mixed.transpose(1, 2) + x


class RelatedExpert(nn.Module):
    """An expert whose answer passes through a cyclic relation between channels."""

    def __init__(self, expert: nn.Module, relation: CyclicRelation) -> None:
        super().__init__()
        self.expert = expert
        self.relation = relation

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Map tokens (B, C, P, D)."""
        y: Tensor = self.relation(self.expert(x, context), context)
        return y


KINDS: dict[str, type[nn.Module]] = {
    "identity": IdentityExpert,
    "trend": TrendExpert,
    "seasonal": SeasonalExpert,
    "fluctuation": FluctuationExpert,
}
"""Expert kinds by name; all are built as ``kind(dim, num_patches, dropout)``."""

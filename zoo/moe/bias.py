"""The loss-free selection bias: balances by moving choices instead of by a loss."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.moe.precision import Fp32Buffers


class SelectionBias(Fp32Buffers):
    """Added to the router's scores for the choice alone; the mixing weights never see it.

    b_e ← b_e + rate · sign(mean(counts) − counts_e), once per optimiser step, from the counts of the whole step
    (all micro-batches, all ranks). A buffer in fp32 under every precision: half precision rounds the steps away.

    Args:
        num_experts: E.
        rate: step of an update.
        centre: take the mean of a step off. A common shift changes no choice, so this changes none either; it keeps the
            numbers near zero, where fp32 is fine enough, and comparable over time.

    Reference: auxiliary-loss-free load balancing (arXiv 2408.15664).
    """

    bias: Tensor

    def __init__(self, num_experts: int, rate: float = 1e-3, centre: bool = True) -> None:
        super().__init__()
        if num_experts < 1 or not rate > 0:
            raise ValueError(f"need num_experts={num_experts} >= 1 and rate={rate} > 0")
        self.rate, self.centre = rate, centre
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32))

    def forward(self, scores: Tensor) -> Tensor:
        """Biased scores (R, E)."""
        return scores + self.bias

    @torch.no_grad()
    def update(self, counts: Tensor, enabled: Tensor | None = None) -> None:
        """Move against the load.

        Args:
            counts: (E,) int64, valid choices per expert over the whole step.
            enabled: (E,) bool, experts that could be chosen; the bias of the others stays. None for all.

        Raises:
            ValueError: the counts are of another number of experts.
        """
        if counts.shape != self.bias.shape:
            raise ValueError(f"counts {tuple(counts.shape)} do not fit a bias of {tuple(self.bias.shape)}")
        counts = counts.to(self.bias.device)
        on = torch.ones_like(counts, dtype=torch.bool) if enabled is None else enabled
        # sign(mean - counts) in whole numbers: the same on every rank, however large the counts.
        step = self.rate * torch.sign((counts * on).sum() - counts * on.sum()).float() * on
        self.bias += (step - step.sum() / on.sum().clamp_min(1)) * on if self.centre else step

    def extra_repr(self) -> str:
        """Shows the settings in the module's print-out."""
        return f"num_experts={self.bias.shape[0]}, rate={self.rate}, centre={self.centre}"

"""The Mixture-of-Experts layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.moe.experts import ExpertBank
from zoo.moe.router import Router
from zoo.moe.routing import Context, MoEOutput


class MoE(nn.Module):
    """y = Σ_e weight_e(x) · expert_e(x) (+ shared(x)).

    Holds no state between calls: a layer that is called twice gives two independent outputs.

    Args:
        router: decides.
        experts: a bank of as many experts as the router scores.
        shared: module x → y that every token visits, added unweighted.
        channels_dim: where the width D stands in x, e.g. 1 for images (B, D, H, W).

    Raises:
        ValueError: router and bank disagree on the number of experts.

    Example:
        >>> layer = MoE(Router(LinearScorer(64, 8), TopK(2)), FeedForwardExperts(64, 128, 8))
        >>> layer(torch.randn(4, 10, 64)).y.shape
        torch.Size([4, 10, 64])
    """

    def __init__(
        self, router: Router, experts: ExpertBank, shared: nn.Module | None = None, channels_dim: int = -1
    ) -> None:
        super().__init__()
        if router.num_experts != experts.num_experts:
            raise ValueError(
                f"the router scores {router.num_experts} experts, the bank holds {experts.num_experts}"
            )
        self.router = router
        self.experts = experts
        self.shared = shared
        self.channels_dim = channels_dim

    def forward(self, x: Tensor, mask: Tensor | None = None, context: Context | None = None) -> MoEOutput:
        """Run the layer.

        Args:
            x: tokens of any leading shape, width at ``channels_dim``.
            mask: x's shape without the width; True for real tokens. Masked tokens are neither routed nor counted
                and come out as exactly zero (before ``shared``).
            context: for router and experts.

        Returns:
            The output in x's layout, with the routing of the flattened tokens.
        """
        tokens = x.movedim(self.channels_dim, -1)
        routing = self.router(tokens, mask, context, self.experts.enabled)
        y = self.experts.mix(tokens, routing, context)
        if self.shared is not None:
            shared = self.shared(tokens)
            y = y + (shared if mask is None else torch.where(mask[..., None], shared, 0.0))
        return MoEOutput(y=y.movedim(-1, self.channels_dim), routing=routing)

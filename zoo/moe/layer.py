"""The Mixture-of-Experts layer.

Shapes: T tokens in any leading shape, D width of x, F width of y.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.moe.experts import ExpertBank
from zoo.moe.precision import raised
from zoo.moe.router import Router
from zoo.moe.routing import Context, MoEOutput


class MoE(nn.Module):
    """y = Σ_e weight_e(x) · expert_e(x) (+ shared(x)); a residual connection is the network's business.

    Holds no state between calls: a layer that is called twice gives two independent outputs.

    Args:
        router: decides.
        experts: a bank of as many experts as the router scores; its answers may be wider or narrower than x.
        shared: module on tokens (..., D) → (..., F) that every token visits, added unweighted; in a
            :class:`GatedShared`, weighted by the token itself.
        channels_dim: where the width stands in x and y, e.g. 1 for images (B, D, H, W).

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
            x: tokens of any leading shape, width D at ``channels_dim``.
            mask: bool, x's shape without the width; True for real tokens. Masked tokens are neither routed nor
                counted and come out as exactly zero, whatever stands there.
            context: for router and experts.

        Returns:
            The output in x's layout, width F at ``channels_dim``, with the routing of the flattened tokens.

        Raises:
            ValueError: a mask of another shape or dtype, or a shared expert of another width than the bank.
        """
        tokens = x.movedim(self.channels_dim, -1)
        check_mask(mask, tokens)
        if mask is not None and context is not None:
            context = context.blanked(mask)
        routing = self.router(tokens, mask, context, self.experts.enabled)
        y = self.experts(tokens, routing.per_token(), context)
        if self.shared is not None:
            y = y + self._shared(self.shared, tokens, mask, y.shape)
        return MoEOutput(y=y.movedim(-1, self.channels_dim), routing=routing)

    def _shared(self, shared: nn.Module, tokens: Tensor, mask: Tensor | None, shape: torch.Size) -> Tensor:
        if mask is not None:
            # Both ways: a masked token must reach neither the answer nor, in the backward pass, the weights.
            tokens = torch.where(mask[..., None], tokens, 0.0)
        answer: Tensor = shared(tokens)
        if answer.shape != shape:
            raise ValueError(f"the shared expert answers {tuple(answer.shape)}, the bank {tuple(shape)}")
        return answer if mask is None else torch.where(mask[..., None], answer, 0.0)


def check_mask(mask: Tensor | None, tokens: Tensor) -> None:
    """Refuse a mask that does not fit tokens (..., D).

    Raises:
        ValueError: it is not of dtype bool, or not of shape (...).
    """
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(f"a mask must be of dtype torch.bool, not {mask.dtype}")
    if mask.shape != tokens.shape[:-1]:
        raise ValueError(
            f"a mask of shape {tuple(mask.shape)} does not fit tokens {tuple(tokens.shape[:-1])}"
        )


class GatedShared(nn.Module):
    """sigmoid(w · x) · module(x): a shared expert that each token weighs for itself; the gate is in fp32.

    w starts at zero and the gate at 1/2.

    Args:
        module: the shared expert, (..., D) → (..., F).
        dim: width D of a token.

    Reference: the shared expert of Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671).
    """

    def __init__(self, module: nn.Module, dim: int) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim={dim} must be at least 1")
        self.module = module
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (..., D) → (..., F)."""
        with torch.autocast(x.device.type, enabled=False):
            gate = torch.sigmoid(raised(x) @ raised(self.weight))
        answer: Tensor = self.module(x)
        return gate[..., None].to(answer.dtype) * answer

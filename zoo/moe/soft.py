"""Soft MoE: experts work on mixtures of tokens, so that nothing is chosen and nothing dropped.

Shapes: B sequences, P tokens per sequence, E experts, S slots per expert, D width in, F width out, T = B·P.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.moe.experts import TokenExperts
from zoo.moe.layer import check_mask
from zoo.moe.precision import raised
from zoo.moe.routing import Context, MoEOutput, Routing


def mix(
    x: Tensor,
    logits: Tensor,
    experts: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    mask: Tensor | None = None,
) -> Tensor:
    """Mix tokens into slots, run the experts on their slots, mix the answers back into tokens.

    With l_ij the logit of token i and slot j of the same sequence (equations 1-3 of the paper)::

        D_ij = exp l_ij / Σ_i' exp l_i'j        x̃_j = Σ_i D_ij x_i        (dispatch: over tokens)
        C_ij = exp l_ij / Σ_j' exp l_ij'        y_i = Σ_j C_ij ỹ_j        (combine: over slots)

    Masked tokens count as zero and have C = 0, and D = 0 beside real ones; without any, the slots are zero.

    Args:
        x: (B, P, D).
        logits: (B, P, E, S) in fp32.
        experts: one (B·S, D) per expert → one (B·S, F) per expert, such as ``bank.each``.
        mask: (B, P) bool, True for real tokens.

    Returns:
        (B, P, F), exactly zero for masked tokens.
    """
    sequences, _, num_experts, slots = logits.shape
    scores = logits.flatten(2)
    if mask is None:
        dispatch, combine = scores.softmax(1), scores.softmax(2)
    else:
        real = mask[..., None]
        x, scores = torch.where(real, x, 0.0), torch.where(real, scores, 0.0)
        # The least finite number and not -inf: a sequence may be without any real token, and mixes its zeros then.
        dispatch = torch.where(real, scores, torch.finfo(scores.dtype).min).softmax(1)
        combine = torch.where(real, scores.softmax(2), 0.0)
    inputs = dispatch.to(x.dtype).transpose(1, 2) @ x
    rows = inputs.reshape(sequences, num_experts, slots, x.shape[-1]).transpose(0, 1).flatten(1, 2)
    answers = torch.stack(list(experts(rows.unbind())))
    answers = answers.reshape(num_experts, sequences, slots, answers.shape[-1]).transpose(0, 1).flatten(1, 2)
    y: Tensor = combine.to(answers.dtype) @ answers
    return y.to(x.dtype)


class SoftMoE(nn.Module):
    """A layer of its own: every expert sees ``slots`` mixtures of all tokens of a sequence.

    Logits compare directions (section 2.3 of the paper): l_ij = a · ⟨x_i / |x_i|, φ_j / |φ_j|⟩, with a learned scale a
    and learned slots φ. :func:`mix` does the rest. A token's answer depends on the other tokens of its sequence, never
    on other sequences.

    Args:
        bank: experts that map rows.
        dim: width D of a token.
        slots: S, slots per expert.

    Attributes:
        slots: (E, S, D), φ.
        scale: (1,), a.

    Raises:
        ValueError: a size below 1.

    Reference: Puigcerver et al., From Sparse to Soft Mixtures of Experts (arXiv 2308.00951).
    """

    depends_on_batch = True

    def __init__(self, bank: TokenExperts, dim: int, slots: int = 1) -> None:
        super().__init__()
        if min(dim, slots) < 1:
            raise ValueError(f"dim={dim} and slots={slots} must be at least 1")
        self.experts = bank
        self.slots = nn.Parameter(torch.empty(bank.num_experts, slots, dim))
        self.scale = nn.Parameter(torch.ones(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with random directions and scale 1."""
        nn.init.normal_(self.slots, std=1 / math.sqrt(self.slots.shape[-1]))
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor, mask: Tensor | None = None, context: Context | None = None) -> MoEOutput:
        """Run the layer.

        Args:
            x: (..., P, D) sequences of tokens.
            mask: (..., P) bool, True for real tokens. Masked tokens enter no slot and come out as exactly zero.
            context: not looked at; a network may call this layer as it calls ``MoE``.

        Returns:
            The output (..., P, F), with a routing of all T tokens to all experts: the weight is the combine weight of
            an expert summed over its slots.

        Raises:
            ValueError: a mask of another shape or dtype.
        """
        check_mask(mask, x)
        sequences = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
        real = None if mask is None else mask.reshape(sequences.shape[:2])
        if real is not None:
            sequences = torch.where(real[..., None], sequences, 0.0)
        logits = self._logits(sequences)
        y = mix(sequences, logits, self.experts.each, real)
        routing = _routing(logits, None if real is None else real.flatten(), x.dtype)
        return MoEOutput(y=y.reshape(*x.shape[:-1], self.experts.dim_out), routing=routing)

    def _logits(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            directions = F.normalize(raised(x), dim=-1, eps=1e-6)
            slots = F.normalize(raised(self.slots), dim=-1, eps=1e-6)
            return raised(self.scale) * torch.einsum("bpd,esd->bpes", directions, slots)

    def extra_repr(self) -> str:
        """Shows the number of slots in the module's print-out."""
        return f"slots={self.slots.shape[1]}"


def _routing(logits: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Routing:
    # exp of a logsumexp is a sum of exps: its softmax over experts is the combine weight summed over slots.
    per_expert = logits.flatten(0, 1).logsumexp(-1)
    probs = per_expert.softmax(-1)
    index = torch.arange(probs.shape[-1], device=probs.device).expand_as(probs)
    valid = torch.ones_like(probs, dtype=torch.bool) if mask is None else mask[:, None].expand_as(probs)
    weight = torch.where(valid, probs, 0.0).to(dtype)
    return Routing(index=index, weight=weight, valid=valid, probs=probs, logits=per_expert, mask=mask)

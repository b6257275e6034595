"""Auxiliary losses: functions of a routing, masked tokens left out, unweighted."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from zoo.moe.routing import Routing


def balance_loss(routing: Routing, convention: Literal["switch", "hf"] = "switch") -> Tensor:
    """E · Σ_e f_e P_e with f the share of choices and P the mean probability of expert e; 1 when uniform.

    E counts the experts that are switched on.

    Args:
        routing: one layer's decisions; f is a count and carries no gradient.
        convention: "switch" divides the counts by K (Fedus et al. 2021, eq. 4), "hf" does not.
    """
    probs = routing.probs if routing.mask is None else routing.probs[routing.mask]
    if probs.shape[0] == 0:
        return routing.probs.sum() * 0.0
    counts = routing.counts().to(probs.dtype)
    share = counts / counts.sum().clamp_min(1)
    offered = (routing.logits > -torch.inf).any(0).sum()
    loss = offered * (share * probs.mean(0)).sum()
    return loss * routing.index.shape[1] if convention == "hf" else loss


def z_loss(routing: Routing) -> Tensor:
    """mean_t logsumexp(logits_t)², which keeps logits small (Zoph et al. 2022, eq. 5)."""
    logits = routing.logits if routing.mask is None else routing.logits[routing.mask]
    if logits.shape[0] == 0:
        return torch.nan_to_num(routing.logits, neginf=0.0).sum() * 0.0
    return logits.logsumexp(-1).square().mean()

"""Activation checkpointing: keep no activations in the forward pass, and compute them again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch.utils.checkpoint import checkpoint as _checkpoint

P = ParamSpec("P")
R = TypeVar("R")


def checkpoint(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function without keeping what its backward pass needs; it runs a second time there.

    Always the variant without re-entry: the re-entrant one cuts the gradients of outputs that are not plain tensors,
    such as the routing in the output of a Mixture-of-Experts layer, and says nothing.

    Args:
        function: a module or function; it must do the same both times, random draws included.
        *args: for the function.
        **kwargs: for the function.

    Returns:
        What the function returns.
    """
    recomputed: Callable[..., Any] = _checkpoint
    result: R = recomputed(function, *args, use_reentrant=False, **kwargs)
    return result

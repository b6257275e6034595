"""Traces: the choices of all layers of a network as flat named tensors, for files and replay buffers.

``0.index`` (R, K) int32 and ``0.valid`` (R, K) bool for the first layer, ``1.index`` and so on for the others: what
``safetensors.torch.save_file`` writes. A trace holds the set of experts and the order of its columns, which fixes the
order of the sums, but no weights: a replay computes them anew (arXiv 2510.11370, rollout routing replay).

Shapes: R decisions, K choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zoo.moe.routing import Choices


def to_tensors(trace: Sequence[Choices]) -> dict[str, Tensor]:
    """Flatten the choices of the layers, first layer first; the tensors stay on their device."""
    tensors: dict[str, Tensor] = {}
    for layer, choices in enumerate(trace):
        # Copies, because every expert in order is one row that is only expanded to R.
        tensors[f"{layer}.index"] = choices.index.to(torch.int32).contiguous()
        tensors[f"{layer}.valid"] = choices.valid.contiguous()
    return tensors


def from_tensors(tensors: Mapping[str, Tensor]) -> list[Choices]:
    """Read back what :func:`to_tensors` wrote.

    Raises:
        ValueError: a layer is missing, a name is unknown, or index and valid do not fit each other.
    """
    layers = len(tensors) // 2
    names = {f"{layer}.{part}" for layer in range(layers) for part in ("index", "valid")}
    if names != set(tensors):
        odd = sorted(names.symmetric_difference(tensors))
        raise ValueError(
            f"a trace of {layers} layers holds an index and a valid for each, but differs in {odd}"
        )
    trace = []
    for layer in range(layers):
        index, valid = tensors[f"{layer}.index"], tensors[f"{layer}.valid"]
        whole = index.dtype in (torch.int32, torch.int64) and valid.dtype == torch.bool
        if not whole or index.ndim != 2 or index.shape != valid.shape:
            raise ValueError(
                f"layer {layer}: index {index.dtype} {tuple(index.shape)} and valid {valid.dtype} "
                f"{tuple(valid.shape)} do not fit"
            )
        trace.append(Choices(index=index.long(), valid=valid))
    return trace

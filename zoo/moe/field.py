"""Field banks: experts that receive the whole x, because they look across positions or channels.

Shapes: E experts, D width of x, F width of an answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from zoo.moe.experts import ExpertBank, anchor, fitting, weights
from zoo.moe.routing import Context, Routing


class FieldExperts(ExpertBank):
    """Any modules that look at the whole of x, mixed per position by the router's weights.

    Each expert is called as ``expert(x, context)`` on all of x (..., D), width last, and returns (..., F). At masked
    positions x is zero; an expert that averages over positions leaves them out by ``context.mask``. Experts that no
    valid position chose are skipped (``skip_idle``): the answer is the same, but they draw no random numbers and update
    no batch statistics.

    Args:
        experts: the modules.
        skip_idle: run only experts that at least one valid position chose.
        dim_out: width F of an answer; None for that of x.
    """

    def __init__(
        self, experts: Sequence[nn.Module], skip_idle: bool = True, dim_out: int | None = None
    ) -> None:
        super().__init__(len(experts))
        if dim_out is not None and dim_out < 1:
            raise ValueError(f"dim_out={dim_out} must be at least 1")
        self.experts = nn.ModuleList(experts)
        self.skip_idle = skip_idle
        self.dim_out = dim_out

    def forward(self, x: Tensor, routing: Routing, context: Context | None = None) -> Tensor:
        """Σ_e weight_e · expert_e(x) per position, for x (..., D) → (..., F).

        Raises:
            ValueError: an expert answers with another shape.
        """
        weight = routing.dense_weight().reshape(*x.shape[:-1], self.num_experts)
        idle = self._idle(routing)
        if routing.mask is not None:
            mask = routing.mask.reshape(x.shape[:-1])
            x = torch.where(mask[..., None], x, 0.0)
            context = replace(context or Context(), mask=mask)
        shape = (*x.shape[:-1], self.dim_out or x.shape[-1])
        # The zero depends on the weights, so that the router gets a zero gradient where all experts idle.
        y = x.new_zeros(shape) + 0.0 * weight.sum()
        for index, expert in enumerate(self.experts):
            if index not in idle:
                y = y + weight[..., index, None] * fitting(expert(x, context), shape, index)
            elif torch.is_grad_enabled():
                y = y + anchor(expert)
        return y

    def matrices(self, expert: int) -> dict[str, Tensor]:
        """The weights of one expert with two or more dimensions, by name."""
        return weights(self.experts[expert])

    def _idle(self, routing: Routing) -> frozenset[int]:
        """Experts that need not run."""
        if not self.skip_idle or torch.compiler.is_compiling():
            return frozenset()
        return frozenset(torch.nonzero(routing.counts() == 0).flatten().tolist())


class ExpertPool(FieldExperts):
    """Field experts in a fixed number of slots, some of which start switched off.

    The slots exist from construction, so that parameters, optimiser and checkpoints keep their shape; the buffer
    ``enabled`` is the topology and part of the state dict.

    Args:
        experts: the modules, one per slot.
        base: the first ``base`` slots are always on; the others start off.
        dim_out: width F of an answer; None for that of x.

    Attributes:
        enabled: (E,) bool buffer.
    """

    enabled: Tensor

    def __init__(self, experts: Sequence[nn.Module], base: int, dim_out: int | None = None) -> None:
        super().__init__(experts, dim_out=dim_out)
        if not 1 <= base <= len(experts):
            raise ValueError(f"base={base} must lie in 1..{len(experts)} slots")
        self.base = base
        self.enabled = torch.arange(len(experts)) < base

    def enable(self, slot: int, seed: int) -> None:
        """Switch a slot on with fresh weights drawn from ``seed`` and the slot's number alone.

        Raises:
            ValueError: the slot is on already, or its expert has parameters that no ``reset_parameters`` draws.
        """
        if bool(self.enabled[slot]):
            raise ValueError(f"slot {slot} is switched on already")
        for name, module in self.experts[slot].named_modules():
            if next(module.parameters(recurse=False), None) is not None and not hasattr(
                module, "reset_parameters"
            ):
                raise ValueError(
                    f"slot {slot}: {type(module).__name__} {name or 'itself'} has parameters but no reset_parameters()"
                )
        digest = hashlib.sha256(f"{seed}/{slot}".encode()).digest()
        # manual_seed seeds every device, so every device's state has to be put back.
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            for module in self.experts[slot].modules():
                reset = getattr(module, "reset_parameters", None)
                if callable(reset):
                    reset()
        self.enabled[slot] = True

    def disable(self, slot: int) -> None:
        """Switch a slot off.

        Raises:
            ValueError: the slot belongs to the base, which is never removed.
        """
        if slot < self.base:
            raise ValueError(f"slot {slot} is one of the {self.base} base experts, which stay on")
        self.enabled[slot] = False

"""Expert banks, in two scopes.

* **token** banks map rows (n, D) → (n, F) and run through ``dispatch``: :class:`FeedForwardExperts`.
* **field** banks receive the whole x, because their experts look across positions (pooling, spectra,
  convolution, other channels): :class:`FieldExperts` and its growing form :class:`ExpertPool`.

A bank answers ``mix(x, routing, context)`` with the mixed output shaped like x.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.moe.dispatch import Backend, dispatch
from zoo.moe.routing import Context, Routing


class ExpertBank(nn.Module):
    """E experts behind one call.

    Attributes:
        num_experts: E.
        enabled: (E,) bool of experts that may be chosen, or None if the topology is fixed.
    """

    num_experts: int
    enabled: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("enabled", None)

    def mix(self, x: Tensor, routing: Routing, context: Context | None = None) -> Tensor:
        """Σ_e weight_e · expert_e(x), shaped like x (..., D)."""
        raise TypeError(f"{type(self).__name__} does not say how to mix its experts")


class FeedForwardExperts(ExpertBank):
    """E feed-forward networks with stacked weights in Linear layout (E, out, in).

    GELU: down(gelu(up x)).  SwiGLU: down(silu(gate x) · up x), with gate and up stacked in ``up``.

    Args:
        dim: width D of a token.
        hidden: width of the hidden layer of one expert.
        num_experts: E.
        activation: "gelu" or "swiglu".
        backend: how to execute, see :mod:`zoo.moe.dispatch`.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        activation: Literal["gelu", "swiglu"] = "gelu",
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        if min(dim, hidden, num_experts) < 1:
            raise ValueError(f"dim={dim}, hidden={hidden} and num_experts={num_experts} must be at least 1")
        self.num_experts = num_experts
        self.dim_out = dim
        self.activation = activation
        self.backend: Backend = backend
        self.up = nn.Parameter(torch.empty(num_experts, hidden * (2 if activation == "swiglu" else 1), dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise every expert as its own nn.Linear would be: uniform in ±1/sqrt(fan_in of one expert)."""
        for weight in (self.up, self.down):
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)

    def _activate(self, hidden: Tensor) -> Tensor:
        if self.activation == "gelu":
            return F.gelu(hidden)
        gate, up = hidden.chunk(2, dim=-1)
        return F.silu(gate) * up

    def expert(self, index: int, rows: Tensor) -> Tensor:
        """Expert ``index`` on rows (n, D)."""
        return F.linear(self._activate(F.linear(rows, self.up[index])), self.down[index])

    def every(self, rows: Tensor) -> Tensor:
        """Every expert on every row: (n, D) → (E, n, D)."""
        hidden = self._activate(torch.einsum("nd,ehd->enh", rows, self.up))
        return torch.einsum("enh,edh->end", hidden, self.down)

    def slices(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Expert e on its own rows[e], for all experts."""
        # unbind, not up[e]: indexing a stacked parameter allocates a full-size gradient per expert.
        return [
            F.linear(self._activate(F.linear(part, up)), down)
            for part, up, down in zip(rows, self.up.unbind(), self.down.unbind(), strict=True)
        ]

    def mix(self, x: Tensor, routing: Routing, context: Context | None = None) -> Tensor:
        """Σ_k weight_k · expert_k(x) for tokens x (..., D)."""
        return dispatch(self, x.reshape(-1, x.shape[-1]), routing, self.backend).reshape(x.shape)

    def extra_repr(self) -> str:
        """Shows the sizes and the back end in the module's print-out."""
        return f"num_experts={self.num_experts}, activation={self.activation}, backend={self.backend}"


class FieldExperts(ExpertBank):
    """Any modules that look at the whole of x, mixed per position by the router's weights.

    Each expert is called as ``expert(x, context)`` on all of x (..., D) and returns the same shape. Experts that no
    valid position chose are skipped (``skip_idle``), which changes nothing but the time taken.

    Args:
        experts: the modules.
        skip_idle: run only experts that at least one valid position chose.
    """

    def __init__(self, experts: Sequence[nn.Module], skip_idle: bool = True) -> None:
        super().__init__()
        if not experts:
            raise ValueError("a bank needs at least one expert")
        self.experts = nn.ModuleList(experts)
        self.num_experts = len(experts)
        self.skip_idle = skip_idle

    def mix(self, x: Tensor, routing: Routing, context: Context | None = None) -> Tensor:
        """Σ_e weight_e · expert_e(x) per position, for x (..., D)."""
        weight = routing.dense_weight().reshape(*x.shape[:-1], self.num_experts)
        idle = self._idle(routing)
        if routing.mask is not None:
            x = torch.where(routing.mask.reshape(*x.shape[:-1], 1), x, 0.0)
        # The zero depends on the weights, so that the router gets a zero gradient where all experts idle.
        y = torch.zeros_like(x) + 0.0 * weight.sum()
        for index, expert in enumerate(self.experts):
            if index not in idle:
                y = y + weight[..., index, None] * expert(x, context)
            elif self.training:
                y = y + _anchor(expert)
        return y

    def _idle(self, routing: Routing) -> frozenset[int]:
        """Experts that need not run."""
        if not self.skip_idle or torch.compiler.is_compiling():
            return frozenset()
        return frozenset(torch.nonzero(routing.counts() == 0).flatten().tolist())


def _anchor(expert: nn.Module) -> Tensor:
    """A zero that depends on every parameter, so that idle experts get zero gradients and not None (DDP needs it)."""
    terms = [0.0 * parameter.flatten()[0] for parameter in expert.parameters() if parameter.requires_grad]
    return torch.stack(terms).sum() if terms else torch.zeros(())


class ExpertPool(FieldExperts):
    """Field experts in a fixed number of slots, some of which start switched off.

    The slots exist from construction, so that parameters, optimiser and checkpoints keep their shape; the buffer
    ``enabled`` is the topology and part of the state dict.

    Args:
        experts: the modules, one per slot.
        base: the first ``base`` slots are always on; the others start off.

    Attributes:
        enabled: (E,) bool buffer.
    """

    enabled: Tensor

    def __init__(self, experts: Sequence[nn.Module], base: int) -> None:
        super().__init__(experts)
        if not 1 <= base <= len(experts):
            raise ValueError(f"base={base} must lie in 1..{len(experts)} slots")
        self.base = base
        self.enabled = torch.arange(len(experts)) < base

    def enable(self, slot: int, seed: int) -> None:
        """Switch a slot on with fresh weights drawn from ``seed`` and the slot's number alone.

        Raises:
            ValueError: the slot is on already.
        """
        if bool(self.enabled[slot]):
            raise ValueError(f"slot {slot} is switched on already")
        digest = hashlib.sha256(f"{seed}/{slot}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
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

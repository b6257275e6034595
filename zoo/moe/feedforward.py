"""Feed-forward experts with stacked weights: the bank of most Mixture-of-Experts models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.moe.activation import Activation, activate
from zoo.moe.dispatch import Backend
from zoo.moe.experts import TokenExperts
from zoo.moe.layout import restack, unstack

SMALL = 1 << 21
"""Multiply-adds of tokens with experts that they did not choose, up to which running them beats sorting."""
LARGE = 1 << 23
"""Multiply-adds up to which all experts run on all tokens even where nothing is surplus: more keeps too much memory."""
READING_ROWS = 16
"""An expert's weights take as long to read as this many rows to multiply."""


class FeedForwardExperts(TokenExperts):
    """E feed-forward networks with stacked weights in Linear layout (E, out, in).

    GELU: down(gelu(up x)).  SwiGLU: down(silu(gate x) · up x), with gate and up stacked in ``up``.

    Args:
        dim: width D of a token.
        hidden: width H of the hidden layer of one expert.
        num_experts: E.
        activation: "gelu" or "swiglu".
        bias: whether the two maps have biases.
        backend: how to execute, see :mod:`zoo.moe.dispatch`.

    Attributes:
        up: (E, H, D), or (E, 2H, D) with the gate first for SwiGLU.
        down: (E, D, H).
        up_bias: (E, H) or (E, 2H), or None.
        down_bias: (E, D), or None.
    """

    backends = ("reference", "dense", "sorted", "fused", "grouped")

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        activation: Activation = "gelu",
        bias: bool = False,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(num_experts, dim, backend)
        if min(dim, hidden) < 1:
            raise ValueError(f"dim={dim} and hidden={hidden} must be at least 1")
        if activation not in ("gelu", "swiglu"):
            raise ValueError(f"activation={activation!r} must be 'gelu' or 'swiglu'")
        self.activation: Activation = activation
        self._size = dim * hidden
        width = hidden * (2 if activation == "swiglu" else 1)
        self.up = nn.Parameter(torch.empty(num_experts, width, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, hidden))
        self.up_bias = nn.Parameter(torch.empty(num_experts, width)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, dim)) if bias else None
        self.reset_parameters()

    @classmethod
    def from_dense(
        cls,
        up: nn.Linear,
        down: nn.Linear,
        num_experts: int,
        gate: nn.Linear | None = None,
        backend: Backend = "auto",
    ) -> Self:
        """Upcycle a dense network: every expert starts as an exact copy of it.

        Args:
            up: D → H.
            down: H → D.
            num_experts: E.
            gate: D → H; given, the network is a SwiGLU, otherwise a GELU.
            backend: how to execute, see :mod:`zoo.moe.dispatch`.

        Returns:
            A bank in the dtype and on the device of ``up``, with biases where the maps have them.

        Raises:
            ValueError: maps that do not fit together, or a bias on one of gate and up alone.

        Reference: Komatsuzaki et al., Sparse Upcycling (arXiv 2212.05055).
        """
        first = [up] if gate is None else [gate, up]
        hidden, dim = up.weight.shape
        for linear, shape in ((down, (dim, hidden)), (first[0], (hidden, dim))):
            if linear.weight.shape != shape:
                raise ValueError(
                    f"up maps {dim} to {hidden}: a {tuple(linear.weight.shape)} weight must be {shape}"
                )
        biases: list[Tensor] = [linear.bias for linear in first if linear.bias is not None]
        if len(biases) == 1 and gate is not None:
            raise ValueError("gate and up must both have a bias or both have none")
        activation: Activation = "gelu" if gate is None else "swiglu"
        bank = cls(dim, hidden, num_experts, activation, bias=True, backend=backend).to(up.weight)
        bank.up_bias = bank.up_bias if biases else None
        bank.down_bias = bank.down_bias if down.bias is not None else None
        with torch.no_grad():
            bank.up.copy_(torch.cat([linear.weight for linear in first]))
            bank.down.copy_(down.weight)
            if bank.up_bias is not None:
                bank.up_bias.copy_(torch.cat(biases))
            if bank.down_bias is not None:
                bank.down_bias.copy_(down.bias)
        return bank

    def reset_parameters(self) -> None:
        """Initialise every expert as its own nn.Linear would be: uniform in ±1/sqrt(fan_in of one expert)."""
        for weight, bias in ((self.up, self.up_bias), (self.down, self.down_bias)):
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def expert(self, index: int, rows: Tensor) -> Tensor:
        """Expert ``index`` on rows (n, D)."""
        up_bias = None if self.up_bias is None else self.up_bias[index]
        down_bias = None if self.down_bias is None else self.down_bias[index]
        return F.linear(
            activate(F.linear(rows, self.up[index], up_bias), self.activation), self.down[index], down_bias
        )

    def each(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Expert e on its own rows[e], for all experts."""
        # unbind, not up[e]: indexing a stacked parameter allocates a full-size gradient per expert.
        none = [None] * self.num_experts
        up_bias = none if self.up_bias is None else self.up_bias.unbind()
        down_bias = none if self.down_bias is None else self.down_bias.unbind()
        parts = zip(rows, self.up.unbind(), up_bias, self.down.unbind(), down_bias, strict=True)
        return [
            F.linear(activate(F.linear(part, up, b_up), self.activation), down, b_down)
            for part, up, b_up, down, b_down in parts
        ]

    def every(self, rows: Tensor) -> Tensor:
        """Every expert on every row: (n, D) → (E, n, D)."""
        # bmm on an expanded x: matmul would fold the experts into one product whose result lies transposed.
        hidden = _stacked(rows.expand(self.num_experts, -1, -1), self.up, self.up_bias)
        return _stacked(activate(hidden, self.activation), self.down, self.down_bias)

    def prefers_dense(self, tokens: int, choices: int) -> bool:
        """Whether the surplus products, T (E - K) D H of them, take less time than sorting: a measured rule."""
        surplus = (tokens + READING_ROWS) * (self.num_experts - choices) * self._size
        return surplus <= SMALL and tokens * self.num_experts * self._size <= LARGE

    def matrices(self, expert: int) -> dict[str, Tensor]:
        """Views of one expert's up (H, D) and down (D, H), and gate (H, D) for SwiGLU."""
        if self.activation == "gelu":
            return {"up": self.up[expert], "down": self.down[expert]}
        gate, up = self.up[expert].chunk(2)
        return {"gate": gate, "up": up, "down": self.down[expert]}

    def per_expert(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Copies of all weights as a checkpoint with one entry per expert.

        Args:
            names: key pattern of each part, with ``{e}`` for the expert: "up", "down", for SwiGLU "gate", and each of
                them with "_bias" where there are biases.

        Raises:
            ValueError: names of other parts than the bank has, or patterns that do not tell keys apart.
        """
        return unstack(self._parts(), names)

    def load_per_expert(self, state: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        """Load what :meth:`per_expert` gives: strictly, and all of it or nothing.

        Raises:
            ValueError: names of other parts than the bank has; a key that is missing, of no expert or of another shape.
        """
        restack(self._parts(), names, state)

    def _parts(self) -> dict[str, Tensor]:
        """Views of the stacked weights, gate and up apart."""
        halves = ("up",) if self.activation == "gelu" else ("gate", "up")
        parts: dict[str, Tensor] = {"down": self.down}
        parts |= zip(halves, self.up.chunk(len(halves), dim=1), strict=True)
        if self.down_bias is not None:
            parts["down_bias"] = self.down_bias
        if self.up_bias is not None:
            biases = (f"{half}_bias" for half in halves)
            parts |= zip(biases, self.up_bias.chunk(len(halves), dim=1), strict=True)
        return parts

    def extra_repr(self) -> str:
        """Shows the sizes and the back end in the module's print-out."""
        return f"{super().extra_repr()}, activation={self.activation}, bias={self.up_bias is not None}"


def _stacked(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Every expert's linear map on its rows: (E, n, in) → (E, n, out)."""
    return rows.bmm(weight.mT) if bias is None else torch.baddbmm(bias[:, None], rows, weight.mT)

"""Expert banks, in two scopes.

* **token** banks map rows (n, D) → (n, F), each row by itself, and run through :mod:`zoo.moe.dispatch`:
  :class:`~zoo.moe.feedforward.FeedForwardExperts`, :class:`~zoo.moe.lowrank.LowRankExperts`,
  :class:`~zoo.moe.expert_list.ExpertList`.
* **field** banks receive the whole x, because their experts look across positions (pooling, spectra, convolution,
  other channels): :class:`~zoo.moe.field.FieldExperts` and its growing form :class:`~zoo.moe.field.ExpertPool`.

A bank is called as ``bank(x, routing, context)`` and answers with the mixed output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zoo.moe.dispatch import Backend, choose, dispatch
from zoo.moe.routing import Context, Routing


class ExpertBank(nn.Module):
    """E experts behind one call.

    Attributes:
        num_experts: E.
        enabled: (E,) bool of experts that may be chosen, or None if the topology is fixed.
    """

    num_experts: int
    enabled: Tensor | None

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        if num_experts < 1:
            raise ValueError("a bank needs at least one expert")
        self.num_experts = num_experts
        self.register_buffer("enabled", None)

    def forward(self, x: Tensor, routing: Routing, context: Context | None = None) -> Tensor:
        """Σ_e weight_e · expert_e(x) for x (..., D), with one row of ``routing`` per token."""
        raise TypeError(f"{type(self).__name__} does not say how to mix its experts")

    def matrices(self, expert: int) -> dict[str, Tensor]:
        """The weight matrices of one expert by name, as views: what analyses and conversions read and write."""
        raise TypeError(f"{type(self).__name__} does not expose its matrices")


class TokenExperts(ExpertBank):
    """A bank whose experts map every row by itself; a subclass writes ``expert`` and ``each``.

    Args:
        num_experts: E.
        dim_out: width F of an answer.
        backend: how to execute, one of ``backends``; "auto" decides by size.

    Attributes:
        backends: what this bank can be executed by.
        ran: the back end of the last call, for people to look at; None before the first.

    Raises:
        ValueError: a back end that this bank does not have.
    """

    backends: tuple[Backend, ...] = ("reference", "dense", "sorted")

    def __init__(self, num_experts: int, dim_out: int, backend: Backend = "auto") -> None:
        super().__init__(num_experts)
        if backend not in ("auto", *self.backends):
            raise ValueError(f"backend={backend!r} must be one of auto, {', '.join(self.backends)}")
        self.dim_out = dim_out
        self.backend: Backend = backend
        self.ran: Backend | None = None

    def expert(self, index: int, rows: Tensor) -> Tensor:
        """Expert ``index`` on rows (n, D) → (n, F)."""
        raise TypeError(f"{type(self).__name__} does not say what one expert does")

    def each(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Expert e on its own rows[e] (n_e, D), for all experts; idle ones still get gradients (zero)."""
        raise TypeError(f"{type(self).__name__} does not say what each expert does")

    def every(self, rows: Tensor) -> Tensor:
        """Every expert on every row: (n, D) → (E, n, F)."""
        return torch.stack([self.expert(index, rows) for index in range(self.num_experts)])

    def blend(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Every expert on every row (n, D), mixed by weights (n, E) → (n, F): what the back end "dense" runs."""
        return (self.every(rows) * weight.t().unsqueeze(-1)).sum(0)

    def prefers_dense(self, tokens: int, choices: int) -> bool:
        """Whether running every expert on every token takes less time than bringing tokens to experts."""
        return False

    def forward(self, x: Tensor, routing: Routing, context: Context | None = None) -> Tensor:
        """Σ_k weight_k · expert_k(x) for tokens x (..., D) → (..., F)."""
        rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        backend = choose(self, rows, routing)
        if not torch.compiler.is_compiling() and backend != self.ran:
            self.ran = backend
        y = dispatch(self, rows, routing, backend)
        return y if x.ndim == 2 else y.reshape(*x.shape[:-1], self.dim_out)

    def extra_repr(self) -> str:
        """Shows the number of experts and the back end in the module's print-out."""
        ran = f" (ran {self.ran})" if self.backend == "auto" and self.ran is not None else ""
        return f"num_experts={self.num_experts}, backend={self.backend}{ran}"


def anchor(module: nn.Module) -> Tensor:
    """A zero that depends on every parameter, so that idle experts get zero gradients and not None (DDP needs it)."""
    terms = [0.0 * parameter.flatten()[0] for parameter in module.parameters() if parameter.requires_grad]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def weights(module: nn.Module) -> dict[str, Tensor]:
    """The weights of any module with two or more dimensions, by name: the matrices of an expert."""
    return {name: weight for name, weight in module.named_parameters() if weight.ndim >= 2}


def fitting(answer: Tensor, shape: Sequence[int], expert: int) -> Tensor:
    """The answer of an expert, which must have the given shape: a wrong one would broadcast and go unnoticed.

    Raises:
        ValueError: it has another shape.
    """
    if tuple(answer.shape) != tuple(shape):
        raise ValueError(f"expert {expert} answers with shape {tuple(answer.shape)}, not {tuple(shape)}")
    return answer

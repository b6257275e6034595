"""A token bank of any modules.

Shapes: E experts, n rows, D width in, F width out.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from zoo.moe.dispatch import Backend
from zoo.moe.experts import TokenExperts, anchor, fitting, weights


class ZeroExpert(nn.Module):
    """Answers with zeros: a token that chooses it is left to the residual connection and the other experts.

    Costs no product and has no parameters, but counts as a choice like any other.

    Args:
        dim: width F of an answer.

    Reference: the zero expert of MoE++ (arXiv 2410.07348); its copy expert is ``nn.Identity``.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim={dim} must be at least 1")
        self.dim = dim

    def forward(self, rows: Tensor) -> Tensor:
        """Rows (..., D) → zeros (..., F)."""
        return rows.new_zeros(*rows.shape[:-1], self.dim)

    def extra_repr(self) -> str:
        """Shows the width in the module's print-out."""
        return f"dim={self.dim}"


class ExpertList(TokenExperts):
    """Any modules that map rows (n, D) → (n, F), each row by itself; they may differ in kind and in hidden width.

    An expert without rows is not called, so a module need not cope with none.

    Args:
        experts: the modules.
        dim_out: width F of their answers.
        backend: how to execute, see :mod:`zoo.moe.dispatch`.

    Raises:
        ValueError: no experts, or a width below 1.
    """

    def __init__(self, experts: Sequence[nn.Module], dim_out: int, backend: Backend = "auto") -> None:
        super().__init__(len(experts), dim_out, backend)
        if dim_out < 1:
            raise ValueError(f"dim_out={dim_out} must be at least 1")
        self.experts = nn.ModuleList(experts)

    def expert(self, index: int, rows: Tensor) -> Tensor:
        """Expert ``index`` on rows (n, D) → (n, F).

        Raises:
            ValueError: it answers with another shape.
        """
        expert = self.experts[index]
        shape = (rows.shape[0], self.dim_out)
        if rows.shape[0] == 0:
            return rows.new_zeros(shape) + anchor(expert)
        return fitting(expert(rows), shape, index)

    def each(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Expert e on its own rows[e], for all experts."""
        return [self.expert(index, part) for index, part in enumerate(rows)]

    def blend(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Every expert on every row (n, D), mixed by weights (n, E) → (n, F), one answer in memory at a time."""
        mixed = rows.new_zeros(rows.shape[0], self.dim_out)
        for index, share in enumerate(weight.unbind(1)):
            mixed = mixed + share[:, None] * self.expert(index, rows)
        return mixed

    def matrices(self, expert: int) -> dict[str, Tensor]:
        """The weights of one expert with two or more dimensions, by name."""
        return weights(self.experts[expert])

"""Low-rank experts: adapters of a frozen map.

Shapes: T tokens, K choices, E experts, n rows, D width in, F width out, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.moe.dispatch import Backend
from zoo.moe.experts import TokenExperts

RANKS_PER_CHOICE = 48
"""Largest E·r over K for which two products over all experts beat sorting, at any number of tokens."""

SMALL_EXPERT = 2**19
"""Largest T·r·(D + F), an expert's work on all tokens, that costs less than calling it on its own."""


class LowRankExperts(TokenExperts):
    """expert_e(x) = scale · U_e diag(s_e) V_e x.

    Starts like LoRA (arXiv 2106.09685): V as the weight of ``nn.Linear(D, r)``, s ones and U zeros, so that every
    expert answers zero. :meth:`from_weight` starts from the singular value decomposition of a frozen weight instead.

    Args:
        dim: width D of a token.
        dim_out: width F of an answer.
        num_experts: E.
        rank: r.
        scale: fixed factor, alpha / rank in LoRA.
        backend: how to execute, see :mod:`zoo.moe.dispatch`.

    Attributes:
        u: (E, F, r).
        s: (E, r).
        v: (E, r, D).

    Raises:
        ValueError: a size below 1, or a rank above min(D, F).
    """

    def __init__(
        self,
        dim: int,
        dim_out: int,
        num_experts: int,
        rank: int,
        scale: float = 1.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(num_experts, dim_out, backend)
        if not 1 <= rank <= min(dim, dim_out):
            raise ValueError(f"rank={rank} must lie in 1..min(dim={dim}, dim_out={dim_out})")
        self.scale = scale
        self.u = nn.Parameter(torch.empty(num_experts, dim_out, rank))
        self.s = nn.Parameter(torch.empty(num_experts, rank))
        self.v = nn.Parameter(torch.empty(num_experts, rank, dim))
        self.reset_parameters()

    @classmethod
    def from_weight(
        cls, weight: Tensor, num_experts: int, rank: int, backend: Backend = "auto"
    ) -> tuple[Tensor, Self]:
        """Split a frozen weight into its principal part and experts that all start from the rest.

        With W = Σ_i σ_i u_i v_iᵀ in falling order, every expert starts from the last ``rank`` triples and
        W_p = W − Σ_{last rank} σ_i u_i v_iᵀ. So W_p x + expert_e(x) = W x for each expert, and for any mixture whose
        weights sum to one. The decomposition runs in float64; the largest entry of each u_i is positive.

        Args:
            weight: (F, D), left as it is.
            num_experts: E.
            rank: r.
            backend: how to execute the experts.

        Returns:
            W_p (F, D), which carries no gradient, and the experts, both in the weight's dtype and on its device.

        Raises:
            ValueError: the weight is no matrix, or the rank exceeds min(F, D).

        Reference: the residual experts of OmniAID (arXiv 2511.08423).
        """
        if weight.ndim != 2:
            raise ValueError(f"a weight of shape {tuple(weight.shape)} is no matrix")
        bank = cls(weight.shape[1], weight.shape[0], num_experts, rank, backend=backend)
        # Off the device: not every accelerator has doubles.
        whole = weight.detach().cpu().double()
        u, s, v = torch.linalg.svd(whole, full_matrices=False)
        u, s, v = u[:, -rank:], s[-rank:], v[-rank:]
        sign = u.gather(0, u.abs().argmax(0, keepdim=True)).sign()
        u, v = u * sign, v * sign.T
        with torch.no_grad():
            for parameter, start in ((bank.u, u), (bank.s, s), (bank.v, v)):
                parameter.copy_(start)
        return (whole - (u * s) @ v).to(weight), bank.to(weight)

    def reset_parameters(self) -> None:
        """Start like LoRA: V uniform in ±1/sqrt(D), s ones, U zeros."""
        bound = 1 / math.sqrt(self.v.shape[-1])
        nn.init.uniform_(self.v, -bound, bound)
        nn.init.ones_(self.s)
        nn.init.zeros_(self.u)

    def expert(self, index: int, rows: Tensor) -> Tensor:
        """Expert ``index`` on rows (n, D) → (n, F)."""
        return self._apply_one(rows, self.u[index], self.s[index], self.v[index])

    def each(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Expert e on its own rows[e], for all experts."""
        # unbind, not u[e]: indexing a stacked parameter allocates a full-size gradient per expert.
        parts = zip(rows, self.u.unbind(), self.s.unbind(), self.v.unbind(), strict=True)
        return [self._apply_one(*part) for part in parts]

    def _apply_one(self, rows: Tensor, u: Tensor, s: Tensor, v: Tensor) -> Tensor:
        return F.linear(F.linear(rows, v) * (self.scale * s), u)

    def blend(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Every expert on every row (n, D), mixed by weights (n, E) → (n, F), as two products.

        The weights enter between them, at rank level: ((x V_allᵀ) · s · w) U_allᵀ with V_all (E·r, D) and
        U_all (F, E·r). No answer of a single expert is ever formed.
        """
        experts, rank = self.s.shape
        inner = F.linear(rows, self.v.flatten(0, 1)).reshape(-1, experts, rank)
        inner = inner * (self.scale * self.s) * weight[..., None]
        return F.linear(inner.flatten(1), self.u.transpose(0, 1).flatten(1))

    def prefers_dense(self, tokens: int, choices: int) -> bool:
        """Whether "dense" is the faster way for T tokens of K choices, as measured on a CPU.

        Its cost grows with E·r, that of "sorted" with K copies of each token's wide rows and with E calls.
        """
        ranks, rank = self.s.numel(), self.s.shape[1]
        work = tokens * rank * (self.v.shape[-1] + self.dim_out)
        return ranks <= RANKS_PER_CHOICE * choices or work <= SMALL_EXPERT

    def matrices(self, expert: int) -> dict[str, Tensor]:
        """Views of one expert's u (F, r), s (r,) and v (r, D)."""
        return {"u": self.u[expert], "s": self.s[expert], "v": self.v[expert]}

    def extra_repr(self) -> str:
        """Shows the sizes and the back end in the module's print-out."""
        return f"{super().extra_repr()}, rank={self.s.shape[1]}, scale={self.scale}"

"""Scorers: from tokens (and context) to one logit per expert.

A scorer is a module ``(x, context) → logits`` with an attribute ``num_experts``. It sees ``x`` unflattened, one row per
decision. Half precision is raised to fp32, weights included, because rounded logits take other experts; a GRU runs in
the precision of its weights.

Shapes: ... any leading dimensions, D width of a token, E experts, W width of the space of a cosine, H hidden state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.moe.precision import raised
from zoo.moe.routing import Context


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """What ``layer(x)`` is before its precision rounds it."""
    return F.linear(raised(x), raised(layer.weight), None if layer.bias is None else raised(layer.bias))


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")


class LinearScorer(nn.Module):
    """logits = W x + b, the router of most Mixture-of-Experts models.

    Args:
        dim: width D of a token.
        num_experts: E.
        bias: whether to learn b.
    """

    def __init__(self, dim: int, num_experts: int, bias: bool = False) -> None:
        super().__init__()
        _check_sizes(dim=dim, num_experts=num_experts)
        self.num_experts = num_experts
        self.out = nn.Linear(dim, num_experts, bias=bias)
        nn.init.normal_(self.out.weight, std=0.02)
        if self.out.bias is not None:
            nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Score tokens (..., D); returns (..., E)."""
        return _linear(self.out, x)


class CosineScorer(nn.Module):
    """logits = s · cos(W x, d_e): compares the direction of a token with one direction per expert.

    The length of a token has no say, and logits cannot grow beyond s. The learned s = limit · sigmoid(a) stays in
    (0, limit) and can always come back; a clamp would hold it at its bound for good. A token of length zero has no
    direction: its logits are zero.

    Args:
        dim: width D of a token.
        num_experts: E.
        width: width W of the low space that tokens are projected to; None compares them as they are, without W.
        scale: s at the start; 1 / s is the temperature of the papers.
        limit: what s stays below.

    Attributes:
        directions: (E, W), learned; only their direction counts.

    Reference: X-MoE (arXiv 2204.09179, sec. 3), which projects to W = E / 2; start and limit of s as in Tutel.
    """

    def __init__(
        self, dim: int, num_experts: int, width: int | None = None, scale: float = 2.0, limit: float = 100.0
    ) -> None:
        super().__init__()
        space = dim if width is None else width
        _check_sizes(dim=dim, num_experts=num_experts, width=space)
        if not 0 < scale < limit:
            raise ValueError(f"scale={scale} must lie between 0 and limit={limit}")
        self.num_experts, self.limit = num_experts, limit
        self.project = None if width is None else nn.Linear(dim, width, bias=False)
        self.directions = nn.Parameter(torch.randn(num_experts, space))
        # One entry and not a scalar, which FSDP2 cannot shard.
        self.scale_logit = nn.Parameter(torch.tensor([math.log(scale / (limit - scale))]))

    @property
    def scale(self) -> Tensor:
        """(1,): the present s."""
        return self.limit * raised(self.scale_logit).sigmoid()

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Score tokens (..., D); returns (..., E)."""
        x = raised(x) if self.project is None else _linear(self.project, x)
        return self.scale * F.linear(_unit(x), _unit(raised(self.directions)))


def _unit(x: Tensor) -> Tensor:
    """The direction of x (..., W); zero, with a tame gradient, where x is too short to have one."""
    length = x.norm(dim=-1, keepdim=True)
    return x / torch.where(length > 1e-6, length, 1.0)


class IdentityScorer(nn.Module):
    """Content plus identity: logits = W (x + u_m) + v_m for a token with the tag m, such as a modality or a task.

    In function the tag shifts the logits either way, by W u_m or by v_m; they learn at different paces. The source has
    two vectors, e_m + b_m, in the place of u_m: they only occur as their sum, so one is enough. Both start at zero: the
    scorer starts as a :class:`LinearScorer`.

    Args:
        dim: width D of a token.
        num_experts: E.
        num_ids: number of tags; ``context.ids`` (...) holds 0..num_ids-1 for each token.
        signal: where the tag acts: "hidden" (u), "logit" (v), "both", or "none", which reads no tags.

    Reference: MM-Spectrum (arXiv 2608.27286), hidden signal in the paper, logit signal in its code.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        num_ids: int,
        signal: Literal["hidden", "logit", "both", "none"] = "hidden",
    ) -> None:
        super().__init__()
        _check_sizes(num_ids=num_ids)
        if signal not in ("hidden", "logit", "both", "none"):
            raise ValueError(f"signal={signal!r} must be 'hidden', 'logit', 'both' or 'none'")
        self.num_experts, self.num_ids = num_experts, num_ids
        self.content = LinearScorer(dim, num_experts)
        self.hidden = nn.Parameter(torch.zeros(num_ids, dim)) if signal in ("hidden", "both") else None
        self.logit = nn.Parameter(torch.zeros(num_ids, num_experts)) if signal in ("logit", "both") else None

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Score tokens (..., D) with tags ``context.ids`` (...); returns (..., E).

        Raises:
            ValueError: the tags are missing, of another shape than the tokens, or out of range.
        """
        if self.hidden is None and self.logit is None:
            return self.content(x)  # type: ignore[no-any-return]
        ids = self._ids(x, context)
        if self.hidden is not None:
            x = raised(x) + F.embedding(ids, raised(self.hidden))
        logits: Tensor = self.content(x)
        return logits if self.logit is None else logits + F.embedding(ids, raised(self.logit))

    def _ids(self, x: Tensor, context: Context | None) -> Tensor:
        ids = None if context is None else context.ids
        if ids is None or ids.dtype not in (torch.int32, torch.int64) or ids.shape != x.shape[:-1]:
            found = None if ids is None else f"{ids.dtype} of shape {tuple(ids.shape)}"
            raise ValueError(f"context.ids must be integers of shape {tuple(x.shape[:-1])}, not {found}")
        if not torch.compiler.is_compiling() and ids.numel():
            low, high = (int(bound) for bound in torch.aminmax(ids))
            if low < 0 or high >= self.num_ids:
                raise ValueError(f"context.ids lie in {low}..{high}, not in 0..{self.num_ids - 1}")
        return ids


class FeatureScorer(nn.Module):
    """Scores ``context.features`` instead of the tokens: a router that looks at something else than its experts.

    Such as a frozen backbone's features, or the spectrum of a window.

    Args:
        scorer: scores the features (..., F).
    """

    def __init__(self, scorer: nn.Module) -> None:
        super().__init__()
        self.scorer = scorer
        self.num_experts = int(scorer.num_experts)  # type: ignore[arg-type]

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Score ``context.features`` (..., F) in the place of tokens (..., D); returns (..., E).

        Raises:
            ValueError: the features are missing, or of other leading dimensions than the tokens.
        """
        features = None if context is None else context.features
        if features is None or features.shape[:-1] != x.shape[:-1]:
            found = None if features is None else tuple(features.shape)
            raise ValueError(f"context.features must be of shape {(*x.shape[:-1], '...')}, not {found}")
        logits: Tensor = self.scorer(features, context)
        return logits


class BlendScorer(nn.Module):
    """A fixed blend of scorers: Σ_i w_i · logits_i, or log Σ_i w_i · softmax(logits_i).

    A blend of logits is a product of distributions, where each scorer can veto an expert; a blend of distributions is
    their mean, where each can propose one.

    Args:
        scorers: of one number of experts.
        weights: one positive weight w_i each; for "probs" they sum to 1.
        on: blend "logits" or distributions ("probs").
    """

    def __init__(
        self,
        scorers: Sequence[nn.Module],
        weights: Sequence[float],
        on: Literal["logits", "probs"] = "logits",
    ) -> None:
        super().__init__()
        experts = [int(scorer.num_experts) for scorer in scorers]  # type: ignore[arg-type]
        if not experts or len(set(experts)) != 1:
            raise ValueError(f"a blend needs scorers of one number of experts, not of {experts}")
        if len(weights) != len(experts) or not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"weights={list(weights)} must be {len(experts)} positive numbers")
        if on not in ("logits", "probs"):
            raise ValueError(f"on={on!r} must be 'logits' or 'probs'")
        if on == "probs" and not math.isclose(sum(weights), 1.0, rel_tol=1e-6):
            raise ValueError(
                f"weights={list(weights)} of a blend of probs must sum to 1, not to {sum(weights)}"
            )
        self.num_experts = experts[0]
        self.scorers = nn.ModuleList(scorers)
        self.weights, self.on = tuple(weights), on

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Score tokens (..., D); returns (..., E)."""
        parts = torch.stack([raised(scorer(x, context)) for scorer in self.scorers])
        weight = parts.new_tensor(self.weights).reshape(-1, *(1,) * (parts.ndim - 1))
        if self.on == "logits":
            return (weight * parts).sum(0)
        return (weight.log() + parts.log_softmax(-1)).logsumexp(0)

    def extra_repr(self) -> str:
        """Shows the settings in the module's print-out."""
        return f"weights={self.weights}, on={self.on}"


class RecurrentScorer(nn.Module):
    """A router with memory: a GRU reads the tokens in order and its state is scored.

    u_p = dropout(relu(norm(W x_p))),  h_p = GRU(u_p, h_{p-1}),  logits = V relu(U h_p)

    The order is the second-last dimension of x (..., P, D). The state starts at zero for every sequence, so a
    sequence's routing depends on no other sequence. An optional ``memory`` module rewrites the states before
    they are scored: it is called as ``memory(states, context)`` with states (..., P, H).

    Args:
        dim: width D of a token.
        num_experts: E.
        hidden: width H of the recurrent state.
        dropout: on the GRU's input and on the scoring layer.
        memory: module that maps states and context to states, such as a repository of known situations.

    Reference: temporal-memory router of Dynamic TMoE (arXiv 2605.20678).
    """

    def __init__(
        self, dim: int, num_experts: int, hidden: int, dropout: float = 0.0, memory: nn.Module | None = None
    ) -> None:
        super().__init__()
        _check_sizes(dim=dim, num_experts=num_experts, hidden=hidden)
        self.num_experts = num_experts
        self.hidden = hidden
        self.project = nn.Linear(dim, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(dropout)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.inner = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, num_experts)
        nn.init.zeros_(self.out.bias)
        self.memory = memory

    def states(self, x: Tensor) -> Tensor:
        """The recurrent states (..., P, H) of tokens x (..., P, D), before any memory rewrites them."""
        u: Tensor = self.dropout(F.relu(self.norm(self.project(x.to(self.project.weight.dtype)))))
        if u.numel() == 0:
            # A GRU takes nothing empty: one step, of which nothing is kept, gives its weights zero gradients.
            states, _ = self.gru(u.new_zeros(1, 1, self.hidden))
            return u + torch.as_tensor(states)[:0].reshape(u.shape)
        states, _ = self.gru(u.reshape(-1, *u.shape[-2:]))
        return torch.as_tensor(states).reshape(u.shape)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Score tokens (..., P, D) in order; returns (..., P, E)."""
        states = self.states(x)
        if self.memory is not None:
            states = self.memory(states, context)
        logits: Tensor = self.out(self.dropout(F.relu(self.inner(states))))
        return logits

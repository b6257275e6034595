"""Auxiliary losses: functions of a routing, unweighted, for a task to weigh and add to its own.

Balance is prices × probabilities: Σ_e q_e p̄_e, where p̄ is the mean of the router's distribution and carries the
gradient, and the price q_e grows with the use of expert e and carries none. The losses differ in the price:

* :func:`balance_loss`: E f_e, with f the share of the choices made;
* :func:`importance_loss`: 2 E p̄_e, the gradient of the potential φ(p̄) = E Σ p̄² − 1, which is the loss itself;
* :func:`kl_loss`: log(E p̄_e) + 1, the gradient of φ(p̄) = Σ p̄ log(E p̄);
* :class:`PriceBalance`: the gradient of either potential at a moving average of p̄.

The squared coefficient of variation of the load (Shazeer et al. 2017) is not among them: counts have no gradient, and
its smooth stand-in needs the noise that was drawn, which a routing does not keep. Its gradient with p̄ in the place of f
is twice that of :func:`balance_loss`.

In every loss: a router that decides for groups counts decisions, not tokens; masked decisions are left out, whatever
stands there; E counts the experts that are switched on; without any real decision the loss is 0 and so are its
gradients. Shapes: R decisions, E experts.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from zoo.moe.precision import Fp32Buffers
from zoo.moe.routing import Routing

_FLOOR = 1e-9
"""Least probability whose logarithm is taken."""


def mean_probs(routing: Routing) -> Tensor:
    """p̄ (E,): the router's distribution, averaged over the real decisions; zeros if there are none."""
    probs = _real(routing.probs, routing.mask)
    return probs.mean(0) if probs.shape[0] else probs.sum(0)


def balance_loss(
    routing: Routing, convention: Literal["switch", "hf"] = "switch", counts: Tensor | None = None
) -> Tensor:
    """E · Σ_e f_e p̄_e with f the share of choices, before any is dropped for want of capacity.

    1 when uniform, K by the convention "hf".

    Args:
        routing: one layer's decisions; f is a count and carries no gradient.
        convention: "switch" divides the counts by K (Fedus et al. 2021, eq. 4), "hf" does not.
        counts: (E,) choices per expert to take f from, instead of the routing's own: summed over micro-batches
            or ranks they balance the whole step and leave each part free to specialise (arXiv 2501.11873).

    Raises:
        ValueError: the counts are of another number of experts.
    """
    mean = mean_probs(routing)
    counts = routing.counts(dropped=True) if counts is None else _per_expert("counts", counts, routing)
    counts = counts.to(mean)
    share = counts / counts.sum().clamp_min(1)
    loss = _on(routing).sum() * (share * mean).sum()
    return loss * routing.index.shape[1] if convention == "hf" else loss


def importance_loss(routing: Routing) -> Tensor:
    """E · Σ_e p̄_e² − 1: the squared coefficient of variation of the importance Σ_t p_te; 0 when uniform.

    The importance of an expert is the probability it gathers over all decisions (Shazeer et al. 2017, eq. 6); its mean
    is R / E, its population variance over the squared mean is the loss.
    """
    experts = _on(routing).sum()
    # Less 1 unless there is nothing to balance.
    return experts * mean_probs(routing).square().sum() - experts.clamp_max(1)


def kl_loss(routing: Routing) -> Tensor:
    """Σ_e p̄_e log(E p̄_e): the divergence, in nats, of the mean distribution from the even one; 0 when uniform.

    Reference: LiME (arXiv 2604.02338).
    """
    mean = mean_probs(routing)
    return (mean * _log(_on(routing).sum() * mean)).sum()


def entropy_loss(routing: Routing) -> Tensor:
    """mean_t Σ_e p_te log p_te: the negative of the mean entropy of a decision, in nats.

    Falls, down to −log E, as single decisions become more even; a negative weight sharpens them. That is another aim
    than balance: decisions may be sharp and even in the mean.

    Reference: exploration term of MM-Spectrum.
    """
    probs = _real(routing.probs, routing.mask)
    return (probs * _log(probs)).sum() / max(probs.shape[0], 1)


def cost_loss(routing: Routing, costs: Tensor) -> Tensor:
    """mean_t Σ_e p_te c_e: what a decision is expected to cost.

    Args:
        routing: one layer's decisions.
        costs: (E,) cost of each expert in any unit, such as its hidden width over the mean one.

    Raises:
        ValueError: the costs are of another number of experts.

    Reference: cost term of MM-Spectrum.
    """
    mean = mean_probs(routing)
    # A sum of products and not a dot product, which autocast would take in half precision.
    return (mean * _per_expert("costs", costs, routing).to(mean)).sum()


def z_loss(routing: Routing) -> Tensor:
    """mean_t logsumexp(logits_t)², which keeps logits small (Zoph et al. 2022, eq. 5)."""
    logits = _real(routing.logits, routing.mask)
    if logits.shape[0] == 0:
        return logits.sum()
    return logits.logsumexp(-1).square().mean()


class PriceBalance(Fp32Buffers):
    """φ-balancing: Σ_e q_e p̄_e with prices q = ∇φ(m) at a moving average m of p̄.

    A loss with memory: batches from one domain may be uneven, as long as their average is even.

    m ← (1 − w) m + w p̄,  q_e = log(E m_e) + 1 ("entropy") or 2 E m_e ("square")

    The potentials are scaled such that with w = 1 the gradient is that of :func:`kl_loss` or :func:`importance_loss`.
    A call prices the batch at the average that would follow it and changes nothing; :meth:`update` moves m. So neither
    recomputed activations nor accumulated micro-batches count twice.

    Args:
        num_experts: E.
        potential: φ.
        new_weight: w in (0, 1], the weight of the newest step. The average should span several domains of the data.

    Attributes:
        mean: (E,) m, a buffer in fp32 under every precision: half precision rounds small steps away.

    Raises:
        ValueError: no expert, an unknown potential, or a weight outside (0, 1].

    Reference: φ-balancing (arXiv 2605.15403).
    """

    mean: Tensor

    def __init__(
        self, num_experts: int, potential: Literal["entropy", "square"] = "entropy", new_weight: float = 1.0
    ) -> None:
        super().__init__()
        if num_experts < 1 or not 0 < new_weight <= 1:
            raise ValueError(f"need num_experts={num_experts} >= 1 and new_weight={new_weight} in (0, 1]")
        if potential not in ("entropy", "square"):
            raise ValueError(f"potential={potential!r} must be 'entropy' or 'square'")
        self.potential, self.new_weight = potential, new_weight
        self.register_buffer("mean", torch.full((num_experts,), 1 / num_experts, dtype=torch.float32))

    def forward(self, routing: Routing) -> Tensor:
        """The loss of a routing; its least value is at an even average."""
        mean = mean_probs(routing)
        return (self.prices(mean.detach(), _on(routing)) * mean).sum()

    def prices(self, mean: Tensor, on: Tensor) -> Tensor:
        """The price (E,) of every expert after a step.

        Args:
            mean: (E,) mean probabilities of the step.
            on: (E,) bool, experts that are switched on.
        """
        held = torch.where(on, self.mean, 0.0)
        scaled = on.sum() * torch.lerp(held / held.sum().clamp_min(_FLOOR), mean, self.new_weight)
        return _log(scaled) + 1 if self.potential == "entropy" else 2 * scaled

    @torch.no_grad()
    def update(self, mean: Tensor) -> None:
        """Move the average; once per optimiser step.

        Args:
            mean: (E,) mean probabilities over the whole step, all micro-batches and all ranks (:func:`mean_probs`);
                zeros, of a step without tokens, move nothing.

        Raises:
            ValueError: the probabilities are of another number of experts.
        """
        if mean.shape != self.mean.shape:
            raise ValueError(
                f"probabilities {tuple(mean.shape)} do not fit an average of {tuple(self.mean.shape)}"
            )
        mean = mean.to(self.mean)
        self.mean.copy_(torch.where(mean.any(), torch.lerp(self.mean, mean, self.new_weight), self.mean))

    def extra_repr(self) -> str:
        """Shows the settings in the module's print-out."""
        return f"num_experts={self.mean.shape[0]}, potential={self.potential}, new_weight={self.new_weight}"


def _real(rows: Tensor, mask: Tensor | None) -> Tensor:
    return rows if mask is None else rows[mask]


def _on(routing: Routing) -> Tensor:
    """(E,) bool, experts that are switched on; none without real decisions."""
    return (_real(routing.logits, routing.mask) > -torch.inf).any(0)


def _log(probs: Tensor) -> Tensor:
    return probs.clamp_min(_FLOOR).log()


def _per_expert(name: str, values: Tensor, routing: Routing) -> Tensor:
    if values.shape != (routing.num_experts,):
        raise ValueError(f"{name} {tuple(values.shape)} do not fit {routing.num_experts} experts")
    return values

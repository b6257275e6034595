"""The anomaly repository: router states of situations that the model has met and been wrong about."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.moe import Context


class AnomalyRepository(nn.Module):
    """A bounded memory of (signature, router state) pairs, written between epochs and read in every forward pass.

    Where a sequence's signature resembles a stored one, the router's states are drawn to the stored state:

        h' = a h + (1 - a) h_ref,   a = sigmoid(f([h; h_ref]))

    Reading never writes: inference leaves every buffer as it was.

    Args:
        signature: length S of a signature.
        hidden: width H of the router's state.
        capacity: entries kept per regime.
        regimes: regimes kept; a later one overwrites the oldest.
        threshold: cosine similarity from which a stored entry counts as the same situation.

    Attributes:
        signatures: (regimes · capacity, S), unit length.
        states: (regimes · capacity, H).
        filled: (regimes · capacity,) bool.
    """

    signatures: Tensor
    states: Tensor
    filled: Tensor

    def __init__(
        self, signature: int, hidden: int, capacity: int = 10, regimes: int = 8, threshold: float = 0.9
    ) -> None:
        super().__init__()
        if not -1.0 < threshold < 1.0:
            raise ValueError(f"threshold={threshold} must lie between -1 and 1")
        self.capacity, self.regimes, self.threshold = capacity, regimes, threshold
        self.register_buffer("signatures", torch.zeros(regimes * capacity, signature))
        self.register_buffer("states", torch.zeros(regimes * capacity, hidden))
        self.register_buffer("filled", torch.zeros(regimes * capacity, dtype=torch.bool))
        self.fuse = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.GELU(), nn.Linear(hidden, 1))
        # Starts by trusting the present: sigmoid(2) = 0.88.
        last = self.fuse[-1]
        nn.init.constant_(last.bias, 2.0)  # type: ignore[arg-type]

    def write(self, regime: int, signatures: Tensor, states: Tensor) -> None:
        """Replace a regime's entries by up to ``capacity`` pairs: signatures (n, S), states (n, H)."""
        count = min(len(signatures), self.capacity)
        start = (regime % self.regimes) * self.capacity
        block = slice(start, start + count)
        with torch.no_grad():
            self.filled[start : start + self.capacity] = False
            self.signatures[block] = F.normalize(signatures[:count], dim=-1)
            self.states[block] = states[:count]
            self.filled[block] = True

    def recall(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """The best stored state for signatures (..., S): state (..., H) and whether it is a match (...)."""
        similarity = F.normalize(features, dim=-1) @ self.signatures.T
        similarity = similarity.masked_fill(~self.filled, -torch.inf)
        best, entry = similarity.max(-1)
        return self.states[entry], best >= self.threshold

    def forward(self, states: Tensor, context: Context | None) -> Tensor:
        """Rewrite states (..., P, H) of the sequences whose signature ``context.features`` (..., S) is known."""
        if context is None or context.features is None:
            raise ValueError("the repository needs context.features, the signatures of the sequences")
        reference, match = self.recall(context.features)
        reference = reference[..., None, :].expand_as(states)
        keep = torch.sigmoid(self.fuse(torch.cat([states, reference], dim=-1)))
        return torch.where(match[..., None, None], keep * states + (1 - keep) * reference, states)

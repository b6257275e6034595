"""The shared Mixture-of-Experts layer: router, experts, dispatch, losses and statistics.

``x, context → Router (scorer ► selector ► gate) → Routing → experts → combine (+ shared) → y``

Plain PyTorch: nothing here knows Lightning, a domain, or the rest of the zoo.
"""

from zoo.moe.experts import ExpertBank, ExpertPool, FeedForwardExperts, FieldExperts
from zoo.moe.layer import MoE
from zoo.moe.losses import balance_loss, z_loss
from zoo.moe.router import Router, SoftmaxGate
from zoo.moe.routing import Context, MoEOutput, Routing
from zoo.moe.scorers import LinearScorer, RecurrentScorer
from zoo.moe.selectors import Dense, TopK
from zoo.moe.stats import RouterStats
from zoo.moe.twin import DenseMixture

__all__ = [
    "Context",
    "Dense",
    "DenseMixture",
    "ExpertBank",
    "ExpertPool",
    "FeedForwardExperts",
    "FieldExperts",
    "LinearScorer",
    "MoE",
    "MoEOutput",
    "RecurrentScorer",
    "Router",
    "RouterStats",
    "Routing",
    "SoftmaxGate",
    "TopK",
    "balance_loss",
    "z_loss",
]

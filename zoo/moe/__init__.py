"""The shared Mixture-of-Experts layer: router, experts, dispatch, losses and statistics.

``x, context → Router (scorer ► transform ► selectors ► gate) → Routing → experts → combine (+ shared) → y``

Plain PyTorch: nothing here knows Lightning, a domain, or the rest of the zoo.
"""

from zoo.moe.bias import SelectionBias
from zoo.moe.collector import Slot, collect, push
from zoo.moe.expert_list import ExpertList, ZeroExpert
from zoo.moe.experts import ExpertBank, TokenExperts
from zoo.moe.feedforward import FeedForwardExperts
from zoo.moe.field import ExpertPool, FieldExperts
from zoo.moe.flops import Cost, cost
from zoo.moe.gates import SigmoidGate, SoftmaxGate, UnweightedGate
from zoo.moe.groups import PerGroup, PerSample, PerSequence, PerWindow
from zoo.moe.layer import GatedShared, MoE
from zoo.moe.losses import (
    PriceBalance,
    balance_loss,
    cost_loss,
    entropy_loss,
    importance_loss,
    kl_loss,
    z_loss,
)
from zoo.moe.lowrank import LowRankExperts
from zoo.moe.router import Router
from zoo.moe.routing import Choices, Context, MoEOutput, Routing
from zoo.moe.scorers import (
    BlendScorer,
    CosineScorer,
    FeatureScorer,
    IdentityScorer,
    LinearScorer,
    RecurrentScorer,
)
from zoo.moe.selectors import Capacity, Dense, ExpertChoice, Fixed, RelativeThreshold, Selection, TopK
from zoo.moe.soft import SoftMoE
from zoo.moe.stats import RouterStats
from zoo.moe.transforms import GaussianNoise, Jitter, Temperature
from zoo.moe.twin import DenseFeedForward, DenseMixture

__all__ = [
    "BlendScorer",
    "Capacity",
    "Choices",
    "Context",
    "CosineScorer",
    "Cost",
    "Dense",
    "DenseFeedForward",
    "DenseMixture",
    "ExpertBank",
    "ExpertChoice",
    "ExpertList",
    "ExpertPool",
    "FeatureScorer",
    "FeedForwardExperts",
    "FieldExperts",
    "Fixed",
    "GatedShared",
    "GaussianNoise",
    "IdentityScorer",
    "Jitter",
    "LinearScorer",
    "LowRankExperts",
    "MoE",
    "MoEOutput",
    "PerGroup",
    "PerSample",
    "PerSequence",
    "PerWindow",
    "PriceBalance",
    "RecurrentScorer",
    "RelativeThreshold",
    "Router",
    "RouterStats",
    "Routing",
    "Selection",
    "SelectionBias",
    "SigmoidGate",
    "Slot",
    "SoftMoE",
    "SoftmaxGate",
    "Temperature",
    "TokenExperts",
    "TopK",
    "UnweightedGate",
    "ZeroExpert",
    "balance_loss",
    "collect",
    "cost",
    "cost_loss",
    "entropy_loss",
    "importance_loss",
    "kl_loss",
    "push",
    "z_loss",
]

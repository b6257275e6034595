"""Small examples with numbers worked out by hand, each through a whole layer.

A token is (value, logit of expert 0, logit of expert 1, ..., 0, ..., 1), 16 wide: the router reads the logits off it,
and the experts scale the value, so that x.grad holds the gradients of the logits one by one. Two numbers agree if they
differ by at most 1e-6 of the larger of one and the greatest expected value, in bf16 by 2e-2.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from pytorch_lightning.plugins.precision import HalfPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from zoo.moe import (
    Capacity,
    Choices,
    Context,
    Dense,
    ExpertChoice,
    FeedForwardExperts,
    LinearScorer,
    MoE,
    MoEOutput,
    Router,
    RouterStats,
    SelectionBias,
    SigmoidGate,
    SoftmaxGate,
    TokenExperts,
    TopK,
    UnweightedGate,
    balance_loss,
    z_loss,
)
from zoo.moe.expert_list import ExpertList, ZeroExpert
from zoo.moe.layer import GatedShared
from zoo.moe.lowrank import LowRankExperts
from zoo.moe.soft import SoftMoE
from zoo.nn import checkpoint

ROOT = Path(__file__).parents[3]
WIDTH = 16
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
LN = [math.log(p) for p in (1, 2, 5)]
"""Logits whose softmax is 1/8, 2/8 and 5/8."""

Run = Callable[..., MoEOutput]

every_way = pytest.mark.parametrize("way", [*FeedForwardExperts.backends, "compiled"])
every_backend = pytest.mark.parametrize("backend", FeedForwardExperts.backends)


def in_every_way(names: Sequence[str], settings: Sequence[tuple[object, ...]]) -> pytest.MarkDecorator:
    """All settings on all back ends; compiled, which takes a second each time, the last setting alone."""
    eager = [(backend, *setting) for backend in FeedForwardExperts.backends for setting in settings]
    return pytest.mark.parametrize(("way", *names), [*eager, ("compiled", *settings[-1])])


def token(value: float, logits: Sequence[float]) -> list[float]:
    return [value, *logits, *[0.0] * (WIDTH - 2 - len(logits)), 1.0]


def answer(value: float) -> list[float]:
    return [value, *[0.0] * (WIDTH - 1)]


def tokens(values: Sequence[float], logits: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([token(*row) for row in zip(values, logits, strict=True)])


def logs(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Logits whose softmax is the given distribution."""
    return [[math.log(p) for p in row] for row in rows]


def reader(experts: int) -> LinearScorer:
    """A scorer that reads the logits off a token."""
    scorer = LinearScorer(WIDTH, experts)
    with torch.no_grad():
        scorer.out.weight.copy_(torch.eye(WIDTH)[1 : experts + 1])
    return scorer


def scaling(factors: Sequence[float], activation: str = "gelu") -> FeedForwardExperts:
    """Experts x → factor · x on the value of a token, exact from 1 on: there gelu(8 x) is 8 x in single precision."""
    bank = FeedForwardExperts(WIDTH, 8, len(factors), activation)
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter.zero_()
        scale = torch.tensor(factors)
        if activation == "gelu":
            bank.up[:, 0, 0] = 8.0
            bank.down[:, 0, 0] = scale / 8
        else:
            # A gate that the constant entry of a token holds open.
            bank.up[:, 0, -1] = 1.0
            bank.up[:, 8, 0] = 1.0
            bank.down[:, 0, 0] = scale / F.silu(torch.ones(()))
    return bank


def random_layer(way: str, experts: int = 4, k: int = 2, channels_dim: int = -1) -> MoE:
    """A layer with biases where the back end knows them."""
    torch.manual_seed(0)
    scorer = LinearScorer(WIDTH, experts)
    nn.init.normal_(scorer.out.weight)
    bank = FeedForwardExperts(WIDTH, 8, experts, "swiglu", bias=way != "grouped")
    return MoE(Router(scorer, TopK(k)), bank, channels_dim=channels_dim)


def going(layer: MoE | SoftMoE, way: str) -> Run:
    """The layer on a back end, or compiled as one graph, which takes the dense one."""
    if way == "compiled":
        torch._dynamo.reset()
        return torch.compile(layer, fullgraph=True, backend="aot_eager")
    layer.experts.backend = way
    return layer


def assert_agrees(a: Tensor, b: Tensor | Sequence[float], dtype: torch.dtype = torch.float32) -> None:
    a, b = a.detach().float(), torch.as_tensor(b).detach().float()
    assert a.shape == b.shape
    if a.numel():
        assert float((a - b).abs().max()) <= TOLERANCE[dtype] * max(1.0, float(b.abs().max()))


def gradients(layer: nn.Module) -> list[Tensor]:
    """Of all parameters, which must all have one."""
    return [parameter.grad.clone() for parameter in layer.parameters()]


# 1. Top-k softmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@in_every_way(
    ("k", "renormalize", "index", "weight", "y", "gradient"),
    [
        (2, True, [2, 1], [5 / 7, 2 / 7], 19.0, [0.0, -10 / 7, 10 / 7]),
        (2, False, [2, 1], [5 / 8, 2 / 8], 16.625, None),
        (1, False, [2], [5 / 8], 13.125, [-1.640625, -3.28125, 4.921875]),
    ],
)
def test_top_k_softmax(way, activation, dtype, k, renormalize, index, weight, y, gradient):
    """Probabilities 1/8, 2/8, 5/8; experts x, 2x, 3x of x = 7 answer 7, 14, 21.

    k=2 renormalised: 5/7 · 21 + 2/7 · 14 = 19, and the logits get (0, 2/7 · (14 − 19), 5/7 · (21 − 19)). k=2 plain:
    5/8 · 21 + 2/8 · 14 = 16.625. k=1 plain: 5/8 · 21 = 13.125, and the logits get 21 · 5/8 · (δ − p). The weights get
    what the chosen experts answer, 21 and 14.
    """
    layer = MoE(Router(reader(3), TopK(k), SoftmaxGate(renormalize)), scaling([1, 2, 3], activation)).to(
        dtype
    )
    x = tokens([7.0], [LN]).to(dtype).requires_grad_()
    out = going(layer, way)(x)
    assert out.routing.index.tolist() == [index]
    assert_agrees(out.routing.probs, [[1 / 8, 2 / 8, 5 / 8]], dtype)
    assert_agrees(out.routing.weight, [weight], dtype)
    assert out.y.dtype == dtype
    assert_agrees(out.y, [answer(y)], dtype)
    if way != "compiled":
        out.routing.weight.retain_grad()
    out.y.sum().backward()
    if gradient is not None:
        assert_agrees(x.grad[0, 1:4], gradient, dtype)
    if renormalize:
        assert float(x.grad[0, 1]) == 0.0
    if way != "compiled":
        assert_agrees(out.routing.weight.grad, [[21.0, 14.0][:k]], dtype)


@every_backend
def test_one_renormalised_choice_answers_21_and_teaches_the_router_nothing(backend):
    """Weight 1 on expert 2: 21, and a gradient of (0, 0, 0); so the combination is refused at construction."""
    with pytest.raises(ValueError, match=r"top_k=1 with renormalised weights trains no router"):
        Router(reader(3), TopK(1))
    x = tokens([7.0], [LN])
    router = Router(reader(3), TopK(1), SoftmaxGate(renormalize=False))
    routing = router(x)
    logits = torch.tensor([LN], requires_grad=True)
    weight = SoftmaxGate(renormalize=True)(logits, logits.softmax(-1), routing.index, None)
    assert weight.tolist() == [[1.0]]
    bank = scaling([1, 2, 3])
    bank.backend = backend
    y = bank(x, type(routing)(**{**vars(routing), "weight": weight}))
    assert_agrees(y, [answer(21.0)])
    y.sum().backward()
    assert torch.equal(logits.grad, torch.zeros(1, 3))


def test_an_exported_layer_computes_the_same():
    """The first example, 19, and a mask of its second token, out of an exported graph."""

    class Answer(nn.Module):
        def __init__(self, layer: MoE) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layer(x, mask).y

    layer = MoE(Router(reader(3), TopK(2)), scaling([1, 2, 3]))
    example = (torch.randn(2, WIDTH), torch.ones(2, dtype=torch.bool))
    exported = torch.export.export(Answer(layer), example).module()
    x = tokens([7.0, 5.0], [LN, LN[::-1]])
    assert_agrees(exported(x, torch.tensor([True, False])), [answer(19.0), answer(0.0)])
    # Reversed logits: experts 0 and 1 answer 5 and 10.
    assert_agrees(exported(x, torch.tensor([True, True])), [answer(19.0), answer(5 / 7 * 5 + 2 / 7 * 10)])


# 2. and 3. Balance loss and z-loss

FOUR = logs([(0.9, 0.1), (0.6, 0.4), (0.2, 0.8), (0.7, 0.3)])


def switch_layer() -> MoE:
    return MoE(Router(reader(2), TopK(1), SoftmaxGate(renormalize=False)), scaling([1, 2]))


@every_way
def test_the_balance_loss_of_four_tokens_and_of_three_under_a_mask(way):
    """Probabilities (.9, .1) (.6, .4) (.2, .8) (.7, .3), E=2, k=1.

    Shares (3/4, 1/4), means (.6, .4): 2 · (.45 + .1) = 1.1, and each row of probabilities gets E f / T = (.375, .125).
    Without token 3: shares (2/3, 1/3), means (1.7/3, 1.3/3): 9.4/9 = 1.0444444; row 3 gets (0, 0), and no bit changes
    with what stands there.
    """
    run = going(switch_layer(), way)
    out = run(tokens([1.0] * 4, FOUR))
    loss = balance_loss(out.routing)
    assert_agrees(loss, 1.1)
    (gradient,) = torch.autograd.grad(loss, out.routing.probs)
    assert_agrees(gradient, [[0.375, 0.125]] * 4)

    mask = torch.tensor([True, True, True, False])
    x = tokens([1.0] * 4, FOUR)
    out = run(x, mask)
    loss = balance_loss(out.routing)
    assert_agrees(loss, 9.4 / 9)
    (gradient,) = torch.autograd.grad(loss, out.routing.probs)
    assert_agrees(gradient[:3], [[2 * 2 / 3 / 3, 2 * 1 / 3 / 3]] * 3)
    assert torch.equal(gradient[3], torch.zeros(2))
    for rubbish in (1e30, -1e30, 0.0):
        x[3] = rubbish
        assert torch.equal(balance_loss(run(x, mask).routing), loss)


@every_backend
def test_the_balance_loss_of_two_choices_is_divided_by_two(backend):
    """E=4, k=2, even probabilities, tokens that choose {0, 1} and {2, 3}: 1, and 2 in the convention of "hf"."""
    layer = MoE(Router(reader(4), TopK(2)), scaling([1, 2, 3, 4]))
    chosen = Choices(index=torch.tensor([[0, 1], [2, 3]]), valid=torch.ones(2, 2, dtype=torch.bool))
    out = going(layer, backend)(tokens([1.0, 1.0], [[0.0] * 4] * 2), None, Context(choices=chosen))
    assert_agrees(out.y, [answer(1.5), answer(3.5)])
    assert_agrees(balance_loss(out.routing), 1.0)
    assert_agrees(balance_loss(out.routing, convention="hf"), 2.0)


@every_backend
@pytest.mark.parametrize("count", [0, 3])
def test_without_real_tokens_losses_and_gradients_are_zeros(backend, count):
    """T=0, or every token masked: losses 0.0, gradients 0, no NaN."""
    layer = random_layer(backend)
    x = torch.randn(count, WIDTH, requires_grad=True)
    out = going(layer, backend)(x, torch.zeros(count, dtype=torch.bool))
    losses = [balance_loss(out.routing), z_loss(out.routing)]
    assert [float(loss.detach()) for loss in losses] == [0.0, 0.0]
    assert torch.equal(out.y, torch.zeros(count, WIDTH))
    (out.y.sum() + sum(losses)).backward()
    for gradient in (x.grad, *gradients(layer)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@every_way
def test_the_z_loss_of_two_tokens_and_of_one_under_a_mask(way):
    """Logits (0, 0) and (ln 3, 0): log-sum-exps ln 2 and ln 4, mean square 1.2011325; the first alone 0.4804530."""
    run = going(switch_layer(), way)
    x = tokens([1.0, 1.0], [[0.0, 0.0], [math.log(3), 0.0]])
    assert_agrees(z_loss(run(x).routing), 1.2011325)
    assert_agrees(z_loss(run(x, torch.tensor([True, False])).routing), 0.4804530)


# 4. Loss-free bias


def biased_layer(experts: int, centre: bool = False) -> MoE:
    bias = SelectionBias(experts, rate=0.1, centre=centre)
    router = Router(reader(experts), TopK(1), SoftmaxGate(renormalize=False), bias=bias)
    return MoE(router, scaling(range(1, experts + 1)))


def visiting(counts: Sequence[int]) -> Tensor:
    """Tokens of which the given numbers prefer each expert."""
    preferred = [expert for expert, count in enumerate(counts) for _ in range(count)]
    return tokens([1.0] * len(preferred), (5 * torch.eye(len(counts)))[preferred].tolist())


@in_every_way(["scale"], [(1.0,), (2.5,)])
def test_the_bias_moves_choices_but_not_weights(way, scale):
    """Sigmoids (.6, .5, .4), bias (−.3, 0, .2): biased (.3, .5, .6), so experts 2 and 1.

    Weights from the raw sigmoids: .4/.9 and .5/.9, times the scale: 1.1111111 and 1.3888889 at 2.5. Of x = 7 the answer
    is (4/9 · 21 + 5/9 · 14) · scale.
    """
    bias = SelectionBias(3)
    bias.bias.copy_(torch.tensor([-0.3, 0.0, 0.2]))
    router = Router(reader(3), TopK(2), SigmoidGate(scale=scale), bias=bias)
    layer = MoE(router, scaling([1, 2, 3]))
    out = going(layer, way)(tokens([7.0], torch.tensor([[0.6, 0.5, 0.4]]).logit().tolist()).requires_grad_())
    assert out.routing.index.tolist() == [[2, 1]]
    assert_agrees(out.routing.weight, [[scale * 4 / 9, scale * 5 / 9]])
    assert_agrees(out.y, [answer(scale * (4 / 9 * 21 + 5 / 9 * 14))])
    out.y.sum().backward()
    assert bias.bias.grad is None
    assert not list(bias.parameters())
    assert "router.bias.bias" in layer.state_dict()


@pytest.mark.parametrize(
    "cast",
    [lambda layer: layer.bfloat16(), HalfPrecision("bf16-true").convert_module],
    ids=["torch", "lightning"],
)
def test_the_bias_stays_in_single_precision(cast):
    """1/3 has no equal in bf16: it must survive the cast to the bit."""
    layer = biased_layer(3)
    layer.router.bias.bias.fill_(1 / 3)
    cast(layer)
    assert layer.experts.up.dtype == torch.bfloat16
    assert layer.router.bias.bias.dtype == torch.float32
    assert torch.equal(layer.router.bias.bias, torch.full((3,), 1 / 3))


@every_backend
@pytest.mark.parametrize(
    ("counts", "centre", "step"),
    [
        ([6, 2, 0, 4], False, [-0.1, 0.1, 0.1, -0.1]),
        ([9, 1, 1, 1], False, [-0.1, 0.1, 0.1, 0.1]),
        ([9, 1, 1, 1], True, [-0.15, 0.05, 0.05, 0.05]),
    ],
)
def test_an_update_moves_the_bias_against_the_load(backend, counts, centre, step):
    """Rate .1, counts (6, 2, 0, 4) of mean 3: (−.1, +.1, +.1, −.1); (9, 1, 1, 1) centred: less its mean .05."""
    layer = biased_layer(4, centre)
    out = going(layer, backend)(visiting(counts))
    assert out.routing.counts().tolist() == counts
    layer.router.bias.update(out.routing.counts())
    assert_agrees(layer.router.bias.bias, step)


@every_backend
def test_micro_batches_that_are_even_together_leave_the_bias_alone(backend):
    """Counts (4, 0) and (0, 4) sum to (4, 4): one update by (0, 0), where each alone would move it by .1."""
    layer = biased_layer(2)
    run = going(layer, backend)
    counts = run(visiting([4, 0])).routing.counts() + run(visiting([0, 4])).routing.counts()
    layer.router.bias.update(counts)
    assert layer.router.bias.bias.tolist() == [0.0, 0.0]
    layer.router.bias.update(run(visiting([4, 0])).routing.counts())
    assert_agrees(layer.router.bias.bias, [-0.1, 0.1])


@every_backend
def test_recomputed_activations_change_neither_counts_nor_gradients(backend):
    """Under checkpointing a layer runs twice: 10 tokens with 2 choices are 20 choices, not 40; no gradient moves."""
    runs = 0

    def one_pass(recompute: bool) -> tuple[Tensor, list[Tensor]]:
        nonlocal runs
        layer = random_layer(backend)
        layer.router.bias = SelectionBias(4)
        layer.experts.backend = backend

        def block(x: Tensor) -> MoEOutput:
            nonlocal runs
            runs += 1
            return layer(x)

        x = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = checkpoint(block, x) if recompute else block(x)
        (out.y.square().sum() + balance_loss(out.routing) + z_loss(out.routing)).backward()
        return out.routing.counts(), [x.grad, *gradients(layer)]

    counts, plain = one_pass(recompute=False)
    again, recomputed = one_pass(recompute=True)
    assert runs == 1 + 2
    assert int(again.sum()) == 20
    assert torch.equal(counts, again)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@every_backend
def test_a_call_leaves_no_state_behind(backend):
    """In training, in evaluation and without gradients: bias and every other entry of the state are as before."""
    layer = biased_layer(2)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    run = going(layer, backend)
    for training in (True, False):
        layer.train(training)
        run(visiting([3, 1])).y.sum().backward()
        with torch.no_grad():
            run(visiting([3, 1]))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


# 5. Empty expert, no tokens, one expert for all


@in_every_way(["activation"], [("gelu",), ("swiglu",)])
def test_one_expert_for_all_tokens_is_a_plain_network(way, activation):
    """E=3, k=1, all six tokens on expert 0 with weight 1: its own network, and exact zeros for experts 1 and 2."""
    torch.manual_seed(0)
    bias = way != "grouped"
    layer = MoE(
        Router(reader(3), TopK(1), UnweightedGate()), FeedForwardExperts(WIDTH, 8, 3, activation, bias)
    )
    x = torch.randn(6, WIDTH)
    x[:, 1:4] = torch.tensor([10.0, 0.0, 0.0])
    out = going(layer, way)(x)
    bank = layer.experts
    up_bias, down_bias = (bank.up_bias[0], bank.down_bias[0]) if bias else (None, None)
    hidden = F.linear(x, bank.up[0], up_bias)
    hidden = F.gelu(hidden) if activation == "gelu" else F.silu(hidden[:, :8]) * hidden[:, 8:]
    assert out.routing.counts().tolist() == [6, 0, 0]
    assert_agrees(out.y, F.linear(hidden, bank.down[0], down_bias))
    out.y.square().sum().backward()
    for parameter in bank.parameters():
        assert parameter.grad.isfinite().all()
        assert parameter.grad[0].abs().max() > 0
        assert torch.equal(parameter.grad[1:], torch.zeros_like(parameter.grad[1:]))


@every_way
def test_no_tokens_at_all(way):
    """T=0: an answer of shape (0, 16), zero gradients and losses of 0.0."""
    layer = random_layer(way)
    out = going(layer, way)(torch.randn(0, WIDTH))
    assert out.y.shape == (0, WIDTH)
    losses = balance_loss(out.routing) + z_loss(out.routing)
    assert float(losses.detach()) == 0.0
    (out.y.sum() + losses).backward()
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients(layer))


def mixed_bank() -> ExpertList:
    """Three experts of different kinds and sizes."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH))
    return ExpertList([nn.Linear(WIDTH, WIDTH), network, nn.Linear(WIDTH, WIDTH, bias=False)], WIDTH)


@pytest.mark.parametrize("way", [*ExpertList.backends, "compiled"])
def test_idle_experts_of_different_kinds_get_zero_gradients(way):
    """All tokens on expert 0 of three: the parameters of the two others have gradients of exact zeros, not None."""
    layer = MoE(Router(reader(3), TopK(1), SoftmaxGate(renormalize=False)), mixed_bank())
    going(layer, way)(visiting([5, 0, 0])).y.square().sum().backward()
    busy, *idle = layer.experts.experts
    assert all(parameter.grad.abs().max() > 0 for parameter in busy.parameters())
    for expert in idle:
        assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients(expert))


TWO_RANKS = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from zoo.moe import FeedForwardExperts, LinearScorer, MoE, Router, SelectionBias, SoftmaxGate, TopK
from zoo.moe.expert_list import ExpertList

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
small = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 4))
banks = [ExpertList([nn.Linear(4, 4), small, nn.Identity()], 4), FeedForwardExperts(4, 8, 3)]
for bank in banks:
    scorer = LinearScorer(4, 3)
    with torch.no_grad():
        scorer.out.weight.copy_(torch.eye(3, 4))
    layer = MoE(Router(scorer, TopK(1), SoftmaxGate(renormalize=False)), bank)
    network = nn.parallel.DistributedDataParallel(layer, find_unused_parameters=False)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    # Every token of a rank visits the same expert: 0 on rank 0, 1 on rank 1, never 2.
    x = torch.zeros(4, 4)
    x[:, rank] = 3.0
    for step in range(3):
        optimizer.zero_grad()
        out = network(x)
        out.y.square().sum().backward()
        assert all(parameter.grad is not None for parameter in network.parameters())
        optimizer.step()
    assert out.routing.counts().tolist() == [[4, 0, 0], [0, 4, 0]][rank]
    flat = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    other = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(other, flat)
    assert torch.equal(*other)
    counts = out.routing.counts()
    dist.all_reduce(counts)
    bias = SelectionBias(2, rate=0.1, centre=False)
    bias.update(counts[:2])
    assert bias.bias.tolist() == [0.0, 0.0]
dist.destroy_process_group()
# At once: the ordinary way out sometimes ends in an abort, when a thread of the process group outlives it.
os._exit(0)
"""


def test_two_ranks_train_experts_that_only_one_of_them_visits(tmp_path):
    """Counts (4, 0, 0) on one rank and (0, 4, 0) on the other, three steps without a search for unused parameters.

    The weights stay equal on both ranks, and counts summed over ranks, (4, 4), leave the bias alone.
    """
    command = [sys.executable, "-c", TWO_RANKS]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], said


# 6. Any shape, token mask, order


@every_way
def test_masked_tokens_of_a_batch_of_sequences(way):
    """x (2, 3, 16) under [[1, 1, 0], [1, 0, 0]]: three tokens count, the others are exact zeros both ways.

    The three rows are those of the three tokens run alone, to the bit where masked tokens leave before the products.
    """
    layer = random_layer(way)
    run = going(layer, way)
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    out = run(x, mask)
    assert out.y.shape == (2, 3, WIDTH)
    assert torch.equal(out.y[~mask], torch.zeros(3, WIDTH))
    alone = run(x[mask]).y
    if way in ("dense", "compiled"):
        # Their products run over all six rows, and a library adds up three in another order.
        assert_agrees(out.y[mask], alone)
    else:
        assert torch.equal(out.y[mask], alone)
    stats = RouterStats.of(out.routing)
    assert (int(stats.tokens), int(stats.counts.sum())) == (3, 6)
    out.y.square().sum().backward()
    assert torch.equal(x.grad[~mask], torch.zeros(3, WIDTH))
    assert (x.grad[mask].abs().amax(-1) > 0).all()


@every_way
def test_images_with_channels_in_front_give_the_same_numbers(way):
    """x (2, 16, 3, 4) with channels_dim=1 and a mask (2, 3, 4) equals x (2, 3, 4, 16) with the width last."""
    x = torch.randn(2, 3, 4, WIDTH)
    mask = torch.rand(2, 3, 4) < 0.7
    expected = going(random_layer(way), "reference")(x, mask)
    out = going(random_layer(way, channels_dim=1), way)(x.movedim(-1, 1), mask)
    assert out.y.shape == (2, WIDTH, 3, 4)
    assert_agrees(out.y.movedim(1, -1), expected.y)
    assert torch.equal(out.routing.index, expected.routing.index)


@every_way
def test_permuted_tokens_and_tokens_alone(way):
    """Permuting 5 tokens permutes their answers, and in evaluation each gets alone what it gets in any batch."""
    layer = random_layer(way).eval()
    run = going(layer, way)
    x = torch.randn(5, WIDTH)
    y, order = run(x).y, torch.tensor([3, 0, 4, 2, 1])
    assert_agrees(run(x[order]).y, y[order])
    for row, expected in zip(x, y, strict=True):
        assert_agrees(run(row[None]).y, expected[None])


# 7. Capacity


def limited_layer(experts: int, **settings: object) -> MoE:
    selectors = [TopK(1), Capacity(**settings)]
    return MoE(
        Router(reader(experts), selectors, SoftmaxGate(renormalize=False)),
        scaling(range(1, experts + 1)),
        shared=nn.Identity(),
    )


CROWD = logs([(0.6, 0.4), (0.7, 0.3), (0.8, 0.2), (0.9, 0.1)])


@in_every_way(
    ("drop", "mask", "kept"),
    [
        ("probs", None, [2, 3]),
        ("position", None, [0, 1]),
        ("probs", [False, True, True, True], [2, 3]),
        ("position", [False, True, True, True], [1, 2]),
    ],
)
def test_a_full_expert_drops_tokens_to_the_shared_one(way, drop, mask, kept):
    """Four tokens choose expert 0 with .6, .7, .8, .9; C = ceil(1 · 4 · 1 / 2) = 2, half of the choices are dropped.

    The most probable or the first two stay: weight · 1 + 1 of the shared expert; the others get the shared 1 alone. A
    masked token takes no room: ceil(3/2) is 2 still, and "position" keeps tokens 1 and 2.
    """
    x = tokens([1.0] * 4, CROWD)
    real = torch.ones(4, dtype=torch.bool) if mask is None else torch.tensor(mask)
    out = going(limited_layer(2, factor=1.0, drop=drop), way)(x, None if mask is None else real)
    weights = [0.6, 0.7, 0.8, 0.9]
    expected = [real[t].item() * (1.0 + (weights[t] if t in kept else 0.0)) for t in range(4)]
    assert_agrees(out.y[:, 0], expected)
    stats = RouterStats.of(out.routing)
    assert stats.counts.tolist() == [2, 0]
    assert stats.dropped_fraction == pytest.approx(1 - 2 / int(real.sum()))


@every_backend
def test_a_single_token_is_never_dropped(backend):
    """T=1, E=8, factor 1: C = ceil(1/8) = 1, where rounding down would drop everything."""
    out = going(limited_layer(8, factor=1.0), backend)(tokens([1.0], [[5.0, *[0.0] * 7]]))
    assert RouterStats.of(out.routing).dropped_fraction == 0.0
    assert out.routing.counts().tolist() == [1, *[0] * 7]


@every_backend
def test_nothing_is_dropped_without_a_capacity_nor_in_evaluation_unless_asked_for(backend):
    """Four tokens on expert 0: all stay by default and in evaluation; with an evaluation factor of 1 two do."""
    x = tokens([1.0] * 4, CROWD)
    assert going(switch_layer(), backend)(x).routing.counts().tolist() == [4, 0]
    for settings, kept in (({}, 4), ({"eval_factor": 1.0}, 2)):
        layer = limited_layer(2, factor=1.0, **settings).eval()
        assert going(layer, backend)(x).routing.counts().tolist() == [kept, 0]


# 8. Expert choice


@every_way
def test_experts_choose_tokens(way):
    """Scores (.9, .1) (.8, .2) (.3, .7), experts x and 10x of x = 1, two tokens each.

    Expert 0 takes {0, 1}, expert 1 takes {2, 1}: (.9, .8 + 2, 7). Without token 1 both take {0, 2}: (.9 + 1, 0,
    .3 + 7). With one token left the surplus places stay empty: (.9 + 1, 0, 0).
    """
    router = Router(reader(2), ExpertChoice(capacity=2), SoftmaxGate(renormalize=False))
    run = going(MoE(router, scaling([1, 10])), way)
    x = tokens([1.0] * 3, logs([(0.9, 0.1), (0.8, 0.2), (0.3, 0.7)]))
    for mask, y, counts in (
        (None, [0.9, 2.8, 7.0], [2, 2]),
        ([True, False, True], [1.9, 0.0, 7.3], [2, 2]),
        ([True, False, False], [1.9, 0.0, 0.0], [1, 1]),
    ):
        out = run(x, None if mask is None else torch.tensor(mask))
        assert_agrees(out.y[:, 0], y)
        assert out.routing.counts().tolist() == counts


# 9. Soft MoE


@pytest.mark.parametrize("way", ["auto", "compiled"])
def test_soft_mixtures_of_two_tokens(way):
    """Tokens 4 and 8, experts x and 2x with a slot each, logits (0, 0) and (0, ln 3).

    Over tokens (1/2, 1/2) and (1/4, 3/4): slots 6 and 7, answers 6 and 14. Over slots the same: 10 and 12. Without
    token 1 both slots hold 4, answers 4 and 8: 6 and 0.
    """
    layer = SoftMoE(scaling([1, 2]), WIDTH)
    with torch.no_grad():
        # Of directions (1, 0, 0) and (.8, .6, 0), the slot (0, 1, 0) sees 0 and .6, the slot (0, 0, 1) nothing.
        layer.slots.copy_(torch.eye(WIDTH)[[2, 1]][:, None])
        layer.scale.fill_(math.log(3) / 0.6)
    x = torch.tensor([answer(4.0), answer(8.0)])
    x[1, 1] = 6.0
    run = going(layer, way)
    assert_agrees(run(x).y, [answer(10.0), answer(12.0)])
    assert_agrees(run(x, torch.tensor([True, False])).y, [answer(6.0), answer(0.0)])


# 10. Different and shared experts


class Triple(nn.Linear):
    """x → 3x."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        nn.init.constant_(self.weight, 3.0)


def different(shared: nn.Module | None = None, weights: Sequence[float] = (-9.0, 0.0, 0.0)) -> MoE:
    """Zero, identity and 3x; the router's weights say which two of them x = 2 visits."""
    scorer = LinearScorer(1, 3)
    with torch.no_grad():
        scorer.out.weight.copy_(torch.tensor(weights)[:, None])
    return MoE(Router(scorer, TopK(2)), ExpertList([ZeroExpert(1), nn.Identity(), Triple()], 1), shared)


@pytest.mark.parametrize("way", [*ExpertList.backends, "compiled"])
@pytest.mark.parametrize(
    ("shared", "y"),
    [(None, 4.0), (nn.Identity(), 6.0), (GatedShared(nn.Identity(), 1), 5.0)],
    ids=["none", "plain", "gated"],
)
def test_different_experts_and_a_shared_one(way, shared, y):
    """x = 2, halves on identity and 3x: 1 + 3 = 4; a shared identity adds 2; gated by sigmoid(0) it adds 1."""
    assert_agrees(going(different(shared), way)(torch.tensor([[2.0]])).y, [[y]])


@pytest.mark.parametrize("backend", ["reference", "sorted"])
def test_the_zero_expert_costs_no_product_but_counts(backend):
    """Halves on zero and identity: 1 without a floating-point operation in the bank; counts (1, 1, 0)."""
    layer = different(weights=(0.0, 0.0, -9.0))
    layer.experts.backend = backend
    counter = FlopCounterMode(display=False)
    with counter:
        out = layer(torch.tensor([[2.0]]))
    assert_agrees(out.y, [[1.0]])
    assert RouterStats.of(out.routing).counts.tolist() == [1, 1, 0]
    # One token, one wide, three logits: 2 · 3 operations, all the router's.
    assert counter.get_total_flops() == 6


@pytest.mark.parametrize("way", [*LowRankExperts.backends, "compiled"])
def test_an_expert_of_rank_one(way):
    """U = (1, 2)ᵀ, s = 3, V = (1, 1) on x = (1, 2): V x = 3, times 3 is 9, U · 9 = (9, 18)."""
    bank: TokenExperts = LowRankExperts(2, 2, 1, rank=1)
    with torch.no_grad():
        bank.u.copy_(torch.tensor([[[1.0], [2.0]]]))
        bank.s.fill_(3.0)
        bank.v.fill_(1.0)
    layer = MoE(Router(LinearScorer(2, 1), Dense()), bank)
    assert_agrees(going(layer, way)(torch.tensor([[1.0, 2.0]])).y, [[9.0, 18.0]])


# 11. Ties and determinism


@in_every_way(["gate"], [(SoftmaxGate(),), (SoftmaxGate(renormalize=False),), (SigmoidGate(),)])
def test_equal_logits_choose_the_lowest_experts(way, gate):
    """Six equal logits, k=2: experts 0 and 1, for a hundred tokens of a router that starts at zero."""
    layer = MoE(Router(LinearScorer(WIDTH, 6), TopK(2), gate), FeedForwardExperts(WIDTH, 8, 6))
    nn.init.zeros_(layer.router.scorer.out.weight)
    out = going(layer, way)(torch.randn(100, WIDTH))
    assert out.routing.index.tolist() == [[0, 1]] * 100


@every_backend
def test_two_runs_with_one_seed_are_equal_to_the_bit(backend):
    """Answer and every gradient of 200 tokens, from seed to backward pass."""

    def once() -> list[Tensor]:
        layer = random_layer(backend)
        layer.experts.backend = backend
        x = torch.randn(200, WIDTH, requires_grad=True)
        y = layer(x).y
        y.square().sum().backward()
        return [y, x.grad, *gradients(layer)]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


def test_a_router_under_autocast_chooses_as_in_single_precision():
    """4096 tokens, E=64, k=8: not one set of experts differs, where logits in bf16 change about 2 % of them."""
    layer = random_layer("auto", experts=64, k=8).requires_grad_(False)
    x = torch.randn(4096, WIDTH).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = layer(x).routing
        coarse = layer.router.scorer(x)
    plain = layer(x.float()).routing
    assert torch.equal(mixed.index, plain.index)
    changed = coarse.float().topk(8).indices.sort().values != plain.index.sort().values
    assert changed.any(-1).float().mean() > 0.005


# 12. Initialisation and layouts of stacked weights


def test_stacked_weights_start_like_linear_layers():
    """(E, H, D) = (4, 16, 8): uniform within 1/√8 = .3535534 for each expert, and no two experts alike.

    The fan of the whole tensor would give a bound of .0883883.
    """
    torch.manual_seed(0)
    bank = FeedForwardExperts(8, 16, 4)
    assert 0.33 < bank.up.abs().max().item() <= 0.35356
    assert 0.23 < bank.down.abs().max().item() <= 0.25001
    for parameter in bank.parameters():
        assert all(not torch.equal(parameter[0], parameter[expert]) for expert in range(1, 4))


@every_way
def test_an_upcycled_layer_computes_what_the_dense_network_did(way):
    """Four exact copies under weights that sum to one."""
    torch.manual_seed(0)
    bias = way != "grouped"
    up, down = nn.Linear(WIDTH, 8, bias), nn.Linear(8, WIDTH, bias)
    bank = FeedForwardExperts.from_dense(up, down, 4)
    for expert in range(4):
        assert torch.equal(bank.up[expert], up.weight)
        assert torch.equal(bank.down[expert], down.weight)
    x = torch.randn(6, WIDTH)
    out = going(MoE(Router(LinearScorer(WIDTH, 4), TopK(2)), bank), way)(x)
    assert_agrees(out.y, down(F.gelu(up(x))))


NAMES = {"gate": "experts.{e}.w1", "up": "experts.{e}.w3", "down": "experts.{e}.w2"}


@every_backend
def test_checkpoints_per_expert_load_into_stacked_weights_and_back(backend):
    """Every weight of "experts.{e}.w1" and so on returns exact; the answers are those of the first bank to the bit."""
    source, target = (FeedForwardExperts(WIDTH, 8, 4, "swiglu", backend=backend) for _ in range(2))
    state = source.per_expert(NAMES)
    assert state.keys() == {f"experts.{e}.w{part}" for e in range(4) for part in (1, 2, 3)}
    assert {key: tuple(value.shape) for key, value in state.items() if ".0." in key} == {
        "experts.0.w1": (8, WIDTH),
        "experts.0.w3": (8, WIDTH),
        "experts.0.w2": (WIDTH, 8),
    }
    target.load_per_expert(state, NAMES)
    assert all(torch.equal(value, state[key]) for key, value in target.per_expert(NAMES).items())
    router = Router(LinearScorer(WIDTH, 4), TopK(2))
    x = torch.randn(6, WIDTH)
    assert torch.equal(MoE(router, source)(x).y, MoE(router, target)(x).y)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("experts.3.w2"),
        lambda state: state.update({"experts.4.w2": state["experts.3.w2"]}),
    ],
    ids=["missing", "unmatched"],
)
def test_checkpoints_with_missing_or_unmatched_experts_are_refused(change):
    """Four experts: the key of a fifth and the lack of one of the fourth are errors, and nothing is loaded."""
    bank = FeedForwardExperts(WIDTH, 8, 4, "swiglu")
    state = {key: value + 1 for key, value in bank.per_expert(NAMES).items()}
    change(state)
    before = bank.up.detach().clone()
    with pytest.raises(ValueError, match=r"experts\.[34]\.w2"):
        bank.load_per_expert(state, NAMES)
    assert torch.equal(bank.up, before)


# 13. Statistics


@every_way
def test_statistics_of_four_tokens_and_their_sum_with_four_others(way):
    """Choices {0,1} {0,1} {0,2} {0,1}: counts (4, 3, 1, 0), load (.5, .375, .125, 0), expert 3 dead.

    Largest over mean 4/2 = 2. Population variance 2.5 over mean 2: √2.5 / 2 = .7905694; entropy of the load .9743148
    nats. Added to counts (0, 1, 3, 4) they are (4, 4, 4, 4), largest over mean 1, where the mean of both ratios would
    be 2.
    """
    run = going(MoE(Router(reader(4), TopK(2)), scaling([1, 2, 3, 4])), way)

    def stats(pairs: Sequence[tuple[int, int]]) -> RouterStats:
        logits = [[3.0 if expert in pair else 0.0 for expert in range(4)] for pair in pairs]
        return RouterStats.of(run(tokens([1.0] * 4, logits)).routing)

    first = stats([(0, 1), (0, 1), (0, 2), (0, 1)])
    assert first.counts.tolist() == [4, 3, 1, 0]
    assert first.load() == [0.5, 0.375, 0.125, 0.0]
    assert first.max_load == 2.0
    assert first.dead() == [3]
    assert first.variation == pytest.approx(0.7905694, abs=1e-7)
    assert first.load_entropy == pytest.approx(0.9743148, abs=1e-7)
    second = stats([(2, 3), (2, 3), (2, 3), (1, 3)])
    assert second.counts.tolist() == [0, 1, 3, 4]
    assert second.max_load == 2.0
    both = first + second
    assert both.counts.tolist() == [4, 4, 4, 4]
    assert int(both.tokens) == 8
    assert both.max_load == 1.0

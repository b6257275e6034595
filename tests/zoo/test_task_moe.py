"""ZooTask with Mixture-of-Experts layers: selection biases, auxiliary losses and weight decay."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zoo.moe import (
    Capacity,
    FeedForwardExperts,
    LinearScorer,
    MoE,
    MoEOutput,
    Router,
    SelectionBias,
    SoftmaxGate,
    TopK,
)
from zoo.moe.soft import SoftMoE
from zoo.nn import checkpoint
from zoo.task import Losses, ZooTask

ROOT = Path(__file__).parents[2]
RATE = 0.1


@dataclass
class Batch:
    """Tokens x (T, 2), each a sample."""

    x: Tensor

    @property
    def index(self) -> Tensor:
        return torch.arange(len(self.x))


def layer(biased: bool = True) -> MoE:
    """Two experts: tokens (1, 0) go to the first, tokens (0, 1) to the second."""
    scorer = LinearScorer(2, 2)
    with torch.no_grad():
        scorer.out.weight.copy_(5 * torch.eye(2))
    bias = SelectionBias(2, rate=RATE) if biased else None
    router = Router(scorer, TopK(1), SoftmaxGate(renormalize=False), bias=bias)
    return MoE(router, FeedForwardExperts(2, 3, 2, bias=True))


class Network(nn.Module):
    """Layers that all see the same tokens, so that each routes them in the same way."""

    def __init__(self, layers: Sequence[MoE | SoftMoE], recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.recompute = recompute
        self.runs = 0

    def forward(self, x: Tensor) -> list[MoEOutput]:
        def run(moe: nn.Module) -> MoEOutput:
            self.runs += 1
            return moe(x)

        if self.recompute:
            return [checkpoint(run, moe) for moe in self.layers]
        return [run(moe) for moe in self.layers]


class Task(ZooTask):
    """Learns to answer with ones."""

    monitor = "val/loss"
    protocol = "none"

    def __init__(self, network: nn.Module, **settings: Any) -> None:
        super().__init__(network="toy", schedule="constant", **settings)
        self.net = network
        self.gradients: list[dict[str, Tensor]] = []

    def training_loss(self, batch: Batch) -> Losses:
        outputs = self.net(batch.x)
        loss = torch.stack([(output.y - 1).square().mean() for output in outputs]).mean()
        return Losses(named={"mse": loss}, moe=outputs)

    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        outputs = self.net(batch.x)
        self.record_routing(outputs)
        return {"index": batch.index, "loss": outputs[0].y.square().mean(-1)}

    def score(self, gathered: dict[str, Tensor]) -> dict[str, float]:
        return {"loss": float(gathered["loss"].mean())}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append({name: p.grad.clone() for name, p in self.named_parameters()})
        super().on_before_optimizer_step(optimizer)


def trainer(folder: Path, **settings: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "num_sanity_val_steps": 0, "default_root_dir": folder}
    return pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, **(quiet | settings))


def tokens(first: int, second: int) -> Batch:
    return Batch(torch.eye(2).repeat_interleave(torch.tensor([first, second]), dim=0))


def batches(*parts: Batch) -> DataLoader[Batch]:
    return DataLoader(parts, batch_size=None)  # type: ignore[arg-type]


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Counts that biases were moved by, in order."""
    seen: list[list[int]] = []
    move = SelectionBias.update

    def update(self: SelectionBias, counts: Tensor, enabled: Tensor | None = None) -> None:
        seen.append(counts.tolist())
        move(self, counts, enabled)

    monkeypatch.setattr(SelectionBias, "update", update)
    return seen


def biases(task: Task) -> list[list[float]]:
    return [module.bias.tolist() for module in task.modules() if isinstance(module, SelectionBias)]


# -- selection biases ---------------------------------------------------------------------------------------------


def test_a_step_moves_the_bias_by_its_choices(tmp_path: Path, updates: list[list[int]]) -> None:
    task = Task(Network([layer()]))
    trainer(tmp_path).fit(task, batches(tokens(4, 0), tokens(3, 1)))
    assert updates == [[4, 0], [3, 1]]
    assert biases(task) == [pytest.approx([-2 * RATE, 2 * RATE])]


def test_choices_dropped_for_want_of_capacity_move_the_bias_too(tmp_path, updates):
    crowded = layer()
    crowded.router.selectors.append(Capacity(1.0))
    # Four of five want the first expert, which takes three.
    trainer(tmp_path).fit(Task(Network([crowded])), batches(tokens(4, 1)))
    assert updates == [[4, 1]]


def test_accumulated_micro_batches_move_the_bias_once_by_their_sum(
    tmp_path: Path, updates: list[list[int]]
) -> None:
    task = Task(Network([layer(), layer()]))
    trainer(tmp_path, accumulate_grad_batches=2).fit(task, batches(tokens(4, 0), tokens(0, 4)))
    assert updates == [[4, 4]] * 2
    assert biases(task) == [[0.0, 0.0]] * 2


def test_a_step_starts_without_the_choices_of_the_last(tmp_path: Path, updates: list[list[int]]) -> None:
    task = Task(Network([layer()]))
    trainer(tmp_path, accumulate_grad_batches=2).fit(task, batches(tokens(4, 0), tokens(1, 3), tokens(0, 2)))
    assert updates == [[5, 3], [0, 2]]  # the last batch of an epoch is a step of its own


def test_recomputed_activations_count_once(tmp_path: Path, updates: list[list[int]]) -> None:
    task = Task(Network([layer(), layer()], recompute=True))
    trainer(tmp_path).fit(task, batches(tokens(3, 1)))
    assert task.net.runs == 4
    assert updates == [[3, 1]] * 2


def test_evaluation_leaves_biases_alone(tmp_path: Path, updates: list[list[int]]) -> None:
    task = Task(Network([layer()]))
    trainer(tmp_path).validate(task, batches(tokens(4, 0)), verbose=False)
    trainer(tmp_path).fit(task, batches(tokens(3, 1)), batches(tokens(4, 0)))
    assert task.routing_summary()["layer0"]["load"] == [1.0, 0.0]
    assert updates == [[3, 1]]


def test_a_frozen_layer_keeps_its_bias(tmp_path: Path, updates: list[list[int]]) -> None:
    task = Task(Network([layer(), layer()]))
    task.net.layers[0].eval()
    trainer(tmp_path).fit(task, batches(tokens(3, 1)))
    assert updates == [[3, 1]]
    assert biases(task) == [[0.0, 0.0], pytest.approx([-RATE, RATE])]


def test_layers_with_and_without_bias_stay_aligned(tmp_path: Path, updates: list[list[int]]) -> None:
    soft, swapped = SoftMoE(FeedForwardExperts(2, 3, 2), 2), layer()
    with torch.no_grad():
        swapped.router.scorer.out.weight.copy_(5 * torch.eye(2).flip(0))
    trainer(tmp_path).fit(Task(Network([layer(biased=False), layer(), soft, swapped])), batches(tokens(3, 1)))
    assert updates == [[3, 1], [1, 3]]


def test_two_layers_with_one_router_move_its_bias_once(tmp_path: Path, updates: list[list[int]]) -> None:
    first, second = layer(), layer()
    second.router = first.router
    trainer(tmp_path).fit(Task(Network([first, second])), batches(tokens(3, 1)))
    assert updates == [[6, 2]]


def test_outputs_that_are_missing_are_an_error_only_where_a_router_has_a_bias(tmp_path: Path) -> None:
    class Forgetful(Task):
        def training_loss(self, batch: Batch) -> Losses:
            losses = super().training_loss(batch)
            return Losses(named=losses.named, moe=losses.moe[1:])

    trainer(tmp_path).fit(Forgetful(Network([layer(biased=False)] * 2)), batches(tokens(3, 1)))
    with pytest.raises(ValueError, match=r"2 Mixture-of-Experts layers.*handed up 1 outputs") as caught:
        trainer(tmp_path).fit(Forgetful(Network([layer(), layer(biased=False)])), batches(tokens(3, 1)))
    assert "\n" not in str(caught.value)


TWO_RANKS = """
import json
import sys
from types import SimpleNamespace
import torch
from tests.zoo.test_task_moe import Network, Task, biases, layer, tokens

rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
task = Task(Network([layer(), layer()]))
task._trainer = SimpleNamespace(world_size=2)
for first, second in ((4, 0), (0, 4)), ((3, 1), (2, 2)):
    task._count_choices(task.training_loss(tokens(*(second if rank else first))).moe)
    task._move_biases()
    print(json.dumps(biases(task)))
"""


def test_choices_of_all_ranks_move_every_bias_alike(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_RANKS, str(rank), str(tmp_path / "meeting")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    told = [rank.communicate(timeout=240)[0].splitlines() for rank in ranks]
    assert told[0] == told[1]
    after_even, after_uneven = map(json.loads, told[0])
    assert after_even == [[0.0, 0.0]] * 2  # (4, 0) and (0, 4)
    assert after_uneven == [pytest.approx([-RATE, RATE])] * 2  # (3, 1) and (2, 2)


# -- auxiliary losses ---------------------------------------------------------------------------------------------


ROUTER = "net.layers.0.router.scorer.out.weight"


def gradient(folder: Path, parts: int, **weights: float) -> dict[str, Tensor]:
    """The gradient of a step over 24 tokens, in one batch or accumulated over several."""
    torch.manual_seed(0)
    task, x = Task(Network([layer(biased=False)]), **weights), torch.randn(24, 2)
    fit = trainer(folder, accumulate_grad_batches=parts)
    fit.fit(task, batches(*map(Batch, x.chunk(parts))))
    (found,) = task.gradients
    return found


def test_accumulation_changes_no_weight_of_the_z_loss(tmp_path: Path) -> None:
    whole, parts = (gradient(tmp_path, parts, z=0.5) for parts in (1, 2))
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-5, atol=1e-6)
    assert (whole[ROUTER] - gradient(tmp_path, 1)[ROUTER]).abs().max() > 0.1


def test_balance_is_asked_of_every_micro_batch(tmp_path: Path) -> None:
    whole, parts = (gradient(tmp_path, parts, balance=0.5) for parts in (1, 2))
    assert (whole[ROUTER] - parts[ROUTER]).abs().max() > 1e-3


# -- weight decay -------------------------------------------------------------------------------------------------


def test_stacked_biases_do_not_decay() -> None:
    task = Task(Network([layer()]), weight_decay=0.3)
    names = {parameter: name.removeprefix("net.layers.0.") for name, parameter in task.named_parameters()}
    assert task.net.layers[0].experts.up_bias.ndim == 2
    decay = {
        group["weight_decay"]: [names[parameter] for parameter in group["params"]]
        for group in task.configure_optimizers().param_groups
    }
    assert decay == {
        0.3: ["router.scorer.out.weight", "experts.up", "experts.down"],
        0.0: ["experts.up_bias", "experts.down_bias"],
    }

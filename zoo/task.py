"""ZooTask: the LightningModule that every domain fills in.

A subclass says what its network is, what a batch's loss is and what is evaluated; optimiser, auxiliary losses,
routing statistics, gathering over ranks, seeding and checkpoints live here.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from zoo.errors import UserError
from zoo.moe import MoE, MoEOutput, RouterStats, SelectionBias, SoftMoE, balance_loss, cost, z_loss
from zoo.results import Row

Schedule = Literal["constant", "decay", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Losses:
    """What a training batch costs.

    Attributes:
        named: weighted terms by name; their sum is minimised.
        moe: outputs of the batch's Mixture-of-Experts layers, for the auxiliary losses and for the selection biases of
            routers; where a router has one, an output of every layer, in the order of the network's modules. Terms in
            an output's own ``losses`` are for the domain to weigh and to name here.
    """

    named: dict[str, Tensor]
    moe: list[MoEOutput] = field(default_factory=list)


def derive_seed(*parts: object) -> int:
    """A seed that is a function of its parts alone."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


class ZooTask(pl.LightningModule):
    """Base of all tasks.

    Auxiliary losses are means over layers and over a batch's tokens, added to the mean loss of the batch, so that their
    weight depends on neither the number of processes nor accumulation. The z-loss of a batch is the mean of those of
    its equal parts. The balance loss is not: each micro-batch of each process counts its own choices, and has to be
    even by itself.

    Args:
        network: name of the network to train, one of the domain's rows.
        lr: peak learning rate of AdamW.
        weight_decay: of weights with two or more dimensions, stacked biases aside.
        schedule: "constant", "decay" (two epochs at full rate, then × 0.8 per epoch) or "cosine" (to zero over
            the run, per step).
        clip: largest norm of the gradient; 0 leaves it alone.
        balance: weight of the load-balance loss of every Mixture-of-Experts layer.
        z: weight of the router z-loss of every Mixture-of-Experts layer.
    """

    monitor: ClassVar[str]
    """Validation metric that picks the best checkpoint, e.g. "val/mse"."""
    monitor_mode: ClassVar[Literal["min", "max"]] = "min"
    spec_type: ClassVar[type[Any]]
    """Dataclass of the datamodule's spec."""
    protocol: ClassVar[str]
    """How the test score is taken, in one phrase; printed beside every score."""
    n_unit: ClassVar[str] = "samples"
    units: ClassVar[str] = ""

    net: nn.Module | None

    def __init__(
        self,
        *,
        network: str,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        schedule: Schedule = "decay",
        clip: float = 0.0,
        balance: float = 0.0,
        z: float = 0.0,
    ) -> None:
        super().__init__()
        if not lr > 0:
            raise ValueError(f"model.lr={lr} must be above 0")
        for name, value in {"weight_decay": weight_decay, "clip": clip, "balance": balance, "z": z}.items():
            if not value >= 0:
                raise ValueError(f"model.{name}={value} must be at least 0")
        self.network, self.schedule = network, schedule
        self.lr, self.weight_decay, self.clip = lr, weight_decay, clip
        self.balance, self.z = balance, z
        self.net = None
        self.spec: Any = None
        self.tested = 0
        self.flops: int | None = None
        self.test_metrics: dict[str, float] = {}
        self._gathered: list[dict[str, Tensor]] = []
        self._routing: dict[str, RouterStats] = {}
        self._choices: dict[SelectionBias, Tensor] = {}

    # -- what a domain fills in

    def build_network(self, spec: Any) -> nn.Module:
        """The network for data with these facts."""
        raise NotImplementedError

    def training_loss(self, batch: Any) -> Losses:
        """The loss of a training batch."""
        raise NotImplementedError

    def evaluate(self, batch: Any) -> dict[str, Tensor]:
        """Small sufficient statistics of a batch, each with leading dimension B, among them ``index`` (B,)."""
        raise NotImplementedError

    def score(self, gathered: dict[str, Tensor]) -> dict[str, float]:
        """Metrics from the statistics of a whole split, every sample once, in order of ``index``."""
        raise NotImplementedError

    def baselines(self, datamodule: Any) -> list[Row]:
        """Closed-form and untrained yardsticks on the test split."""
        return []

    def setting(self) -> dict[str, object]:
        """What a score depends on beside data and protocol, such as lookback and horizon."""
        return {}

    def kind(self) -> Literal["model", "twin", "baseline", "ablation"]:
        """What the trained network is in the results table."""
        return "twin" if self.network.endswith("_dense") else "model"

    def calibrate(self, datamodule: Any, directory: Path) -> None:
        """Measure what predictions on users' files need beside the weights, and write it into the run folder."""

    def draw(self, datamodule: Any, directory: Path) -> list[Path]:
        """Pictures of the test split for people; returns the files written."""
        return []

    # -- building and checkpoints

    def build(self, spec: Any) -> None:
        """Build the network for ``spec``, with initial weights that depend on the global seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed("weights", global_seed()))
            self.net = self.build_network(spec)
        self.spec = spec

    @classmethod
    def from_checkpoint(cls, checkpoint: dict[str, Any]) -> Self:
        """A trained task from the content of a checkpoint alone, in evaluation mode.

        Raises:
            UserError: the weights are not exactly those of the network that the checkpoint describes.
        """
        settings = {
            key: value for key, value in checkpoint["hyper_parameters"].items() if key != "_instantiator"
        }
        task = cls(**settings)
        task.on_load_checkpoint(checkpoint)
        try:
            task.load_state_dict(checkpoint["state_dict"], strict=True)
        except RuntimeError as error:
            raise UserError(
                f"the checkpoint does not fit its network: {' '.join(str(error).split())}"
            ) from error
        return task.eval()

    def configure_model(self) -> None:
        """Build from the data's facts when a trainer is attached and nothing is built yet."""
        if self.net is None and self._trainer is not None:
            self.build(self.datamodule.spec)

    @property
    def datamodule(self) -> Any:
        """The trainer's datamodule."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the data's facts, so that the file alone rebuilds the model."""
        checkpoint["spec"] = asdict(self.spec)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Rebuild from the stored facts, or make the attached data fit them.

        Raises:
            UserError: the file is no checkpoint of this task, or the data differ and cannot be made to fit.
        """
        if "spec" not in checkpoint:
            raise UserError(
                f"this checkpoint holds no data facts: it was not written by {type(self).__name__}"
            )
        spec = self.spec_type(**checkpoint["spec"])
        if self.net is None:
            self.build(spec)
        elif spec != self.spec:
            self.datamodule.conform(spec)
            # Anew, because the columns may be others than those it was built for.
            self.build(self.datamodule.spec)

    # -- training

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Reseed, so that a step draws the same numbers whether or not the run was interrupted."""
        torch.manual_seed(derive_seed("step", global_seed(), self.global_step, batch_idx, self.global_rank))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One batch's total loss."""
        losses = self.training_loss(batch)
        self._count_choices(losses.moe)
        terms = dict(losses.named)
        if losses.moe and self.balance:
            terms["balance"] = self.balance * _mean(balance_loss(output.routing) for output in losses.moe)
        if losses.moe and self.z:
            terms["z"] = self.z * _mean(z_loss(output.routing) for output in losses.moe)
        total = torch.stack(list(terms.values())).sum()
        if not bool(torch.isfinite(total)):
            raise UserError(
                f"the training loss became {float(total)} in epoch {self.current_epoch}, step {self.global_step}: "
                f"lower model.lr={self.lr:g} or look at the data with python -m zoo.data check"
            )
        size = len(batch.index)
        # The mean over an epoch and over ranks.
        settings: dict[str, Any] = {"on_step": False, "on_epoch": True, "sync_dist": True, "batch_size": size}
        self.log("train/loss", total, prog_bar=True, **settings)
        for name, term in terms.items():
            if len(terms) > 1:
                self.log(f"train/{name}", term, **settings)
        return total

    def configure_optimizers(self) -> Any:
        """AdamW, weight decay on matrices only, and the chosen schedule."""
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                # The biases of stacked experts are (E, F).
                matrix = parameter.ndim >= 2 and not name.endswith("bias")
                (matrices if matrix else others).append(parameter)
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=self.lr)
        if self.schedule == "constant":
            return optimizer
        if self.schedule == "decay":
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.8 ** max(epoch - 1, 0))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}
        steps = self.trainer.estimated_stepping_batches
        if not 0 < steps < math.inf:
            raise UserError("model.schedule=cosine needs an end: set trainer.max_epochs")
        # A function of the step alone, so that a run that is continued for longer follows the longer curve.
        cosine = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(step / steps, 1.0)))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradient, and move the routers' selection biases by the choices of the whole step."""
        if self.clip:
            nn.utils.clip_grad_norm_(self.parameters(), self.clip)
        if self._choices:
            self._move_biases()

    def _count_choices(self, outputs: list[MoEOutput]) -> None:
        """Add a micro-batch's choices to those of the step, for every router with a selection bias."""
        modules = () if self.net is None else self.net.modules()
        biases = [
            module.router.bias if isinstance(module, MoE) else None
            for module in modules
            if isinstance(module, (MoE, SoftMoE))
        ]
        if all(bias is None for bias in biases):
            return
        if len(biases) != len(outputs):
            raise ValueError(
                f"the network has {len(biases)} Mixture-of-Experts layers, some with a selection bias, but "
                f"training_loss handed up {len(outputs)} outputs: it must return one per layer, in order, as Losses.moe"
            )
        for bias, output in zip(biases, outputs, strict=True):
            # A layer in evaluation mode is frozen.
            if bias is not None and bias.training:
                # Counted here and not in the layer, which runs again where activations are recomputed.
                counts = output.routing.counts(dropped=True)
                self._choices[bias] = self._choices[bias] + counts if bias in self._choices else counts

    def _move_biases(self) -> None:
        counts = torch.cat(list(self._choices.values()))
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(counts)
        sizes = [len(part) for part in self._choices.values()]
        layers = [module for module in self.modules() if isinstance(module, MoE)]
        enabled = {layer.router.bias: layer.experts.enabled for layer in layers}
        for bias, part in zip(self._choices, torch.split(counts, sizes), strict=True):
            bias.update(part, enabled[bias])
        self._choices = {}

    # -- evaluation

    def record_routing(self, outputs: Iterable[MoEOutput], tag: str = "") -> None:
        """Add a batch's routing to the statistics of this evaluation.

        Args:
            outputs: one per layer, in order.
            tag: what the tokens have in common (a regime, a modality); "" for all.
        """
        for layer, output in enumerate(outputs):
            name = f"layer{layer}/{tag}" if tag else f"layer{layer}"
            stats = RouterStats.of(output.routing)
            self._routing[name] = self._routing[name] + stats if name in self._routing else stats

    def routing_summary(self) -> dict[str, dict[str, object]]:
        """Routing statistics of the last evaluation, per layer and tag, JSON-ready."""
        return {name: stats.summary() for name, stats in self._routing.items()}

    def _start_evaluation(self) -> None:
        self._gathered, self._routing = [], {}

    def _evaluation_step(self, batch: Any) -> None:
        self._gathered.append({name: value.detach() for name, value in self.evaluate(batch).items()})

    def _finish_evaluation(self) -> tuple[dict[str, float], int]:
        merged = {name: torch.cat([part[name] for part in self._gathered]) for name in self._gathered[0]}
        if self.trainer.world_size > 1:
            merged = {name: torch.cat(list(self.all_gather(value))) for name, value in merged.items()}
            self._routing = _over_ranks(self._routing, self.trainer.world_size)
        # Ranks that ran out of samples repeated some: keep each once, in order.
        index = merged["index"].cpu()
        order = torch.argsort(index, stable=True)
        first = torch.ones_like(index, dtype=torch.bool)
        first[1:] = index[order][1:] != index[order][:-1]
        once = order[first]
        gathered = {name: value.cpu()[once] for name, value in merged.items()}
        return self.score(gathered), len(once)

    def on_validation_epoch_start(self) -> None:
        """Forget the last evaluation."""
        self._start_evaluation()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Collect a batch's statistics."""
        self._evaluation_step(batch)

    def on_validation_epoch_end(self) -> None:
        """Score the whole split at once, so that batch size and ranks cannot matter."""
        metrics, _ = self._finish_evaluation()
        chosen_by = self.monitor.removeprefix("val/")
        if not math.isfinite(metrics.get(chosen_by, 0.0)) and not self.trainer.sanity_checking:
            raise UserError(
                f"{self.monitor} became {metrics[chosen_by]} in epoch {self.current_epoch}, so that no checkpoint can "
                f"be chosen: lower model.lr={self.lr:g} or look at the data with python -m zoo.data check"
            )
        for name, value in metrics.items():
            # Scores are the same on every rank already, in float64 until here.
            self.log(f"val/{name}", value, prog_bar=f"val/{name}" == self.monitor)

    def on_test_epoch_start(self) -> None:
        """Forget the last evaluation."""
        self._start_evaluation()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Collect a batch's statistics, and count the first batch's operations."""
        if batch_idx == 0:
            self.flops = self._count_flops(batch)
        self._evaluation_step(batch)

    def _count_flops(self, batch: Any) -> int:
        """Operations of one sample's forward pass, the mean over a batch."""
        recorded, self._routing = self._routing, {}
        flops = cost(_Evaluation(self.net, self.evaluate), batch).flops
        self._routing = recorded
        return round(flops / len(batch.index))

    def on_test_epoch_end(self) -> None:
        """Score the whole split at once and keep the numbers for :meth:`row`."""
        self.test_metrics, self.tested = self._finish_evaluation()
        for name, value in self.test_metrics.items():
            self.log(f"test/{name}", value)

    def row(self) -> Row:
        """The results-table row of this network after a test."""
        total, active = self.count_parameters()
        return Row(
            name=self.network,
            kind=self.kind(),
            data=self.spec.name,
            split="test",
            protocol=self.protocol,
            setting=self.setting(),
            n=self.tested,
            n_unit=self.n_unit,
            metrics=dict(self.test_metrics),
            units=self.units,
            parameters_total=total,
            parameters_active=active,
            flops=self.flops,
        )

    def count_parameters(self) -> tuple[int, int]:
        """Parameters in all, and those that one sample uses."""
        total = sum(parameter.numel() for parameter in self.parameters())
        return total, total


class _Evaluation(nn.Module):
    """A network and what runs it, for the counter of operations."""

    def __init__(self, net: nn.Module | None, evaluate: Callable[[Any], dict[str, Tensor]]) -> None:
        super().__init__()
        self.net = net
        self.evaluate = evaluate

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return self.evaluate(batch)


def global_seed() -> int:
    """The seed given to ``seed_everything``, 0 if none was."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def _over_ranks(routing: dict[str, RouterStats], ranks: int) -> dict[str, RouterStats]:
    """Statistics of all processes, which may have met different tags, added up."""
    own = {
        name: RouterStats(**{item.name: getattr(stats, item.name).cpu() for item in fields(stats)})
        for name, stats in routing.items()
    }
    parts: list[dict[str, RouterStats]] = [{}] * ranks
    torch.distributed.all_gather_object(parts, own)
    merged: dict[str, RouterStats] = {}
    for part in parts:
        for name, stats in part.items():
            merged[name] = merged[name] + stats if name in merged else stats
    return merged


def _mean(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).mean()

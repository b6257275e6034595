"""A domain of a few lines, for tests of the front doors: a straight line, learned by networks of one layer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import zoo
from zoo import registry
from zoo.data.module import Split, ZooDataModule
from zoo.errors import UserError
from zoo.registry import Domain
from zoo.results import Row
from zoo.task import Losses, ZooTask

DOMAIN = Domain(
    name="toy",
    title="A straight line",
    task="tests.zoo.toy:ToyTask",
    data="tests.zoo.toy:ToyData",
    predictor="tests.zoo.toy:ToyPredictor",
    model="toy",
    twin="toy_dense",
    networks=("toy", "toy_dense", "bias"),
)

_FILES = {
    "default": "model: {width: 8}\ndata: {rows: 16}\ntrainer: {max_epochs: 2, accelerator: cpu}\n",
    "model/tiny": "model: {width: 4}\n",
    "model/base": "model: {width: 16}\n",
    "data/long": "data: {rows: 32}\n",
    "data/short": "data: {rows: 8, horizon: 3}\n",
}


@dataclass(frozen=True)
class ToySpec:
    """Facts of the data."""

    name: str = "line"
    channels: int = 2


@dataclass
class Gate:
    """Settings of the gate.

    Args:
        num_experts: How many experts.
        router: Kind of router.
    """

    num_experts: int = 4
    router: Literal["softmax", "sigmoid"] = "softmax"


@dataclass
class ToyBatch:
    """Points: index (B,), x (B, C), y (B, 1)."""

    index: Tensor
    x: Tensor
    y: Tensor


class ToyTask(ZooTask):
    """Regression.

    Args:
        network: Which network.
        width: Hidden units.
        top_k: Experts per token.
        dropout: Share of units left out.
        gate: Settings of the gate.
        lr: Step size.
    """

    monitor = "val/mse"
    spec_type = ToySpec
    protocol = "all points"
    n_unit = "points"

    def __init__(
        self,
        network: Literal["toy", "toy_dense", "bias"] = "toy",
        width: int = 8,
        top_k: int = 1,
        dropout: float = 0.0,
        gate: Gate = Gate(),  # noqa: B008
        lr: float = 0.01,
    ) -> None:
        super().__init__(network=network, lr=lr)
        if top_k > gate.num_experts:
            raise ValueError(f"top_k={top_k} must lie in 1..num_experts={gate.num_experts}")
        self.width, self.dropout = width, dropout

    @classmethod
    def example_spec(cls, **overrides: Any) -> ToySpec:
        return ToySpec(**overrides)

    def kind(self) -> Literal["model", "twin", "baseline", "ablation"]:
        return "baseline" if self.network == "bias" else super().kind()

    def build_network(self, spec: ToySpec) -> nn.Module:
        if self.width > 1000:
            raise ValueError(f"width={self.width} must lie in 1..1000")
        if self.network == "bias":
            return nn.Linear(spec.channels, 1)
        return nn.Sequential(
            nn.Linear(spec.channels, self.width), nn.Dropout(self.dropout), nn.Linear(self.width, 1)
        )

    def training_loss(self, batch: ToyBatch) -> Losses:
        assert self.net is not None
        return Losses(named={"mse": nn.functional.mse_loss(self.net(batch.x), batch.y)})

    def evaluate(self, batch: ToyBatch) -> dict[str, Tensor]:
        assert self.net is not None
        return {"index": batch.index, "error": (self.net(batch.x) - batch.y).squeeze(-1).square()}

    def score(self, gathered: dict[str, Tensor]) -> dict[str, float]:
        return {"mse": float(gathered["error"].double().mean())}

    def baselines(self, datamodule: Any) -> list[Row]:
        return [
            Row(
                name="zero", kind="baseline", data="line", split="test", protocol="all points", setting={}, n=16,
                n_unit="points", metrics={"mse": 0.5}, units="",
            )
        ]  # fmt: skip

    def draw(self, datamodule: Any, directory: Path) -> list[Path]:
        path = directory / "line.png"
        path.write_bytes(b"")
        return [path]


class ToyData(ZooDataModule):
    """Points of a line.

    Args:
        rows: Number of points.
        path: File to read.
        horizon: Points to look ahead.
        columns: Names of the columns.
        batch_size: Points per step.
        seed: Order of the points.
    """

    generated = True
    spec = ToySpec()

    def __init__(
        self,
        rows: int = 16,
        path: str | None = None,
        horizon: int = 1,
        columns: list[str] | None = None,
        batch_size: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, seed=seed)
        self.rows, self.path = rows, path

    def setup(self, stage: str) -> None:
        if self.path is not None:
            raise UserError(f"{self.path}: no such file")
        inputs = torch.linspace(-1, 1, 2 * self.rows).reshape(self.rows, 2)
        self.points = TensorDataset(torch.arange(self.rows), inputs, inputs.sum(-1, keepdim=True))

    def dataset(self, split: Split) -> Dataset[Any]:
        return self.points

    def collate(self, samples: Any) -> ToyBatch:
        return ToyBatch(*map(torch.stack, zip(*samples, strict=True)))

    def fingerprint(self) -> list[dict[str, str]]:
        digest = hashlib.sha256(str(self.rows).encode()).hexdigest()
        return [{"name": "line", "file": "generated", "sha256": digest}]


@contextmanager
def installed(root: Path) -> Iterator[None]:
    """Make the toy a domain of the zoo, with its configuration files under ``root``."""
    for name, text in _FILES.items():
        path = root / "configs" / "toy" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    registry.DOMAINS["toy"] = DOMAIN
    zoo.__path__.append(str(root))
    try:
        yield
    finally:
        del registry.DOMAINS["toy"]
        zoo.__path__.remove(str(root))

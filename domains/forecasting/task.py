"""ForecastingTask: what a forecaster learns from, how it is scored, and the clock of its growth."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from zoo.data.forecasting.module import ForecastingData
from zoo.data.forecasting.windows import ForecastingSpec, WindowBatch
from zoo.domains.forecasting import calibration, metrics
from zoo.domains.forecasting.drift import detect
from zoo.domains.forecasting.evaluation import baseline_forecaster, fitted_baselines, test_sums
from zoo.domains.forecasting.growth import GrowthSettings, forget, grow, prune, regime_windows, remember
from zoo.domains.forecasting.network import DynamicTMoE, Forecast
from zoo.results import Row
from zoo.task import Losses, Schedule, ZooTask, derive_seed, global_seed

log = logging.getLogger(__name__)

Network = Literal["dynamic_tmoe", "dynamic_tmoe_dense", "dlinear", "patchtst"]


class ForecastingTask(ZooTask):
    """Forecast the next rows of a multivariate series.

    Args:
        network: "dynamic_tmoe", its dense twin "dynamic_tmoe_dense", "dlinear" or "patchtst".
        width: width of a token.
        layers: expert layers, or Transformer blocks of patchtst.
        patch: patch length in rows.
        stride: rows from patch to patch.
        experts: kinds of the base experts, which are always on: identity, trend, seasonal, fluctuation.
        drift_slots: experts that growth may add.
        top_k: experts per patch.
        router: "memory" (recurrent over patches) or "linear".
        router_width: width of the memory router's state.
        repository: whether the memory router recalls states of anomalies met in training.
        relation: which experts mix channels by the cyclic relation: "all", those that growth adds ("drift") or "none".
        profile: whether a learned shape of the cycle is taken off and put back.
        dropout: in the network.
        loss: "mae" (robust to the outliers of drifting series), "mse" or "huber".
        growth: whether change points of the training rows add experts.
        warmup_epochs: epochs before the first change point is handled.
        prune_share: share of the routing below which an expert that growth added counts as idle.
        prune_patience: idle epochs in a row after which it is switched off.
        drift_alpha: level of the change-point test.
        lr: peak learning rate.
        weight_decay: of matrices.
        schedule: of the learning rate: "constant", "decay" or "cosine".
        clip: largest norm of the gradient; 0 leaves it alone.
        balance: weight of the load-balance loss.
        z: weight of the router z-loss.
    """

    monitor: ClassVar[str] = "val/mse"
    spec_type: ClassVar[type[Any]] = ForecastingSpec
    protocol: ClassVar[str] = metrics.PROTOCOL
    n_unit: ClassVar[str] = "windows"
    units: ClassVar[str] = "z-scored"

    def __init__(
        self,
        *,
        network: Network = "dynamic_tmoe",
        width: int = 32,
        layers: int = 1,
        patch: int = 16,
        stride: int = 8,
        experts: tuple[str, ...] = ("identity", "trend", "seasonal", "fluctuation"),
        drift_slots: int = 3,
        top_k: int = 3,
        router: Literal["memory", "linear"] = "memory",
        router_width: int = 32,
        repository: bool = True,
        relation: Literal["drift", "all", "none"] = "all",
        profile: bool = True,
        dropout: float = 0.2,
        loss: Literal["mae", "mse", "huber"] = "mae",
        growth: bool = True,
        warmup_epochs: int = 1,
        prune_share: float = 0.01,
        prune_patience: int = 3,
        drift_alpha: float = 0.01,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        schedule: Schedule = "decay",
        clip: float = 1.0,
        balance: float = 0.0,
        z: float = 0.0,
    ) -> None:
        super().__init__(
            network=network,
            lr=lr,
            weight_decay=weight_decay,
            schedule=schedule,
            clip=clip,
            balance=balance,
            z=z,
        )
        for name, value, low, high in (
            ("dropout", dropout, 0.0, 0.99),
            ("warmup_epochs", warmup_epochs, 0, math.inf),
            ("prune_share", prune_share, 0.0, 1.0),
            ("prune_patience", prune_patience, 1, math.inf),
            ("drift_slots", drift_slots, 0, math.inf),
            ("drift_alpha", drift_alpha, 1e-6, 0.5),
        ):
            if not low <= value <= high:
                raise ValueError(f"model.{name}={value} must lie in {low:g}..{high:g}")
        self.save_hyperparameters()
        self.width, self.layers, self.patch, self.stride, self.dropout = width, layers, patch, stride, dropout
        self.experts, self.drift_slots, self.top_k = tuple(experts), drift_slots, top_k
        self.router, self.router_width = router, router_width
        self.repository, self.relation, self.profile = repository, relation, profile
        self.loss = loss
        self.growth = growth and network == "dynamic_tmoe" and drift_slots > 0
        self.warmup_epochs, self.prune_share, self.prune_patience = warmup_epochs, prune_share, prune_patience
        self.drift_alpha = drift_alpha
        # Part of the checkpoint: what the clock has seen and done.
        self.change_points: list[dict[str, Any]] | None = None
        self.events: list[dict[str, Any]] = []
        self.memories: dict[int, list[tuple[int, int]]] = {}
        self.idle: list[list[int]] = []

    @classmethod
    def example_spec(cls, *, channels: int = 7, known: int = 0, **facts: Any) -> ForecastingSpec:
        """Facts to build a network without data: numbers of ``channels`` and ``known`` columns, and the spec's."""
        defaults: dict[str, Any] = {
            "name": "example",
            "columns": tuple(f"c{i}" for i in range(channels)),
            "known": tuple(f"k{i}" for i in range(known)),
            "lookback": 96,
            "horizon": 96,
            "freq": "h",
            "cycle": 24,
            "mean": (0.0,) * channels,
            "std": (1.0,) * channels,
            "known_mean": (0.0,) * known,
            "known_std": (1.0,) * known,
        }
        return ForecastingSpec(**(defaults | facts))

    def build_network(self, spec: ForecastingSpec) -> nn.Module:
        """The chosen network for data with these facts."""
        patch = min(self.patch, spec.lookback)
        sizes: dict[str, Any] = {
            "patch": patch,
            "stride": min(self.stride, patch),
            "width": self.width,
            "dropout": self.dropout,
        }
        if self.network in ("dlinear", "patchtst"):
            from zoo.domains.forecasting.network import peers

            if self.network == "dlinear":
                return peers.DLinear(lookback=spec.lookback, horizon=spec.horizon)
            return peers.PatchTST(
                lookback=spec.lookback, horizon=spec.horizon, depth=max(self.layers, 2), **sizes
            )
        return DynamicTMoE(
            channels=len(spec.columns),
            lookback=spec.lookback,
            horizon=spec.horizon,
            cycle=spec.cycle,
            known=len(spec.known),
            layers=self.layers,
            base=self.experts,
            drift_slots=self.drift_slots,
            top_k=self.top_k,
            router=self.router,
            router_width=self.router_width,
            repository=self.repository,
            relation=self.relation,
            profile=self.profile,
            dense=self.network == "dynamic_tmoe_dense",
            **sizes,
        )

    def kind(self) -> Literal["model", "twin", "baseline", "ablation"]:
        """The two peers are baselines; a model with a mechanism switched off is an ablation."""
        if self.network in ("dlinear", "patchtst"):
            return "baseline"
        return "ablation" if self.network == "dynamic_tmoe" and self._ablated() else super().kind()

    def setting(self) -> dict[str, object]:
        """Lookback, horizon, and mechanisms that are switched off."""
        setting: dict[str, object] = {"lookback": self.spec.lookback, "horizon": self.spec.horizon}
        if self.network == "dynamic_tmoe" and (without := self._ablated()):
            setting["without"] = ", ".join(without)
        return setting

    def _ablated(self) -> list[str]:
        """Mechanisms of the model that its settings switch off."""
        memory = self.router == "memory"
        present = {
            "growth": self.growth,
            "memory router": memory,
            # The repository lives in the memory router, and is written where growth looks at change points.
            "repository": self.repository and memory and self.growth,
            "heterogeneous experts": len(set(self.experts)) > 1,
            "cyclic relation": self.relation != "none",
            "cycle profile": self.profile,
        }
        return [name for name, on in present.items() if not on]

    def forward(self, batch: WindowBatch) -> Forecast:
        """Forecast a batch in z-scored units."""
        forecast: Forecast = self.net(batch.past, batch.phase, batch.known)  # type: ignore[misc]
        return forecast

    def training_loss(self, batch: WindowBatch) -> Losses:
        """Mean error over the scored cells."""
        forecast = self(batch)
        error = forecast.y - batch.future
        if self.loss == "mae":
            cost = error.abs()
        elif self.loss == "mse":
            cost = error.square()
        else:
            cost = nn.functional.huber_loss(forecast.y, batch.future, reduction="none")
        scored = batch.scored.sum().clamp_min(1)
        return Losses(
            named={self.loss: torch.where(batch.scored, cost, 0.0).sum() / scored}, moe=forecast.moe
        )

    def evaluate(self, batch: WindowBatch) -> dict[str, Tensor]:
        """Error sums of each window."""
        forecast = self(batch)
        self.record_routing(forecast.moe)
        sums = metrics.window_sums(forecast.y, batch.future, batch.scored)
        return {"index": batch.index, **sums}

    def score(self, gathered: dict[str, Tensor]) -> dict[str, float]:
        """Mean squared and mean absolute error over all windows."""
        return metrics.score(gathered)

    def predict_step(self, batch: WindowBatch, batch_idx: int) -> Tensor:
        """Forecasts (B, H, C) in z-scored units."""
        return self(batch).y

    def baselines(self, datamodule: ForecastingData) -> list[Row]:
        """naive, seasonal_naive and ridge on all test windows."""
        windows, spec = datamodule.dataset("test"), datamodule.spec
        fitted, refused = fitted_baselines(datamodule)
        scores: dict[str, dict[str, float | None]] = {
            baseline.name: dict(metrics.score(test_sums(baseline_forecaster(baseline), windows)))
            for baseline in fitted
        }
        return [
            Row(
                name=name,
                kind="baseline",
                data=spec.name,
                split="test",
                protocol=self.protocol,
                setting={"lookback": spec.lookback, "horizon": spec.horizon},
                n=len(windows),
                n_unit=self.n_unit,
                metrics=scores.get(name, {"mse": None, "mae": None}),
                units=self.units,
                notes=refused.get(name, ""),
            )
            for name in ("naive", "seasonal_naive", "ridge")
        ]

    def count_parameters(self) -> tuple[int, int]:
        """Slots that are switched off are not active."""
        total, off = sum(parameter.numel() for parameter in self.parameters()), 0
        for pool in self.net.pools() if isinstance(self.net, DynamicTMoE) else []:
            for expert, enabled in zip(pool.experts, pool.enabled.tolist(), strict=True):
                off += 0 if enabled else sum(parameter.numel() for parameter in expert.parameters())
        return total, total - off

    def calibrate(self, datamodule: ForecastingData, directory: Path) -> None:
        """Measure intervals on validation and their coverage on test, and what the training rows look like."""
        calibration.measure(self, datamodule).write(directory)

    def draw(self, datamodule: ForecastingData, directory: Path) -> list[Path]:
        """Error by step, typical and worst windows, and the change points of the training rows."""
        from zoo.domains.forecasting.pictures import draw_test

        return draw_test(self, datamodule, directory)

    # -- the clock of growth

    def on_train_start(self) -> None:
        """Find the change points of the training rows, once, on rank 0."""
        if self.growth and self.change_points is None:
            found = self._find_changes() if self.trainer.is_global_zero else None
            self.change_points = self.trainer.strategy.broadcast(found)

    def on_train_epoch_start(self) -> None:
        """Handle the next change point, on rank 0, and give the outcome to all."""
        if not self.growth or self.current_epoch < self.warmup_epochs:
            return
        known = len(self.events)
        state = self._tick() if self.trainer.is_global_zero else None
        if self.trainer.world_size > 1:
            state = self.trainer.strategy.broadcast(state)
            weights, self.events, self.memories, self.idle = state  # type: ignore[misc]
            self._network().load_state_dict(weights)
            if not self.trainer.is_global_zero:
                # Each rank has its own optimiser, and all must take the same steps.
                for event in self.events[known:]:
                    forget(self.trainer.optimizers[0], self._network(), event.get("slots", []))

    def on_train_epoch_end(self) -> None:
        """Count for how many epochs each expert has idled, by the last validation."""
        if self.growth and self._routing:
            self._count_idle()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the clock beside the facts."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["growth"] = {
            "change_points": self.change_points,
            "events": self.events,
            "memories": self.memories,
            "idle": self.idle,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up the clock where it stood."""
        super().on_load_checkpoint(checkpoint)
        clock = checkpoint.get("growth", {})
        self.change_points, self.events = clock.get("change_points"), clock.get("events", [])
        self.memories, self.idle = clock.get("memories", {}), clock.get("idle", [])

    def _count_idle(self) -> None:
        shares = [stats.share() for stats in self._routing.values()]
        pools = self._network().pools()
        self.idle = self.idle or [[0] * pool.num_experts for pool in pools]
        for pool, layer, counters in zip(pools, shares, self.idle, strict=True):
            for slot, share in enumerate(layer):
                idle = bool(pool.enabled[slot]) and share < self.prune_share
                counters[slot] = counters[slot] + 1 if idle else 0

    def _network(self) -> DynamicTMoE:
        if not isinstance(self.net, DynamicTMoE):
            raise TypeError(f"{self.network} does not grow")
        return self.net

    def _find_changes(self) -> list[dict[str, Any]]:
        data: ForecastingData = self.datamodule
        start, stop = data.borders.train
        report = detect(
            data.values[start:stop].double().numpy(),
            cycle=data.spec.cycle,
            alpha=self.drift_alpha,
            seed=derive_seed("drift", global_seed()) % 2**32,
        )
        points = len(report.change_points)
        log.info("drift: %d of %d checks flagged, %d change points", report.flagged, report.checks, points)
        series = data.series
        stamps = [] if series is None else series.format_time(series.time[start:stop])
        return report.described(stamps, data.spec.columns, start)

    def _tick(self) -> tuple[Any, ...]:
        """One epoch's growth: prune, refresh the repository, handle the next change point."""
        network = self._network()
        points = self.change_points or []
        for layer, slot in prune(network, self.idle, self.prune_patience):
            self._record({"action": "pruned", "layer": layer, "slot": slot})
        for regime, picks in self.memories.items():
            batch = self._regime(regime, points)
            if batch is not None:
                remember(network, batch, regime, picks)
        handled = sum("row" in event for event in self.events)
        if handled < len(points):
            self._handle(handled, points)
        return network.state_dict(), self.events, self.memories, self.idle

    def _regime(self, regime: int, points: list[dict[str, Any]]) -> WindowBatch | None:
        """Windows of regime r, which starts at change point r - 1."""
        data: ForecastingData = self.datamodule
        stop = points[regime]["row"] if regime < len(points) else data.borders.train[1]
        batch = regime_windows(
            data.dataset("train"), points[regime - 1]["row"], stop, GrowthSettings().windows
        )
        return None if batch is None else batch.to(self.device).floats(self.dtype)  # type: ignore[arg-type]

    def _handle(self, number: int, points: list[dict[str, Any]]) -> None:
        point = {key: points[number][key] for key in ("row", "time", "p_value")}
        batch = self._regime(number + 1, points)
        if batch is None:
            self._record({**point, "action": "regime shorter than a window"})
            return
        network = self._network()
        seed = derive_seed("growth", global_seed(), number) % 2**32
        optimizer = self.trainer.optimizers[0]
        settings = GrowthSettings(lr=self.lr)
        self._record(point | grow(network, batch, settings, seed, optimizer))
        self.memories[number + 1] = remember(network, batch, number + 1, None)

    def _record(self, event: dict[str, Any]) -> None:
        self.events.append({"epoch": self.current_epoch, **event})
        log.info("growth: %s", told(event))


def told(event: dict[str, Any]) -> str:
    """An event of growth as a line for people."""
    if event["action"] == "pruned":
        return f"layer {event['layer']} switches off slot {event['slot']}, which idled"
    change = f"change of {event['time']} (p = {event['p_value']:.2g}): {event['action']}"
    if event["action"] != "enabled":
        return change + (f" of kind {event['kind']}" if "kind" in event else "")
    slots = ", ".join("none" if slot is None else str(slot) for slot in event["slots"])
    loss = f"loss on its windows {event['loss_before']:.3f} to {event['loss_after']:.3f}"
    return f"{change} {event['kind']}, slot per layer {slots}, {loss}"

"""What a prediction needs beside the weights: interval widths, their coverage, and how the training rows look."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from zoo.data.forecasting.module import ForecastingData
from zoo.domains.forecasting.conformal import calibrate, covered, notice
from zoo.domains.forecasting.drift import patch_statistics
from zoo.domains.forecasting.evaluation import batches, network_forecaster
from zoo.errors import UserError
from zoo.files import replacing

LEVELS = (0.5, 0.8, 0.9, 0.95)
FILE = "calibration.safetensors"
_CELLS = 2**27
"""Most residuals held at once; longer validation splits are thinned evenly."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Intervals of a trained forecaster, z-scored.

    Attributes:
        radius: by level, (H, C) half-widths; empty if validation was too short.
        coverage: by level, the share of test targets inside.
        windows: validation windows used.
        reference: (R, F) patch statistics of training windows that do not overlap.
        notice: why there is no interval, or "".
    """

    radius: dict[float, Tensor]
    coverage: dict[float, float]
    windows: int
    reference: Tensor
    notice: str = ""

    def write(self, directory: Path) -> Path:
        """Write into a run folder, whole or not at all."""
        tensors = {f"radius/{level}": radius.contiguous() for level, radius in self.radius.items()}
        facts = {"coverage": json.dumps(self.coverage), "windows": str(self.windows), "notice": self.notice}
        with replacing(directory / FILE) as temporary:
            save_file({"reference": self.reference.contiguous(), **tensors}, temporary, metadata=facts)
        return directory / FILE


def read(directory: Path) -> Calibration:
    """The calibration of a run folder; one without intervals if the run was never calibrated.

    Raises:
        UserError: the file is damaged.
    """
    from safetensors import safe_open

    path = directory / FILE
    if not path.is_file():
        text = f"no interval: {directory} was not calibrated; python -m zoo.train run={directory} does it"
        return Calibration(radius={}, coverage={}, windows=0, reference=torch.zeros(0, 0), notice=text)
    try:
        tensors = load_file(path)
        with safe_open(path, framework="pt") as stored:
            facts = stored.metadata()
    except (SafetensorError, OSError):
        raise UserError(f"{path}: damaged; python -m zoo.train run={directory} writes it anew") from None
    return Calibration(
        radius={
            float(name.split("/")[1]): value for name, value in tensors.items() if name.startswith("radius/")
        },
        coverage={float(level): share for level, share in json.loads(facts["coverage"]).items()},
        windows=int(facts["windows"]),
        reference=tensors["reference"],
        notice=facts["notice"],
    )


def measure(task: torch.nn.Module, data: ForecastingData) -> Calibration:
    """Calibrate on the validation windows and measure coverage on the test windows."""
    forecaster = network_forecaster(task)
    spec = data.spec
    most = max(1, _CELLS // (spec.horizon * len(spec.columns)))
    residuals, scored = [], []
    for batch in batches(data.dataset("val"), most):
        residuals.append(batch.future - forecaster(batch))
        scored.append(batch.scored)
    residual, observed = torch.cat(residuals), torch.cat(scored)
    radius = {
        level: found.radius for level in LEVELS if (found := calibrate(residual, level, observed)) is not None
    }
    inside, counted = dict.fromkeys(radius, 0), 0
    for batch in batches(data.dataset("test")):
        forecast = forecaster(batch)
        for level, width in radius.items():
            inside[level] += int(covered(forecast, batch.future, width, batch.scored)["inside"].sum())
        counted += int(batch.scored.sum())
    return Calibration(
        radius=radius,
        coverage={level: count / max(counted, 1) for level, count in inside.items()},
        windows=len(residual),
        reference=training_reference(data),
        notice="" if 0.9 in radius else notice(len(residual), 0.9),
    )


def training_reference(data: ForecastingData) -> Tensor:
    """Patch statistics of back-to-back training windows, (R, F)."""
    start, stop = data.borders.train
    lookback = data.spec.lookback
    count = (stop - start) // lookback
    rows = data.values[start : start + count * lookback].numpy().astype(np.float64)
    statistics = patch_statistics(rows.reshape(count, lookback, rows.shape[1]))
    return torch.from_numpy(statistics.reshape(count, -1))

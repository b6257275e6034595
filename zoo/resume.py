"""Settings of now against the network of a run that is taken up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from zoo.cli import ZooCLI, told_in_one_line
from zoo.errors import UserError
from zoo.runs import load_checkpoint


def shapes(task: Any, spec: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that a task builds for data with these facts; no memory is taken.

    Raises:
        UserError: The network refuses a setting.
    """
    with told_in_one_line(), torch.device("meta"):
        return {name: tuple(value.shape) for name, value in task.build_network(spec).state_dict().items()}


def refuse_other_shapes(cli: ZooCLI, run: Path, checkpoint: Path) -> None:
    """Refuse a setting of the model that changes the shapes of a network that is there already.

    Args:
        cli: The command line with the settings of now.
        run: The run folder, whose ``config.yaml`` has the settings of then.
        checkpoint: The checkpoint whose facts about the data the network was built for.

    Raises:
        UserError: A key of ``model`` does so; the message names it. Or the checkpoint is damaged.
    """
    spec = cli.task.spec_type(**load_checkpoint(checkpoint)["spec"])
    now = _flat(cli.settings.model.as_dict())
    then = _flat(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")).get("model") or {})
    changed = [key for key, value in now.items() if key in then and then[key] != value]

    def built(keys: list[str]) -> dict[str, tuple[int, ...]]:
        old = [f"--config={_nested(key, then[key])}" for key in changed if key not in keys]
        return shapes(ZooCLI(cli.domain, cli.stage, [f"--config={cli.dump()}", *old]).task, spec)

    for key in changed:
        if built([key]) != built([]):
            raise UserError(
                f"model.{key}={now[key]} changes the shapes of the network in {run} (saved {then[key]}): "
                "start a new run or drop the word"
            )


def _nested(key: str, value: object) -> str:
    """The YAML text that sets one key of the model."""
    for part in reversed(f"model.{key}".split(".")):
        value = {part: value}
    return yaml.safe_dump(value)


def _flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in section.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat

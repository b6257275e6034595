"""Converters between stacked weights (E, ...) and checkpoints with one entry per expert.

A mapping of names says how a checkpoint calls each part, with ``{e}`` for the number of the expert::

    {"gate": "experts.{e}.gate_proj.weight", "up": "experts.{e}.up_proj.weight", "down": "experts.{e}.down_proj.weight"}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def unstack(parts: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Copies of all experts' weights under the checkpoint's keys.

    Args:
        parts: stacked weights (E, ...) by name.
        names: a key pattern with ``{e}`` for each of the same names.

    Raises:
        ValueError: names that do not fit the parts, or patterns that do not tell keys apart.
    """
    keys = _keys(parts, names)
    return {key: parts[name].detach()[expert].clone() for key, (name, expert) in keys.items()}


def restack(parts: Mapping[str, Tensor], names: Mapping[str, str], state: Mapping[str, Tensor]) -> None:
    """Write a per-expert checkpoint into stacked weights, in place; all of it or nothing.

    Args:
        parts: stacked weights (E, ...) by name.
        names: a key pattern with ``{e}`` for each of the same names.
        state: the checkpoint, with these keys and no others.

    Raises:
        ValueError: names that do not fit the parts; a key that is missing, of no expert, of another shape, or not of
            floats.
    """
    keys = _keys(parts, names)
    if missing := keys.keys() - state.keys():
        raise ValueError(f"the checkpoint lacks {_listed(missing)}")
    if unmatched := state.keys() - keys.keys():
        raise ValueError(f"no expert takes {_listed(unmatched)}")
    for key, (name, expert) in keys.items():
        expected, found = parts[name][expert], state[key]
        if found.shape != expected.shape or not found.is_floating_point():
            raise ValueError(
                f"{key} is {found.dtype} of shape {tuple(found.shape)}, not floats of {tuple(expected.shape)}"
            )
    with torch.no_grad():
        for key, (name, expert) in keys.items():
            parts[name][expert].copy_(state[key])


def _keys(parts: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """The part and the expert behind each key of the checkpoint."""
    if parts.keys() != names.keys():
        raise ValueError(f"names for {', '.join(sorted(names))} do not fit parts {', '.join(sorted(parts))}")
    keys: dict[str, tuple[str, int]] = {}
    for name, pattern in names.items():
        for expert in range(parts[name].shape[0]):
            key = pattern.replace("{e}", str(expert))
            if key in keys:
                raise ValueError(f"the pattern {pattern!r} of {name} gives the key {key!r} a second time")
            keys[key] = (name, expert)
    return keys


def _listed(keys: Iterable[str]) -> str:
    first, *others = sorted(keys)
    return f"{first} and {len(others)} more" if others else first

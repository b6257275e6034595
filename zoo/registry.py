"""What the zoo holds: domains, their sizes, data presets and networks, told without importing any of them.

A domain is named by strings ("package.module:Attribute"), so that lists, help and wrong words are answered
before torch is loaded. Only :func:`resolve` and :func:`create_model` import a domain.
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

import zoo
from zoo.errors import UserError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Domain:
    """One domain of the zoo.

    Attributes:
        name: The word after ``domain=``, also the folder under ``domains/``, ``data/`` and ``configs/``.
        title: One line for lists.
        task: Where its ``ZooTask`` is.
        data: Where its ``ZooDataModule`` is.
        predictor: Where its ``Predictor`` is.
        model: The network that is the domain's model.
        twin: The dense network beside it.
        networks: All networks that can be trained, in the order of the table.
        size: The size taken when none is named.
    """

    name: str
    title: str
    task: str
    data: str
    predictor: str
    model: str
    twin: str
    networks: tuple[str, ...]
    size: str = "tiny"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One name of :func:`list_models`: a network of a domain in one of its sizes."""

    name: str
    domain: str
    network: str
    size: str


DOMAINS: dict[str, Domain] = {
    "forecasting": Domain(
        name="forecasting",
        title="Non-stationary time-series forecasting (Dynamic TMoE)",
        task="zoo.domains.forecasting.task:ForecastingTask",
        data="zoo.data.forecasting.module:ForecastingData",
        predictor="zoo.domains.forecasting.predict:ForecastingPredictor",
        model="dynamic_tmoe",
        twin="dynamic_tmoe_dense",
        networks=("dynamic_tmoe", "dynamic_tmoe_dense", "dlinear", "patchtst"),
    ),
}


def unknown(kind: str, word: str, known: Iterable[str]) -> UserError:
    """The error for a word that is none of the known ones, with the nearest of them."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return UserError(f"unknown {kind} {word!r}.{hint} Known: {', '.join(names) or 'none'}.")


def get_domain(name: str) -> Domain:
    """The domain of that name.

    Raises:
        UserError: There is none.
    """
    if name not in DOMAINS:
        raise unknown("domain", name, DOMAINS)
    return DOMAINS[name]


def resolve(place: str) -> Any:
    """Import what a registry string names, ``"package.module:Attribute"``."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def configs(domain: str) -> Path:
    """The folder with the YAML files of a domain, in a checkout or in an installed package."""
    roots = [Path(root) / "configs" / domain for root in zoo.__path__]
    return next((root for root in roots if root.is_dir()), roots[0])


def sizes(domain: str) -> tuple[str, ...]:
    """Names of the sizes of a domain, sorted."""
    return _stems(configs(domain) / "model")


def data_presets(domain: str) -> tuple[str, ...]:
    """Names of the data presets of a domain, sorted."""
    return _stems(configs(domain) / "data")


def _stems(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def preset_path(domain: str, kind: Literal["model", "data"], name: str) -> Path:
    """The YAML file of a size (``kind="model"``) or of a data preset (``kind="data"``).

    Raises:
        UserError: The domain has none of that name.
    """
    known = sizes(domain) if kind == "model" else data_presets(domain)
    if name not in known:
        raise unknown(f"{'size' if kind == 'model' else 'data preset'} of {domain}", name, known)
    return configs(domain) / kind / f"{name}.yaml"


def entries(domain: str | None = None) -> list[Entry]:
    """All networks in all sizes, of one domain or of the whole zoo, in the order of the tables."""
    chosen = DOMAINS.values() if domain is None else [get_domain(domain)]
    return [
        Entry(name=f"{network}_{size}", domain=item.name, network=network, size=size)
        for item in chosen
        for network in item.networks
        for size in sizes(item.name)
    ]


def list_models(pattern: str = "*", domain: str | None = None) -> list[str]:
    """Names that :func:`create_model` takes, such as ``dynamic_tmoe_tiny``.

    Args:
        pattern: Shell pattern that the names must match, ``"*_tiny"``.
        domain: Only the models of this domain.

    Raises:
        UserError: The domain is unknown.
    """
    return [entry.name for entry in entries(domain) if fnmatch.fnmatchcase(entry.name, pattern)]


def get_entry(name: str) -> Entry:
    """What a model's name stands for.

    Raises:
        UserError: No model has this name.
    """
    known = {entry.name: entry for entry in entries()}
    if name not in known:
        raise unknown("model", name, known)
    return known[name]


def create_model(name: str, **overrides: Any) -> nn.Module:
    """Build an untrained network by name.

    Args:
        name: One of :func:`list_models`.
        overrides: Facts about the data (the fields of the domain's spec, such as ``channels``) and settings of
            the model (the keys under ``model.`` in the configuration, such as ``width``).

    Returns:
        A plain module with fresh weights.

    Raises:
        UserError: The name is unknown, or an override is neither a fact nor a setting, or has a wrong value.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    entry = get_entry(name)
    task_class = resolve(get_domain(entry.domain).task)
    facts = {field.name for field in fields(task_class.spec_type)} | set(
        signature(task_class.example_spec).parameters
    )
    spec = task_class.example_spec(**{key: value for key, value in overrides.items() if key in facts})
    settings = {key: value for key, value in overrides.items() if key not in facts}

    parser = ArgumentParser(exit_on_error=False)
    keys = parser.add_class_arguments(task_class, "model")
    for key in settings:
        if f"model.{key}" not in keys and key not in keys:
            raise unknown(
                f"override of {name}", key, sorted(facts | {key.removeprefix("model.") for key in keys})
            )
    try:
        config = parser.parse_object({"model": _model_section(entry) | {"network": entry.network} | settings})
        task = parser.instantiate(config).model
        network: nn.Module = task.build_network(spec)
    except (ArgumentError, TypeError, ValueError) as error:
        raise UserError(f"{name}: {' '.join(str(error).split())}") from error
    return network


def _model_section(entry: Entry) -> dict[str, Any]:
    """The ``model:`` part of the default file with that of the size laid over it."""
    section: dict[str, Any] = {}
    for path in (configs(entry.domain) / "default.yaml", preset_path(entry.domain, "model", entry.size)):
        section |= (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("model", {})
    return section

"""Who may import whom, and calls that are not made anywhere: read from the sources."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOMAINS = ("forecasting", "aigi", "tracking", "spectra", "v2x", "ridehail")
FRONT_DOORS = ("zoo.train", "zoo.cli", "zoo.predict", "zoo.session", "zoo.registry", "zoo.hub", "zoo.export")
ABOVE = ("zoo.domains", "zoo.task", "zoo.report", *FRONT_DOORS)
HEAVY = ("timm", "torch_geometric", "rdkit", "cv2", "pandas")
# Who never imports whom.
FORBIDDEN = (
    (("zoo",), ("domains", "data", "configs", "lightning")),
    (("zoo.nn",), ("zoo.data", *ABOVE)),
    (("zoo.data",), ABOVE),
    (("zoo.domains",), FRONT_DOORS),
    *(
        ((f"zoo.domains.{one}", f"zoo.data.{one}"), (f"zoo.domains.{other}", f"zoo.data.{other}"))
        for one in DOMAINS
        for other in DOMAINS
        if one != other
    ),
)


def modules(root: Path) -> dict[str, Path]:
    """Every module of the product by its import name."""
    found = {}
    for folder in ("zoo", "domains", "data", "configs"):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts if folder == "zoo" else ("zoo", *parts))
            found[name.removesuffix(".__init__")] = path
    return found


def imports(name: str, source: str, package: bool) -> set[str]:
    """Absolute names that a module imports, at its top or inside a function, hints included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            home = name.split(".")[: None if package else -1]
            up = home[: len(home) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def below(name: str, *tops: str) -> bool:
    """Whether a module is one of ``tops`` or inside it."""
    return any(name == top or name.startswith(f"{top}.") for top in tops)


def climbs(module: str, imported: str) -> bool:
    """Whether this import is forbidden."""
    if module == "zoo.errors":
        return imported != "__future__"
    if below(module, "zoo.moe"):
        return below(imported, "zoo") and not below(imported, "zoo.moe")
    if not below(module, "zoo.domains", "zoo.data") and below(imported, "zoo.domains", *HEAVY):
        return True  # what domains share reaches them by strings alone
    return any(below(module, *who) and below(imported, *whom) for who, whom in FORBIDDEN)


MODULES = modules(ROOT)


@pytest.mark.parametrize("name", MODULES)
def test_imports_climb_no_floor(name: str) -> None:
    path = MODULES[name]
    wanted = imports(name, path.read_text(encoding="utf-8"), path.name == "__init__.py")
    assert [module for module in sorted(wanted) if climbs(name, module)] == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("zoo.task", "from data import sources"),
        ("zoo.errors", "import os"),
        ("zoo.moe.layer", "from zoo.errors import UserError"),
        ("zoo.moe.layer", "from ..nn import dropout"),
        ("zoo.nn.dropout", "import zoo.cli"),
        ("zoo.data.module", "def f():\n    from zoo.domains import forecasting"),
        ("zoo.data.forecasting.reader", "from zoo.task import ZooTask"),
        ("zoo.cli", "from zoo.domains.forecasting.task import ForecastingTask"),
        ("zoo.domains.forecasting.task", "from zoo.train import main"),
        ("zoo.domains.forecasting.task", "from ..aigi import network"),
        ("zoo.domains.forecasting.task", "from zoo.data.v2x import boxes"),
        ("zoo.report", "import pandas as pd"),
        ("zoo.task", "from lightning import LightningModule"),
    ],
)
def test_a_climbing_import_is_found(name: str, source: str) -> None:
    assert any(climbs(name, module) for module in imports(name, source, package=False))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("zoo.data.module", "from zoo.errors import UserError"),
        ("zoo.domains.forecasting.task", "from zoo.data.forecasting import ForecastingData\nimport pandas"),
        ("zoo.domains.forecasting.network.blocks", "from .experts import Linear\nfrom zoo.moe import MoE"),
        ("zoo.moe.layer", "from .router import Router\nimport torch"),
    ],
)
def test_an_honest_import_passes(name: str, source: str) -> None:
    assert not any(climbs(name, module) for module in imports(name, source, package=False))


def unsafe(source: str) -> Iterator[str]:
    """Calls that run code from files, or write where an archive says."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword):
            value = node.value.value if isinstance(node.value, ast.Constant) else None
            if (node.arg, value) in {
                ("weights_only", False),
                ("allow_pickle", True),
                ("trust_remote_code", True),
            }:
                yield f"{node.arg}={value}"
        elif isinstance(node, ast.Attribute):
            if node.attr in {"extractall", "unsafe_load", "full_load"}:
                yield node.attr
            # Naming the error of a foreign checkpoint is fine; everything else in that module is not.
            if ast.unparse(node.value) == "pickle" and node.attr != "UnpicklingError":
                yield f"pickle.{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {
            "yaml.load",
            "os.system",
            "eval",
            "exec",
        }:
            yield ast.unparse(node.func)
        elif isinstance(node, ast.ImportFrom) and node.module == "pickle":
            yield from (f"pickle.{alias.name}" for alias in node.names if alias.name != "UnpicklingError")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None), *(alias.name for alias in node.names)]
            yield from {"cloudpickle", "dill", "joblib", "marshal", "shelve"} & {*names}


SCRIPTS = [*MODULES.values(), *sorted((ROOT / "benchmarks").rglob("*.py"))]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_unsafe_is_called(path: Path) -> None:
    assert list(unsafe(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.full_load(text)",
        "from pickle import loads",
        "import pickle\npickle.load(file)",
        "import joblib",
        "tar.extractall(folder)",
        "eval(text)",
    ],
)
def test_an_unsafe_call_is_found(source: str) -> None:
    assert list(unsafe(source)) != []


def test_third_parties_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[\[>]", line)[0] for line in project["dependencies"]}
    owners = importlib.metadata.packages_distributions()
    undeclared = {}
    for name, path in MODULES.items():
        for module in imports(name, path.read_text(encoding="utf-8"), path.name == "__init__.py"):
            top = module.split(".")[0]
            if top in sys.stdlib_module_names or top == "zoo":
                continue
            if not {owner.lower() for owner in owners.get(top, [])} & declared:
                undeclared.setdefault(top, name)
    assert undeclared == {}


@pytest.mark.parametrize("name", ["zoo", "zoo.registry", "zoo.train"])
def test_front_doors_load_no_torch(name: str) -> None:
    program = f"import sys, {name}; print({{'torch', 'pandas', 'pytorch_lightning'}} & sys.modules.keys())"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr

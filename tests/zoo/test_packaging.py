"""The zoo imports under one name from a checkout, a wheel and an editable install, beside any folder of the user's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import zoo

SOURCES = ("zoo", "domains", "data", "configs", "pyproject.toml", "setup.py", "README.md", "LICENSE")
MODES = ("checkout", "wheel", "editable")
DIST_INFO = f"moe_zoo-{zoo.__version__}.dist-info"

ASK = """
import importlib, json, sys
from importlib.resources import files
import zoo
names = ["zoo.domains", "zoo.data", "zoo.configs", "zoo.registry", "zoo.train"]
print(json.dumps({
    "version": zoo.__version__,
    "models": zoo.list_models(),
    "places": {name: importlib.import_module(name).__file__ for name in names},
    "torch": "torch" in sys.modules,
    "presets": sum(1 for _ in files("zoo.configs").rglob("*.yaml")),
    "cards": sum(1 for _ in files("zoo.domains").glob("*/README.md")),
    "weights": sum(1 for _ in (files("zoo") / "weights").glob("*")),
}))
"""

WORKERS = """
from torch.utils.data import DataLoader, Dataset

class Names(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        import zoo.data, zoo.domains
        return (zoo.domains.__name__, zoo.data.__name__)[index]

if __name__ == "__main__":
    loader = DataLoader(Names(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    print(*next(iter(loader)))
"""


@dataclass
class Place:
    """An interpreter that has the zoo in one of the ways that users have it."""

    python: Path
    checkout: Path
    env: dict[str, str]

    def run(self, *arguments: str, cwd: Path) -> str:
        """Run the interpreter in ``cwd`` and return what it printed; fails the test on an error."""
        done = subprocess.run(
            [self.python, *arguments], cwd=cwd, env=self.env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def checkout(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a package is built from, so that building leaves nothing in the real checkout."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        if (root / name).is_dir():
            shutil.copytree(
                root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        else:
            shutil.copy(root / name, copy / name)
    return copy


@pytest.fixture(scope="session")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution as for a release."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "is absent from the `packages` configuration" not in done.stdout + done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="session", params=MODES)
def place(request: pytest.FixtureRequest, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A fresh environment with the zoo installed (or not: ``checkout``), and the third parties of this one."""
    folder = tmp_path_factory.mktemp(request.param)
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    paths = sysconfig.get_paths("venv", vars={"base": str(folder), "platbase": str(folder)})
    # As a plain path, so that an editable zoo of this environment stays out of sight.
    (Path(paths["purelib"]) / "third_parties.pth").write_text(sysconfig.get_path("purelib") + "\n")
    here = Place(Path(paths["scripts"]) / "python", checkout, {**os.environ})
    here.env.pop("PYTHONPATH", None)
    if request.param == "checkout":
        here.env["PYTHONPATH"] = str(checkout)
    else:
        what = ["--editable", str(checkout)]
        if request.param == "wheel":
            what = [str(request.getfixturevalue("wheel"))]
        pip = [sys.executable, "-m", "pip", "--python", str(here.python), "install", "--quiet", "--no-index"]
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", *what], check=True, timeout=120)
    return here


def test_same_zoo_everywhere(place: Place, root: Path, tmp_path: Path) -> None:
    answer = json.loads(place.run("-c", ASK, cwd=tmp_path))
    assert answer["version"] == zoo.__version__
    assert "dynamic_tmoe_tiny" in answer["models"]
    assert answer["torch"] is False
    assert answer["presets"] == len(list((place.checkout / "configs").rglob("*.yaml"))) > 0
    assert answer["cards"] == len(list((place.checkout / "domains").glob("*/README.md")))
    assert answer["weights"] == len(list((place.checkout / "zoo" / "weights").glob("*")))
    assert not any(str(root) + os.sep in where for where in answer["places"].values())


def test_front_door_answers_in_an_empty_folder(place: Place, tmp_path: Path) -> None:
    assert "domain=forecasting" in place.run("-m", "zoo.train", "--help", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", [True, False], ids=["with __init__", "plain folder"])
def test_users_own_folders_stay_theirs(place: Place, tmp_path: Path, package: bool) -> None:
    for name in ("data", "domains", "configs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"OWNER = 'user of {name}'\n")
        if package:
            (tmp_path / name / "__init__.py").write_text("")
    program = (
        "import zoo.data, zoo.domains, zoo.configs\nprint(bool(zoo.data.__doc__), hasattr(zoo.data, 'mine'))"
    )
    assert place.run("-c", program, cwd=tmp_path).split() == ["True", "False"]
    # On PYTHONPATH, Python itself prefers the checkout's package to a plain folder.
    if package or "PYTHONPATH" not in place.env:
        program += "\nimport data.mine, domains.mine, configs.mine\nprint(data.mine.OWNER)"
        assert place.run("-c", program, cwd=tmp_path).endswith("user of data\n")


def test_spawned_workers_find_it(place: Place, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WORKERS)
    assert place.run("program.py", cwd=tmp_path).split() == ["zoo.domains", "zoo.data"]


@pytest.fixture
def newcomer(checkout: Path) -> Iterator[str]:
    """A module that joins the checkout after the zoo was installed from it."""
    path = checkout / "domains" / "newcomer.py"
    path.write_text("ANSWER = 42\n")
    yield "zoo.domains.newcomer"
    path.unlink()


@pytest.mark.parametrize("place", ["checkout", "editable"], indirect=True)
def test_new_modules_are_seen_without_reinstall(place: Place, newcomer: str, tmp_path: Path) -> None:
    assert place.run("-c", f"import {newcomer} as new; print(new.ANSWER)", cwd=tmp_path).strip() == "42"


def test_wheel_holds_one_package(wheel: Path, checkout: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"zoo", DIST_INFO}
    assert {"zoo/py.typed", "zoo/domains/__init__.py", "zoo/data/__init__.py"} <= set(names)
    assert f"{DIST_INFO}/licenses/LICENSE" in names
    assert not any("__pycache__" in name or "/tests/" in name for name in names)
    modules = {
        path.relative_to(checkout)
        for folder in ("domains", "data")
        for path in (checkout / folder).rglob("*.py")
    }
    assert {f"zoo/{module.as_posix()}" for module in modules} <= set(names)


def test_metadata(wheel: Path) -> None:
    text = zipfile.ZipFile(wheel).read(f"{DIST_INFO}/METADATA").decode()
    header = text.partition("\n\n")[0].splitlines()
    assert {
        "Name: moe-zoo",
        f"Version: {zoo.__version__}",
        "License-Expression: Apache-2.0",
        "Requires-Python: >=3.11",
    } <= {*header}
    core = [
        line.removeprefix("Requires-Dist: ")
        for line in header
        if "Requires-Dist" in line and "extra" not in line
    ]
    names = {line.split(">")[0].split("[")[0] for line in core}
    assert {"torch", "pytorch-lightning", "timm", "torch-geometric", "rdkit", "opencv-python"} <= names
    assert "lightning" not in names
    assert all(">=" in line and "<" not in line.replace(">=", "") for line in core)


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'creat_model'"):
        zoo.creat_model  # noqa: B018
    assert {"create_model", "get_entry", "list_models"} <= set(dir(zoo))

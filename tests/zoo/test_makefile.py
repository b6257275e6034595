"""The Makefile: one set-up, plain words to the front door and nothing else, types across the folders."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

# Stands in for Python: notes how it is called, and makes an environment that holds itself.
STUB = """#!/bin/sh
[ "$1" = -c ] && exit 0
printf '%s\\n' "$*" >> "$NOTES"
[ "$2" = "$BROKEN" ] && exit 1
[ "$2" = venv ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
exit 0
"""


class Workshop:
    """A folder with the real Makefile and a stand-in for Python."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        for name in ("Makefile", "pyproject.toml", "setup.py"):
            shutil.copy(root / name, folder / name)
        stub = folder / "stub"
        stub.write_text(STUB)
        stub.chmod(0o755)

    def make(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run make with these words, and nothing of a make above this test."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
        # Make runs a word such as a!=id before it reads the Makefile, in the SHELL of the environment, and complains
        # in a line of its own where there is none, as under some service managers.
        settings = {
            "SHELL": "/bin/sh",
            "PYTHON": str(self.folder / "stub"),
            "NOTES": str(self.notes),
            "LC_ALL": "C",
        }
        return subprocess.run(
            ["make", *words],
            cwd=self.folder,
            env={**clean, **settings, **env},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self) -> list[str]:
        """How Python was called since the last look."""
        text = self.notes.read_text() if self.notes.exists() else ""
        self.notes.unlink(missing_ok=True)
        return text.splitlines()


@pytest.fixture
def workshop(root: Path, tmp_path: Path) -> Workshop:
    return Workshop(root, tmp_path)


@pytest.fixture
def ready(workshop: Workshop) -> Workshop:
    """A workshop whose set-up is done."""
    assert workshop.make("setup").returncode == 0
    workshop.calls()
    return workshop


def test_second_call_installs_nothing(workshop: Workshop) -> None:
    first, second = (workshop.make("train", "domain=forecasting") for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    venv, pip, *trainings = workshop.calls()
    assert venv == "-m venv .venv"
    assert pip.startswith("-m pip install")
    assert pip.endswith("-e .[dev]")
    assert trainings == ["-m zoo.train domain=forecasting"] * 2
    assert "Installing" in first.stdout
    assert second.stdout == ""


@pytest.mark.parametrize("name", ["pyproject.toml", "setup.py"])
def test_changed_requirements_install_again(ready: Workshop, name: str) -> None:
    with (ready.folder / name).open("a") as file:
        file.write("\n# changed\n")
    ready.make("setup")
    ready.make("setup")
    assert [call.split()[1] for call in ready.calls()] == ["pip"]


def test_touched_requirements_do_not(ready: Workshop) -> None:
    (ready.folder / "pyproject.toml").touch()
    ready.make("setup")
    assert ready.calls() == []


def test_failed_install_is_tried_again(workshop: Workshop) -> None:
    assert workshop.make("train", "domain=forecasting", BROKEN="pip").returncode == 2
    assert [call.split()[1] for call in workshop.calls()] == ["venv", "pip"]
    assert workshop.make("train", "domain=forecasting").returncode == 0
    assert [call.split()[1] for call in workshop.calls()] == ["pip", "zoo.train"]


def test_torch_index_and_pip_arguments(workshop: Workshop) -> None:
    workshop.make("setup", TORCH_INDEX="https://example.org/cpu", PIP_ARGS="--retries 9")
    _, torch, rest = workshop.calls()
    assert torch.endswith("--retries 9 torch torchvision --index-url https://example.org/cpu")
    assert rest.endswith("--retries 9 -e .[dev]")


def test_old_python_is_refused_in_one_line(workshop: Workshop) -> None:
    done = workshop.make("setup", PYTHON="no-such-python false")
    assert done.returncode == 2
    assert "error: no Python 3.11 or later among: no-such-python false" in done.stderr
    assert workshop.calls() == []


def test_words_are_forwarded(ready: Workshop) -> None:
    words = [
        "domain=forecasting",
        "size=tiny",
        "data.path=my/file.csv",
        "run=runs/a-b",
        "note=50%,@x:+1=2",
        "empty=",
    ]
    assert ready.make("train", *words).returncode == 0
    (call,) = ready.calls()
    assert sorted(call.removeprefix("-m zoo.train ").split()) == sorted(words)


def test_environment_does_not_leak_in(ready: Workshop) -> None:
    names = dict.fromkeys(("data", "domain", "size", "run", "input", "rows", "seeds"), "leak")
    assert ready.make("train", "domain=forecasting", **names).returncode == 0
    assert ready.make("-e", "train", "domain=forecasting", **names).returncode == 0
    assert ready.calls() == ["-m zoo.train domain=forecasting"] * 2


@pytest.mark.parametrize(
    "word",
    [
        "fit",
        "model.a=1 2",
        "callbacks+=EarlyStopping",
        "a:=1",
        "a?=1",
        "a!=id",
        "a=$(shell touch evil)",
        "a=$$(touch evil)",
        "a=`touch evil`",
        "a=x;touch evil",
        "a=x|touch evil",
        "a='",
        'a="',
        "a=*",
        "a=[1,2]",
        "a={b: 1}",
        "a=b#c",
        "a=b\\c",
        "a=~",
        "a=b\nc=d",
        "a=b\n",
        "domain=forecasting",
        "UPPER=1",
        "2a=1",
        "--=1",
    ],
)
def test_other_words_are_refused_in_one_line(workshop: Workshop, word: str) -> None:
    done = workshop.make("train", "domain=forecasting", "--", word)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert ".venv/bin/python -m zoo.train" in done.stderr
    assert workshop.calls() == []
    assert not (workshop.folder / "evil").exists()


def test_variables_and_targets(root: Path) -> None:
    text = (root / "Makefile").read_text()
    variables = re.findall(r"^(?:define |export )?([A-Za-z_]+)\s*[:?+]?=", text, flags=re.MULTILINE)
    assert not {"data", "domain", "size", "run", "input"} & {*variables}
    targets = set(re.findall(r"^([a-z]+):", text, flags=re.MULTILINE))
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, flags=re.MULTILINE)
    assert targets == set(phony.split())


def test_help_lists_every_target(workshop: Workshop, root: Path) -> None:
    done = workshop.make()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (root / "Makefile").read_text(), flags=re.MULTILINE)
    assert {line.split()[1] for line in done.stdout.splitlines()} == set(phony.split())


@pytest.mark.parametrize("kind", ["int", "str"])
def test_types_are_checked_across_folders(ready: Workshop, kind: str) -> None:
    sources = {
        "zoo/__init__.py": "",
        "data/__init__.py": "def rows(path: str) -> int:\n    return len(path)\n",
        "domains/__init__.py": f"from zoo.data import rows\n\ntotal: {kind} = rows('x')\n",
        "configs/__init__.py": "",
    }
    for name, source in sources.items():
        (ready.folder / name).parent.mkdir(exist_ok=True)
        (ready.folder / name).write_text(source)
    mypy = ready.folder / ".venv" / "bin" / "mypy"
    mypy.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mypy "$@"\n')
    mypy.chmod(0o755)
    done = ready.make("types")
    if kind == "int":
        assert done.returncode == 0, done.stdout
    else:
        assert done.returncode == 2
        assert (
            'domains/__init__.py:3: error: Incompatible types in assignment (expression has type "int"'
            in done.stdout
        )

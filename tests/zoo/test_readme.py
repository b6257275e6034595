"""The README files: every fenced block tagged ``run`` is run, in the order of its file, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(bash|python) run( slow)?\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    file: str
    line: int
    language: str
    code: str


def blocks() -> list[object]:
    """Blocks of all README files; those tagged ``run slow`` carry that mark."""
    found = []
    for path in [ROOT / "README.md", *sorted(ROOT.glob("domains/*/README.md"))]:
        text = path.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            block = Block(path.relative_to(ROOT).as_posix(), line, match[1], match[3])
            marks = [pytest.mark.slow] if match[2] else []
            found.append(pytest.param(block, id=f"{block.file}:{line}", marks=marks))
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder for each file, so that a block may use what an earlier one made."""
    return {
        path.relative_to(ROOT).as_posix(): tmp_path_factory.mktemp("readme")
        for path in ROOT.rglob("README.md")
    }


@pytest.mark.parametrize("block", blocks())
def test_block_runs(block: Block, folders: dict[str, Path]) -> None:
    command = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}[block.language]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [*command, block.code],
        cwd=folders[block.file],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr

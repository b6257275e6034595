"""The page about the layer: its code runs, and it names every part there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import zoo.moe

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "moe.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    exec(compile(BLOCKS[number], f"docs/moe.md, block {number}", "exec"), {})
    assert ("'load'" in capsys.readouterr().out) == (number == 0)


def test_table_names_what_the_package_exports() -> None:
    section = PAGE.partition("## What there is")[2].partition("\n## ")[0]
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    assert set(re.findall(r"`(\w+)`", table)) == set(zoo.moe.__all__)

"""The tests' own ground: real files are required where promised, the network is closed, commands run as users' do."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import zoo


def test_real_file_is_found(real_file: Callable[[str], Path], monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "y.csv").write_text("a\n")
    monkeypatch.setenv("ZOO_DATA", str(tmp_path))
    assert real_file("x/y.csv") == (tmp_path / "x" / "y.csv").resolve()


@pytest.mark.parametrize("data", [None, "empty"])
@pytest.mark.parametrize("required", [False, True])
def test_missing_real_file(
    real_file: Callable[[str], Path], monkeypatch, tmp_path: Path, data: str | None, required: bool
) -> None:
    monkeypatch.delenv("ZOO_DATA", raising=False)
    if data:
        monkeypatch.setenv("ZOO_DATA", str(tmp_path))
    monkeypatch.setenv("ZOO_REQUIRE_DATA", "1" if required else "0")
    outcome = pytest.fail.Exception if required else pytest.skip.Exception
    with pytest.raises(outcome, match=r"needs ZOO_DATA with x/y\.csv"):
        real_file("x/y.csv")


def test_network_is_closed() -> None:
    with socket.socket() as client, pytest.raises(OSError, match=r"may not connect to 192\.0\.2\.1"):
        client.connect(("192.0.2.1", 80))


def test_loopback_is_open() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        client.sendall(b"x")
        assert server.accept()[0].recv(1) == b"x"


def test_commands_run_elsewhere_with_their_own_cache(run_cli, tmp_path: Path, zoo_home: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, zoo\nprint(os.getcwd(), os.environ['ZOO_HOME'], zoo.__version__)\nsys.exit(7)\n"
    )
    done = run_cli(["program"], cwd=tmp_path)
    assert done.returncode == 7
    assert done.stdout.split() == [str(tmp_path.resolve()), str(zoo_home), zoo.__version__]


@pytest.mark.parametrize(
    ("given", "there", "expected"),
    [
        ("", True, "{top}/shared/data 1"),
        ("", False, "- -"),
        ("/elsewhere", True, "/elsewhere 1"),
    ],
)
def test_ci_requires_the_real_files(
    root: Path, tmp_path: Path, given: str, there: bool, expected: str
) -> None:
    script = tmp_path / "repository" / ".ci" / "run"
    script.parent.mkdir(parents=True)
    shutil.copy(root / ".ci" / "run", script)
    if there:
        (tmp_path / "shared" / "data").mkdir(parents=True)
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text('#!/bin/sh\necho "$*" "$PWD" "${ZOO_DATA:--}" "${ZOO_REQUIRE_DATA:--}"\n')
    make.chmod(0o755)
    env = {"PATH": f"{make.parent}{os.pathsep}{os.environ['PATH']}", "ZOO_DATA": given}
    done = subprocess.run(["bash", script], cwd="/", env=env, capture_output=True, text=True, timeout=30)
    top = tmp_path.resolve()
    assert done.stdout.strip() == f"test {top}/repository {expected.format(top=top)}"

"""What all tests share: no network, no home folder, real files only by name, and a way to run the commands."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

RunCli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def zoo_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder of this test session, empty at its start."""
    return tmp_path_factory.mktemp("zoo_home")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, zoo_home: Path) -> None:
    monkeypatch.setenv("ZOO_HOME", str(zoo_home))


@pytest.fixture
def real_file() -> Callable[[str], Path]:
    """Find a real data file, such as ``real_file("forecasting/ETTh1.csv")``, under ``$ZOO_DATA``.

    Where it is missing the test skips; with ``ZOO_REQUIRE_DATA=1`` it fails.
    """

    def find(relative: str) -> Path:
        folder = os.environ.get("ZOO_DATA")
        path = Path(folder or ".") / relative
        if folder and path.exists():
            return path.resolve()
        reason = f"needs ZOO_DATA with {relative}"
        if os.environ.get("ZOO_REQUIRE_DATA") == "1":
            pytest.fail(reason)
        pytest.skip(reason)

    return find


@pytest.fixture(autouse=True)
def _no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse connections that leave this machine, unless the test is marked ``network``."""
    if request.node.get_closest_marker("network"):
        return
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        if isinstance(address, tuple) and not _is_loopback(str(address[0])):
            raise OSError(f"this test may not connect to {address[0]}: mark it `network`")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@pytest.fixture
def run_cli(tmp_path: Path, zoo_home: Path) -> RunCli:
    """Run a command of the zoo as a user does: ``run_cli(["zoo.train", "domain=forecasting"])``.

    The returned function takes the words after ``python -m`` and, by name, ``cwd`` (default: the test's empty
    folder), ``timeout`` in seconds and ``env`` with further variables. It never raises for an exit status.
    """

    def run(
        words: Sequence[object],
        *,
        cwd: Path | None = None,
        timeout: float = 240,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", *map(str, words)]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "ZOO_HOME": str(zoo_home),
            "COLUMNS": "160",
            # A proxy at a closed port: a command that reaches out fails at once.
            "http_proxy": "http://127.0.0.1:9",
            "https_proxy": "http://127.0.0.1:9",
            "no_proxy": "127.0.0.1,localhost",
            **(env or {}),
        }
        return subprocess.run(
            command,
            cwd=cwd or tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    return run

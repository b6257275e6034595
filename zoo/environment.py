"""What a number was made with: package versions and hardware, as plain text. Imports no torch."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = (
    "moe-zoo",
    "torch",
    "pytorch-lightning",
    "jsonargparse",
    "numpy",
    "pandas",
    "timm",
    "torch-geometric",
)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that results depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, str]:
    """Return operating system, processor, usable cores, memory and graphics processors of this machine."""
    facts = {"system": f"{platform.system()} {platform.machine()}", "cpu": _cpu(), "cores": str(_cores())}
    memory = _memory()
    if memory is not None:
        facts["memory"] = f"{memory / 2**30:.0f} GiB"
    gpus = _gpus()
    if gpus:
        facts["gpu"] = ", ".join(gpus)
    return facts


def _cores() -> int:
    """Count the cores this process may use, which a container can hold below the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> str:
    """Name the processor; Linux tells it only in /proc."""
    return _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()


def _memory() -> int | None:
    """Return the bytes of physical memory, where the system tells them."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _gpus() -> list[str]:
    """Name the NVIDIA devices from the driver's own files, so that no GPU library is loaded for it."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return [name for name in (_field(file, "Model") for file in files) if name]


def _field(file: Path, key: str) -> str | None:
    """Return the value of the first ``key : value`` line of a /proc file."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None

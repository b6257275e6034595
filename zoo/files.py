"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` which takes its place when the block ends well.

    A reader sees the old file or the new one, never half of one. After an exception the old file stands and
    the temporary one is gone. The temporary name keeps the suffix, because writers such as matplotlib choose
    the format by it.

    Args:
        path: Where the file shall stand; missing parent folders are made.

    Yields:
        The path to write to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` in UTF-8 to ``path``, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")

"""Where files come from: the user's folder, the cache, or a pinned public address.

Order: ``$ZOO_DATA/<folder>/<file>``, then the cache (``$ZOO_HOME``, by default ``~/.cache/moe-zoo``), then a
download with known sha256. ``ZOO_OFFLINE=1`` forbids the last.
"""

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from zoo.errors import UserError

log = logging.getLogger(__name__)

_TIMEOUT = 60.0
_verified: dict[tuple[str, int, int], str] = {}


@dataclass(frozen=True)
class SourceFile:
    """A public file.

    Attributes:
        name: path below the folder of its domain, as ``EPF/NP.csv``.
        sha256: of its bytes; None where not known, then a file is taken as it is and never downloaded.
        url: address at a pinned commit; None where the user must fetch it.
        license: terms, in words.
        size: bytes; None where not known.
    """

    name: str
    sha256: str | None
    url: str | None
    license: str
    size: int | None


def cache_folder() -> Path:
    """Return the folder where downloads and generated data are kept; it need not exist."""
    home = os.environ.get("ZOO_HOME")
    if home:
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "moe-zoo"


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, remembered in this process while its size and time of change stay."""
    state = path.stat()
    key = (str(path.resolve()), state.st_size, state.st_mtime_ns)
    if key not in _verified:
        with path.open("rb") as stream:
            _verified[key] = hashlib.file_digest(stream, "sha256").hexdigest()
    return _verified[key]


def locate(file: SourceFile, folder: str = "forecasting") -> Path:
    """Return a verified copy of a file on this machine.

    Args:
        file: what is wanted.
        folder: subfolder of the domain, in ``$ZOO_DATA`` and in the cache.

    Raises:
        UserError: if a copy in ``$ZOO_DATA`` is another file, or there is none and it cannot be downloaded.
    """
    held = _in_data_folder(file, folder)
    if held:
        return held
    cached = cache_folder() / "data" / folder / file.name
    if file.sha256 and cached.is_file() and sha256_of(cached) == file.sha256:
        return cached
    cure = f"put it at $ZOO_DATA/{folder}/{file.name}"
    if file.url is None or file.sha256 is None:
        raise UserError(f"{file.name} is not here and has no pinned address; {cure}")
    if os.environ.get("ZOO_OFFLINE", "0") not in ("", "0"):
        raise UserError(f"{file.name} is not here and ZOO_OFFLINE forbids fetching {file.url}; {cure}")
    _download(file.url, file.sha256, file, cached, cure)
    return cached


def _in_data_folder(file: SourceFile, folder: str) -> Path | None:
    root = os.environ.get("ZOO_DATA")
    if not root:
        return None
    held = Path(root).expanduser() / folder / file.name
    if not held.is_file():
        return None
    if file.sha256 and sha256_of(held) != file.sha256:
        raise UserError(
            f"{held} is not the file expected: its sha256 is {sha256_of(held)}, expected {file.sha256};"
            " replace it, or read it by path as a file of your own"
        )
    return held


def _download(url: str, sha256: str, file: SourceFile, target: Path, cure: str) -> None:
    import pooch  # type: ignore[import-untyped]
    import requests

    size = f"{file.size:,} bytes" if file.size else "size unknown"
    # A licence is something to be told before the fact, so this shows with logging unconfigured too.
    log.warning("downloading %s (%s; licence: %s) from %s", file.name, size, file.license, url)
    pooch.get_logger().setLevel(logging.ERROR)
    try:
        pooch.retrieve(
            url,
            known_hash=f"sha256:{sha256}",
            fname=target.name,
            path=target.parent,
            downloader=pooch.HTTPDownloader(timeout=_TIMEOUT),
        )
    except (requests.RequestException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{file.name} could not be fetched from {url}: {reason}; {cure}") from error

"""From a path to text that can be trusted: size, compression, encoding."""

import gzip
import hashlib
import io
import zlib
from dataclasses import dataclass
from pathlib import Path

from zoo.data.examination import Report

MAX_BYTES = 2**31
"""Largest text read, after decompression."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file as it was found: its text still encoded, ``sha256`` of the bytes on disk."""

    path: Path
    raw: bytes
    sha256: str
    encoding: str


def load(path: str | Path, report: Report) -> Source:
    """Read the bytes of a text file, decompressing gzip.

    Raises:
        Halt: if there is no such file, or it is no text file, or it is empty or too large.
    """
    file = Path(path)
    try:
        if file.stat().st_size > MAX_BYTES:
            report.stop("file", f"is larger than {MAX_BYTES:,} bytes; split it, or keep fewer columns")
        stored = file.read_bytes()
    except FileNotFoundError:
        report.stop("file", "no such file")
    except IsADirectoryError:
        report.stop("file", "is a folder; name one CSV file in it")
    except OSError as error:
        report.stop("file", f"cannot be read: {error.strerror}")
    raw = _unpacked(stored, report) if stored[:2] == b"\x1f\x8b" else stored
    if not raw.strip():
        report.stop("file", "is empty")
    if raw[:4] in (b"PK\x03\x04", b"PAR1") or raw[:4] == b"\xd0\xcf\x11\xe0":
        report.stop("file", "is a workbook or an archive, not text; save it as CSV")
    return Source(
        path=file, raw=raw, sha256=hashlib.sha256(stored).hexdigest(), encoding=_encoding(raw, report)
    )


def _unpacked(stored: bytes, report: Report) -> bytes:
    try:
        with gzip.open(io.BytesIO(stored)) as stream:
            raw = stream.read(MAX_BYTES + 1)
    except (EOFError, OSError, zlib.error):
        report.stop("file", "is a damaged gzip file")
    if len(raw) > MAX_BYTES:
        report.stop("file", f"unpacks to more than {MAX_BYTES:,} bytes; split it, or keep fewer columns")
    return raw


def _encoding(raw: bytes, report: Report) -> str:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        try:
            raw.decode("utf-16")
        except UnicodeDecodeError:
            report.stop("encoding", "is damaged UTF-16; save the file as UTF-8")
        report.ok("encoding", "UTF-16")
        return "utf-16"
    if b"\0" in raw[:4096]:
        report.stop("encoding", "is not a text file (it holds zero bytes); save it as UTF-8 CSV")
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        try:
            raw.decode("cp1252")
        except UnicodeDecodeError:
            report.stop("encoding", f"line {line} is neither UTF-8 nor Windows-1252; save the file as UTF-8")
        report.warn("encoding", f"not UTF-8 (line {line}): read as Windows-1252, check the accented letters")
        return "cp1252"
    report.ok("encoding", "UTF-8")
    return "utf-8-sig" if raw.startswith(b"\xef\xbb\xbf") else "utf-8"

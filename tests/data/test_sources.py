"""Files come from ZOO_DATA, the cache, or a verified download."""

import functools
import hashlib
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from zoo.data import sources
from zoo.data.sources import SourceFile, cache_folder, locate, sha256_of
from zoo.errors import UserError

CONTENT = b"date,a\n" + b"2020-01-01,1\n" * 1000
SHA = hashlib.sha256(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Serves the file whole, cut, changed, or not at all."""

    def __init__(self, hits, *arguments):
        self.hits = hits
        super().__init__(*arguments)

    def do_GET(self):
        self.hits.append(self.path)
        if self.path == "/missing":
            self.send_error(404)
            return
        body = {"/whole": CONTENT, "/cut": CONTENT[:5000], "/wrong": b"D" + CONTENT[1:]}[self.path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        """Keep quiet."""


@pytest.fixture
def server(monkeypatch):
    """Return a loopback server's address and the list of paths asked for."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ZOO_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    hits = []
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, hits)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", hits
        server.shutdown()


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path):
    """Point data folder and cache at empty folders."""
    monkeypatch.setenv("ZOO_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))
    return tmp_path


def file(url, name="sub/x.csv", sha256=SHA):
    return SourceFile(name, sha256, url, "CC BY 4.0", len(CONTENT))


def kept(folder):
    return [path.name for path in folder.rglob("*") if path.is_file()]


def test_download_is_verified_cached_and_announced(server, folders, caplog):
    address, hits = server
    with caplog.at_level(logging.WARNING):
        path = locate(file(f"{address}/whole"))
    assert path == folders / "home" / "data" / "forecasting" / "sub" / "x.csv"
    assert path.read_bytes() == CONTENT
    assert f"downloading sub/x.csv (13,007 bytes; licence: CC BY 4.0) from {address}/whole" in caplog.text
    assert locate(file(f"{address}/whole")) == path
    assert hits == ["/whole"]


@pytest.mark.parametrize("fault", ["cut", "wrong", "missing"])
def test_nothing_unverified_is_kept(server, folders, fault):
    address, _ = server
    with pytest.raises(
        UserError, match=r"x.csv could not be fetched .*put it at \$ZOO_DATA/forecasting/sub/x.csv"
    ) as e:
        locate(file(f"{address}/{fault}"))
    assert "\n" not in str(e.value)
    assert kept(folders) == []


def test_a_damaged_cache_is_replaced(server, folders):
    address, hits = server
    path = locate(file(f"{address}/whole"))
    path.write_bytes(CONTENT[:-1])
    assert locate(file(f"{address}/whole")).read_bytes() == CONTENT
    assert len(hits) == 2


def test_offline_refuses_naming_address_and_cure(server, monkeypatch):
    address, hits = server
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(UserError) as caught:
        locate(file(f"{address}/whole"))
    assert f"ZOO_OFFLINE forbids fetching {address}/whole" in str(caught.value)
    assert "put it at $ZOO_DATA/forecasting/sub/x.csv" in str(caught.value)
    monkeypatch.setenv("ZOO_OFFLINE", "0")
    path = locate(file(f"{address}/whole"))
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    assert locate(file(f"{address}/whole")) == path
    assert hits == ["/whole"]


def test_unreachable_server_is_one_line(monkeypatch):
    monkeypatch.delenv("ZOO_OFFLINE", raising=False)
    with pytest.raises(UserError, match="could not be fetched"):
        locate(file("http://127.0.0.1:9/x.csv"))


def test_data_folder_comes_first_and_is_verified(folders):
    held = folders / "data" / "other" / "sub" / "x.csv"
    held.parent.mkdir(parents=True)
    held.write_bytes(CONTENT)
    assert locate(file(None), "other") == held
    held.write_bytes(CONTENT + b"\n")
    with pytest.raises(UserError) as caught:
        locate(file(None), "other")
    assert SHA in str(caught.value)
    assert hashlib.sha256(CONTENT + b"\n").hexdigest() in str(caught.value)
    assert locate(file(None, sha256=None), "other") == held


def test_file_without_address_names_its_place():
    with pytest.raises(UserError, match=r"has no pinned address; put it at \$ZOO_DATA/forecasting/sub/x.csv"):
        locate(file(None))


def test_checksums_are_computed_once_per_state(folders, monkeypatch):
    path = folders / "big.bin"
    path.write_bytes(b"1")
    first = sha256_of(path)
    monkeypatch.setattr(sources.hashlib, "file_digest", None)
    assert sha256_of(path) == first
    monkeypatch.undo()
    path.write_bytes(b"22")
    assert sha256_of(path) != first


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "home"
    monkeypatch.delenv("ZOO_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "moe-zoo"

"""Downloads are complete or continued, limited in size, and fail with one clear line."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow
import pytest
from blake3 import blake3
from pyarrow import parquet

from peerd.config.manifest import DataConfig
from peerd.data.download import download, file_hash, obtain, obtain_tokenizer
from peerd.data.progress import silent
from peerd.data.tokens import prepare_tokens
from peerd.errors import ManifestError, UnreachableError

CONTENT = bytes(range(256)) * 5000


@dataclass(slots=True)
class Site:
    """A web server with files; `cut_after` breaks the next answers off early, as a bad connection does."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    tag: str = '"one"'
    cut_after: list[int] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def site() -> Iterator[Site]:
    found = Site(files={"/text.txt": CONTENT})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = found.files.get(self.path.partition("?")[0])
            if content is None:
                self.send_error(404)
                return
            begin, wanted = 0, self.headers.get("Range", "")
            found.asked.append(wanted)
            if wanted and self.headers.get("If-Range") == found.tag:
                begin = int(wanted.removeprefix("bytes=").rstrip("-"))
            self.send_response(206 if begin else 200)
            self.send_header("Content-Length", str(len(content) - begin))
            self.send_header("ETag", found.tag)
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the interrupted client has gone
                self.wfile.write(content[begin:][: found.cut_after.pop(0) if found.cut_after else None])

        def log_message(self, *_args: object) -> None:
            """Print nothing: the test's output is for failures."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield found
    server.shutdown()
    server.server_close()


def test_a_download_that_breaks_off_goes_on_where_it_was(site: Site, tmp_path: Path) -> None:
    site.cut_after = [400_000, 500_000]
    path = download(site.address + "/text.txt", tmp_path, silent)
    assert path.read_bytes() == CONTENT
    assert site.asked == ["", "bytes=400000-", "bytes=900000-"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["text.txt"]
    assert download(site.address + "/text.txt", tmp_path, silent) == path
    assert len(site.asked) == 3, "what is there is not asked for again"


def test_a_file_that_changed_meanwhile_is_begun_anew(site: Site, tmp_path: Path) -> None:
    def stop(_progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(site.address + "/text.txt", tmp_path, stop)
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".mark", ".part"]
    site.tag, site.files["/text.txt"] = '"two"', b"short"
    assert download(site.address + "/text.txt", tmp_path, silent).read_bytes() == b"short"


def test_what_is_too_large_or_not_there_is_said_in_one_line(site: Site, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="is 1280000 bytes; the limit is 1000"):
        download(site.address + "/text.txt", tmp_path, silent, most_bytes=1000)
    with pytest.raises(UnreachableError, match="the server says 404"):
        download(site.address + "/gone.txt", tmp_path, silent)
    with pytest.raises(UnreachableError, match=r"cannot be downloaded: .*refused.*; try again to continue"):
        download("http://127.0.0.1:9/text.txt", tmp_path, silent)


@pytest.mark.parametrize("address", ["ftp://host/a", "http://", "https://host/a b", "http://user:secret@host/a", "http://[/"])
def test_only_plain_web_addresses_are_opened(tmp_path: Path, address: str) -> None:
    with pytest.raises(ManifestError, match=r"data source"):
        download(address, tmp_path, silent)


def test_a_file_other_than_the_runs_is_refused_and_not_kept(site: Site, tmp_path: Path) -> None:
    address = site.address + "/text.txt"
    path = Path(obtain(address, tmp_path, "", silent))
    assert obtain(address, tmp_path, file_hash(path), silent) == str(path)
    with pytest.raises(ManifestError, match=r"gives a file with blake3 .*, the run's has abababababab"):
        obtain(address, tmp_path, "ab" * 32, silent)
    assert not path.exists()


def test_an_address_is_a_source_like_any_other(site: Site, tmp_path: Path) -> None:
    site.files["/data/lines.jsonl"] = b'{"text": "one"}\n{"text": "two"}\n'
    made = prepare_tokens(site.address + "/data/lines.jsonl?key=1", tmp_path, DataConfig(field="text"))
    assert made.path.read_bytes() == b"one\ntwo"
    assert made.source_blake3 == blake3(site.files["/data/lines.jsonl"]).hexdigest()


def test_data_sets_and_tokenizers_of_a_hub_are_found_by_name(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", site.address)
    for number in range(2):
        parquet.write_table(pyarrow.table({"text": [f"row {number}"]}), tmp_path / "part.parquet")
        site.files[f"/files/{number}.parquet"] = (tmp_path / "part.parquet").read_bytes()
    urls = [f"{site.address}/files/{number}.parquet" for number in range(2)]
    site.files["/api/datasets/owner/name/parquet"] = json.dumps({"default": {"train": urls, "test": urls[:1]}}).encode()
    site.files["/owner/words/resolve/main/tokenizer.json"] = b"{}"
    cache = tmp_path / "cache"
    assert prepare_tokens("hub:owner/name", cache, DataConfig(field="text")).path.read_bytes() == b"row 0\nrow 1"
    assert prepare_tokens("hub:owner/name/default/test", cache, DataConfig(field="text")).path.read_bytes() == b"row 0"
    with pytest.raises(ManifestError, match=r"no default/dev; the hub has: default/train, default/test"):
        prepare_tokens("hub:owner/name/default/dev", cache, DataConfig(field="text"))
    with pytest.raises(ManifestError, match=r"not a name on the hub"):
        prepare_tokens("hub:owner/../name", cache, DataConfig(field="text"))
    assert (obtain_tokenizer("hub:owner/words", cache, silent) / "tokenizer.json").read_bytes() == b"{}"


def test_a_hub_out_of_reach_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UnreachableError, match=r"the hub cannot be asked for owner/name: .*; download it elsewhere and name its folder"):
        obtain("hub:owner/name", tmp_path, "", silent)
    with pytest.raises(UnreachableError, match=r"; download owner/words's tokenizer\.json elsewhere and name its path"):
        obtain_tokenizer("hub:owner/words", tmp_path, silent)

"""A checkpoint on a hub becomes a run with its weights and its tokenizer; none of its code is downloaded."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from peerd.cli.main import run
from peerd.config import manifest
from peerd.errors import ExitCode

pytestmark = pytest.mark.slow

NAME, COMMIT = "owner/small", "c0ffee" + "0" * 34


@dataclass(slots=True)
class Hub:
    """A model hub's answers about one checkpoint."""

    folder: Path
    address: str = ""
    fetched: set[str] = field(default_factory=set)

    def answer(self, path: str) -> bytes | None:
        """The answer to a path; None if there is none."""
        place, _, _ = path.partition("?")
        if place == f"/api/models/{NAME}/revision/main":
            return json.dumps({"id": NAME, "sha": COMMIT, "siblings": []}).encode()
        if place.startswith(f"/api/models/{NAME}/tree/{COMMIT}"):
            return json.dumps([self._entry(each) for each in self.folder.iterdir()]).encode()
        prefix, _, name = place.rpartition("/")
        if prefix not in (f"/{NAME}/resolve/{COMMIT}", f"/{NAME}/resolve/main") or not (self.folder / name).is_file():
            return None
        self.fetched.add(name)
        return (self.folder / name).read_bytes()

    @staticmethod
    def _entry(path: Path) -> dict[str, object]:
        return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _digest(path.read_bytes())}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A GPT-2 as transformers saves it, with code of its own beside it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    found = Hub(tmp_path / "small")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=256, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(found.folder)
    (found.folder / "tokenizer.json").write_text("{}")
    (found.folder / "modeling_small.py").write_text("raise SystemExit('code of a hub was run')")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = found.answer(self.path)
            if content is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{_digest(content)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_args: object) -> None:
            """Print nothing: the test's output is for failures."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", found.address)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    yield found
    server.shutdown()
    server.server_close()


def test_a_checkpoint_is_found_by_name_and_gone_on_from(hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["new", str(tmp_path / "run"), "--model", f"hf:{NAME}", "--stages", "2"]) == ExitCode.OK
    assert "its own tokenizer is used; --tokenizer names another" in capfd.readouterr().err
    made = manifest.load(tmp_path / "run" / "run.toml")
    assert (made.model.num_layers, made.model.vocab_size, made.data.tokenizer) == (2, 256, f"hub:{NAME}")
    begun, published = load_file(tmp_path / "run" / made.start.state), load_file(hub.folder / "model.safetensors")
    assert all(torch.equal(begun[f"parameters/{name}"], value) for name, value in published.items())
    assert hub.fetched >= {"config.json", "model.safetensors"}
    assert "modeling_small.py" not in hub.fetched


def test_a_hub_that_does_not_have_it_or_is_out_of_reach_is_one_line(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for address in (hub.address, "http://127.0.0.1:9"):
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert run(["new", str(tmp_path / "run"), "--model", "hf:owner/other"]) == ExitCode.UNREACHABLE
        said = capfd.readouterr().err.strip().splitlines()
        assert said[-1].startswith("peerd: error: the hub does not give owner/other: ")
        assert said[-1].endswith("; download it where you can, and name its folder")
    assert not (tmp_path / "run" / "run.toml").exists()

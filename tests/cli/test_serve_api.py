"""`peerd serve-api`: the process that it becomes says how to reach the model, keeps its token, and answers with an export's text."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from peerd import serve_api
from peerd.api.requests import parse_completion
from peerd.cli.main import cli
from peerd.config.paths import Home
from peerd.errors import ExitCode
from peerd.generate import GenerationRequest, generate, open_text_model
from peerd.stage.export import write_export
from tests.stage.test_hf_export import trained_a_little
from tests.tiny_run import tiny_manifest


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    manifest = tiny_manifest(2)
    write_export(tmp_path / "trained", manifest, trained_a_little(manifest), None, ())
    return tmp_path / "trained"


def becomes(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    """The command that the verb's process becomes."""
    found: list[str] = []
    monkeypatch.setattr(os, "execv", lambda _path, command: found.extend(command))
    cli(["serve-api", *arguments], standalone_mode=False)
    return found


def test_the_process_says_how_to_reach_the_model_and_serves(
    exported: Path, short_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[Any] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda _server, sockets: served.extend(sockets))
    command = becomes(monkeypatch, str(exported), "--port", "0", "--json")
    assert command[2:4] == ["-m", "peerd.serve_api"]
    told = []
    for _ in range(2):
        assert serve_api.main(command[4:]) == ExitCode.OK
        told.append(json.loads(capsys.readouterr().out))
    token = Home(short_home).api_token
    assert told[0]["model"] == "trained"
    assert told[0]["context"] == 16
    assert told[0]["token"] == told[1]["token"] == token.read_text()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(served) == 2
    assert serve_api.main(becomes(monkeypatch, str(exported))[4:]) == ExitCode.OK
    assert "token    " + token.read_text() in capsys.readouterr().out


def test_a_port_that_is_taken_is_said(
    exported: Path, short_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_api._bind(0) as listener:
        taken = listener.getsockname()[1]
        code = serve_api.main(becomes(monkeypatch, str(exported), "--port", str(taken))[4:])
    assert code == ExitCode.PORT_TAKEN
    assert f"port {taken}" in capsys.readouterr().err


def test_two_answers_side_by_side_are_those_of_generate(exported: Path) -> None:
    """Greedy, and token by token in turns: neither touches the other's keys and values."""
    text_model = open_text_model([exported])
    model = serve_api.ExportedModel(text_model, "trained")
    prompts, answers = ("def ", "for x"), ([], [])  # type: tuple[str, str], tuple[list[int], list[int]]
    nexts = []
    for prompt in prompts:
        asked = parse_completion(json.dumps({"model": "trained", "prompt": prompt, "temperature": 0}).encode())
        nexts.append(model.begin(model.encode(prompt), asked, 8))
    for _ in range(8):
        for answer, next_token in zip(answers, nexts, strict=True):
            answer.append(next(next_token))
    due = [generate(text_model, GenerationRequest(sources=[], prompt=prompt, max_tokens=8)) for prompt in prompts]
    assert [model.decode(answer) for answer in answers] == due

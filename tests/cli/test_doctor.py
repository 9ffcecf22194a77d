"""The output of a checkup: one line for each check, or a table that fits a terminal; the exit code shows if there is a problem."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from peerd.cli import launch
from peerd.cli.doctor import checkup_table
from tests.cli.conftest import Command

FINE = {"code": "device", "verdict": "ok", "title": "CPU (cpu) computes", "remedy": ""}
SLOW = {"code": "upload", "verdict": "warning", "title": "1.2 Mbit/s upload", "remedy": "stop other transfers"}
BROKEN = {"code": "reach", "verdict": "problem", "title": "nobody answers as \x1b[31m12D3", "remedy": "check the address " * 12}


def reply(*checks: dict[str, str], worst: str) -> dict[str, Any]:
    return {"schema": 1, "worst": worst, "checks": list(checks)}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The findings of the next checkup; it records the request."""
    story: dict[str, Any] = {}

    def run_child(module: str, order: dict[str, Any], **_bounds: object) -> dict[str, Any]:
        assert module == "peerd.checkup.doctor"
        story["order"] = json.loads(json.dumps(order))
        return dict(story["reply"])

    monkeypatch.setattr(launch, "run_child", run_child)
    return story


def test_a_warning_is_no_failure_and_a_problem_is(peerd: Command, found: dict[str, Any]) -> None:
    found["reply"] = reply(FINE, SLOW, worst="warning")
    done = peerd("doctor")
    assert (done.code, done.err) == (0, "")
    assert done.out == "ok: device: CPU (cpu) computes\nwarning: upload: 1.2 Mbit/s upload; stop other transfers\n"
    found["reply"] = reply(FINE, BROKEN, worst="problem")
    done = peerd("doctor")
    assert done.code == 1
    assert "\x1b" not in done.out


def test_scripts_get_the_whole_checkup(peerd: Command, found: dict[str, Any]) -> None:
    found["reply"] = reply(BROKEN, worst="problem")
    done = peerd("doctor", "--json")
    assert done.code == 1
    assert json.loads(done.out) == found["reply"]


def test_what_shall_be_checked_is_handed_on(peerd: Command, found: dict[str, Any], short_home: object) -> None:
    found["reply"] = reply(worst="ok")
    ports = ("--port", 31337, "--direct-port", 31338)
    assert peerd("doctor", "a", "b", *ports, "--host", "localhost", "--device", "cuda:1").code == 0
    expected = {"home": str(short_home), "addresses": ["a", "b"], "device": "cuda:1", "host": "127.0.0.1", "port": 31337}
    assert found["order"] == expected | {"direct_port": 31338, "self_test": False}
    assert peerd("doctor", "--host", "here").code == 2


@pytest.mark.parametrize("width", [80, 40])
def test_the_table_fits_the_terminal(width: int) -> None:
    out = io.StringIO()
    Console(file=out, width=width).print(checkup_table(reply(FINE, SLOW, BROKEN, worst="problem")))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "\x1b" not in out.getvalue()

"""The output of a checkup: one line for each check, or a table that fits a terminal; the exit code shows if there is a problem."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from peerd.cli import launch
from peerd.cli.doctor import checkup_table, conclusion
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

    def run_child(module: str, order: dict[str, Any], *, hear: Callable[[bytes], None], **_bounds: object) -> dict[str, Any]:
        assert module == "peerd.checkup.doctor"
        story["order"] = json.loads(json.dumps(order))
        for check in story["reply"]["checks"]:
            hear(json.dumps({"begins": check["code"]}).encode())
            hear(json.dumps({"found": check}).encode())
        return dict(story["reply"])

    monkeypatch.setattr(launch, "run_child", run_child)
    return story


def test_a_warning_is_no_failure_and_a_problem_is(peerd: Command, found: dict[str, Any]) -> None:
    found["reply"] = reply(FINE, SLOW, worst="warning")
    done = peerd("doctor")
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        "ok: device: CPU (cpu) computes\nwarning: upload: 1.2 Mbit/s upload; stop other transfers\n"
        "this machine is ready (1 warning); `peerd doctor ADDRESS` checks the connection to a run as well\n"
    )
    found["reply"] = reply(FINE, BROKEN, worst="problem")
    done = peerd("doctor")
    assert done.code == 1
    assert "\x1b" not in done.out
    assert done.out.endswith("not ready: 1 problem above\n")


@pytest.mark.parametrize(
    ("checks", "addresses", "self_test", "told"),
    [
        ([FINE], ["/ip4/1.2.3.4/tcp/1/p2p/12D3#9f"], False, "ready: peerd join '/ip4/1.2.3.4/tcp/1/p2p/12D3#9f'"),
        ([FINE, SLOW, SLOW], ["a", "b"], False, "ready (2 warnings): peerd join a b"),
        ([FINE, BROKEN, SLOW], ["a"], False, "not ready: 1 problem above (1 warning)"),
        ([FINE], [], True, "the device passed"),
        ([FINE | {"code": "daemon"}], [], False, "a daemon of this home runs, and there is no problem"),
    ],
)
def test_the_last_line_says_whether_the_machine_is_ready(
    checks: list[dict[str, str]], addresses: list[str], self_test: bool, told: str
) -> None:
    assert conclusion(checks, addresses, self_test) == told


def test_each_finding_is_printed_when_it_is_made(
    peerd: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def run_child(_module: str, _order: object, *, hear: Callable[[bytes], None], **_bounds: object) -> dict[str, Any]:
        for check in (FINE, SLOW):
            hear(json.dumps({"found": check}).encode())
            seen.append(capfd.readouterr().out)
        return reply(FINE, SLOW, worst="warning")

    monkeypatch.setattr(launch, "run_child", run_child)
    assert peerd("doctor").code == 0
    assert seen == ["ok: device: CPU (cpu) computes\n", "warning: upload: 1.2 Mbit/s upload; stop other transfers\n"]


def test_scripts_get_the_whole_checkup(peerd: Command, found: dict[str, Any]) -> None:
    found["reply"] = reply(BROKEN, worst="problem")
    done = peerd("doctor", "--json")
    assert done.code == 1
    assert json.loads(done.out) == found["reply"]


def test_what_shall_be_checked_is_handed_on(peerd: Command, found: dict[str, Any], short_home: object) -> None:
    found["reply"] = reply(worst="ok")
    ports = ("--port", 31337, "--direct-port", 31338)
    assert peerd("doctor", "a", "b", *ports, "--host", "localhost").code == 0
    expected = {"home": str(short_home), "addresses": ["a", "b"], "device": "auto", "host": "127.0.0.1", "port": 31337}
    assert found["order"] == expected | {"direct_port": 31338, "self_test": False}
    for given, device in (("--device",), "auto"), (("--device", "cuda:1"), "cuda:1"):
        peerd("doctor", *given)
        assert (found["order"]["device"], found["order"]["self_test"]) == (device, True)
    assert peerd("doctor", "--host", "here").code == 2


@pytest.mark.parametrize("width", [80, 40])
def test_the_table_fits_the_terminal(width: int) -> None:
    out = io.StringIO()
    Console(file=out, width=width).print(checkup_table([FINE, SLOW, BROKEN]))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "\x1b" not in out.getvalue()


@pytest.mark.timeout(180)  # two libraries are loaded, and each precision is tried
def test_the_self_test_of_a_processor_passes_as_a_whole(peerd: Command) -> None:
    done = peerd("doctor", "--device", "cpu", "--json")
    reply = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert [check for check in reply["checks"] if check["verdict"] == "problem"] == []
    codes = {check["code"] for check in reply["checks"]}
    assert {"codec int8", "kernel attention", "stage float32", "stage bfloat16", "memory", "speed", "self-test"} <= codes
    assert reply["schema"] == 1


@pytest.mark.parametrize(
    ("then", "told"), [("os.abort()", "SIGABRT"), ("time.sleep(600)", "has told nothing for 2 s")], ids=["crashes", "hangs"]
)
def test_the_part_is_named_in_which_a_device_ends_or_hangs_the_self_test(
    peerd: Command, monkeypatch: pytest.MonkeyPatch, then: str, told: str
) -> None:
    lines = [{"begins": "codec int8"}, {"found": FINE}, {"begins": "codec int4"}]
    program = f"import json, os, time\nfor line in {lines!r}: print(json.dumps(line), flush=True)\n{then}"
    monkeypatch.setattr(launch, "module_command", lambda *_given: [sys.executable, "-c", program])
    monkeypatch.setattr("peerd.cli.doctor.DOCTOR_SILENCE_S", 2.0)
    done = peerd("doctor", "--device", "--json")
    reply = json.loads(done.out)
    assert (done.code, reply["worst"]) == (1, "problem")
    assert [check["code"] for check in reply["checks"]] == ["device", "codec int4"]
    assert told in reply["checks"][-1]["title"]


def test_a_self_test_that_had_not_begun_is_an_error(peerd: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "module_command", lambda *_given: [sys.executable, "-c", "raise SystemExit(4)"])
    assert peerd("doctor", "--device").code == 4

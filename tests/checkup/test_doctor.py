"""The doctor finds nothing wrong where nothing is, and leaves no trace. Broken set-ups: tests/cli/test_broken_setups.py."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from peerd.checkup.doctor import examine
from peerd.checkup.here import Order, of_platform, pauses
from peerd.config import paths
from peerd.config.paths import Home
from peerd.policy.swarm.checkup import Finding, Verdict, worst
from tests.checkup.stub_peer import Faults, stub_peer

pytestmark = [
    # hivemind leaves its streams to p2pd for the garbage collector to close
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"),
]

OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM
OF_THE_MACHINE = ("disk", "memory", "open-files", "pauses", "leftovers")
"""Findings that depend on the machine that runs the tests."""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Home]:
    """A home, and a folder that stands in for /tmp, as short as sockets need it: what other daemons left is none of the test's business."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "home").mkdir()
    with tempfile.TemporaryDirectory(prefix="peerd-t-", dir=paths.SHORT_PARENT) as short:
        monkeypatch.setattr(paths, "SHORT_PARENT", Path(short))
        yield Home(tmp_path / "home")


def the(findings: list[Finding], code: str) -> Finding:
    (finding,) = (each for each in findings if each.code == code)
    return finding


def visits() -> set[Path]:
    """The doctor's homes, which go with it."""
    return set(Path(tempfile.gettempdir()).glob("peerd-doctor-*"))


@pytest.mark.parametrize(
    ("system", "release", "machine", "told"),
    [
        ("linux", "Linux 6.6.87.2-microsoft-standard-WSL2", "x86_64", {"platform": "warning", "sleep": "ok", "spilled memory": "ok"}),
        ("linux", "Linux 6.8.0", "x86_64", {"platform": "ok"}),
        ("darwin", "Darwin 24.1.0", "arm64", {"platform": "ok", "sleep": "ok", "operators": "ok"}),
        ("darwin", "Darwin 22.6.0", "x86_64", {"platform": "ok", "sleep": "ok"}),
        ("win32", "Windows 11", "AMD64", {"platform": "problem"}),
    ],
)
def test_what_matters_of_an_operating_system_is_told(system: str, release: str, machine: str, told: dict[str, str]) -> None:
    assert {finding.code: str(finding.verdict) for finding in of_platform(system, release, machine)} == told


@pytest.mark.parametrize(("text", "verdict"), [("0\n", OK), ("1\n", WARNING)])
def test_what_a_pause_does_to_connections_is_told(tmp_path: Path, text: str, verdict: Verdict) -> None:
    setting = tmp_path / "tcp_slow_start_after_idle"
    assert list(pauses(setting)) == []
    setting.write_text(text)
    (found,) = pauses(setting)
    assert found.verdict == verdict
    assert ("sysctl" in found.remedy) == (verdict == WARNING)


def test_a_sound_machine_without_an_address_is_told_how_to_go_on(home: Home) -> None:
    before = visits()
    findings = examine(Order(home=str(home.folder), device="cpu"))
    assert visits() <= before
    told = {finding.code: finding.verdict for finding in findings if finding.code not in OF_THE_MACHINE}
    expected = ("platform", "python", "torch", "hivemind", "grpcio", "protobuf", "device", "home", "limits", "port", "p2pd")
    assert told == {**dict.fromkeys(expected, OK), "reach": WARNING}
    assert "peerd doctor ADDRESS" in the(findings, "reach").remedy
    assert list(home.folder.iterdir()) == []  # it leaves no trace


async def test_where_nothing_is_wrong_with_the_way_everything_is_ok(home: Home) -> None:
    async with stub_peer(Faults()) as address:
        order = Order(home=str(home.folder), device="cpu", addresses=(address,), host="127.0.0.1")
        findings = await asyncio.to_thread(examine, order)
    there = {each.code: each for each in findings}
    codes = ("reach", "peerd", "clock", "run", "dial-back", "relay", "direct", "upload", "download", "dht")
    assert {code: there[code].verdict for code in codes} == dict.fromkeys(codes, OK)
    assert "1 of 1 peers" in there["dial-back"].title
    assert "1 of 1 peers" in there["direct"].title
    assert "this run's stages take" in there["memory"].title
    assert worst(findings) is not PROBLEM

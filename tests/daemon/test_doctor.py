"""The doctor names the fault in every broken set-up, says what to do about it, and finds nothing wrong where nothing is."""

from __future__ import annotations

import asyncio
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from peerd.config import paths
from peerd.config.paths import Home
from peerd.daemon.checkup_here import Order
from peerd.daemon.doctor import examine
from peerd.policy.checkup import Finding, Verdict, worst
from peerd.swarm.identity import Identity, LocalState
from peerd.table.record import RunId
from peerd.wire import p2pd
from peerd.wire.libp2p import P2PD
from tests.daemon.stub_peer import Faults, stub_peer

pytestmark = [
    # hivemind leaves its streams to p2pd for the garbage collector to close
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"),
]

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEXTUXiqjRrCJRZ1AJuwYtJ7E1hENCwDBAFpVVjKpVHJd"
OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM
HOLD = (
    "import sys\nfrom filelock import FileLock\nlock = FileLock(sys.argv[1])\nlock.acquire()\nprint('held', flush=True)\nsys.stdin.read()\n"
)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """A home in a folder that stands in for /tmp, too: what other daemons left is none of the test's business."""
    folder = Path(tempfile.mkdtemp(prefix="peerd-t-", dir="/tmp"))
    monkeypatch.setattr(paths, "SHORT_PARENT", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "home").mkdir()
    yield Home(folder / "home")
    shutil.rmtree(folder, ignore_errors=True)


def order(at: Home, **changes: object) -> Order:
    return replace(Order(home=str(at.folder), device="cpu"), **changes)  # type: ignore[arg-type]


def the(findings: list[Finding], code: str) -> Finding:
    """The worst of those with this code."""
    return max((finding for finding in findings if finding.code == code), key=lambda each: list(Verdict).index(each.verdict))


@pytest.fixture
def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """For faults of this machine: p2pd is not needed to find them, and takes a second to start."""
    monkeypatch.setattr("peerd.daemon.doctor._examine_network", _nothing)


async def _nothing(*_arguments: object) -> list[Finding]:
    return []


# This machine


def test_a_sound_machine_without_an_address_is_told_how_to_go_on(home: Home) -> None:
    before = visits()
    findings = examine(order(home))
    assert visits() <= before
    told = {finding.code: finding.verdict for finding in findings if finding.code not in ("disk", "memory", "open-files", "leftovers")}
    expected = dict.fromkeys(("platform", "python", "torch", "hivemind", "grpcio", "protobuf", "device", "home", "port", "p2pd"), OK)
    assert told == {**expected, "reach": WARNING}
    assert "peerd doctor ADDRESS" in the(findings, "reach").remedy
    assert list(home.folder.iterdir()) == []  # it leaves no trace


def visits() -> set[Path]:
    """The doctor's homes, which go with it."""
    return set(Path(tempfile.gettempdir()).glob("peerd-doctor-*"))


Break = Callable[[Home], dict[str, object]]


def unknown_device(_home: Home) -> dict[str, object]:
    return {"device": "cuda:77"}


def home_within_a_file(home: Home) -> dict[str, object]:
    (home.folder / "file").touch()
    return {"home": str(home.folder / "file" / "home")}


def damaged_identity(home: Home) -> dict[str, object]:
    home.identity.write_bytes(b"not a key")
    return {}


def identity_for_all_to_read(home: Home) -> dict[str, object]:
    Identity.load_or_create(home.identity)
    home.identity.chmod(0o644)
    return {}


def damaged_state(home: Home) -> dict[str, object]:
    home.state.write_text("{")
    return {}


def sockets_left_in_the_home(home: Home) -> dict[str, object]:
    home.run_folder.mkdir()
    leave_socket(home.control_socket)
    return {}


def sockets_left_outside(_home: Home) -> dict[str, object]:
    folder = Home(Path("/") / ("h" * 100)).run_folder
    folder.mkdir(mode=0o700)
    leave_socket(folder / "control.sock")
    return {}


def leave_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))


def no_address(_home: Home) -> dict[str, object]:
    return {"addresses": ("somewhere",)}


@pytest.mark.usefixtures("without_network")
@pytest.mark.parametrize(
    ("break_it", "code", "verdict", "title", "remedy"),
    [
        (unknown_device, "device", PROBLEM, "cuda:77 is not available", "--device auto"),
        (home_within_a_file, "disk", PROBLEM, "cannot write", "--home"),
        (damaged_identity, "home", PROBLEM, "is not an identity key", "move it away"),
        (identity_for_all_to_read, "home", WARNING, "others may read", "chmod 600"),
        (damaged_state, "home", PROBLEM, "is damaged", "delete it"),
        (sockets_left_in_the_home, "leftovers", WARNING, "sockets of daemons that are gone", "the next start removes them"),
        (sockets_left_outside, "leftovers", WARNING, "sockets of daemons that are gone", "the next start removes them"),
        (no_address, "address", PROBLEM, "is not an address", "paste the whole line"),
    ],
)
def test_a_fault_of_this_machine_is_named(home: Home, break_it: Break, code: str, verdict: Verdict, title: str, remedy: str) -> None:
    finding = the(examine(order(home, **break_it(home))), code)
    assert finding.verdict is verdict
    assert title in finding.title
    assert remedy in finding.remedy


@pytest.mark.usefixtures("without_network")
def test_a_port_that_somebody_else_has_is_named(home: Home) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = the(examine(order(home, host="127.0.0.1", port=port)), "port")
        assert (finding.verdict, "choose another one with --port" in finding.remedy) == (PROBLEM, True)
        LocalState(home).remember(RunId("a" * 32), b"", port)
        finding = the(examine(order(home, host="127.0.0.1")), "port")
        assert (finding.verdict, "that of last time" in finding.title) == (WARNING, True)


@pytest.mark.usefixtures("without_network")
def test_a_process_that_holds_the_home_and_does_not_answer_is_named(home: Home) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(home.lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        finding = the(examine(order(home)), "daemon")
        assert finding.verdict is WARNING
        assert "fuser" in finding.remedy
        holder.kill()
    assert [each for each in examine(order(home)) if each.code == "daemon"] == []


@pytest.mark.usefixtures("without_network")
def test_a_p2pd_without_its_daemon_is_named_with_its_process(home: Home) -> None:
    socket_path = home.folder / "s"
    with subprocess.Popen([str(P2PD), f"-listen=/unix{socket_path}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as orphan:
        assert orphan.stdout is not None
        assert orphan.stdout.readline()
        finding = the(examine(order(home)), "leftovers")
        orphan.kill()
    assert finding.verdict is WARNING
    assert str(orphan.pid) in finding.remedy.split()


@pytest.mark.usefixtures("without_network")
def test_a_low_limit_of_open_files_is_named(home: Home) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        finding = the(examine(order(home)), "open-files")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert finding.verdict is WARNING
    assert "ulimit -n" in finding.remedy


def test_a_p2pd_that_does_not_start_is_named(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2pd, "P2PD", Path("/bin/false"))
    findings = examine(order(home))
    assert the(findings, "p2pd").verdict is PROBLEM
    assert the(findings, "memory").verdict is OK


# The network


def test_nobody_at_the_address_is_a_problem_and_a_peer_of_old_that_is_gone_a_warning(home: Home) -> None:
    finding = the(examine(order(home, addresses=(NOBODY,))), "reach")
    assert (finding.verdict, "check the address" in finding.remedy) == (PROBLEM, True)
    state = LocalState(home)
    state.remember(RunId("a" * 32), b"", 0)
    state.remember_peers([NOBODY])
    finding = the(examine(order(home)), "reach")
    assert (finding.verdict, "ask the organiser" in finding.remedy) == (WARNING, True)


async def visit(home: Home, faults: Faults, change: Callable[[str], str] = lambda address: address) -> list[Finding]:
    async with stub_peer(faults) as address:
        return await asyncio.to_thread(examine, order(home, addresses=(change(address),), host="127.0.0.1"))


async def test_where_nothing_is_wrong_with_the_way_everything_is_ok(home: Home) -> None:
    findings = await visit(home, Faults())
    there = {each.code: each for each in findings}
    codes = ("reach", "peerd", "clock", "run", "dial-back", "relay", "upload", "download", "dht")
    assert {code: there[code].verdict for code in codes} == dict.fromkeys(codes, OK)
    assert "1 of 1 peers" in there["dial-back"].title
    assert "this run's stages take" in there["memory"].title
    assert worst(findings) is not PROBLEM


async def test_a_clock_that_is_off_and_a_run_that_is_not_served_there_are_named(home: Home) -> None:
    findings = await visit(home, Faults(clock_off_s=60.0), lambda address: address[:-32] + "b" * 32)
    clock, run = the(findings, "clock"), the(findings, "run")
    assert (clock.verdict, run.verdict) == (PROBLEM, PROBLEM)
    assert "s behind the swarm's" in clock.title
    assert "NTP" in clock.remedy
    assert "ask the organiser" in run.remedy


async def test_a_machine_that_nobody_reaches_is_named_and_so_are_missing_relays(home: Home) -> None:
    findings = await visit(home, Faults(sees_callers_at="/ip4/127.0.0.77/tcp/5", software="0.0.1"))
    finding = the(findings, "dial-back")
    assert finding.verdict is PROBLEM
    assert "0 of 1 peers" in finding.title
    assert "forward TCP port" in finding.remedy
    assert (the(findings, "relay").verdict, the(findings, "peerd").verdict) == (WARNING, WARNING)


async def test_what_a_peer_cannot_do_is_a_warning_and_a_dht_that_keeps_nothing_a_problem(home: Home) -> None:
    findings = await visit(home, Faults(knows_checkups=False, has_dht=False))
    assert [the(findings, code).verdict for code in ("dial-back", "upload", "download", "dht")] == [WARNING, WARNING, WARNING, PROBLEM]

"""Broken set-ups: `peerd doctor --json` names each fault and its remedy, and the exit code tells problems from warnings.

Every fault is real: disks are full, ports taken, files damaged, libraries old or absent, and the peer asked is a running one.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peerd import child
from peerd.checkup import doctor
from peerd.cli import launch
from peerd.config import paths
from peerd.config.limits import Wishes, save_wishes
from peerd.config.manifest import ModelConfig
from peerd.config.paths import Home
from peerd.link import p2pd
from peerd.policy.owner.governor import Limits
from peerd.swarm.identity import LocalState
from tests.checkup.stub_peer import Faults, stub_peer
from tests.cli import broken_machine as broken
from tests.cli.broken_machine import RUN, Break, Line, Machine, problem, warning
from tests.cli.conftest import ROOT, Command
from tests.tiny_run import tiny_manifest

pytestmark = [
    # hivemind leaves its streams to p2pd for the garbage collector to close
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"),
]

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEXTUXiqjRrCJRZ1AJuwYtJ7E1hENCwDBAFpVVjKpVHJd"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, short_home: Path, peerd: Command) -> Iterator[Machine]:
    """Run the doctor's child in this process. A folder replaces /tmp, which may hold leftovers of other daemons."""
    folder = Path(tempfile.mkdtemp(prefix="peerd-t-", dir="/tmp"))
    monkeypatch.setattr(paths, "SHORT_PARENT", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(launch, "run_child", in_this_process)
    with ExitStack() as stack:
        yield Machine(Home(short_home), peerd, stack)
    shutil.rmtree(folder, ignore_errors=True)


def in_this_process(module: str, order: dict[str, Any], **_bounds: object) -> dict[str, Any]:
    assert module == doctor.__name__
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert child.main([module, json.dumps(order)]) == 0
    return dict(json.loads(said.getvalue().splitlines()[-1]))


@pytest.fixture
def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip p2pd for faults of this machine: it is not needed to find them, and takes a second to start."""

    async def nothing(*_arguments: object) -> list[Any]:
        return []

    monkeypatch.setattr(doctor, "_examine_network", nothing)


@pytest.mark.usefixtures("without_network")
@pytest.mark.parametrize(
    ("break_it", "line"),
    [
        (broken.full_disk, problem("disk", "0 MB of disk free", "free some space")),
        (broken.disk_that_cannot_be_written_to, problem("disk", "Read-only file system", "--home")),
        (broken.home_within_a_file, problem("disk", "cannot write", "--home")),
        (broken.damaged_identity, problem("home", "is not an identity key", "move it away")),
        (broken.identity_for_all_to_read, warning("home", "others may read", "chmod 600")),
        (broken.damaged_state, problem("home", "is damaged", "delete it")),
        (broken.damaged_checkpoint, warning("checkpoints", "0of1-10-", "delete it")),
        (broken.damaged_limits, problem("limits", "limits.json is damaged", "`peerd limits`")),
        (broken.paused_by_its_owner, warning("limits", "its owner paused it", "after `peerd resume`")),
        (broken.outside_the_hours, warning("limits", "outside the hours allowed", "it goes on at ")),
        (broken.quota_used_up, warning("limits", "today's data quota is used up", "at midnight")),
        (broken.power_that_nothing_tells, warning("limits", "a limit on power is set", "`peerd limits --power none --duty 50%`")),
        (broken.cap_that_starves_others, warning("limits", "only 1 Mbit/s of upload allowed", "peerd limits --upload 5Mbit")),
        (broken.sockets_left_in_the_home, warning("leftovers", "sockets of daemons that are gone", "the next start removes them")),
        (broken.sockets_left_outside, warning("leftovers", "sockets of daemons that are gone", "the next start removes them")),
        (broken.p2pd_without_its_daemon, warning("leftovers", "p2pd runs on without its daemon", "end it: kill ")),
        (broken.process_that_holds_the_home_and_does_not_answer, warning("daemon", "a process holds this home", "fuser")),
        (broken.unknown_device, problem("device", "cuda:77 is not available", "--device auto")),
        (broken.library_that_is_too_old, problem("torch", "torch 2.1.0 is older than 2.6", "scripts/constraints.txt")),
        (broken.port_taken, problem("port", "is in use", "choose another one with --port")),
        (broken.port_of_last_time_taken, warning("port", "is in use: that of last time", "the next start takes another")),
        (broken.direct_port_taken, problem("direct", "is in use", "choose another one with --direct-port")),
        (broken.no_address, problem("address", "is not an address", "paste the whole line")),
    ],
)
def test_a_fault_of_this_machine_is_named(machine: Machine, break_it: Break, line: Line) -> None:
    machine.names(line, arguments=break_it(machine))


def test_a_library_that_is_not_there_is_named_and_stands_in_the_way_of_no_other_check(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real child, in an installation that lacks one library."""
    for entry in Path(torch.__file__).parents[1].iterdir():
        if entry.name != "grpc" and not entry.name.startswith("grpcio-"):
            (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr(launch, "module_command", lambda module, *arguments: [sys.executable, "-S", "-m", module, *arguments])
    checks = machine.names(
        problem("grpcio", "grpcio is not installed", "scripts/constraints.txt"),
        problem("network", "No module named 'grpc'", "install peerd anew"),
        arguments=("--home", str(machine.home.folder)),
    )
    assert {"torch", "device", "disk", "home", "limits", "port", "leftovers"} <= {each["code"] for each in checks}


def test_a_hard_limit_of_open_files_that_is_low_is_named_for_the_peers_that_it_has_room_for() -> None:
    asks = "from peerd.checkup import here; print(*(f for n in (1, 30) for f in here.open_files(n)), sep='\\n')"
    command = ["prlimit", "--nofile=128:256", sys.executable, "-c", asks]
    few, too_few = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    assert "warning" in few
    assert "256 open files allowed, enough for 12 other peers" in few
    assert "problem" in too_few
    assert "this peer needs 544 open files for 30 other peers, and the limit is 256" in too_few
    assert "ulimit -n 1024" in too_few


def test_a_p2pd_that_does_not_start_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2pd, "P2PD", Path("/bin/false"))
    machine.names(problem("p2pd", "p2pd ended while it started", "install peerd anew"))


# The network


def test_nobody_at_the_address_is_a_problem_and_a_peer_of_old_that_is_gone_a_warning(machine: Machine) -> None:
    machine.names(problem("reach", "nobody answers", "check the address"), arguments=(NOBODY,))
    state = LocalState(machine.home)
    state.remember(RUN, b"", 0)
    state.remember_peers([NOBODY])
    machine.names(warning("reach", "nobody answers", "ask the organiser"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """A running peer, and this machine's way to it."""

    faults: Faults = field(default_factory=Faults)
    limits: Limits = field(default_factory=Limits)
    change: Callable[[str], str] = lambda address: address
    lines: tuple[Line, ...]


def too_large_a_run() -> Faults:
    manifest = tiny_manifest(num_stages=2)
    return Faults(manifest=replace(manifest, model=ModelConfig(num_layers=2, d_model=1 << 17, num_heads=2, d_ff=1 << 19)))


@pytest.mark.parametrize(
    "set_up",
    [
        pytest.param(
            SetUp(
                faults=Faults(clock_off_s=60.0),
                change=lambda address: address[:-32] + "b" * 32,
                lines=(problem("clock", "s behind 12D3", "NTP"), problem("run", "does not serve run bbb", "ask the organiser")),
            ),
            id="clock off, another run",
        ),
        pytest.param(
            SetUp(
                faults=Faults(sees_callers_at="/ip4/127.0.0.77/tcp/5", software="0.0.1"),
                lines=(
                    problem("dial-back", "0 of 1 peers reached port", "forward TCP port"),
                    warning("relay", "no peer volunteers as a relay", "--relay"),
                    warning("direct", "0 of 1 peers reached port", "--direct-port"),
                    warning("peerd", "the peer there has 0.0.1", "use the version that the run uses"),
                ),
            ),
            id="nobody gets in, no relay, another version",
        ),
        pytest.param(
            SetUp(
                faults=Faults(knows_checkups=False, has_dht=False),
                lines=(
                    problem("dht", "the swarm's DHT", "firewall"),
                    warning("dial-back", "no peer could say", "another peer"),
                    warning("direct", "no peer could say", "another peer"),
                    warning("upload", "could not be measured", "try again"),
                    warning("download", "could not be measured", "try again"),
                ),
            ),
            id="no DHT, a peer that checks nobody",
        ),
        pytest.param(
            SetUp(faults=too_large_a_run(), lines=(problem("memory", "this run's stages take", "a machine with more memory"),)),
            id="stages too large",
        ),
        pytest.param(
            SetUp(
                faults=Faults(line=250_000.0),
                limits=Limits(memory=10_000),
                lines=(
                    problem("memory", "of memory allowed, this run's stages take", "peerd limits --memory"),
                    warning("upload", "Mbit/s upload", "stop other transfers"),
                    warning("download", "Mbit/s download", "stop other transfers"),
                ),
            ),
            id="too little memory allowed, a slow line",
        ),
        pytest.param(
            SetUp(
                faults=Faults(line=2.5e6),
                limits=Limits(upload=50e6 / 8, download=100e6 / 8),
                lines=(
                    warning("upload", "less than the cap of 50 Mbit/s", "peerd limits --upload"),
                    warning("download", "less than the cap of 100 Mbit/s", "peerd limits --download"),
                    Line("direct", "ok", "a cap is set", ""),
                ),
            ),
            id="caps above what the line carries",
        ),
    ],
)
async def test_a_fault_between_this_machine_and_the_swarm_is_named(machine: Machine, set_up: SetUp) -> None:
    save_wishes(machine.home, Wishes(limits=set_up.limits))
    async with stub_peer(set_up.faults) as address:
        arguments = (set_up.change(address), "--host", "127.0.0.1")
        await asyncio.to_thread(machine.names, *set_up.lines, arguments=arguments)

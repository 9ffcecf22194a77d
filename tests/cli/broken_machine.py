"""A volunteer's machine, ways to really break it, and the doctor's expected findings."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from peerd.config.limits import Wishes, save_wishes
from peerd.config.paths import Home
from peerd.link.libp2p import P2PD
from peerd.owner.usage import Usage
from peerd.policy.owner.governor import MINUTES_A_DAY, Hours, Limits
from peerd.policy.swarm.checkup import SLOW_UPLOAD_BITS_PER_S
from peerd.stage.checkpoints import CheckpointStore
from peerd.stage.snapshots import Downloaded
from peerd.swarm.identity import Identity, LocalState
from peerd.table.record import Lineage, RunId
from tests.cli.conftest import Command

RUN = RunId("a" * 32)
HOLD = (
    "import sys\nfrom filelock import FileLock\nlock = FileLock(sys.argv[1])\nlock.acquire()\nprint('held', flush=True)\nsys.stdin.read()\n"
)


@dataclass(frozen=True, slots=True)
class Line:
    """An expected finding of the doctor: the check, its verdict, and words of the finding and of its remedy."""

    code: str
    verdict: str
    title: str
    remedy: str


def warning(code: str, title: str, remedy: str) -> Line:
    return Line(code, "warning", title, remedy)


def problem(code: str, title: str, remedy: str) -> Line:
    return Line(code, "problem", title, remedy)


@dataclass(frozen=True, slots=True)
class Machine:
    """The volunteer's machine. `stack` undoes every change to it."""

    home: Home
    peerd: Command
    stack: ExitStack

    def doctor(self, *arguments: str) -> tuple[int, list[dict[str, str]]]:
        """Exit code and checks."""
        done = self.peerd("doctor", *arguments, "--json")
        assert done.out, done
        reply = json.loads(done.out)
        assert done.code == int(reply["worst"] == "problem"), done
        return done.code, reply["checks"]

    def names(self, *lines: Line, arguments: Sequence[str] = ()) -> list[dict[str, str]]:
        """Check that the doctor reports these findings and no other problem."""
        code, checks = self.doctor(*arguments)
        for line in lines:
            told = [each for each in checks if (each["code"], each["verdict"]) == (line.code, line.verdict)]
            assert any(line.title in each["title"] and line.remedy in each["remedy"] for each in told), checks
        blamed = {each["code"] for each in checks if each["verdict"] == "problem"}
        assert blamed == {line.code for line in lines if line.verdict == "problem"}, checks
        assert code == int(bool(blamed))
        return checks


Break = Callable[[Machine], Sequence[str]]
"""A function that breaks something and returns the arguments for the doctor."""


# Disk and home


def full_disk(machine: Machine) -> Sequence[str]:
    mount(machine, "size=64k")
    with contextlib.suppress(OSError), (machine.home.folder / "full").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return ()


def disk_that_cannot_be_written_to(machine: Machine) -> Sequence[str]:
    mount(machine, "size=64k,ro")
    return ()


def mount(machine: Machine, options: str) -> None:
    """Put the home on a small disk of its own."""
    if shutil.which("mount") is None or subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    folder = str(machine.home.folder)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "peerd-test", folder], check=True, capture_output=True)
    machine.stack.callback(subprocess.run, ["umount", "--lazy", folder], check=True, capture_output=True)


def home_within_a_file(machine: Machine) -> Sequence[str]:
    (machine.home.folder / "file").touch()
    return ("--home", str(machine.home.folder / "file" / "home"))


def damaged_identity(machine: Machine) -> Sequence[str]:
    machine.home.identity.write_bytes(b"not a key")
    return ()


def identity_for_all_to_read(machine: Machine) -> Sequence[str]:
    Identity.load_or_create(machine.home.identity)
    machine.home.identity.chmod(0o644)
    return ()


def damaged_state(machine: Machine) -> Sequence[str]:
    machine.home.state.write_text("{")
    return ()


def damaged_checkpoint(machine: Machine) -> Sequence[str]:
    LocalState(machine.home).remember(RUN, b"", 0)
    folder = machine.home.checkpoints(RUN)
    folder.mkdir(parents=True)
    for step in (5, 10):
        CheckpointStore(folder, 1).save(0, Downloaded(step, Lineage(0, b""), {"weight": torch.full((8,), float(step))}, ()))
    (newest,) = folder.glob("0of1-10-*")
    raw = bytearray(newest.read_bytes())
    raw[-1] ^= 1
    newest.write_bytes(raw)
    return ()


# The owner's limits


def damaged_limits(machine: Machine) -> Sequence[str]:
    machine.home.limits.write_text('{"limits": {"upload": "much"}}')
    return ()


def paused_by_its_owner(machine: Machine) -> Sequence[str]:
    save_wishes(machine.home, Wishes(paused=True))
    return ()


def outside_the_hours(machine: Machine) -> Sequence[str]:
    minute = 60 * time.localtime().tm_hour
    save_wishes(machine.home, Wishes(limits=Limits(hours=Hours((minute - 120) % MINUTES_A_DAY, (minute - 60) % MINUTES_A_DAY))))
    return ()


def quota_used_up(machine: Machine) -> Sequence[str]:
    save_wishes(machine.home, Wishes(limits=Limits(daily=10**6)))
    usage = Usage(machine.home)
    usage.add(2 * 10**6)
    usage.save()
    return ()


def cap_that_starves_others(machine: Machine) -> Sequence[str]:
    save_wishes(machine.home, Wishes(limits=Limits(upload=SLOW_UPLOAD_BITS_PER_S / 8 / 5)))
    return ()


def power_that_nothing_tells(machine: Machine) -> Sequence[str]:
    save_wishes(machine.home, Wishes(limits=Limits(power=200)))
    return ()


# Leftovers of a crash


def sockets_left_in_the_home(machine: Machine) -> Sequence[str]:
    machine.home.run_folder.mkdir()
    leave_socket(machine.home.control_socket)
    return ()


def sockets_left_outside(_machine: Machine) -> Sequence[str]:
    folder = Home(Path("/") / ("h" * 100)).run_folder
    folder.mkdir(mode=0o700)
    leave_socket(folder / "control.sock")
    return ()


def leave_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))


def p2pd_without_its_daemon(machine: Machine) -> Sequence[str]:
    keep_running(machine, str(P2PD), f"-listen=/unix{machine.home.folder / 's'}")
    return ()


def process_that_holds_the_home_and_does_not_answer(machine: Machine) -> Sequence[str]:
    keep_running(machine, sys.executable, "-c", HOLD, str(machine.home.lock))
    return ()


def keep_running(machine: Machine, *command: str) -> None:
    """Run a process until the test ends. Returns when it has printed something."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    machine.stack.enter_context(process)
    machine.stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline()


# System


def unknown_device(_machine: Machine) -> Sequence[str]:
    return ("--device", "cuda:77")


def library_that_is_too_old(machine: Machine) -> Sequence[str]:
    """Put another installation of the library first on the path."""
    folder = Path(machine.stack.enter_context(tempfile.TemporaryDirectory(prefix="peerd-t-")))
    install_metadata(folder, "torch", "2.1.0")
    sys.path.insert(0, str(folder))
    machine.stack.callback(sys.path.remove, str(folder))
    importlib.invalidate_caches()
    return ()


def install_metadata(folder: Path, name: str, version: str) -> None:
    (folder / f"{name}-{version}.dist-info").mkdir()
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def port_taken(machine: Machine) -> Sequence[str]:
    return ("--host", "127.0.0.1", "--port", str(taken_port(machine)))


def port_of_last_time_taken(machine: Machine) -> Sequence[str]:
    LocalState(machine.home).remember(RUN, b"", taken_port(machine))
    return ("--host", "127.0.0.1")


def direct_port_taken(machine: Machine) -> Sequence[str]:
    return ("--host", "127.0.0.1", "--direct-port", str(taken_port(machine)))


def taken_port(machine: Machine) -> int:
    taken = machine.stack.enter_context(socket.socket())
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return int(taken.getsockname()[1])


def no_address(_machine: Machine) -> Sequence[str]:
    return ("somewhere",)

"""What `peerd doctor` finds on this machine, without the network. Each check is a function that yields findings."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerd.config.device_homes import every_home, owner_home_of
from peerd.config.laptop import usual_limits
from peerd.config.limits import load_wishes
from peerd.config.paths import Home, cache_folder
from peerd.errors import PeerdError
from peerd.policy.owner.governor import Limits, Pause, Readings, why_pause
from peerd.policy.swarm.checkup import Finding, of_disk, of_health, of_limits, of_open_files, of_pauses, of_versions, ok, problem, warning

NEEDED = {"python": "3.11", "torch": "2.6", "hivemind": "1.1.12", "grpcio": "1.85.1", "protobuf": "7.35"}
"""The least versions; grpcio's and protobuf's follow from the code that scripts/protos generates."""
DAEMON_SILENCE_S = 10.0
AFTER_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
"""Of Linux. It holds for the network namespace of the process, so also for a container alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the doctor is asked to look at. Travels as one JSON argument."""

    home: str
    addresses: tuple[str, ...] = ()
    host: str = ""
    port: int = 0
    direct_port: int = 0
    device: str = "auto"
    self_test: bool = False
    """Test the device, and nothing else."""


def versions() -> Iterator[Finding]:
    found = {"python": platform.python_version()}
    for name in NEEDED:
        if name not in found:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
    yield from of_versions(found, NEEDED)


def device(wanted: str) -> Iterator[Finding]:
    """Whether it is there and computes."""
    import torch

    from peerd.daemon.device import OTHER_BUILD, choose_device, describe, lacks, left_out

    try:
        chosen = choose_device(wanted)
    except PeerdError as error:
        yield problem("device", error.message, error.remedy)
        return
    for lack in left_out() if wanted == "auto" else ():
        yield warning("device", f"a GPU is left out: {lack}", OTHER_BUILD)
    try:
        torch.ones(8, 8, device=chosen).matmul(torch.ones(8, 8, device=chosen)).sum().item()
    except RuntimeError as error:
        said = str(error).partition("\n")[0][:120]
        yield problem("device", f"{describe(chosen)} does not compute: {said}", "update its driver, or use --device cpu")
        return
    lack = lacks(chosen, "bfloat16")
    told = f"{describe(chosen)} ({chosen}) computes" + (f"; {lack}, which counts in runs of that precision" if lack else "")
    more = "" if chosen.type == "cpu" else f"; this was one product, `peerd doctor --device {chosen}` tests all of it"
    yield ok("device", told + more)


def disk(home: Home) -> Iterator[Finding]:
    """Room and the right to write, for the home and for the run's text. Nothing is left behind."""
    for folder in (home.folder, cache_folder()):
        there = next(each for each in (folder, *folder.parents) if each.exists())
        try:
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            yield problem("disk", f"cannot write to {there}: {error.strerror}", "choose a folder you can write to with --home")
            continue
        yield of_disk(str(folder), shutil.disk_usage(there).free)


def open_files(num_peers: int = 1) -> Iterator[Finding]:
    """Whether a daemon that works with so many others may open what it needs. The limit is raised as a daemon raises its own."""
    from peerd.daemon.open_files import raise_limit

    yield of_open_files(raise_limit(), num_peers)


def pauses(setting: Path = AFTER_IDLE) -> Iterator[Finding]:
    """Whether connections keep their speed over a pause. Nothing is said where the system does not tell."""
    try:
        told = setting.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return
    yield of_pauses(begins_slowly=told != "0")


def home_files(home: Home) -> Iterator[Finding]:
    """The identity and what else outlives a daemon."""
    from peerd.swarm.identity import Identity, LocalState

    try:
        LocalState(home)
        if home.identity.exists():
            peer = Identity.load_or_create(home.identity).peer
            if stat.S_IMODE(home.identity.stat().st_mode) & 0o077:
                yield warning("home", f"others may read {home.identity}", f"chmod 600 {home.identity}")
            else:
                yield ok("home", f"{home.folder} is in order, this peer is {peer}")
        else:
            yield ok("home", f"{home.folder} gets its identity at the first join")
    except PeerdError as error:
        yield problem("home", error.message, error.remedy)


def checkpoints(home: Home) -> Iterator[Finding]:
    """Those of the run that this home was last in, which it would resume from."""
    from peerd.swarm.identity import LocalState

    try:
        run = LocalState(home).run
    except PeerdError:
        return  # told with the home
    if not run or not home.checkpoints(run).is_dir():
        return
    from peerd.stage.checkpoints import damaged_in

    for path in damaged_in(home.checkpoints(run)):
        yield warning("checkpoints", f"{path} is damaged", "delete it: the daemon passes it over, and resumes from another or from peers")


def gpu_tells(limits: Limits, device: str) -> Iterator[Finding]:
    """A limit on the GPU's power is kept by what it tells."""
    from peerd.daemon.device import choose_device
    from peerd.owner.sensors import gpu_power

    try:
        silent = bool(limits.power) and gpu_power(choose_device(device)) is None
    except PeerdError:
        return  # told with the device
    if silent:
        remedy = "for NVIDIA: pip install 'peerd[gpu]'; else limit the time that it computes: `peerd limits --power none --duty 50%`"
        yield warning("limits", "a limit on power is set, and nothing here tells what the device draws", remedy)


def owners_limits(home: Home, status: Mapping[str, Any] | None) -> tuple[Limits, list[Finding]]:
    """What the owner allows, and what is to be said about it. A running daemon knows best why it pauses."""
    from peerd.owner.usage import Usage

    try:
        wishes = load_wishes(owner_home_of(home), usual_limits())
    except PeerdError as error:
        return Limits(), [problem("limits", error.message, error.remedy)]
    if status is not None:
        owner = status["owner"]
        return wishes.limits, of_limits(wishes.limits, Pause(owner["paused"], owner["until"]) if owner["paused"] else None)
    others = [each for each in every_home(owner_home_of(home)) if each != home]
    usage, now = Usage(home, others), time.localtime()
    readings = Readings(minute=60 * now.tm_hour + now.tm_min, today=usage.today, this_month=usage.this_month)
    asked = wishes.pause if not wishes.paused_until_s or time.time() < wishes.paused_until_s else None
    return wishes.limits, of_limits(wishes.limits, asked or why_pause(wishes.limits, readings))


def running_daemon(home: Home) -> tuple[dict[str, Any] | None, list[Finding]]:
    """The status of this home's daemon where one runs, and what is to be said about it."""
    from filelock import FileLock, Timeout

    from peerd.control.client import ControlClient

    try:
        status = ControlClient(home).request("status", silence_s=DAEMON_SILENCE_S)
    except PeerdError as error:
        said = error.message
    else:
        return status, [ok("daemon", f"a daemon runs from this home (process {status['pid']})"), *of_health(status["health"])]
    if not home.lock.exists():
        return None, []
    try:
        with FileLock(home.lock, timeout=0):
            return None, []
    except Timeout:
        remedy = f"it may be starting: wait; if it hangs, find it with `fuser {home.lock}` and end it"
        return None, [warning("daemon", f"a process holds this home, but {said}", remedy)]


def port(host: str, wanted: int, home: Home) -> Iterator[Finding]:
    """Whether the port that a daemon would listen on is free."""
    from peerd.swarm.identity import LocalState

    try:
        chosen = wanted or LocalState(home).port
    except PeerdError:
        chosen = 0  # told with the home
    refused = _refused(host, chosen)
    if refused and wanted:
        yield problem("port", refused.message, refused.remedy)
    elif refused:
        yield warning("port", f"{refused.message}: that of last time", "the next start takes another; forward that, or choose --port")
    elif chosen:
        yield ok("port", f"TCP port {chosen} is free")
    else:
        yield ok("port", "a daemon takes any free TCP port; a router needs a fixed one (--port)")


def direct_port(host: str, wanted: int) -> Iterator[Finding]:
    """Only what stands in its way: whether others get there, they tell."""
    refused = _refused(host, wanted)
    if refused:
        yield problem("direct", refused.message, "choose another one with --direct-port, or leave it out")


def _refused(host: str, port: int) -> PeerdError | None:
    """Why a daemon could not listen there."""
    from peerd.link.p2pd import check_port_free

    try:
        check_port_free(host or "0.0.0.0", port)  # noqa: S104 - where a daemon listens that others shall reach
    except PeerdError as error:
        return error
    return None


def leftovers(home: Home, *, runs: bool) -> Iterator[Finding]:
    """What crashed daemons of this user left: folders of sockets, and p2pd without a daemon."""
    from peerd.link.run_folder import is_listened_to, stale_folders

    stale = list(stale_folders())
    own = home.run_folder
    if not runs and own.is_dir() and own not in stale and any(own.iterdir()) and not is_listened_to(own):
        stale.append(own)
    orphans = orphaned_p2pds()
    if stale:
        some = ", ".join(str(folder) for folder in stale[:3]) + (f" and {len(stale) - 3} more" if len(stale) > 3 else "")
        yield warning("leftovers", f"sockets of daemons that are gone: {some}", "nothing to do: the next start removes them")
    if orphans:
        some = " ".join(str(process) for process in orphans)
        yield warning("leftovers", f"p2pd runs on without its daemon (process {some})", f"end it: kill {some}")
    if not stale and not orphans:
        yield ok("leftovers", "nothing left by a crash")


def orphaned_p2pds() -> list[int]:
    """Processes of this user that run our p2pd and whose parent is no keeper."""
    import psutil

    from peerd.link.libp2p import P2PD

    found = []
    for process in psutil.process_iter():
        try:
            if process.uids().real != os.getuid() or process.exe() != str(P2PD.resolve()):
                continue
            if any(part.endswith("keeper.py") for part in psutil.Process(process.ppid()).cmdline()):
                continue
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            continue
        if process.is_running():
            found.append(process.pid)
    return found


def platform_line() -> Iterator[Finding]:
    return of_platform(sys.platform, f"{platform.system()} {platform.release()}", platform.machine())


def of_platform(system: str, release: str, machine: str) -> Iterator[Finding]:
    """What matters of an operating system; `system` is as in sys.platform. The remarks on GPUs are their makers' word, and not tried."""
    if system not in ("linux", "darwin"):
        yield problem("platform", f"peerd does not run on {system}", "use Linux, macOS, or WSL2 on Windows")
        return
    if "microsoft" in release.lower():
        remedy = "forward the port from Windows to WSL2, or set networkingMode=mirrored in .wslconfig"
        yield warning("platform", "WSL2: others reach this machine only through Windows", remedy)
        yield ok("sleep", "WSL2 stands still while Windows sleeps: let Windows stay awake while you lend the machine")
        spills = "a GPU's memory may spill into the machine's, which is slow and no error: NVIDIA's control panel can prefer no fallback"
        yield ok("spilled memory", f"WSL2: {spills}; or keep below what is free with `peerd limits --memory`")
        return
    yield ok("platform", f"{release}, {machine}")
    if system == "darwin":
        yield ok("sleep", "a Mac sleeps by itself, and its peer then goes: `caffeinate -i peerd join ...` keeps it awake")
        if machine == "arm64":
            told = "operators that Apple's GPU lacks end a pass; with PYTORCH_ENABLE_MPS_FALLBACK=1 the processor computes them"
            yield ok("operators", f"{told}, slowly; `--device cpu` does without the GPU")


def is_apart(wanted: str) -> bool:
    """Whether the device has memory of its own."""
    from peerd.daemon.device import choose_device
    from peerd.transfers import has_own_memory

    try:
        return has_own_memory(choose_device(wanted))
    except PeerdError:
        return False  # told with the device


def free_memory(wanted: str) -> int:
    """Bytes a stage may take on the device. PeerdError where the device is not there."""
    from peerd.daemon.device import choose_device, free_memory_bytes

    return free_memory_bytes(choose_device(wanted))

"""The faults that a daemon can be told to show."""

from __future__ import annotations

import subprocess
import sys

from peerd.daemon.faults import FAULT_SITES, Point


def test_every_point_at_which_a_daemon_can_end_lies_at_a_method_that_is_there() -> None:
    assert [site for site in FAULT_SITES if not callable(getattr(site.owner, site.method, None))] == []
    at_sites = {point for site in FAULT_SITES for point in (*site.before, *site.after)}
    assert set(Point) - at_sites == {Point.QUEUED, Point.WAITING}, "these two lie within a call, not at its ends"


def test_a_full_disk_and_a_skewed_clock_are_what_the_process_finds() -> None:
    """In a process of its own, for it stays so."""
    found = subprocess.run([sys.executable, "-c", HARMED], capture_output=True, text=True, timeout=60, check=False)
    assert found.stdout.split() == ["ENOSPC", "ENOSPC", "7200", "7200", "0", "fine", "0"], found.stderr


HARMED = """
import asyncio, errno, os, structlog, sys, tempfile, time
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
from pathlib import Path
from hivemind.utils import get_dht_time
from peerd.daemon.faults import Faults
from peerd.stage.disk_room import DiskRoom
from peerd.swarm import clock as clock
faults, ask = Faults(None), lambda **fault: asyncio.run(faults.fault(fault, None))
faults.install()
right = time.monotonic
def tell(write):
    try:
        write()
    except OSError as error:
        print(errno.errorcode[error.errno])
    else:
        print("fine")
began = time.time() - right()
ask(kind="disk-full", for_s=60)
ask(kind="skewed-clock", by_s=7200, for_s=60)
with tempfile.TemporaryFile() as file:
    tell(lambda: os.fsync(file.fileno()))
    tell(lambda: DiskRoom(Path("/tmp")).writing(1).__enter__())
    from hivemind.dht import node
    print(round(clock.time.time() - right() - began), round(node.get_dht_time() - right() - began), round(time.time() - right() - began))
    ask(kind="disk-full", for_s=0)
    ask(kind="skewed-clock", by_s=7200, for_s=0)
    tell(lambda: os.fsync(file.fileno()))
    print(round(clock.time.time() - right() - began))
"""

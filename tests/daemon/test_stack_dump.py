"""A process that seems stuck says what it waits for, whether its event loop runs or not."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

MOST_S = 60.0

PROGRAM = """
import asyncio, sys, threading
import uvloop
from peerd.daemon.stack_dump import tell_on_signal

async def wait_for_the_end():
    await asyncio.Event().wait()

async def main():
    tell_on_signal(asyncio.get_running_loop())
    waiting = asyncio.ensure_future(wait_for_the_end())
    await asyncio.sleep(0)
    print("ready", flush=True)
    if sys.argv[1] == "blocked":
        threading.Event().wait()
    await waiting

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs SIGUSR1")
@pytest.mark.parametrize(("kind", "told"), [("running", b"wait_for_the_end"), ("blocked", b"in main")])
def test_a_signal_makes_it_tell(kind: str, told: bytes) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, kind], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    enough = threading.Timer(MOST_S, process.kill)
    enough.start()
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGUSR1)
        while told not in (line := process.stdout.readline()):
            assert line
    finally:
        enough.cancel()
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]

"""Runs p2pd so that it cannot outlive the daemon, however the daemon ends.

Usage: python keeper.py '{"command": [...], "remove": [folder, ...], "prune": [folder, ...]}'

Standard input is a pipe from the daemon. When it closes, because the daemon ended or was killed, the keeper kills p2pd, deletes the
folders in `remove`, and deletes those in `prune` that are empty. When p2pd ends by itself, the keeper exits, and the daemon sees that.
A byte on standard input ends p2pd alone. The keeper lives as long as the daemon, so it imports little to save memory.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

_TOLD_WITHIN_S = 0.2


def _die_with_parent() -> None:
    """On Linux, ask the kernel to kill p2pd when the keeper dies."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    order = json.loads(sys.argv[1])
    child = subprocess.Popen(
        order["command"],
        stdin=subprocess.DEVNULL,
        preexec_fn=_die_with_parent,
    )
    closed = threading.Event()

    def wait_for_daemon() -> None:
        if os.read(0, 1):  # a byte: p2pd hangs, and the daemon wants to end it alone
            child.kill()
            return
        closed.set()
        child.kill()

    waiting = threading.Thread(target=wait_for_daemon, daemon=True)
    waiting.start()
    code = child.wait()
    sys.stdout.flush()
    # The daemon's end may have ended p2pd, which writes where nobody reads any more. Then it is told here as well, maybe a moment later.
    if select.select([0], [], [], _TOLD_WITHIN_S)[0]:
        waiting.join()
    if not closed.is_set():
        return code if code > 0 else 1
    for folder in order["remove"]:
        shutil.rmtree(folder, ignore_errors=True)
    for folder in order["prune"]:
        try:
            Path(folder).rmdir()
        except OSError:
            continue
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Daemons for tests that need not import their libraries: each is forked from one process that has imported them and does nothing else.

Imports are most of what a short-lived daemon costs, some two seconds of a processor. A forked daemon is a process of its own, a child
of the tests' process, and runs the same `main` as an executed one.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from peerd.child import exit_code_of
from peerd.cli.launch import module_command
from peerd.errors import ExitCode

CAN_FORK = sys.platform == "linux"
_SET_CHILD_SUBREAPER = 36
"""For prctl(2): orphans among the descendants become children of this process."""
_MOST_BYTES = 1 << 17


class Forked(subprocess.Popen[bytes]):
    """Popen for `python -m peerd.daemon SETTINGS` with all three standard files given. The daemon gets a session of its own."""

    def _execute_child(self, args: list[str], *given: Any) -> None:
        """Replaces the part of Popen that forks and executes. `given` is what that takes, in its order."""
        environment, pipes = given[5], given[9:15]
        to_read, _, _, to_write, _, errors = pipes
        self.pid = _fork(args[-1], environment, [to_read, to_write, errors])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _fork(settings: str, environment: Mapping[str, str], files: list[int]) -> int:
    """The process id of a new daemon, which is a child of this process."""
    order = json.dumps({"settings": settings, "environment": dict(environment)}).encode()
    parent = _parent()
    socket.send_fds(parent, [order], files)
    return int(parent.recv(_MOST_BYTES))


@functools.cache
def _parent() -> socket.socket:
    """A connection to the process that forks. It ends when this one does."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        command = module_command(__name__, str(its.fileno()))
        process = subprocess.Popen(command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)

    def end() -> None:
        mine.close()
        process.wait()

    atexit.register(end)
    assert mine.recv(_MOST_BYTES) == b"ready"
    return mine


# In the process that forks


def serve(orders: socket.socket) -> int:
    """Fork a daemon for each order until nobody is left to give one. Returns, in each process, its exit code."""
    main = importlib.import_module("peerd.daemon.__main__").main
    importlib.import_module("peerd.daemon.run")
    gc.freeze()
    orders.send(b"ready")
    while True:
        order, files, _, _ = socket.recv_fds(orders, _MOST_BYTES, 3)
        if not order:
            return ExitCode.OK
        told, tells = os.pipe()
        between = os.fork()
        if between == 0:  # its end makes an orphan of the daemon, which the process that ordered it inherits
            daemon = os.fork()
            if daemon == 0:
                orders.close()
                os.close(told)
                os.close(tells)
                return int(main([_become(json.loads(order), files)]))
            os.write(tells, str(daemon).encode())
            os._exit(0)
        os.waitpid(between, 0)
        orders.send(os.read(told, 64))
        for file in (told, tells, *files):
            os.close(file)


def _become(order: Mapping[str, Any], files: list[int]) -> str:
    """Make this process what an executed one would be. Returns the daemon's settings."""
    os.setsid()
    for standard, file in enumerate(files):
        os.dup2(file, standard)
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # looked up again
    return str(order["settings"])


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: serve(socket.socket(fileno=int(sys.argv[1])))))

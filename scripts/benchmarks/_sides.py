"""Processes that a benchmark gives orders in turn, one JSON object per line in each direction. They end when standard input closes.

A side defines coroutines; `serve` calls the one that an order names and answers with its result.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import uvloop

from peerd.cli.launch import module_command
from peerd.errors import PeerdError

LARGEST_LINE = 1 << 20
PATIENCE_S, TIMEOUT_S = 60.0, 300.0
"""Timeouts for one message, and for any operation."""
SOCKETS, HIVEMINDS = Path("/tmp"), "hivemind-p2p*.sock"  # noqa: S108 - that is where it puts them


def serve(side: Any) -> None:
    """Take orders until standard input ends, on the same kind of event loop as a daemon."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(side))


async def spent_s() -> float:
    """Processor time of this process and its children, including p2pd."""
    me = psutil.Process()
    return float(sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True))))


async def _serve(side: Any) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # keeps the output of libraries apart from the answers
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            do = order.pop("do")
            answer = await (spent_s() if do == "spent_s" else getattr(side, do)(**order))
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        await side.close()


def sweep_sockets() -> None:
    """Remove the sockets that hivemind leaves behind. A socket with a listener is kept."""
    for path in SOCKETS.glob(HIVEMINDS):
        with socket.socket(socket.AF_UNIX) as caller:
            try:
                caller.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue


@dataclass(slots=True)
class Team:
    """The processes of a side, one per member."""

    name: str
    module: str
    jobs: Sequence[Mapping[str, Any]]
    environment: Mapping[str, str] = field(default_factory=dict)
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def __enter__(self) -> Team:
        for job in self.jobs:
            process = subprocess.Popen(
                module_command(self.module, json.dumps(job)),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                start_new_session=True,  # so that Ctrl-C reaches only the benchmark
                env={**os.environ, "GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0", **self.environment},
            )  # fmt: skip
            self._processes.append(process)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # including its forked processes
                process.wait()

    def ask(self, do: str, **order: Any) -> list[Any]:
        """Give all members the same order at once. Returns their answers."""
        for process in self._processes:
            self._tell(process, {"do": do, **order})
        return [self._answer(process) for process in self._processes]

    def ask_one(self, member: int, do: str, **order: Any) -> Any:
        self._tell(process := self._processes[member], {"do": do, **order})
        return self._answer(process)

    def _tell(self, process: subprocess.Popen[str], order: Mapping[str, Any]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer shows it
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()

    def _answer(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline(LARGEST_LINE)
        if not line:
            raise PeerdError(f"{self.name}: a process ended with exit code {process.wait()}")
        return json.loads(line)

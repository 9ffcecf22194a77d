"""The life of a daemon: enter the swarm, run the parts in one TaskGroup, leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import structlog
import uvloop

from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.control.protocol import SCHEMA
from peerd.control.server import Verb, control_server
from peerd.daemon.answers import Answers, join_line
from peerd.daemon.enter import enter
from peerd.daemon.log import configure
from peerd.daemon.node import Node
from peerd.daemon.supervisor import Supervisor
from peerd.errors import ExitCode, PeerdError
from peerd.swarm.identity import lock_home
from peerd.table.record import Phase

DRAIN_TIMEOUT_S = 60.0
QUIET_BEFORE_REFUSING_S = 0.3
LOG = structlog.get_logger()


class Left(Exception):  # noqa: N818 - it is no error
    """Raised inside the TaskGroup to end the daemon."""


def run_daemon(settings: Settings) -> int:
    """Run until left. PeerdError for whatever stands in the way."""
    home = Home(Path(settings.home))
    lock = lock_home(home)
    configure()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.get_loop().set_exception_handler(_unretrieved)
            return runner.run(_live(settings, home))
    finally:
        lock.release()
        if settings.ephemeral:
            shutil.rmtree(home.folder, ignore_errors=True)


def _unretrieved(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """hivemind's background tasks end with errors nobody reads when a connection closes; that is no news."""
    LOG.debug("background task", message=context.get("message"), error=repr(context.get("exception")))


async def _live(settings: Settings, home: Home) -> int:
    async with contextlib.AsyncExitStack() as stack:
        entering = asyncio.ensure_future(enter(settings, home, stack))
        with _signals(lambda: entering.cancel()):
            try:
                node = await entering
            except asyncio.CancelledError:
                return ExitCode.INTERRUPTED
        configure(peer=node.membership.me[-6:], stage=node.place.stage)
        departure = Departure(node)
        await stack.enter_async_context(control_server(home.control_socket, _verbs(node, departure)))
        _say_ready(node)
        try:
            await _run(node, departure)
        except* Left:
            LOG.info("left", step=node.state.record.step)
        except* PeerdError as group:
            raise _first(group) from None
        finally:
            node.liveness.close()
            node.rounds.shut()
    return ExitCode.OK


def _verbs(node: Node, departure: Departure) -> dict[str, Verb]:
    """What the control socket answers to; `fault` only where the settings allow harm."""
    verbs = Answers(node, departure.leave).verbs()
    if node.settings.allow_faults:
        from peerd.daemon.faults import Faults

        faults = Faults(node.service)
        faults.install()
        verbs["fault"] = faults.fault
    return verbs


async def _run(node: Node, departure: Departure) -> None:
    with _signals(departure.ask):
        async with asyncio.TaskGroup() as group:
            group.create_task(node.gossip.run())
            group.create_task(node.stepper.run())
            group.create_task(node.sweep())
            if node.trainer is not None:
                group.create_task(node.trainer.run())
            group.create_task(Supervisor(node).run())
            group.create_task(departure.run())
            if node.settings.follow_parent:
                group.create_task(_follow_parent(departure))


class Departure:
    """The way out: drain first, or at once when asked a second time."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._asked = asyncio.Event()
        self._at_once = asyncio.Event()
        self._gone = asyncio.Event()

    def ask(self) -> None:
        """A signal: the first drains, the second leaves now."""
        if self._asked.is_set():
            self._at_once.set()
        else:
            LOG.info("leaving", how="finishing what is queued; once more leaves now")
        self._asked.set()

    def ask_now(self) -> None:
        self._at_once.set()
        self._asked.set()

    async def leave(self, now: bool) -> None:
        """The control verb: returns when the daemon is about to end."""
        self._asked.set()
        if now:
            self._at_once.set()
        await self._gone.wait()

    async def run(self) -> None:
        await self._asked.wait()
        drain = asyncio.ensure_future(self._drain())
        at_once = asyncio.ensure_future(self._at_once.wait())
        try:
            await asyncio.wait({drain, at_once}, timeout=DRAIN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            drain.cancel()
            at_once.cancel()
        self._gone.set()
        raise Left

    async def _drain(self) -> None:
        """Take nothing new, finish the queue, take part in the average, then go: nothing is replayed because of it."""
        node = self._node
        node.leaving = True
        node.announce()
        await self._until(lambda: node.service.queue == 0)
        await asyncio.sleep(QUIET_BEFORE_REFUSING_S)  # for peers that have not heard yet
        await self._until(lambda: node.service.queue == 0)
        node.service.leaving = True
        await self._until(self._owes_nothing)

    async def _until(self, done: Any) -> None:
        while not done():
            await self._node.membership.changed(0.1)

    def _owes_nothing(self) -> bool:
        """My ledger is empty, or nobody is there to average it with."""
        node = self._node
        record = node.state.record
        mates = [r for r in node.membership.live().serving(record.stage) if r.peer != record.peer and not r.leaving]
        return not mates or record.phase is Phase.JOINING or (record.phase is Phase.ACCUMULATING and record.done == 0)


async def _follow_parent(departure: Departure) -> None:
    """Leave at once when standard input closes: whoever started this daemon is gone."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(4096):
        pass
    departure.ask_now()


@contextlib.contextmanager
def _signals(handler: Any) -> Any:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _say_ready(node: Node) -> None:
    """One line on standard output: JSON, or what a person pastes to others."""
    line = join_line(node)
    LOG.info("reachable", address=line, stage=node.place.stage)
    if os.environ.get("PEERD_READY") == "text":
        print(
            f"This peer serves stage {node.place.stage} of run {node.place.manifest.name}. Others join with:\n\n  peerd join {line}\n",
            flush=True,
        )
        return
    ready = {
        "schema": SCHEMA,
        "join": line,
        "peer": node.membership.me,
        "run": node.place.signed.run,
        "pid": os.getpid(),
        "organiser": node.place.signed.organiser_key.hex(),
    }
    print(json.dumps(ready), flush=True)


def _first(group: BaseExceptionGroup[PeerdError]) -> PeerdError:
    for error in group.exceptions:
        return error if isinstance(error, PeerdError) else _first(error)
    raise AssertionError("an empty group")

"""The life of a daemon: enter the swarm, run the parts in one TaskGroup, leave."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import structlog
import uvloop

from peerd.background import INTERNAL_ERRORS, Tasks
from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.control.protocol import SCHEMA
from peerd.control.server import Verb, control_server
from peerd.daemon.answers import Answers, join_line
from peerd.daemon.departure import Departure, Left, Moved, Paused
from peerd.daemon.device import choose_device
from peerd.daemon.enter import enter
from peerd.daemon.log import configure
from peerd.daemon.lost_errors import on_lost_error
from peerd.daemon.mover import Mover
from peerd.daemon.node import Node
from peerd.daemon.stack_dump import tell_on_signal
from peerd.daemon.supervisor import Supervisor
from peerd.daemon.volunteering import Volunteering
from peerd.daemon.watching.dashboard import Dashboard, no_dashboard, take_place
from peerd.daemon.watching.history import Past
from peerd.daemon.watching.observer import Observer
from peerd.daemon.watching.otel import OpenTelemetry
from peerd.daemon.watching.sinks import sinks_of
from peerd.daemon.watching.tracing import Tracing
from peerd.data.sources import STDLIB
from peerd.errors import ExitCode, PeerdError
from peerd.observe.archive import Archive
from peerd.owner.governor import Governor
from peerd.stage.malloc import give_back_free_memory
from peerd.swarm.identity import lock_home

ANY_STAGE = -1
"""As in the settings: the one that needs help most."""
LOG = structlog.get_logger()
Raised = TypeVar("Raised", bound=BaseException)


def run_daemon(settings: Settings) -> int:
    """Run until left. PeerdError for whatever stands in the way."""
    home = Home(Path(settings.home))
    lock = lock_home(home)
    configure(home)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.get_loop().set_exception_handler(on_lost_error)
            tell_on_signal(runner.get_loop())
            return runner.run(_live(settings, home))
    finally:
        lock.release()
        if settings.ephemeral:
            shutil.rmtree(home.folder, ignore_errors=True)


async def _live(settings: Settings, home: Home) -> int:
    """One stage after another until the daemon leaves; a move is leaving one stage and entering another, a pause has a rest between."""
    service = ControlService(home, Governor(home, choose_device(settings.device)))
    async with service:
        while True:
            match await _serve_one_stage(settings, home, service):
                case Moved(stage=stage):
                    pass
                case Paused() if await _rest(service):
                    stage = settings.stage if settings.stay else ANY_STAGE
                case _:
                    return ExitCode.OK
            settings = replace(settings, run_file="", join="", stage=stage, data=service.data_source)


async def _rest(service: ControlService) -> bool:
    """Out of the swarm until this peer may go on. False when it was told to leave meanwhile."""
    service.rest()
    with _signals(service.left.set):
        going_on = asyncio.ensure_future(service.governor.until_free())
        leaving = asyncio.ensure_future(service.left.wait())
        try:
            await asyncio.wait({going_on, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            going_on.cancel()
            leaving.cancel()
        return not service.left.is_set()


async def _serve_one_stage(settings: Settings, home: Home, service: ControlService) -> Left | Moved | Paused:
    """How it ended."""
    async with contextlib.AsyncExitStack() as stack:
        entering = asyncio.ensure_future(enter(settings, home, stack, service.governor))
        with _signals(entering.cancel):
            try:
                node = await entering
            except asyncio.CancelledError:
                raise KeyboardInterrupt from None
        configure(home, peer=node.membership.me[-6:], stage=node.place.stage)
        departure = Departure(node)
        await service.serve(node, departure)
        outcome: Left | Moved | Paused = Left()
        try:
            await _run(node, departure, service)
        except* (Left, Moved, Paused) as group:
            outcome = _first(group)
        except* PeerdError as group:
            raise _first(group) from None
        except* Exception as group:
            INTERNAL_ERRORS.report("daemon", group)
            raise
        finally:
            node.liveness.close()
            node.rounds.shut()
        to_stage = {"to_stage": outcome.stage} if isinstance(outcome, Moved) else {}
        LOG.info(outcome.news, step=node.state.record.step, **to_stage)
        if not isinstance(outcome, Left):
            await asyncio.to_thread(node.remember_peers)
            node.network.keep_folders = True
    if isinstance(outcome, Paused):
        node.release()
        give_back_free_memory()
    return outcome


class ControlService:
    """The control socket, history and dashboard, which outlive a move. The ready line is printed with the first stage served."""

    def __init__(self, home: Home, governor: Governor) -> None:
        self._home = home
        self.governor = governor
        self.left = asyncio.Event()
        """Told to leave while at rest."""
        self._stack = contextlib.AsyncExitStack()
        self._verbs: dict[str, Verb] = {}
        self._answers: Answers | None = None
        self._departure: Departure | None = None
        self._tasks = Tasks()
        self._following: asyncio.Task[None] | None = None
        self._archive: Archive | None = None
        self._dashboard: Dashboard | None = None
        self._otel: OpenTelemetry | None = None
        self.observer: Observer | None = None
        self.data_source = ""

    async def __aenter__(self) -> ControlService:
        self._tasks.start(self.governor.run())
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._tasks.close()
        await self._stack.aclose()

    def rest(self) -> None:
        """Until the next stage is served, the control socket says what cannot be had now."""
        assert self._answers is not None
        if self._following is not None and self._following.done():
            self.left.set()
        self._verbs.update(self._answers.resting_verbs(self.left))
        self.governor.rest(True)

    async def serve(self, node: Node, departure: Departure) -> None:
        self._departure = departure
        first, self._answers = self._answers is None, Answers(node, departure, self.governor, self._answers)
        self.governor.on_limits = node.keep_limits
        node.keep_limits(self.governor.in_force)
        if first:
            self._open(node)
            await self._recall(node)
        self._verbs.update(_verbs(node, self._answers))
        await self._watch(node, self._answers, first)
        self.data_source = node.place.data_source if node.place.data_source != STDLIB else ""
        if self._following is not None and self._following.done():
            departure.ask_now()  # the parent went while this daemon moved
        if self.left.is_set():
            departure.ask_to_leave()
        self.governor.rest(False)
        if first:
            await self._stack.enter_async_context(control_server(self._home.control_socket, self._verbs))
            if node.settings.follow_parent:
                self._following = self._tasks.start(self._follow_parent())
            _say_ready(node)
            gc.freeze()  # what is there by now stays: to look through it for cycles takes a tenth of a second each time
            for looker in (self._dashboard, self._otel):
                if looker is not None:
                    self._tasks.start(looker.run())

    def _open(self, node: Node) -> None:
        """The history goes on where this home's last daemon left it."""
        settings = node.settings
        self._archive = Archive(self._home.history(node.place.signed.run))
        self._stack.push_async_callback(self._archive.close)
        if settings.observe:
            self.observer = Observer(self._archive)
        if settings.otel:
            self._otel = OpenTelemetry()
        if settings.dashboard:
            self._dashboard = Dashboard(take_place(settings, self._home), self._archive, settings.dashboard_public)
            self._verbs["dashboard"] = self._dashboard.tell
        else:
            self._verbs["dashboard"] = no_dashboard

    async def _recall(self, node: Node) -> None:
        """How far the run had come before, for a founder without a checkpoint, who may begin it anew."""
        assert self._archive is not None
        if node.settings.run_file and not node.state.record.checkpoints:
            for newest in await self._archive.read(lambda store: store.steps(most=1)) or ():
                node.stepper.beginning = replace(node.stepper.beginning, reached=newest.step + 1)

    async def _watch(self, node: Node, answers: Answers, first: bool) -> None:
        """What looks on looks at this stage from here on."""
        assert self._archive is not None
        past = Past(node, self._archive)
        self._verbs.update(past.verbs())
        if self.observer is not None:
            self.observer.attach(node, answers)
            if first and (node.settings.tensorboard or node.settings.wandb):
                self.observer.sinks = await self._stack.enter_async_context(sinks_of(node.settings, node))
        if self._otel is not None:
            self._otel.attach(node)
        if self._dashboard is not None:
            self._dashboard.attach(node, answers, past, self.observer)

    async def _follow_parent(self) -> None:
        """Leave at once when standard input closes: whoever started this daemon is gone."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while await reader.read(4096):
            pass
        assert self._departure is not None
        self._departure.ask_now()
        self.left.set()


def _verbs(node: Node, answers: Answers) -> dict[str, Verb]:
    """What the control socket answers to; `fault` only where the settings allow harm."""
    verbs = answers.verbs() | Tracing(node).verbs()
    if node.settings.allow_faults:
        from peerd.daemon.faults import Faults

        faults = Faults(node.service)
        faults.install()
        verbs["fault"] = faults.fault
    return verbs


async def _mind(governor: Governor, departure: Departure) -> None:
    """Leave the stage when the owner's limits say so."""
    await governor.until_paused()
    departure.pause()


async def _run(node: Node, departure: Departure, service: ControlService) -> None:
    with _signals(departure.ask):
        async with asyncio.TaskGroup() as group:
            group.create_task(node.gossip.run())
            group.create_task(node.liveness.follow(node.network.tunnel.broken))
            group.create_task(node.stepper.run())
            group.create_task(node.sweep())
            group.create_task(node.keep_notes())
            group.create_task(node.watch_addresses())
            if node.network.direct is not None:
                group.create_task(node.network.direct.endpoint.run())
            group.create_task(node.reachability.run())
            group.create_task(Volunteering(node, service.governor).run())
            group.create_task(node.training.run())
            group.create_task(Supervisor(node).run())
            group.create_task(departure.run())
            group.create_task(Mover(node, departure).run())
            group.create_task(_mind(service.governor, departure))
            if service.observer is not None:
                group.create_task(service.observer.run())
                group.create_task(service.observer.lag.run())


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


def _first(group: BaseExceptionGroup[Raised]) -> Raised:
    for error in group.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    raise AssertionError("an empty group")

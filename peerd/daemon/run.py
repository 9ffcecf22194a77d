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
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import structlog
import uvloop

from peerd import SCHEMA
from peerd.background import INTERNAL_ERRORS, Part, Tasks, keep
from peerd.config.atomic import remove_drafts
from peerd.config.laptop import usual_limits
from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.control.server import Say, Verb, control_server
from peerd.daemon.admission import AccessVerb
from peerd.daemon.answers import Answers, join_line
from peerd.daemon.ask_verb import AskVerb
from peerd.daemon.audit_replies import AuditVerb
from peerd.daemon.departure import Departure, Left, Moved, Paused
from peerd.daemon.device import choose_device, left_out
from peerd.daemon.doing import tell_doing
from peerd.daemon.enter import come_back, enter
from peerd.daemon.log import configure
from peerd.daemon.lost_errors import on_lost_error
from peerd.daemon.mover import Mover
from peerd.daemon.peer import Peer
from peerd.daemon.seat import Seat, Unwatched, Watcher
from peerd.daemon.seating import ANY_STAGE, NoRoomError, another_stage, room_lacks, take_seat
from peerd.daemon.stack_dump import tell_on_signal
from peerd.daemon.supervisor import Supervisor
from peerd.daemon.volunteering import Volunteering
from peerd.daemon.watching.dashboard import Dashboard, no_dashboard, take_place
from peerd.daemon.watching.observer import Observer
from peerd.daemon.watching.otel import OpenTelemetry
from peerd.daemon.watching.sample import Sampler
from peerd.daemon.watching.sinks import sinks_of
from peerd.daemon.watching.tracing import Tracing
from peerd.errors import ExitCode, PeerdError, UsageError, system_error
from peerd.owner.governor import Governor
from peerd.peer_names import short_id
from peerd.policy.owner.governor import Limits
from peerd.stage.executor import threads_for_blocking
from peerd.stage.malloc import give_back_free_memory
from peerd.swarm.identity import lock_home
from peerd.transfers import is_out_of_memory

ROOM_LOOK_S = 5.0
"""How often a peer that rests for want of memory looks whether there is some."""
LOG = structlog.get_logger()
Raised = TypeVar("Raised", bound=BaseException)


def harmful_verbs(peer: Peer) -> dict[str, Verb]:
    """Return `fault` and `lie`. Unless the settings allow faults they refuse, and nothing of them is loaded."""
    if not peer.settings.allow_faults:
        return {"fault": _no_faults, "lie": _no_faults}
    from peerd.daemon.faults import Faults
    from peerd.daemon.liars import Liars

    faults = Faults(peer)
    faults.install()
    return {"fault": faults.fault, "lie": Liars(peer).lie}


async def _no_faults(request: Mapping[str, Any], _say: Say) -> NoReturn:
    remedy = "only a daemon for tests does: start one with allow_faults in its settings"
    raise UsageError(f"this daemon does not obey the verb {request['verb']}", remedy)


def run_daemon(settings: Settings) -> int:
    """Run until the daemon leaves. Raises PeerdError if something prevents that."""
    home = Home(Path(settings.home))
    lock = lock_home(home)
    configure(home)
    for folder in home.checkpoint_folders:
        remove_drafts(folder)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.get_loop().set_exception_handler(on_lost_error)
            runner.get_loop().set_default_executor(threads_for_blocking())
            tell_on_signal(runner.get_loop())
            return runner.run(_live(settings, home))
    finally:
        shutil.rmtree(home.averages, ignore_errors=True)  # the next daemon has no use for them
        lock.release()
        if settings.ephemeral:
            shutil.rmtree(home.folder, ignore_errors=True)


async def _live(settings: Settings, home: Home) -> int:
    """Enter the swarm once, and serve one stage after another, with rests while the owner pauses it, until this daemon leaves."""
    owner_home = Home(Path(settings.owner_home)) if settings.owner_home else home
    usual = usual_limits() if settings.spares_laptop else Limits()
    governor = Governor(home, choose_device(settings.device), owner_home, settings.sharers, usual)
    for lack in left_out() if settings.device == "auto" else ():
        LOG.warning("a GPU is left out", lack=lack)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(_running(governor.run()))
        entering = asyncio.ensure_future(enter(settings, home, stack, governor))
        with _signals(entering.cancel):
            try:
                peer = await entering
            except asyncio.CancelledError:
                raise KeyboardInterrupt from None
        service = ControlService(peer, stack)
        with _signals(service.departure.ask):
            return await _until_left(peer, service)


async def _until_left(peer: Peer, service: ControlService) -> int:
    stage = peer.settings.stage
    try:
        async with asyncio.TaskGroup() as group:
            for part in (*peer.always(), Supervisor(peer).run):
                group.create_task(keep(part))
            while await _take_part(peer, service, stage) and await _rest(peer, service.departure):
                await come_back(peer)
                stage = peer.settings.stage if peer.settings.keeps_stage else ANY_STAGE
            raise Left
    except* Left:
        pass
    except* PeerdError as errors:
        raise _first(errors) from None
    except* Exception as errors:
        first = _first(errors)
        told = system_error(first) if isinstance(first, OSError) else None
        if told is not None:
            raise told from None
        INTERNAL_ERRORS.report("daemon", errors)
        raise
    return ExitCode.OK


async def _take_part(peer: Peer, service: ControlService, stage: int) -> bool:
    """Serve one stage after another. Returns True if this peer is to rest, False if it leaves."""
    outcome: Left | Moved | Paused = Left()
    try:
        async with asyncio.TaskGroup() as group:
            tell_doing("choosing a stage and making room for it" if not peer.has_served else "choosing a stage")
            outcome = Paused()  # what it is if a peer that resumes finds no room
            seat = await take_seat(peer, stage, service.watcher) if not peer.has_served else await _next_seat(peer, stage, service.watcher)
            await service.open(seat)
            for part in (*peer.in_swarm(), Volunteering(peer).run, *service.lookers()):
                group.create_task(keep(part))
            while isinstance(outcome := await _serve(seat, service), Moved):
                peer.moves += 1
                seat = await _next_seat(peer, outcome.stage, service.watcher)
                peer.announce()
                configure(peer.network.home, peer=short_id(peer.membership.me), stage=seat.stage)
            raise outcome
    except* (Left, Paused):
        pass
    except* PeerdError as errors:
        raise _first(errors) from None
    finally:
        peer.liveness.close()
    return isinstance(outcome, Paused)


async def _next_seat(peer: Peer, stage: int, watcher: Watcher) -> Seat:
    """Take the seat of this stage, or of another one for which there is memory. Raises Paused if there is none: it may come back."""
    for wanted in (stage, ANY_STAGE):
        try:
            return await take_seat(peer, wanted, watcher)
        except NoRoomError as error:
            LOG.warning("no memory for the next stage", error=error.message)
            peer.room_wanted = error.message
    raise Paused


async def _serve(seat: Seat, service: ControlService) -> Left | Moved | Paused:
    """Serve the stage until it is left. Returns how that ended."""
    peer, departure = seat.peer, service.departure
    outcome: Left | Moved | Paused = Left()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_step(seat))
            group.create_task(seat.training.run())
            group.create_task(keep(departure.of_stage, passes=(Left, Moved, Paused)))
            group.create_task(keep(Mover(seat, departure).run))
            group.create_task(_mind(peer.governor, departure))
            group.create_task(_mind_memory(seat, departure))
            group.create_task(keep(seat.texts.run))
            if seat.auditor is not None:
                group.create_task(keep(seat.auditor.run))
    except* (Left, Moved, Paused) as ends:
        outcome = _first(ends)
        to_stage = {"to_stage": outcome.stage} if isinstance(outcome, Moved) else {}
        LOG.info(outcome.news, step=seat.state.record.step, **to_stage)
    finally:
        await seat.close(for_good=isinstance(outcome, Left))
    await peer.notes.remember_peers()
    return outcome


async def _step(seat: Seat) -> None:
    """Run the stepper. Raises Paused where a step had no memory: the parameters may be half updated, and nothing of them is kept."""
    try:
        await seat.stepper.run()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        LOG.error("a step had no memory: the stage is left, and its state is downloaded anew", error=str(error))
        traceback.clear_frames(error.__traceback__)  # they hold the stage's tensors
    else:
        return
    another_stage(seat.peer)
    seat.peer.outgrew = seat.stage
    raise Paused


async def _mind_memory(seat: Seat, departure: Departure) -> None:
    """Give the stage up once the device's memory does not suffice for it."""
    await seat.has_no_memory.wait()
    to_stage = another_stage(seat.peer)
    LOG.warning("the device's memory does not suffice for the stage", stage=seat.stage, to_stage=to_stage)
    seat.peer.outgrew = seat.stage
    departure.give_up(to_stage)


async def _until_may_go_on(peer: Peer) -> None:
    """Wait until the owner lets this peer go on, and there is memory for a stage."""
    wanted = peer.settings.stage if peer.settings.keeps_stage else ANY_STAGE
    if peer.room_wanted:  # an attempt has just failed, whatever the estimate says
        await asyncio.sleep(ROOM_LOOK_S)
    while True:
        await peer.governor.until_free()
        peer.room_wanted = await asyncio.to_thread(room_lacks, peer, wanted)
        if not peer.room_wanted:
            return
        await asyncio.sleep(ROOM_LOOK_S)


async def _rest(peer: Peer, departure: Departure) -> bool:
    """Stay out of the swarm until this peer may go on. Returns False if it is told to leave meanwhile."""
    give_back_free_memory()
    peer.is_resting = True
    peer.governor.rest(True)
    going_on = asyncio.ensure_future(_until_may_go_on(peer))
    leaving = asyncio.ensure_future(departure.of_resting())
    try:
        await asyncio.wait({going_on, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return not leaving.done()
    finally:
        going_on.cancel()
        leaving.cancel()
        peer.is_resting, peer.room_wanted = False, ""
        peer.governor.rest(False)


async def _mind(governor: Governor, departure: Departure) -> None:
    """Leave the stage when the owner's limits require it."""
    await governor.until_paused()
    departure.pause()


class ControlService:
    """The control socket and the observers (history, dashboard, traces). They live as long as the daemon."""

    def __init__(self, peer: Peer, stack: contextlib.AsyncExitStack) -> None:
        settings, home = peer.settings, peer.network.home
        self._peer = peer
        self._stack = stack
        self.departure = Departure(peer)
        spot = take_place(settings, home) if settings.dashboard else None
        self._answers = Answers(peer, self.departure, spot.address if spot else "")
        self.observer = Observer(peer, self._answers) if settings.observe else None
        self._ask = AskVerb(peer)
        self._sampler = Sampler(peer, self._ask.ask)
        self._dashboard = Dashboard(spot, peer, self._answers, self.observer, settings.dashboard_public, self._sampler) if spot else None
        self._otel = OpenTelemetry(peer.traces, peer.membership.me, peer.place.signed.run) if peer.traces else None
        self._is_open = False

    @property
    def watcher(self) -> Watcher:
        return self.observer or Unwatched()

    def lookers(self) -> Sequence[Part]:
        """Return the observers' work while this peer is in the swarm."""
        return () if self.observer is None else (self.observer.run, self.observer.lag.run)

    async def open(self, seat: Seat) -> None:
        """Answer other peers and the control socket, and print how to join, once the first stage is served."""
        if self._is_open:
            return
        self._is_open = True
        peer, home, settings = self._peer, self._peer.network.home, self._peer.settings
        configure(home, peer=short_id(peer.membership.me), stage=seat.stage)
        await peer.serve()
        self._stack.push_async_callback(peer.network.stop_serving)
        if self.observer is not None and (settings.tensorboard or settings.wandb):
            self.observer.sinks = await self._stack.enter_async_context(sinks_of(settings, peer))
        await self._stack.enter_async_context(control_server(home.control_socket, self._verbs()))
        if settings.follow_parent:
            await self._stack.enter_async_context(_running(self._follow_parent()))
        _say_ready(peer)
        gc.freeze()  # objects that exist now stay: searching them for cycles would take a tenth of a second each time
        for looker in (self._dashboard, self._otel, self._sampler if settings.dashboard else None):
            if looker is not None:
                await self._stack.enter_async_context(_running(looker.run()))

    def _verbs(self) -> dict[str, Verb]:
        """Return the verbs of the control socket."""
        peer = self._peer
        own = AccessVerb(peer.membership.access, peer.place.signed, peer.settings, peer.membership.me)
        told = AuditVerb(peer).verbs() | self._ask.verbs() | self._answers.verbs()
        verbs = own.verbs() | told | Tracing(peer).verbs() | peer.past.verbs() | peer.accounting.verbs() | harmful_verbs(peer)
        verbs["dashboard"] = self._dashboard.tell if self._dashboard is not None else no_dashboard
        return verbs

    async def _follow_parent(self) -> None:
        """Leave at once when standard input closes, because the process that started this daemon has ended."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while await reader.read(4096):
            pass
        self.departure.ask_now()


@contextlib.asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` beside the block, and cancel it at the end."""
    tasks = Tasks()
    tasks.start(work)
    try:
        yield
    finally:
        await tasks.close()


@contextlib.contextmanager
def _signals(handler: Callable[[], object]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _say_ready(peer: Peer) -> None:
    """Print one line on standard output: JSON, or the command with which others join."""
    line = join_line(peer)
    LOG.info("reachable", address=line, stage=peer.seat.stage)
    if os.environ.get("PEERD_READY") == "text":
        print(
            f"This peer serves stage {peer.seat.stage} of run {peer.place.manifest.name}. Others join with:\n\n  peerd join {line}\n",
            flush=True,
        )
        return
    ready = {
        "schema": SCHEMA,
        "join": line,
        "peer": peer.membership.me,
        "run": peer.place.signed.run,
        "pid": os.getpid(),
        "organiser": peer.place.signed.organiser_key.hex(),
    }
    print(json.dumps(ready), flush=True)


def _first(group: BaseExceptionGroup[Raised]) -> Raised:
    for error in group.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    raise AssertionError("an empty group")

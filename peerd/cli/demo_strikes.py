"""Carries out the schedule of demo_chaos.py on the demo's daemons, and replaces those it killed.

A separate shell wakes a stopped process, so that it is woken even if the demo is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from peerd.cli.demo_chaos import MIN_FAULTS, Candidate, Chaos, FaultKind, Strike, may_fall, schedule
from peerd.errors import PeerdError

if TYPE_CHECKING:
    from peerd.cli.demo_daemons import DemoSwarm
    from peerd.cli.demo_process import DemoDaemon

ORDER_SILENCE_S = 3.0
LAST_LOOK_SILENCE_S = 0.5
MAX_CONTACTS = 3
"""Number of addresses given to a replacement, because the next fault may hit the first of them."""
WAKE = 'sleep "$1"; kill -CONT "$2"'


@dataclass(frozen=True, slots=True)
class Suspended:
    """A process that is stopped for a while."""

    pid: int
    waker: subprocess.Popen[bytes]

    @classmethod
    def begin(cls, pid: int, for_s: float) -> Suspended:
        null = subprocess.DEVNULL
        command = ["/bin/sh", "-c", WAKE, "sh", str(for_s), str(pid)]
        waker = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
        os.kill(pid, signal.SIGSTOP)
        return cls(pid, waker)

    @property
    def over(self) -> bool:
        return self.waker.poll() is not None

    def wake(self) -> None:
        """Wake the process now, and end its waker."""
        if not self.over:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.waker.pid, signal.SIGKILL)
            self.waker.wait()


class Strikes:
    """The chaos of one demo. Peers in `spared` are never killed; all other faults may hit them."""

    def __init__(self, swarm: DemoSwarm, chaos: Chaos, seed: int, spared: frozenset[int] = frozenset()) -> None:
        self._spared = spared
        self._swarm = swarm
        self._chaos = chaos
        self._schedule = schedule(chaos, seed)
        self._next: Strike = next(self._schedule)
        self._began = time.monotonic()
        self._late_s = 0.0
        self._struck = 0
        self._nobody_left = False

    @property
    def over(self) -> bool:
        """True if all steps are done, and ten faults have happened or no peer is left to strike."""
        return self._swarm.steps_done and (self._struck >= MIN_FAULTS or self._nobody_left)

    def tick(self) -> None:
        """Carry out a strike that is due. The schedule waits while no peer may be struck."""
        if self._chaos.respawn:
            self._replace_the_dead()
        now_s = time.monotonic() - self._began
        if self.over or now_s < self._next.at_s + self._late_s:
            return
        self._swarm.poll()
        spared = self._spared if self._next.kind is FaultKind.KILL else frozenset()
        victim = self._next.victim([peer for peer in self._able(self._swarm.living) if peer not in spared])
        self._nobody_left = victim is None and not self._chaos.respawn
        if victim is None or not self._still_may_fall(self._swarm.daemons[victim]):
            return
        self._late_s = max(self._late_s, now_s - self._next.at_s)
        self._strike(self._swarm.daemons[victim], self._next.kind)
        self._next = next(self._schedule)

    def _able(self, daemons: Sequence[DemoDaemon]) -> list[int]:
        return may_fall([self._candidate(daemon) for daemon in daemons])

    def _still_may_fall(self, victim: DemoDaemon) -> bool:
        """Ask the victim's stage again: it may have become the only one at a newer step while the poll waited for a slow daemon."""
        stage = [daemon for daemon in self._swarm.living if daemon.stage == victim.stage]
        self._swarm.ask(stage, LAST_LOOK_SILENCE_S)
        return victim.peer in self._able(stage)

    def _candidate(self, daemon: DemoDaemon) -> Candidate:
        return Candidate(
            peer=daemon.peer,
            stage=daemon.stage,
            step=daemon.step,
            serving=daemon.serves,
            sound=daemon.ready is not None and daemon.answers and not daemon.disturbed,
        )

    def _strike(self, daemon: DemoDaemon, kind: FaultKind) -> None:
        deeds: dict[FaultKind, Callable[[DemoDaemon], str]] = {
            FaultKind.KILL: self._kill,
            FaultKind.STOP: self._stop,
            FaultKind.CUT: self._cut,
            FaultKind.SLOW: self._slow,
            FaultKind.CORRUPT: self._corrupt,
        }
        try:
            detail = deeds[kind](daemon)
        except (PeerdError, ProcessLookupError):
            return  # it has just ended by itself, or is too busy to answer
        self._struck += 1
        daemon.disturbed_until = time.monotonic() + self._chaos.for_s
        if kind is not FaultKind.KILL:  # the swarm notes every death, whatever its cause
            self._swarm.note(daemon, str(kind), detail)

    def _kill(self, daemon: DemoDaemon) -> str:
        daemon.kill()
        return ""

    def _stop(self, daemon: DemoDaemon) -> str:
        daemon.suspended = Suspended.begin(daemon.process.pid, self._chaos.for_s)
        return f"was stopped for {self._chaos.for_s:g} s"

    def _cut(self, daemon: DemoDaemon) -> str:
        daemon.cut_off = Suspended.begin(_p2pd_of(daemon.process.pid), self._chaos.for_s)
        return f"lost its links for {self._chaos.for_s:g} s"

    def _slow(self, daemon: DemoDaemon) -> str:
        self._order(daemon, kind="slow", factor=self._chaos.factor, for_s=self._chaos.for_s)
        return f"became {self._chaos.factor:g} times slower for {self._chaos.for_s:g} s"

    def _corrupt(self, daemon: DemoDaemon) -> str:
        self._order(daemon, kind="corrupt", for_s=self._chaos.for_s, seed=self._struck)
        return f"sent broken messages for {self._chaos.for_s:g} s"

    def _order(self, daemon: DemoDaemon, **fault: Any) -> None:
        daemon.client.request("fault", silence_s=ORDER_SILENCE_S, **fault)

    def _replace_the_dead(self) -> None:
        """Start a new daemon for each dead one, also for one that could not join, with the addresses of sound peers."""
        for daemon in [each for each in self._swarm.daemons if each.noted and not each.replaced]:
            sound = [each for each in self._swarm.living if each.answers and not each.disturbed]
            addresses = [each.ready.join for each in sound if each.ready is not None]
            if addresses:
                daemon.replaced = True
                first = int(self._next.chance * len(addresses))
                contacts = (addresses[first:] + addresses[:first])[:MAX_CONTACTS]
                self._swarm.spawn_another(daemon.stage, " ".join(contacts), daemon)


def _p2pd_of(pid: int) -> int:
    """The process id of a daemon's p2pd: the only child of its keeper, which is the daemon's only child."""
    import psutil

    try:
        for keeper in psutil.Process(pid).children():
            for child in keeper.children():
                return child.pid
    except psutil.NoSuchProcess:
        pass
    raise ProcessLookupError(pid)

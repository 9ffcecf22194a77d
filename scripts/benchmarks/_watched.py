"""A swarm with liars in it, as it is looked on from outside: who counts where, and for how long not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from peerd.cli.demo_daemons import DemoSwarm
from peerd.cli.demo_process import DemoDaemon
from peerd.errors import TimedOutError
from scripts.benchmarks._accusations import noted_of

READY_S, LOOK_S = 240.0, 1.0


@dataclass(slots=True)
class Watched:
    """A swarm with liars, and what was seen of it."""

    swarm: DemoSwarm
    liars: tuple[int, ...]
    ttl_s: float
    hidden_since_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """By honest observer and honest peer: since when it does not count there."""
    hidden_s: float = 0.0
    """The longest that one has not counted at another."""
    lied_at_step: int | None = None
    out_after_steps: dict[int, int] = field(default_factory=dict)
    """By liar: the steps until it counted nowhere."""

    @property
    def honest(self) -> list[DemoDaemon]:
        return [daemon for daemon in self.swarm.daemons if daemon.peer not in self.liars]

    @property
    def are_out(self) -> bool:
        return len(self.out_after_steps) == len(self.liars)

    def counted(self, name: str) -> list[int]:
        return [int(dict(daemon.status["counters"])[name]) for daemon in self.honest if daemon.status is not None]  # type: ignore[call-overload]

    @property
    def errors_of_liars(self) -> int:
        told = (self.swarm.daemons[liar].status for liar in self.liars)
        return sum(int(status["counters"]["internal_errors"]) for status in told if status is not None)

    def until_all_serve(self) -> None:
        deadline_s = time.monotonic() + READY_S
        while not all(daemon.serves for daemon in self.swarm.daemons) or self.swarm.num_steps_told < 3:
            if time.monotonic() > deadline_s:
                raise TimedOutError(f"not all daemons serve within {READY_S:.0f} s")
            time.sleep(LOOK_S)
            self.swarm.poll()

    def watch(self, seconds: float) -> float:
        """Look on for so long. Returns the time of a step; if none ended, the whole time."""
        began_s = time.time()
        while time.time() - began_s < seconds:
            time.sleep(LOOK_S)
            self.swarm.poll()
            self._look_for_hidden()
        ended_s = time.time()
        self.swarm.poll()
        ends = [step for step in self.swarm.steps if began_s < step["time_s"] <= ended_s]
        return (ended_s - began_s) / max(1, len(ends))

    def until_out(self, most_s: float) -> None:
        """Look on until no liar counts anywhere."""
        deadline_s = time.monotonic() + most_s
        while not self.are_out and time.monotonic() < deadline_s:
            self.watch(LOOK_S)

    def until_steps_after_out(self, steps: int, most_s: float) -> None:
        """Look on until so many steps have ended since the last liar was out."""
        assert self.lied_at_step is not None
        last = self.lied_at_step + max(self.out_after_steps.values()) + steps
        deadline_s = time.monotonic() + most_s
        while self.swarm.num_steps_told < last and time.monotonic() < deadline_s:
            self.watch(LOOK_S)

    def _look_for_hidden(self) -> None:
        now_s, names = time.monotonic(), {daemon.ready.peer: daemon.peer for daemon in self.honest if daemon.ready is not None}
        tables = list(self.swarm.pool.map(lambda daemon: (daemon.peer, self.swarm.table([daemon])), self.honest))
        counted = set() if all(table for _, table in tables) else set(self.liars)
        ids = {daemon.ready.peer: daemon.peer for daemon in self.swarm.daemons if daemon.peer in self.liars and daemon.ready is not None}
        for observer, table in tables:
            if table is None:
                continue
            rows = [row for stage in table["stages"] for row in stage["peers"]]
            counted |= {ids[row["id"]] for row in rows if row["id"] in ids and not row["suspect"] and row["phase"] != "sidelined"}
            seen = {names[row["id"]] for row in rows if row["id"] in names and not row["suspect"]}
            for peer in names.values():
                if peer in seen:
                    self.hidden_since_s.pop((observer, peer), None)
                else:
                    since_s = self.hidden_since_s.setdefault((observer, peer), now_s)
                    self.hidden_s = max(self.hidden_s, now_s - since_s)

        if self.lied_at_step is not None:
            for liar in set(self.liars).difference(counted, self.out_after_steps):
                self.out_after_steps[liar] = self.swarm.num_steps_told - self.lied_at_step

    def noted_of_honest(self, texts: Sequence[str]) -> int:
        """Number of lines of honest daemons' logs with one of these texts that name an honest peer."""
        return len(noted_of(self.honest, self.honest, texts))

    def memory_mb(self) -> dict[int, float]:
        """By honest daemon, with the processes that it has started."""
        found = {}
        for daemon in self.honest:
            try:
                found[daemon.peer] = sum(process.memory_info().rss for process in with_children(daemon)) / 1e6
            except psutil.NoSuchProcess:
                continue
        return found


def with_children(daemon: DemoDaemon) -> list[psutil.Process]:
    """A daemon's process, and those that it has started."""
    process = psutil.Process(daemon.process.pid)
    return [process, *process.children(recursive=True)]

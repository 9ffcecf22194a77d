"""The cost of observation: the same run with all observers, against a run without any.

The observers are history, metrics, dashboard and timelines in every daemon. The first daemon also has a page whose stream stays open, a
Prometheus that scrapes every second, and the requests of `peerd top` every second. Both sides are real daemons that train in turns of a
few steps, each frozen while the other works.

A few turns of wall clock do not show a difference below one percent: the noise of a machine is ten times that. So there are many short
turns, processor time is compared as well as throughput (observation takes processor time, which a fully busy machine has to take from
training), and each ratio comes with its 95 % confidence interval. With --stand-in the daemons sleep in place of most of the computing; the
cost of observation is then known to a thousandth of a core.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import itertools
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from peerd.cli.top.feed import PERIOD_S as TOP_PERIOD_S
from peerd.cli.top.feed import Feed
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from peerd.control.client import ControlClient
from peerd.errors import PeerdError
from scripts.benchmarks._report import Row, paired_interval, paired_ratio, print_json, print_table, progress, run
from scripts.benchmarks._turns import Contender, Peers, Step, warmed_up

LONG_ENOUGH_S = 300.0
SCRAPE_PERIOD_S = 1.0
READ_TIMEOUT_S = 5.0
LOOKED, ALONE = "watched", "not watched"
MOST_COST = 0.01
"""Allowed loss of throughput; the benchmark fails if the whole interval is worse."""


def manifest(stand_in_ms: float) -> Manifest:
    """A run with steps of about two seconds, far shorter than real ones, so that costs per step, as of the history, weigh more."""
    width = 64 if stand_in_ms else 256
    return Manifest(
        name="bench",
        model=ModelConfig(num_layers=4, d_model=width, num_heads=4, d_ff=4 * width, vocab_size=256),
        train=TrainConfig(num_stages=2, microbatches_per_step=16, microbatch_size=4, sequence_length=128, learning_rate=3e-4),
        compute=ComputeConfig(threads=1, recompute="never"),
        swarm=SwarmConfig(announce_period_s=LONG_ENOUGH_S, checkpoint_every_steps=0, rebalance_period_s=0),
    )


class MeteredPeers(Peers):
    """Peers whose processor time is noted whenever their steps are asked for."""

    def __init__(self, manifest: Manifest, observed: bool, stand_in_ms: float) -> None:
        super().__init__(manifest, observed=observed, stand_in_ms=stand_in_ms)
        self._noted: list[tuple[float, list[float]]] = []

    def steps(self) -> Sequence[Step]:
        self._noted.append((time.time(), [sum(psutil.Process(pid).cpu_times()[:2]) for pid in self.pids()]))
        return super().steps()

    def spent_s(self, wall_s: float) -> list[float]:
        """Processor time of each daemon until then, interpolated linearly between notes."""
        after = max(1, min(bisect.bisect(self._noted, (wall_s, [])), len(self._noted) - 1))
        (began_s, before), (ended_s, behind) = self._noted[after - 1], self._noted[after]
        part = (wall_s - began_s) / (ended_s - began_s)
        return [old + (new - old) * part for old, new in zip(before, behind, strict=True)]

    @property
    def first(self) -> ControlClient:
        return self._swarm.daemons[0].client


@dataclass(slots=True)
class Side:
    """One contender, and the time per step of each of its turns."""

    peers: MeteredPeers
    contender: Contender
    seconds: list[float] = field(default_factory=list)
    processor: list[list[float]] = field(default_factory=list)
    """Processor time per step of each daemon, by turn."""

    def turn(self, steps: int) -> None:
        before, last = (step.time_s for step in self.contender.stretch(steps))
        self.seconds.append((self.contender.worked_s(last) - self.contender.worked_s(before)) / steps)
        spent = zip(self.peers.spent_s(before), self.peers.spent_s(last), strict=True)
        self.processor.append([(behind_s - before_s) / steps for before_s, behind_s in spent])

    @property
    def processor_of_all(self) -> list[float]:
        return [sum(each) for each in self.processor]

    def told(self) -> str:
        """A line about the last turn."""
        return f"{self.contender.name}: {self.seconds[-1]:.3f} s a step, {self.processor_of_all[-1]:.3f} s of processor"


def opened(address: str) -> Any:
    return urllib.request.urlopen(address, timeout=READ_TIMEOUT_S)  # noqa: S310 - a daemon of this benchmark


@dataclass(slots=True)
class Lookers:
    """A simulated page, Prometheus and `peerd top`. They send requests only while the daemon is not frozen."""

    looks: dict[str, int] = field(default_factory=lambda: {"stream": 0, "scrapes": 0, "top": 0})
    _stopped: threading.Event = field(default_factory=threading.Event)
    _awake: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def at(self, peers: MeteredPeers) -> Iterator[None]:
        feed = Feed(peers.first)
        works: list[Callable[[], None]] = [
            lambda: self._stream(peers.dashboard),
            lambda: self._ask("scrapes", SCRAPE_PERIOD_S, lambda: self._scrape(peers.dashboard)),
            lambda: self._ask("top", TOP_PERIOD_S, feed.ask),
        ]
        for work in works:
            threading.Thread(target=work, daemon=True).start()
        try:
            yield
        finally:
            self._stopped.set()
            self._awake.set()

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        self._awake.set()
        try:
            yield
        finally:
            self._awake.clear()

    def _ask(self, name: str, period_s: float, ask: Callable[[], object]) -> None:
        while not self._stopped.wait(period_s):
            self._awake.wait()
            with contextlib.suppress(OSError, PeerdError):
                ask()
                self.looks[name] += 1

    def _scrape(self, address: str) -> None:
        with opened(f"{address}metrics") as reply:
            reply.read()

    def _stream(self, address: str) -> None:
        while not self._stopped.wait(SCRAPE_PERIOD_S):
            with contextlib.suppress(OSError), opened(f"{address}api/live") as reply:
                for line in reply:
                    self.looks["stream"] += line.startswith(b"event: now")


def measure(given: argparse.Namespace) -> tuple[Side, Side, dict[str, int]]:
    sides = []
    for observed, name in ((True, LOOKED), (False, ALONE)):
        peers = MeteredPeers(manifest(given.stand_in), observed, given.stand_in)
        sides.append(Side(peers, Contender(name, peers)))
    looked, alone = sides
    lookers = Lookers()
    with warmed_up([side.contender for side in sides], given.warmup), lookers.at(looked.peers):
        until_s = time.monotonic() + 60 * given.minutes
        for number in range(given.rounds):
            if number and time.monotonic() > until_s:
                break
            for side in (looked, alone) if number % 2 == 0 else (alone, looked):
                with lookers.looking() if side is looked else contextlib.nullcontext():
                    side.turn(given.steps)
                progress(f"round {number + 1}  {side.told()}")
    return looked, alone, lookers.looks


def rows_of(looked: Side, alone: Side, num_steps: int) -> list[Row]:
    kinds: list[tuple[str, Callable[[Side], list[float]]]] = [
        ("wall", lambda side: side.seconds),
        ("processor", lambda side: side.processor_of_all),
    ]
    rows = []
    for (kind, of), side in itertools.product(kinds, (looked, alone)):
        pairs = (of(alone), of(looked)) if side is looked else None
        rows.append(
            Row(
                name=f"{side.contender.name}, {kind}",
                median=statistics.median(of(side)),
                ratio=paired_ratio(*pairs) if pairs else None,
                interval=paired_interval(*pairs) if pairs else None,
                baseline=f"{ALONE}, {kind}" if pairs else None,
                loss=side.contender.steps[num_steps - 1].loss,
            )
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench watching", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="rounds, in each of which both sides have a turn (default 30)")
    parser.add_argument("--minutes", type=float, default=4.0, metavar="M", help="begin no round after so many minutes of them (default 4)")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="steps per turn (default 2)")
    parser.add_argument("--warmup", type=int, default=3, metavar="N", help="steps before those (default 3)")
    parser.add_argument(
        "--stand-in", type=float, default=0.0, metavar="MS", help="sleep so long per microbatch and stage (default 0: compute)"
    )
    given = parser.parse_args()
    if min(given.rounds, given.steps, given.warmup) < 1 or given.stand_in < 0:
        parser.error("--rounds, --steps and --warmup must be at least 1 and --stand-in not negative")
    looked, alone, looks = measure(given)
    return report(given, looked, alone, looks)


def report(given: argparse.Namespace, looked: Side, alone: Side, looks: dict[str, int]) -> int:
    rounds = len(looked.seconds)
    rows = rows_of(looked, alone, given.warmup + rounds * given.steps)
    added = [
        statistics.median(
            (more[daemon] - less[daemon]) / wall_s
            for more, less, wall_s in zip(looked.processor, alone.processor, looked.seconds, strict=True)
        )
        for daemon in range(len(looked.peers.pids()))
    ]
    if given.json:
        print_json(rows, looks=looks, added_cores=added)
    else:
        doing = f"{given.stand_in:g} ms of sleep a microbatch" if given.stand_in else "1 thread each"
        print_table(f"2 stages of 1 peer, {doing}; medians of {rounds} turns of {given.steps} steps", "s a step", rows)
        shares = " and ".join(f"{100 * share:.2f} %" for share in added)
        print(f"processor added to the daemon that is looked at, and to the other: {shares} of a core")
        print(", ".join(f"{count} {name}" for name, count in looks.items()))
    if not all(looks.values()):
        print(f"an observer saw nothing ({looks}): the sides are alike", file=sys.stderr)
        return 1
    highest = rows[0].interval[1] if rows[0].interval else 1.0
    return 0 if highest > 1 - MOST_COST else 1


if __name__ == "__main__":
    sys.exit(run(main))

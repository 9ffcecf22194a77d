"""Worlds for the fuzz of the policies: views that hold honest peers and records with any values that a record may have.

A field of a liar's record is honest, or drawn from the extremes of its form. Crowds of liars share some of their values. All follows
from the seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from peerd.peer_names import MAX_NAME_CHARACTERS
from peerd.policy.step.ledger import full
from peerd.table.forms import MAX_COUNT, MAX_LIST, MAX_MICROBATCHES_PER_STEP
from peerd.table.record import (
    MAX_ASIDES,
    MAX_BACKLOG,
    MAX_DRIFT,
    MAX_ERROR,
    MAX_HEIGHT,
    MAX_KEPT_STEPS,
    MAX_LOSS,
    MAX_OFFSET,
    MAX_PEERS,
    MAX_PERIODS,
    MAX_RATE,
    MAX_SIDELINED,
    MAX_STAGES,
    MAX_STAY_HOURS,
    MAX_STEP,
    MAX_THROUGHPUT,
    Aside,
    AverageId,
    Coordinate,
    Evaluation,
    Lineage,
    PeerId,
    PeerRecord,
    Phase,
    Reach,
    StageSummary,
    StepNorm,
    Suspicion,
    TiedSum,
    Void,
)
from peerd.table.swarm_view import SwarmView
from peerd.table.view import TTL_PERIODS, LiveView

PERIOD_S = 5.0
TTL_S = TTL_PERIODS * PERIOD_S
SIZES = ((0.7, 8, 16), (0.25, 40, 120), (0.05, 300, 2048))
"""Chance, most honest peers, most liars."""
HONEST_CHANCE = 0.4
"""The chance that a field of a liar's record is what an honest peer would say."""
ADDRESSES = (
    "",
    "/",
    "/ip4/999.1.1.1/tcp/1",
    "/ip4/127.0.0.1/tcp/0/p2p/x",
    "/ip4/10.0.0.1/tcp/1/p2p/x/p2p-circuit/p2p/y",
    "/p2p-circuit/p2p/" * 15,
    "/ip6/::1/tcp/9",
    "\u00e9" * 256,
)


@dataclass(slots=True)
class World:
    """One peer's view of one run, and what is needed to draw more for it."""

    seed: int
    is_crowd: bool = False
    """As many liars as a table holds, that all seem to take part in this step."""
    random: Random = field(init=False)
    num_stages: int = field(init=False)
    num_microbatches: int = field(init=False)
    step: int = field(init=False)
    honest: list[PeerRecord] = field(init=False)
    liars: list[PeerRecord] = field(init=False)
    names: list[PeerId] = field(init=False)
    on_stairs: bool = field(init=False)
    own: PeerRecord = field(init=False)
    """This peer's exact state, which may be later than its record in the view."""
    now_s: float = 1000.0
    live: LiveView = field(init=False)
    _risen: list[tuple[float, PeerRecord]] = field(init=False)
    """All records in the order in which they came."""

    def __post_init__(self) -> None:
        self.random = random = Random(self.seed)
        _chance, most_honest, most_liars = SIZES[-1] if self.is_crowd else random.choices(SIZES, [chance for chance, *_ in SIZES])[0]
        num_honest = most_honest if self.is_crowd else random.randint(1, most_honest)
        num_liars = most_liars if self.is_crowd else random.randint(1, most_liars)
        self.num_stages = random.choice((1, 2, 2, 3, 5, 40))
        self.num_microbatches = random.choice((1, 6, 24, 300, MAX_MICROBATCHES_PER_STEP))
        self.step = random.choice((0, 1, 7, 1000, 10**6))
        self.names = [PeerId(f"peer{number}") for number in range(num_honest + num_liars)]
        random.shuffle(self.names)
        self.honest = [self._honest(name) for name in self.names[:num_honest]]
        common = random.sample(sorted(DRAWS), random.choice((0, 3, 10, 20)))
        shared = {name: DRAWS[name](self) for name in common}
        self.on_stairs = random.random() < 0.1
        self.liars = [self._liar(number, name, shared) for number, name in enumerate(self.names[num_honest:])]
        self._look()

    def _look(self) -> None:
        """Merge all records, in any order, within two lives of a record. The first honest peer is this one."""
        random, mine = self.random, self.honest[0]
        risen = [(self.now_s - random.choice((0.0, 1.0, 0.9 * TTL_S, 2 * TTL_S)), record) for record in (*self.honest, *self.liars)]
        random.shuffle(risen)
        self._risen = sorted(risen, key=lambda each: each[0])
        self.live = self.new_view().live(self.now_s)
        self.own = self._honest(mine.peer) if random.random() < 0.5 else mine

    def new_view(self) -> SwarmView:
        mine = self.honest[0]
        view = SwarmView(me=mine.peer, ttl_s=TTL_S)
        for risen_at_s, record in self._risen:
            view.merge(record, risen_at_s)
        view.merge(replace(mine, version=mine.version + 1), self.now_s)
        return view

    @property
    def records(self) -> tuple[PeerRecord, ...]:
        return self.live.records

    def some_step(self) -> int:
        return self.random.choice((self.step, self.step, self.step + 1, max(0, self.step - 1), self.step + 2, self.count()))

    def some_stage(self) -> int:
        return self.random.randrange(self.num_stages)

    def some_peer(self) -> PeerId:
        return self.random.choice(self.names)

    def count(self, most: int = MAX_COUNT) -> int:
        """A number within a form's bounds: an extreme, or one near this run's step."""
        near = [self.step + off for off in (-3, -2, -1, 0, 0, 0, 1, 2, 3, 10)]
        return min(most, max(0, self.random.choice((0, 1, 1 << 31, most - 1, most, *near))))

    def told_step(self) -> int:
        return self.count(MAX_STEP)

    def real(self, most: float) -> float:
        return self.random.choice((0.0, 5e-324, 1e-300, 1.0, math.pi, most / 2, most))

    def norm(self) -> float:
        return self.random.choice((0.0, 5e-324, 1.0, 1e308, math.inf, self.random.random()))

    def ledger(self) -> int:
        everything = full(self.num_microbatches)
        bit = 1 << self.random.randrange(self.num_microbatches)
        some = self.random.getrandbits(self.num_microbatches)
        return self.random.choice((0, bit, everything ^ bit, everything, some, full(MAX_MICROBATCHES_PER_STEP), 1 << 8191))

    def peer(self) -> PeerId:
        """A peer that a record names: one of this run, this one, or no peer at all."""
        return self.random.choice((*self.random.choices(self.names, k=3), self.names[0], PeerId(""), PeerId("x" * 64)))

    def raw(self, most: int) -> bytes:
        return self.random.choice((b"", b"\0" * most, b"\xff" * most, b"a", self.random.randbytes(most)))

    def lineage(self) -> Lineage:
        return self.random.choice((Lineage(), Lineage(0, self.raw(32)), Lineage(self.count(), self.raw(32))))

    def many(self, one: Callable[[], Any], most: int = MAX_LIST) -> tuple[Any, ...]:
        return tuple(one() for _ in range(self.random.choice((0, 1, 2, most))))

    def maybe(self, one: Callable[[], Any]) -> Any:
        return one() if self.random.random() < 0.7 else None

    def summary(self) -> StageSummary:
        return StageSummary(
            peers=self.count(MAX_PEERS),
            trainers=self.count(MAX_PEERS),
            queue=self.count(1 << 40),
            throughput=self.real(MAX_PEERS * MAX_THROUGHPUT),
            held=self.ledger(),
            next_held=self.ledger(),
        )

    def coordinate(self) -> Coordinate:
        x, y = (self.random.choice((-MAX_OFFSET, 0, self.random.randint(-MAX_OFFSET, MAX_OFFSET), MAX_OFFSET)) for _ in range(2))
        return Coordinate(x, y, self.count(MAX_HEIGHT), self.count(MAX_ERROR))

    def _honest(self, peer: PeerId) -> PeerRecord:
        """A peer of an orderly run: at this step or beside it, with a part of its microbatches."""
        random = self.random
        phase, overlaps = random.choice((Phase.ACCUMULATING, *Phase)), random.random() < 0.3
        return PeerRecord(
            peer=peer,
            incarnation=random.randint(1, 3),
            version=random.randint(1, 99),
            stage=self.some_stage(),
            step=max(0, self.step + random.choice((0, 0, 0, 0, -1, 1))),
            phase=phase,
            done=random.getrandbits(self.num_microbatches) & random.getrandbits(self.num_microbatches),
            ledger_no=random.randint(1, 9),
            next_ledger_no=10 if overlaps else 0,
            next_done=random.getrandbits(self.num_microbatches) if overlaps else 0,
            average_id=AverageId(random.randbytes(16)) if phase is Phase.AVERAGED else AverageId(b""),
            gradient_norm=random.random() if phase is Phase.AVERAGED else None,
            trains=random.random() < 0.7,
            throughput=random.uniform(0.5, 4.0),
            queue=random.randrange(4),
            addresses=("/ip4/127.0.0.1/tcp/4000/p2p/x",),
            checkpoints=tuple(random.sample(range(self.step + 1), min(2, self.step))) if random.random() < 0.3 else (),
        )

    def _liar(self, number: int, peer: PeerId, shared: dict[str, Any]) -> PeerRecord:
        """`number` counts the liars: of those on stairs each makes the one above outlived."""
        found = self._honest(peer)
        told = {name: draw(self) for name, draw in DRAWS.items() if self.random.random() > HONEST_CHANCE}
        stairs = {"stage": number // 2 % self.num_stages, "step": number // 2 if number % 2 else MAX_STEP, "phase": Phase.ACCUMULATING}
        if self.is_crowd:
            return replace(found, stage=0, step=self.step, trains=True, unreached=tuple(self.random.choices(self.names, k=MAX_LIST)))
        return replace(found, **(told | shared | (stairs if self.on_stairs else {})))


DRAWS: dict[str, Callable[[World], Any]] = {
    "addresses": lambda w: w.many(lambda: w.random.choice(ADDRESSES), 8),
    "paused": lambda w: w.random.random() < 0.5,
    "leaving": lambda w: w.random.random() < 0.5,
    "trains": lambda w: w.random.random() < 0.8,
    "trains_from": lambda w: w.told_step(),
    "queue": lambda w: w.count(1 << 20),
    "in_flight": lambda w: w.count(1 << 20),
    "throughput": lambda w: w.real(MAX_THROUGHPUT),
    "tokens": lambda w: w.count(),
    "last_loss": lambda w: w.maybe(lambda: w.real(MAX_LOSS)),
    **dict.fromkeys(("evaluation", "evaluated"), lambda w: w.maybe(lambda: Evaluation(w.told_step(), w.real(MAX_LOSS)))),
    "software": lambda w: w.random.choice(("", "0", "\u00e9" * 64)),
    "device": lambda w: w.random.choice(("", "cpu", "\u00e9" * 64)),
    "drift": lambda w: w.real(MAX_DRIFT),
    "unlisted": lambda w: w.random.random() < 0.5,
    "nickname": lambda w: w.random.choice(("", "a", "\u00e9" * MAX_NAME_CHARACTERS)),
    "team": lambda w: w.random.choice(("", "b", "\u4e00" * MAX_NAME_CHARACTERS)),
    "memory_bytes": lambda w: w.count(),
    "kept_averages": lambda w: w.count(),
    "diverged_at": lambda w: w.maybe(w.told_step),
    "reach": lambda w: w.random.choice(list(Reach)),
    "relays": lambda w: w.random.random() < 0.5,
    "incarnation": lambda w: w.count(),
    "version": lambda w: w.count(),
    "stage": lambda w: w.random.choice((w.some_stage(), w.some_stage(), w.count(MAX_STAGES - 1))),
    "step": lambda w: w.told_step(),
    "phase": lambda w: w.random.choice(list(Phase)),
    **dict.fromkeys(("done", "own_done", "sections"), World.ledger),
    "ledger_no": lambda w: w.count(),
    "average_id": lambda w: AverageId(w.raw(16)),
    "group": lambda w: w.random.choice((AverageId(b""), AverageId(bytes(16)), AverageId(w.raw(16)))),
    "lineage": World.lineage,
    "suspects": lambda w: w.many(lambda: Suspicion(w.peer(), w.count(), w.count())),
    "voids": lambda w: w.many(lambda: Void(w.peer(), w.count(), w.told_step())),
    "checkpoints": lambda w: w.many(w.told_step),
    "gives_start": lambda w: w.random.random() < 0.5,
    "gradient_norm": lambda w: w.maybe(w.norm),
    "norms": lambda w: w.many(lambda: StepNorm(w.told_step(), w.norm()), MAX_KEPT_STEPS),
    "next_done": World.ledger,
    "next_ledger_no": lambda w: w.count(),
    "tied_sum": lambda w: AverageId(w.raw(16)),
    "tied_sums": lambda w: w.many(lambda: TiedSum(w.told_step(), AverageId(w.raw(16))), MAX_KEPT_STEPS),
    "tied": World.lineage,
    "periods": lambda w: w.random.choice((1, 2, MAX_PERIODS)),
    "summary": lambda w: w.maybe(w.summary),
    "asides": lambda w: w.many(lambda: Aside(w.peer(), w.ledger()), MAX_ASIDES),
    "next_asides": lambda w: w.many(lambda: Aside(w.peer(), w.ledger()), MAX_ASIDES),
    "invitation": lambda w: w.raw(72),
    "unreached": lambda w: w.many(w.peer),
    "sidelined": lambda w: w.many(w.peer, MAX_SIDELINED),
    "unaveraged": lambda w: w.told_step(),
    "up": lambda w: w.count(MAX_RATE),
    "down": lambda w: w.count(MAX_RATE),
    "stays_hours": lambda w: w.count(MAX_STAY_HOURS),
    "coins": lambda w: w.raw(64),
    "computes": lambda w: w.real(MAX_THROUGHPUT),
    "backlog": lambda w: w.real(MAX_BACKLOG),
    "coordinate": lambda w: w.maybe(w.coordinate),
}
"""By field of a record: any value that its form lets through."""

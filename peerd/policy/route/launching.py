"""Which missing microbatches a trainer launches, and when another one takes over. `owning.py` says who owns what."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import median_high

from peerd.policy.route.owning import first_owners, owned_among_first
from peerd.policy.step.ledger import accumulate_set, indices, is_averaged, stages_missing, work_step
from peerd.table.record import PeerId, PeerRecord, Phase
from peerd.table.view import LiveView

STEPS_TO_BE_HEARD = 2
FORWARDS_PER_MICROBATCH = 3
"""Forward passes that take as long as a forward and a backward pass."""
AT_FIRST = 2
"""Microbatches for each peer of the first stage, one to compute and one to wait, that come while it commits the step before theirs."""
LATE_STEPS, MOST_TIMES = 16, 8
"""Steps for which a trainer that was late comes after the others; twice as many each time in a row, up to so many times."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Send microbatch `index` of `step` through the pipeline; the stages in `accumulate` shall add it."""

    step: int
    index: int
    accumulate: frozenset[int]
    again: bool = False
    """Another trainer, which may be alive, comes before this one: it may have launched it, too."""


def first_owned(live: LiveView, step: int, num_microbatches: int) -> list[int]:
    """The microbatches of a step that this peer owns first: it may launch them before any other trainer takes them over."""
    return list(indices(owned_among_first(tuple(trainers_of(live, step)), live.me, step, num_microbatches)))


@dataclass(frozen=True, slots=True)
class Late:
    """A trainer whose microbatches were taken over: before the step `until` it comes after those that were not late."""

    peer: PeerId
    until: int
    times: int = 1
    """How often in a row."""

    @property
    def forgiven(self) -> int:
        """The step from which being late again counts as the first time."""
        return self.until + (LATE_STEPS << self.times)


@dataclass(frozen=True, slots=True)
class Standstill:
    """Since when exactly the same microbatches have been missing. Each one that is done or lost begins it anew."""

    step: int = 0
    absent: int = 0
    since_s: float = 0.0
    late: tuple[Late, ...] = ()
    """What this trainer knows of others that were late, and of itself."""
    few_since_s: float | None = None
    """Since when all that is missing of the step has been what few trainers own, though some of that may get done; None: it is not."""

    def is_over(self, now_s: float, takeover_s: float) -> bool:
        """Whether what is missing has been so for a takeover time, or what few own has not been finished in one (hole 61)."""
        return now_s - (self.since_s if self.few_since_s is None else min(self.since_s, self.few_since_s)) >= takeover_s


@dataclass(frozen=True, slots=True)
class OfStep:
    """What this trainer launches of one step."""

    step: int
    mine: int
    """Bitmap."""
    again: int = 0
    """Those of `mine` that another trainer, which may be alive, owns before this one: it may have launched them, too."""
    wanted: tuple[tuple[int, int], ...] = ()
    """By stage, the bitmap of what it lacks."""

    def launches(self, but: int = 0) -> Iterator[Launch]:
        """Those of `mine` that are not in the bitmap `but`, ascending."""
        for index in indices(self.mine & ~but):
            yield Launch(self.step, index, accumulate_set(dict(self.wanted), index), bool(self.again >> index & 1))


@dataclass(frozen=True, slots=True)
class Work:
    """The microbatches that are missing, and which of them this trainer launches. Bitmaps: a step may have thousands."""

    steps: tuple[OfStep, ...] = ()
    """In the order to launch them."""
    still: Standstill = Standstill()
    """What is missing and others may take over."""
    missing: int = 0
    """Number of missing microbatches that some trainer may launch now, those of the next step included."""

    @property
    def num_mine(self) -> int:
        return sum(each.mine.bit_count() for each in self.steps)

    @property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(launch for each in self.steps for launch in each.launches())


def those_who_train(live: LiveView) -> list[PeerRecord]:
    """Return all trainers. In a swarm too large to know them all, return those of the first stage that has any: they know each other."""
    trainers = [record for record in live.records if record.trains]
    if not live.is_summarised:
        return trainers
    stages = {record.stage for record in live.records if record.summary is not None}
    told = [stage for stage in stages if (summary := live.summary(stage)) is not None and summary.trainers]
    first = min([record.stage for record in trainers] + told, default=0)
    return [record for record in trainers if record.stage == first]


def trainers_of(live: LiveView, step: int) -> list[PeerId]:
    """Return the owners of the microbatches of `step`: the trainers that were there when it began, or all if none of those is left.

    A leaving trainer counts until its record says that it no longer trains: what it has in flight must not be launched twice.
    """
    trainers, first = those_who_train(live), {record.peer for record in live.serving(0) if _takes(record, step)}
    trainers = [record for record in trainers if _can_deliver(record, first)] or trainers
    return [record.peer for record in trainers if record.trains_from <= step] or [record.peer for record in trainers]


def _takes(record: PeerRecord, step: int) -> bool:
    """Whether a peer takes microbatches of a step, by rule W2 (call). One that stepped aside behind a dead link is behind it."""
    takes_next = record.phase is Phase.AVERAGED or record.next_ledger_no > 0
    return step <= record.step <= step + 1 or (record.step == step - 1 and takes_next)


def _can_deliver(trainer: PeerRecord, first: Set[PeerId]) -> bool:
    """Whether a trainer can call a peer of the first stage that takes the step, as far as its record tells.

    If it can not, others need not wait for it (holes 18 and 22). One of the first stage that takes the step itself always can.
    """
    return not first or not first <= set(trainer.unreached)


def first_step_owned(live: LiveView, num_stages: int, overlaps: bool) -> int:
    """The first step at which a new trainer owns microbatches: all others have heard of it by then. 0 if nobody else trains.

    A trainer that has not heard of the newcomer launches its share, too. Then two peers of a stage add one microbatch, and one of
    them starts its step anew. The next step is too soon: it may begin before the newcomer's first record is everywhere.
    """
    if not any(record.trains and record.peer != live.me for record in live.records):
        return 0
    return (work_step(live, num_stages) or 0) + STEPS_TO_BE_HEARD + overlaps


def launchable(
    live: LiveView,
    num_stages: int,
    num_microbatches: int,
    before: Standstill,
    now_s: float,
    takeover_s: float,
    last_step: int = 0,
    overlaps: bool = False,
) -> Work:
    """What this trainer may launch now, and all that is missing.

    The owner of rank k launches once the same microbatches have been missing for `takeover_s` times k: while others are
    done, none is late. Nor may few trainers take longer for what they own once all the rest is done. A trainer that is late comes last for
    some steps, so that one that never launches what it owns does not make each step wait. One that its stage leaves out is late at once.
    The caller passes the last answer's `still`, and leaves out what it has in flight. The run ends at `last_step`; 0: never.

    Where steps overlap, what this trainer owns of the next step comes after all that it owns of this one: the pipeline never runs
    empty. It counts as missing, for others to take over, once nothing of this step is. Elsewhere it comes once every stage has
    averaged this step, and finds the peers while they commit.
    """
    step = work_step(live, num_stages)
    if step is None:
        return Work(still=Standstill(late=before.late))
    before = with_banned(before, live, frozenset().union(*map(live.sidelined, range(num_stages))), step)
    steps: list[OfStep] = []
    still = Standstill(late=before.late)
    missing = 0
    early = overlaps or is_averaged(live, num_stages, step)
    for at in (step, step + 1) if early else (step,):
        if last_step and at >= last_step:
            break
        wanted = stages_missing(live, num_stages, at, num_microbatches, early)
        lacking = 0
        for bitmap in wanted.values():
            lacking |= bitmap
        if not lacking:
            continue
        stands = before if (before.step, before.absent) == (at, lacking) else Standstill(at, lacking, now_s, before.late)
        trainers = tuple(trainers_of(live, at))
        begun_s = before.few_since_s if before.step == at else None
        is_few = bool(_few(stands, trainers, num_microbatches))
        stands = replace(stands, few_since_s=(now_s if begun_s is None else begun_s) if is_few else None)
        if stands.is_over(now_s, takeover_s):
            stands = _judged(stands, trainers, num_microbatches, now_s)
        ranks = 1 + int((now_s - stands.since_s) / takeover_s)
        mine = lacking & _owned(trainers, live.me, stands, ranks, num_microbatches)
        again = _perhaps_launched(live, trainers, at, mine, num_microbatches)
        steps += [OfStep(at, mine, again, tuple(wanted.items()))] if mine else []
        missing += lacking.bit_count()
        still = still if still.absent else stands
    return Work(tuple(steps), still, missing)


def what_launches_hang_on(record: PeerRecord) -> tuple[object, ...]:
    """The parts of a record that can give a trainer more to launch. While none of them changes, only time and finished microbatches do.

    A ledger that grows takes work away. A peer's death, a void, a ledger with another number or an aside that is dropped gives it back.
    """
    ledgers = (record.incarnation, record.ledger_no, record.next_ledger_no, len(record.asides), record.voids, record.summary)
    trainer = (record.trains, record.trains_from, record.unreached)
    return record.peer, record.stage, record.step, record.phase, record.leaving, record.sidelined, trainer, ledgers


def _punctual(trainers: tuple[PeerId, ...], stands: Standstill) -> tuple[PeerId, ...]:
    """The trainers that were not late; all of them if there is no such."""
    late = {each.peer for each in stands.late if stands.step < each.until}
    return (tuple(trainer for trainer in trainers if trainer not in late) or trainers) if late else trainers


def _owned(trainers: tuple[PeerId, ...], me: PeerId, stands: Standstill, ranks: int, num_microbatches: int) -> int:
    """The bitmap of what this trainer may launch of the step that stands, as one of its first `ranks` owners. Late ones come last."""
    punctual = _punctual(trainers, stands)
    if me in punctual:
        return owned_among_first(punctual, me, stands.step, num_microbatches, ranks)
    behind = tuple(trainer for trainer in trainers if trainer not in punctual)
    return owned_among_first(behind, me, stands.step, num_microbatches, ranks - len(punctual)) if ranks > len(punctual) else 0


def _judged(stands: Standstill, trainers: tuple[PeerId, ...], num_microbatches: int, now_s: float) -> Standstill:
    """The standstill after a takeover time: those who own what is missing are late, and the others' turn begins now.

    Where more than half of the trainers would be late, it is not they that are.
    """
    found = _few(stands, trainers, num_microbatches)
    return Standstill(stands.step, stands.absent, now_s, _with_late(stands.late, found, stands.step)) if found else stands


def _few(stands: Standstill, trainers: tuple[PeerId, ...], num_microbatches: int) -> set[PeerId]:
    """Those who own what is missing, if they are no more than half of the trainers that were not late; else nobody."""
    punctual = _punctual(trainers, stands)
    found = set(islice(first_owners(punctual, stands.step, stands.absent, num_microbatches), len(punctual) // 2 + 1))
    return found if 2 * len(found) <= len(punctual) else set()


def with_banned(stands: Standstill, live: LiveView, banned: Collection[PeerId], step: int) -> Standstill:
    """The standstill with trainers whose calls this peer refuses, as nothing that they launch comes here, or that are sidelined: they are
    late at once.
    """
    if not banned or step < 0:
        return stands
    known = {each.peer for each in stands.late if step < each.until}
    found = {record.peer for record in those_who_train(live) if record.peer in banned} - known
    return replace(stands, late=_with_late(stands.late, found, step)) if found else stands


def _with_late(late: tuple[Late, ...], peers: Set[PeerId], step: int) -> tuple[Late, ...]:
    known = {each.peer: each for each in late if step < each.forgiven}
    for peer in sorted(peers):
        times = min(known[peer].times + 1, MOST_TIMES) if peer in known else 1
        known[peer] = Late(peer, step + 1 + (LATE_STEPS << times - 1), times)
    return tuple(known.values())


def _perhaps_launched(live: LiveView, trainers: tuple[PeerId, ...], step: int, mine: int, num_microbatches: int) -> int:
    """The bitmap of those of `mine` that a trainer that comes before this one, and may be alive, may have launched. A late one may, too."""
    suspected = [r.peer for r in live.suspected if r.trains and r.trains_from <= step]
    perhaps = tuple(sorted({*trainers, *suspected})) if suspected else trainers
    return mine & ~owned_among_first(perhaps, live.me, step, num_microbatches)


@dataclass(slots=True)
class WayTime:
    """The recent minimum of the time that a microbatch spends between peers; anything above it is queueing.

    A step begins with empty links, so the minimum over this step and the last depends only on link latency and tensor size. The peers on
    the way tell how long they held the microbatch, and one that tells too much makes the way short. So each peer of the first stage has a
    minimum of its own, and the median counts: within a step what goes to one of them goes on through the same later peers.
    """

    _last_s: dict[PeerId, float] = field(default_factory=dict)
    _this_s: dict[PeerId, float] = field(default_factory=dict)

    def note(self, first: PeerId, way_s: float) -> None:
        """Add the transit time of one microbatch that went to `first`: all its hops together, in both directions."""
        if way_s >= 0:
            self._this_s[first] = min(self._this_s.get(first, math.inf), way_s)

    def next_step(self) -> None:
        self._last_s, self._this_s = self._this_s, {}

    @property
    def least_s(self) -> float:
        """The median of the minima; 0 before anything was noted."""
        least_s = [min(self._last_s.get(peer, math.inf), self._this_s.get(peer, math.inf)) for peer in {*self._last_s, *self._this_s}]
        return median_high(least_s) if least_s else 0.0


def on_the_way(live: LiveView, num_stages: int, microbatch_size: int, way_s: float) -> int:
    """Microbatches between peers while the slowest stage never waits (Little's law: rate times time), at the beginning of a step.

    Until the first gradient is back a stage has forward passes alone to do, each a third of a microbatch's work: with as many on the way
    as later on, the first stage of two stood still for 157 ms of each step at 50 ms round trip, and the second for as long afterwards.
    """
    strengths = []
    for stage in range(num_stages):
        known, told = sum(record.throughput for record in live.serving(stage)), live.summary(stage)
        strengths.append(max(known, told.throughput if told is not None else 0.0))
    return int(FORWARDS_PER_MICROBATCH * min(strengths, default=0.0) * way_s / microbatch_size)


def window(live: LiveView, num_stages: int, slots: int, underway: int = 0, most_slots: int = 0) -> int:
    """How many microbatches all trainers together keep in flight: enough to fill the narrowest stage's pipeline and the links.

    A microbatch passes each stage twice, the last one once; one being computed and one waiting or on its way for each pass
    keeps peers busy (4 instead of 6 left two stages idle 7 % of the time), and more only sits in the queues of slow peers.
    A peer keeps a slot free: the microbatches in flight are not spread evenly at every moment, and what a full peer refuses must go
    through another. Where links are long, `underway` more are on them (`on_the_way`), as far as peers hold `most_slots` each.
    """
    return window_of([live.num_serving(stage) for stage in range(num_stages)], slots, underway, most_slots)


def window_of(sizes: Sequence[int], slots: int, underway: int = 0, most_slots: int = 0) -> int:
    """The same for stages of so many peers."""
    num_stages, narrowest, widest = len(sizes), min(sizes, default=0), max(sizes, default=0)
    at_peers = min((2 * num_stages - 1) * (narrowest + widest), (slots - 1) * max(narrowest, 1))
    return max(1, at_peers, min(at_peers + underway, most_slots * max(narrowest, 1)))


def at_first(live: LiveView, step: int, underway: int, total: int) -> int:
    """Number of a window's microbatches of `step` to launch while no peer of the first stage is known to be at `step`.

    They arrive while these peers commit the step before. More than keeps a peer busy right afterwards only slows its commit: with a
    whole window of 12, two stages of two peers on two cores took 50 ms from the last gradient to the next forward pass, and so 44.
    `underway` more fill long links.
    """
    if any(record.step >= step for record in live.serving(0)):
        return total
    return min(total, AT_FIRST * live.num_serving(0) + underway)


def share(total: int, work: Work) -> int:
    """This trainer's share of the window: its share of what is missing, so that all trainers finish a step together.

    With equal shares a trainer that owns more than others would end the step alone, and the pipeline would run dry.
    """
    return max(1, round(total * work.num_mine / max(1, work.missing)))

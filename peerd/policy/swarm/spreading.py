"""How news of records spreads in a swarm too large for everybody to tell everybody, at a cost that does not grow with it.

Up to `TELLS_ALL` peers, each tells all others. Beyond that, peers ask one another for news several times a period: the asking
peer names the versions that it has, and the other answers with what is missing. News doubles its hearers with every turn, and a
record travels to each peer once. From `SUMMARISED` peers on, a record goes to its own and the neighbouring stages alone. A few
peers of each stage speak for it: their records contain the stage's numbers and go to everybody. A peer that knows many others
announces itself less often and says so in its record, so that each reader knows how long it lives: rule T2 (alive).
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import TypeVar

from peerd.policy.hashing import digest
from peerd.policy.step.ledger import held, stage_step
from peerd.table.record import MAX_PERIODS, PeerId, PeerRecord, RawRecord, StageSummary
from peerd.table.view import NEAR_STAGES, LiveView

TELLS_ALL = 15
"""Up to this number of live peers each tells all others."""
SUMMARISED = 128
"""From this number of peers on, no peer knows all."""
KNOWN_PER_PERIOD = 32
"""Number of announcements that a peer should receive in a period; peers that know more others announce themselves less often."""
TURNS_PER_PERIOD, QUIET_TURNS = 5, 3
"""Number of times a period that a peer asks for news, and the number after a period that brought only renewals."""
KEPT_TURNS = 15
"""Turns for which a record counts as news: twice as many as it takes to reach 10,000 peers."""
TIMES_FOR_MATES = 2
"""What is news for mates alone counts as news for so many times as long: questions to other stages do not bring it."""
MOST_NEWS = 48
"""Number of records in one answer, newest first; the rest goes with the next."""
MOST_IN_A_TURN = 4
"""Questions of one turn, as long as answers are full."""
MOST_TAGS = 512
REST_SHARE = 1 / 6
"""A ledger rests once it has not grown for a period, and for this share of the time that its peer has been at the step."""
PAGE_RECORDS, PAGE_BYTES = 512, 1 << 20
"""Size of one page of a table: at most so many records, and no further one once they have so many bytes."""
MOST_PAGES = 64
"""Number of pages that are read of one peer's table."""
SPEAKERS = 3
KEEPERS = 4
"""Peers of a stage whose records the directory keeps, when it is too large for all: enough to hear of the others from."""
PARTNERS, MATES_AMONG_PARTNERS = 16, 12
NEARNESSES_REMEMBERED = 1 << 12
MOST_TOLD = 32
"""Of so many peers of its stage, or of others, each may be told by pushes. Of more a few are: the rest hear of it by asking."""
MOST_PAUSE = 12
"""The longest time between two reads of the directory while nobody comes or goes, in periods."""
READS_PER_PERIOD = 8
"""Reads of the directory by all peers together while peers come or go: the others hear of what one finds."""
STORED_EVERY = 2
"""The directory gets every second announcement; what it stores lives for three, and some seconds."""
EARLY = 0.5
"""In periods: what becomes due before the next look at the clock is due now."""
ANNOUNCED_TO = 3
"""Number of peers that are told of an announcement at once, so that it starts from more than one."""
TAG_BYTES = 8
_WHO_BYTES = 4
_VERSIONS = 1 << 16
Who = TypeVar("Who")
FAR_SHARE = 0.5
"""Share of a speaker's questions that go to speakers of far stages. Other peers ask none of them, to spare those few."""


def periods(num_known: int) -> int:
    """Announce periods between two announcements of a peer that knows `num_known` others; one more where records travel by gossip."""
    return min(MAX_PERIODS, 1 + (num_known > TELLS_ALL) + num_known // KNOWN_PER_PERIOD)


def is_to_announce(every: int, since: float) -> bool:
    """True if a peer that announces itself at least once in `every` periods does so now, `since` periods after the last time."""
    return every == 1 or since >= every - EARLY


def is_to_store(mine: PeerRecord, live: LiveView, since: float) -> bool:
    """True if the directory gets this announcement, `since` periods after the last. It keeps only a few peers of a large swarm's stage."""
    return since >= STORED_EVERY * mine.periods - EARLY and (len(live.records) <= TELLS_ALL or is_among_first(mine, live, KEEPERS))


@dataclass(frozen=True, slots=True)
class DirectoryReading:
    """When the directory is read, told period by period.

    Gossip brings what is new to those who have heard of one another; the directory is for those who have not. So it is read
    every period while a stage has nobody, by a few each period while somebody comes or goes, and ever more seldom while all stay
    who they were.
    """

    before: LiveView
    """The view at the last read."""
    pause: int = 1
    """Periods from that read to the next."""
    waited: int = 0

    @property
    def is_now(self) -> bool:
        return not self.waited

    def after(self, live: LiveView, num_stages: int) -> DirectoryReading:
        """A period later, or at the start."""
        if any(not live.num_serving(stage) for stage in range(num_stages)):
            return DirectoryReading(live)
        if {record.peer for record in self.before.records} != {record.peer for record in live.records}:
            pause = min(MOST_PAUSE, max(1, len(live.records) // READS_PER_PERIOD))
            return DirectoryReading(live, pause) if self.waited + 1 >= pause else replace(self, waited=self.waited + 1)
        if self.waited + 1 >= self.pause:
            return DirectoryReading(live, min(2 * self.pause, MOST_PAUSE))
        return replace(self, waited=self.waited + 1)


def num_peers(live: LiveView) -> int:
    """The size of the whole swarm, as far as this peer knows or speakers tell."""
    stages = {record.stage for record in live.records}
    return sum(max(len(live.of_stage(stage)), live.num_serving(stage)) for stage in stages)


def _rank(record: PeerRecord) -> bytes:
    return digest("speaker", record.peer, record.stage, size=8)


def is_among_first(mine: PeerRecord, live: LiveView, how_many: int) -> bool:
    """True if this peer is one of the first `how_many` of its stage, in an order by hash that all its peers share."""
    able = [r for r in live.serving(mine.stage) if not r.leaving]
    return mine.peer in {r.peer for r in sorted(able, key=_rank)[:how_many]}


def summarise(mine: PeerRecord, live: LiveView) -> StageSummary | None:
    """This peer's summary of its stage; None if it does not speak for the stage, or every peer knows all others."""
    if num_peers(live) < SUMMARISED or not is_among_first(mine, live, SPEAKERS):
        return None
    serving, everybody = live.serving(mine.stage), live.of_stage(mine.stage)
    leads = stage_step(live, mine.stage) == mine.step
    return StageSummary(
        peers=len(serving),
        trainers=sum(r.trains for r in everybody),
        queue=sum(r.queue for r in everybody),
        throughput=sum(r.throughput for r in everybody if not r.leaving),
        held=held(live, mine.stage, mine.step) if leads else 0,
        next_held=held(live, mine.stage, mine.step + 1) if leads and mine.next_ledger_no else 0,
    )


def page(table: Sequence[tuple[PeerId, RawRecord]], after: PeerId, most: int = PAGE_RECORDS) -> tuple[list[RawRecord], PeerId]:
    """The records of a page, from the first peer above `after` on, and the last peer of the page; no peer if it ends the table.

    The table is sorted by peer.
    """
    found: list[RawRecord] = []
    num_bytes = 0
    for peer, raw in table[bisect_right(table, after, key=itemgetter(0)) :]:
        found.append(raw)
        num_bytes += len(raw[0]) + len(raw[1])
        if len(found) == most or num_bytes >= PAGE_BYTES:
            return found, peer if peer != table[-1][0] else PeerId("")
    return found, PeerId("")


def concerns(record: PeerRecord, stage: int) -> bool:
    """True if a peer of `stage` needs this record in a summarised swarm."""
    return record.summary is not None or abs(record.stage - stage) <= NEAR_STAGES


@lru_cache(maxsize=NEARNESSES_REMEMBERED)
def _nearness(me: PeerId, peer: PeerId) -> bytes:
    return digest("partner", me, peer, size=8)


def partners(me: PeerId, near: Sequence[PeerId]) -> list[PeerId]:
    """The few peers to exchange news with, chosen by a hash: always the same ones, because each is a connection to keep."""
    return sorted(near, key=lambda peer: _nearness(me, peer))[:PARTNERS]


def partners_near(me: PeerId, mates: Sequence[PeerId], others: Sequence[PeerId]) -> list[PeerId]:
    """The few to exchange news with in a summarised swarm: most are mates, because most news is for mates alone."""
    of_others = partners(me, others)[: max(PARTNERS - MATES_AMONG_PARTNERS, PARTNERS - len(mates))]
    return partners(me, mates)[: PARTNERS - len(of_others)] + of_others


def choose_partners(live: LiveView, num_stages: int) -> list[PeerId]:
    """This peer's partners among the peers of all stages; in a summarised swarm of its own and those beside it, which need its news."""
    mine = live.mine
    if mine is None or not live.is_summarised:
        return partners(live.me, [r.peer for stage in range(num_stages) for r in live.of_stage(stage) if r.peer != live.me])
    beside = [stage for stage in range(mine.stage - NEAR_STAGES, mine.stage + NEAR_STAGES + 1) if stage != mine.stage]
    mates, others = live.of_stage(mine.stage), [r.peer for stage in beside for r in live.of_stage(stage)]
    return partners_near(live.me, [r.peer for r in mates if r.peer != live.me], others)


def to_tell(me: PeerId, others: Sequence[PeerId]) -> Sequence[PeerId]:
    """The peers, of these, that this one pushes its record to: all of few, and always the same ones of many."""
    return others if len(others) <= MOST_TOLD else partners(me, others)


def whom_to_ask(speaks: bool, mine: Sequence[Who], far_speakers: Sequence[Who], draws: tuple[float, float]) -> Who | None:
    """The peer to ask for news this time: one of the partners, or a speaker of a far stage; None if there is neither.

    `draws` are two random numbers in [0, 1).
    """
    is_far = bool(far_speakers) and (not mine or (speaks and draws[0] < FAR_SHARE))
    able = far_speakers if is_far else mine
    return able[int(draws[1] * len(able))] if able else None


@dataclass(frozen=True, slots=True)
class NewsItem:
    """A record that rose here, as it travels, the tag that names this version of it, and when."""

    record: PeerRecord
    raw: RawRecord
    tag: bytes
    risen_at_s: float
    is_for_mates: bool = False
    """Whether peers of its own stage alone are told."""

    def concerns(self, stage: int | None) -> bool:
        """True if a peer of `stage` is told; None: of any."""
        return stage is None or (self.record.stage == stage if self.is_for_mates else concerns(self.record, stage))


def tag_of(record: PeerRecord, raw: RawRecord) -> bytes:
    """Name a record's peer, version and text in few bytes. The order of two versions is known if they are less than 32,768 apart."""
    who, text = digest("tag", record.peer, size=_WHO_BYTES), digest("text", raw[0], size=1)
    return who + (record.incarnation & 0xFF).to_bytes(1, "big") + text + (record.version % _VERSIONS).to_bytes(2, "big")


def _is_news(tag: bytes, to: bytes | None) -> bool:
    """True if the version of a tag is newer than that of another one, or has another text: T7 (contradiction)."""
    if to is None or tag[_WHO_BYTES] != to[_WHO_BYTES]:
        return True
    ahead = (int.from_bytes(tag[-2:], "big") - int.from_bytes(to[-2:], "big")) % _VERSIONS
    return ahead < _VERSIONS // 2 and tag != to


def _said(record: PeerRecord) -> tuple[object, ...]:
    """What peers of all near stages go by. A change of it is news at once."""
    applied = (record.average_id, record.gradient_norm, record.tied_sum, record.tied)
    return (record.incarnation, record.step, record.phase, record.leaving, record.reach, applied)


def _said_to_mates(record: PeerRecord) -> tuple[object, ...]:
    """What the rounds of a peer's mates wait for, beside its ledger. A change of it is news for them within a period."""
    return (record.group, record.sections, record.voids, record.sidelined, record.suspects)


class ToldBy(enum.Enum):
    """The peer that has told a version of a record."""

    OWN = enum.auto()
    """This peer has made it."""
    PUSHED = enum.auto()
    """Its peer has told it itself, and may tell another one in a moment."""
    PASSED_ON = enum.auto()


def _is_same_to_mates(record: PeerRecord, other: PeerRecord) -> bool:
    return record.done == other.done and _said_to_mates(record) == _said_to_mates(other)


@dataclass(slots=True)
class _Told:
    """What was last news of a peer: for anybody, and for all near stages."""

    record: PeerRecord
    at_s: float
    to_all_s: float
    step_since_s: float
    """When it was first known to be at its step."""


class News:
    """The records that rose lately, newest last. Times are seconds on the caller's clock."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._said_s = float("-inf")
        self._items: dict[PeerId, NewsItem] = {}
        self._told: dict[PeerId, _Told] = {}
        self._waiting: dict[PeerId, tuple[float, NewsItem]] = {}
        """Versions that are no news yet, and when they are, unless newer ones come before; never: at infinity."""

    def note(self, record: PeerRecord, raw: RawRecord, now_s: float, told_by: ToldBy = ToldBy.PUSHED) -> None:
        """Note a record that rose.

        A version that says nothing new and comes long before it is due is no news. One that says something to mates alone is news for
        these, once a period at most. A ledger that grew is so once it rests, which its own peer tells: otherwise each microbatch would be
        news.
        """
        told, item = self._told.get(record.peer), NewsItem(record, raw, tag_of(record, raw), now_s)
        if told is None or _said(record) != _said(told.record):
            self._tell_all(item, is_change=told is not None)
        elif now_s - told.to_all_s >= self._period_s * record.periods / 3:
            self._tell_all(item, is_change=False)
        elif told_by is ToldBy.PASSED_ON and not _is_same_to_mates(record, told.record):
            self._tell_mates(item, now_s)
        else:
            self._waiting[record.peer] = (self._due_s(record, told, told_by, now_s), item)

    def _due_s(self, record: PeerRecord, told: _Told, told_by: ToldBy, now_s: float) -> float:
        """When a version that waits is news for mates, if no newer one comes before."""
        before = self._waiting.get(record.peer)
        if before is not None and _is_same_to_mates(record, before[1].record):
            return before[0]
        if _said_to_mates(record) != _said_to_mates(told.record):
            return told.at_s + self._period_s
        if told_by is ToldBy.OWN and record.done != told.record.done:
            return now_s + max(self._period_s, REST_SHARE * (now_s - told.step_since_s))
        return math.inf

    def _tell_all(self, item: NewsItem, is_change: bool) -> None:
        told, now_s = self._told.get(item.record.peer), item.risen_at_s
        since_s = told.step_since_s if told is not None and told.record.step == item.record.step else now_s
        if is_change:
            self._said_s = now_s
        self._told[item.record.peer] = _Told(item.record, now_s, now_s, since_s)
        self._add(item)

    def _tell_mates(self, item: NewsItem, now_s: float) -> None:
        """Make a version news for mates.

        All near stages get it, too, if it replaces news for them that they may not have yet, or accuses somebody: callers of a peer that
        died know it first, and its own mates wait for it.
        """
        told, before = self._told[item.record.peer], self._items.get(item.record.peer)
        is_for_mates = (before is None or before.is_for_mates) and item.record.suspects == told.record.suspects
        told.record, told.at_s, self._said_s = item.record, now_s, now_s
        self._add(replace(item, risen_at_s=now_s, is_for_mates=is_for_mates))

    def _add(self, item: NewsItem) -> None:
        self._waiting.pop(item.record.peer, None)
        self._items.pop(item.record.peer, None)
        self._items[item.record.peer] = item

    def forget(self, peer: PeerId) -> None:
        """Forget a peer that is gone for good."""
        self._told.pop(peer, None)
        self._items.pop(peer, None)
        self._waiting.pop(peer, None)

    def turn_s(self, now_s: float) -> float:
        """Seconds until the next turn to ask."""
        is_quiet = now_s - self._said_s > self._period_s
        return self._period_s / (QUIET_TURNS if is_quiet else TURNS_PER_PERIOD)

    def tags(self, now_s: float) -> list[bytes]:
        """The tags of the versions that this peer has, newest first."""
        self._look(now_s)
        had = self._items | {peer: item for peer, (_, item) in self._waiting.items()}
        return [item.tag for item in reversed([*had.values()][-MOST_TAGS:])]

    def unknown_to(self, tags: Collection[bytes], stage: int | None, now_s: float) -> list[RawRecord]:
        """The records that are new to a peer of `stage` and concern it; with stage None, all that are new."""
        self._look(now_s)
        known = {tag[:_WHO_BYTES]: tag for tag in tags}
        found: list[RawRecord] = []
        for item in reversed(self._items.values()):
            if item.concerns(stage) and _is_news(item.tag, known.get(item.tag[:_WHO_BYTES])):
                found.append(item.raw)
                if len(found) == MOST_NEWS:
                    break
        return found

    def _look(self, now_s: float) -> None:
        """Make news of what is due, and forget what is none any more."""
        for item in [item for due_s, item in self._waiting.values() if due_s <= now_s]:
            self._tell_mates(item, now_s)
        kept_s = KEPT_TURNS * self.turn_s(now_s)
        for peer, item in [*self._items.items()]:
            if now_s - item.risen_at_s >= (TIMES_FOR_MATES if item.is_for_mates else 1) * kept_s:
                del self._items[peer]
        for peer, (due_s, item) in [*self._waiting.items()]:
            if due_s == math.inf and now_s - item.risen_at_s >= kept_s:
                del self._waiting[peer]

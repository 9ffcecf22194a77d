"""How news of records spreads in a swarm too large for everybody to tell everybody, at a cost that does not grow with it.

Up to `TELLS_ALL` peers, each tells all others. Beyond that, peers ask one another for news several times a period: the asking
peer names the versions that it has, and the other answers with what is missing. News doubles its hearers with every turn, and a
record travels to each peer once. From `SUMMARISED` peers on, a record goes to its own and the neighbouring stages alone. A few
peers of each stage speak for it: their records contain the stage's numbers and go to everybody. A peer that knows many others
announces itself less often and says so in its record, so that each reader knows how long it lives: rule T2 (alive).
"""

from __future__ import annotations

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
MOST_NEWS = 48
"""Number of records in one answer, newest first; the rest goes with the next."""
MOST_TAGS = 256
PAGE_RECORDS, PAGE_BYTES = 512, 1 << 20
"""Size of one page of a table: at most so many records, and no further one once they have so many bytes."""
MOST_PAGES = 64
"""Number of pages that are read of one peer's table."""
SPEAKERS = 3
KEEPERS = 4
"""Peers of a stage whose records the directory keeps, when it is too large for all: enough to hear of the others from."""
PARTNERS = 16
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


class News:
    """The records that rose lately, newest last. Times are seconds on the caller's clock."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._said_s = float("-inf")
        self._items: dict[PeerId, NewsItem] = {}
        self._told_s: dict[PeerId, tuple[float, tuple[object, ...]]] = {}
        """For each peer: when its record was last news, and what it said then."""

    def note(self, record: PeerRecord, raw: RawRecord, now_s: float) -> None:
        """Note a record that rose. A version that says nothing new and comes long before it is due is no news."""
        applied = (record.average_id, record.gradient_norm, record.tied_sum, record.tied)
        said = (record.incarnation, record.step, record.phase, record.leaving, record.reach, applied)
        last_s, before = self._told_s.get(record.peer, (float("-inf"), None))
        if said == before and now_s - last_s < self._period_s * record.periods / 3:
            return
        if before is not None and said != before:
            self._said_s = now_s
        self._told_s[record.peer] = (now_s, said)
        self._items.pop(record.peer, None)
        self._items[record.peer] = NewsItem(record, raw, tag_of(record, raw), now_s)

    def forget(self, peer: PeerId) -> None:
        """Forget a peer that is gone for good."""
        self._told_s.pop(peer, None)
        self._items.pop(peer, None)

    def turn_s(self, now_s: float) -> float:
        """Seconds until the next turn to ask."""
        is_quiet = now_s - self._said_s > self._period_s
        return self._period_s / (QUIET_TURNS if is_quiet else TURNS_PER_PERIOD)

    def tags(self, now_s: float) -> list[bytes]:
        """The tags of the versions that this peer has, newest first."""
        self._forget(now_s)
        newest = list(self._items.values())[-MOST_TAGS:]
        return [item.tag for item in reversed(newest)]

    def unknown_to(self, tags: Collection[bytes], stage: int | None, now_s: float) -> list[RawRecord]:
        """The records that are new to a peer of `stage` and concern it; with stage None, all that are new."""
        self._forget(now_s)
        known = {tag[:_WHO_BYTES]: tag for tag in tags}
        found: list[RawRecord] = []
        for item in reversed(self._items.values()):
            if (stage is None or concerns(item.record, stage)) and _is_news(item.tag, known.get(item.tag[:_WHO_BYTES])):
                found.append(item.raw)
                if len(found) == MOST_NEWS:
                    break
        return found

    def _forget(self, now_s: float) -> None:
        kept_s = KEPT_TURNS * self.turn_s(now_s)
        while self._items:
            oldest = next(iter(self._items.values()))
            if now_s - oldest.risen_at_s < kept_s:
                return
            del self._items[oldest.record.peer]

"""How news of records spreads in a swarm too large for everybody to tell everybody, at a cost that does not grow with it.

Up to `TELLS_ALL` peers each tells all. Beyond that peers ask one another, some times a period, what rose lately: the one who asks
names what it has of that, the one asked answers with what is missing. Each asks few, news doubles its hearers with every
turn, and a record travels once to each who wants it. From `SUMMARISED` peers a record concerns its own and the neighbouring
stages alone. A few peers of each stage speak for it: their records, with the stage's numbers in them, go to everybody. And who
knows many announces itself less often, and says so in its record, so that each reader knows how long it lives: rule T2 (alive).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from peerd.policy.hashing import digest
from peerd.policy.step.ledger import held, stage_step
from peerd.table.record import PeerId, PeerRecord, RawRecord, StageSummary
from peerd.table.view import NEAR_STAGES, LiveView

TELLS_ALL = 15
"""Live peers, up to which each tells all."""
SUMMARISED = 128
"""Peers, from which nobody knows all."""
KNOWN_PER_PERIOD = 32
"""As many announcements a period should come in; who knows more peers announces itself less often, and so do they."""
TURNS_PER_PERIOD, QUIET_TURNS = 5, 3
"""So often a peer asks another for news, and where nothing but renewals came for a period."""
KEPT_TURNS = 15
"""So long news is new: twice the turns in which it reaches 10,000 peers."""
MOST_NEWS = 48
"""In one answer, the newest first; what finds no room goes with the next."""
MOST_TAGS = 256
SPEAKERS = 3
KEEPERS = 4
"""Peers of a stage whose records the directory keeps, when it is too large for all: enough to hear of the others from."""
PARTNERS = 16
MOST_PAUSE = 12
"""Periods between two reads of the directory that are to bring nobody new."""
READS_PER_PERIOD = 8
"""Of the directory, by all peers together, while peers come or go: what one finds the others hear of."""
STORED_EVERY = 2
"""Announcements; what the directory has of me lives for three, and some seconds."""
EARLY = 0.5
"""In periods: what is due before the next look at the clock is due now."""
ANNOUNCED_TO = 3
"""Peers who are told at once of an announcement, so that it does not begin its way with one."""
TAG_BYTES = 7
_WHO_BYTES = 4
_VERSIONS = 1 << 16
Who = TypeVar("Who")
FAR_SHARE = 0.5
"""A speaker asks speakers of far stages so often; others never do, lest all ask those few."""


def periods(num_known: int) -> int:
    """Announce periods between two announcements of one who knows so many peers: one more where they go from mouth to mouth."""
    return 1 + (num_known > TELLS_ALL) + num_known // KNOWN_PER_PERIOD


def is_to_announce(every: int, since: float) -> bool:
    """Whether one who announces itself at least once in `every` periods does so now, so many periods after it last did."""
    return every == 1 or since >= every - EARLY


def is_to_store(mine: PeerRecord, live: LiveView, since: float) -> bool:
    """Whether the directory gets my announcement, so many periods after the last one it got. It keeps a few of a large swarm's stage."""
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
    """Of the whole swarm, as far as I know or am told."""
    stages = {record.stage for record in live.records}
    return sum(max(len(live.of_stage(stage)), live.num_serving(stage)) for stage in stages)


def _rank(record: PeerRecord) -> bytes:
    return digest("speaker", record.peer, record.stage, size=8)


def is_among_first(mine: PeerRecord, live: LiveView, how_many: int) -> bool:
    """Whether I am one of so many peers of my stage that all its peers agree on by a hash."""
    able = [r for r in live.serving(mine.stage) if not r.leaving]
    return mine.peer in {r.peer for r in sorted(able, key=_rank)[:how_many]}


def summarise(mine: PeerRecord, live: LiveView) -> StageSummary | None:
    """What I say of my stage; None where I do not speak for it, or the swarm is small enough for all to know all."""
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


def concerns(record: PeerRecord, stage: int) -> bool:
    """Whether a peer of `stage` has to know this record in a summarised swarm."""
    return record.summary is not None or abs(record.stage - stage) <= NEAR_STAGES


def partners(me: PeerId, near: Sequence[PeerId]) -> list[PeerId]:
    """The few with whom I exchange news, by a hash of my own: always the same ones, for each is a connection to be kept."""
    return sorted(near, key=lambda peer: digest("partner", me, peer, size=8))[:PARTNERS]


def whom_to_ask(speaks: bool, mine: Sequence[Who], far_speakers: Sequence[Who], draws: tuple[float, float]) -> Who | None:
    """Which of my partners I ask for news this time, or which speaker of a far stage; None where nobody is there.

    `draws` are two numbers of chance in [0, 1).
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


def tag_of(record: PeerRecord) -> bytes:
    """Whose record and which version, in few bytes: versions that are less than 32,768 apart can be told to be older or newer."""
    who = digest("tag", record.peer, size=_WHO_BYTES)
    return who + (record.incarnation & 0xFF).to_bytes(1, "big") + (record.version % _VERSIONS).to_bytes(2, "big")


def _is_newer(tag: bytes, than: bytes | None) -> bool:
    if than is None or tag[_WHO_BYTES] != than[_WHO_BYTES]:
        return True
    ahead = int.from_bytes(tag[-2:], "big") - int.from_bytes(than[-2:], "big")
    return 0 < ahead % _VERSIONS < _VERSIONS // 2


class News:
    """What rose lately, the newest last. Times are seconds of the caller's clock."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._said_s = float("-inf")
        self._items: dict[PeerId, NewsItem] = {}
        self._told_s: dict[PeerId, tuple[float, tuple[object, ...]]] = {}
        """When each record was last news, and what it said then."""

    def note(self, record: PeerRecord, raw: RawRecord, now_s: float) -> None:
        """It rose. A version that says nothing new and comes long before it is due is no news."""
        applied = (record.average_id, record.gradient_norm, record.tied_sum, record.tied)
        said = (record.incarnation, record.step, record.phase, record.leaving, record.reach, applied)
        last_s, before = self._told_s.get(record.peer, (float("-inf"), None))
        if said == before and now_s - last_s < self._period_s * record.periods / 3:
            return
        if before is not None and said != before:
            self._said_s = now_s
        self._told_s[record.peer] = (now_s, said)
        self._items.pop(record.peer, None)
        self._items[record.peer] = NewsItem(record, raw, tag_of(record), now_s)

    def forget(self, peer: PeerId) -> None:
        """It is gone for good."""
        self._told_s.pop(peer, None)

    def turn_s(self, now_s: float) -> float:
        """How long until the next turn to ask."""
        is_quiet = now_s - self._said_s > self._period_s
        return self._period_s / (QUIET_TURNS if is_quiet else TURNS_PER_PERIOD)

    def tags(self, now_s: float) -> list[bytes]:
        """What I need not be told, the newest first."""
        self._forget(now_s)
        newest = list(self._items.values())[-MOST_TAGS:]
        return [item.tag for item in reversed(newest)]

    def unknown_to(self, tags: Collection[bytes], stage: int | None, now_s: float) -> list[RawRecord]:
        """What is new to one of `stage`, whom only some records concern; None: all do."""
        self._forget(now_s)
        known = {tag[:_WHO_BYTES]: tag for tag in tags}
        found: list[RawRecord] = []
        for item in reversed(self._items.values()):
            if (stage is None or concerns(item.record, stage)) and _is_newer(item.tag, known.get(item.tag[:_WHO_BYTES])):
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

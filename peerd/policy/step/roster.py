"""The roster of an average: its members, each with its exact ledger, and the checks that prove the average exact.

An average is exact if its ledgers are pairwise disjoint and cover the step. Each member checks that for itself from
the roster's content, so peers need not agree on a roster (docs/protocol.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from peerd.policy.hashing import digest, peer_rank
from peerd.policy.step.groups import Levels, StageMembers
from peerd.policy.step.ledger import full, indices
from peerd.table.record import NO_AVERAGE, AverageId, Lineage, PeerId, PeerRecord, Phase, Void
from peerd.table.view import LiveView

ROUNDS_BEFORE_VOID = 2
WHOLE = 1 << 16
"""What the shares of a roster sum to."""
MOST_CHUNKS = 1 << 20
MOST_EXPECTED_S = 1e6
MOST_CREDITS = 4096


@dataclass(frozen=True, slots=True, order=True)
class RosterEntry:
    """A member and its ledger: (incarnation, ledger_no) names the ledger, and the bitmap `done` is its content."""

    peer: PeerId
    incarnation: int
    ledger_no: int
    done: int


@dataclass(frozen=True, slots=True, order=True)
class Credit:
    """A member of a group, and the microbatches of its group's sum that it has computed."""

    peer: PeerId
    done: int


@dataclass(frozen=True)
class Roster:
    """Entries sorted by peer. `attempt`, `leader` and what the leader has chosen make the id of every round unique."""

    stage: int
    step: int
    attempt: int
    leader: PeerId
    entries: tuple[RosterEntry, ...]
    codecs: tuple[str, ...] = ()
    """The codec of what each member sends, in the order of the entries, if the run leaves the choice to the leader; else the manifest's."""
    shares: tuple[int, ...] = ()
    """What each member reduces, of `WHOLE`; empty: all the same."""
    num_chunks: int = 1
    """The number of chunks of each slice."""
    expected_s: float = 0.0
    """How long the round takes at the rates that the leader believes, in seconds; 0: no other member takes part."""
    credits: tuple[Credit, ...] = ()
    """Who has computed what is in the sums of groups, by peer. It makes nothing exact, and counts as contributions."""
    section: int = 0
    """The section of the average that the round makes, of `num_sections`."""
    num_sections: int = 1
    averages_parameters: bool = False
    """Whether a few of the members' parameters follow the gradients."""
    parts: tuple[AverageId, ...] = ()
    """The sections of this average in their order: their ids with the numbers, or those of their rounds where the run does not certify.
    Empty: one round made the average."""

    @cached_property
    def average_id(self) -> AverageId:
        """The hash of all this. Each message of a round asks for it."""
        if self.parts:
            return AverageId(digest("sections", self.stage, self.step, *self.parts))
        parts: list[bytes | str | int] = ["average", self.stage, self.step, self.attempt, self.leader]
        for entry in self.entries:
            parts += [entry.peer, entry.incarnation, entry.ledger_no, hex(entry.done)]
        parts += ["round", *self.codecs, *self.shares, self.num_chunks, self.expected_s.hex()]
        for credit in self.credits:
            parts += ["credit", credit.peer, hex(credit.done)]
        parts += ["section", self.section, self.num_sections] if self.num_sections > 1 else []
        parts += ["parameters"] if self.averages_parameters else []
        return AverageId(digest(*parts))

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return tuple(entry.peer for entry in self.entries)

    @property
    def computed(self) -> dict[PeerId, int]:
        """The microbatches by the peer that has computed them. Those of members of groups that have died since are nobody's."""
        in_groups = 0
        for credit in self.credits:
            in_groups |= credit.done
        found = {entry.peer: entry.done for entry in self.entries if not entry.done & in_groups}
        return found | {credit.peer: credit.done for credit in self.credits}

    @property
    def rounds(self) -> tuple[AverageId, ...]:
        """The ids of the rounds that made it, in a run that does not certify."""
        return self.parts or (self.average_id,)

    def entry_of(self, peer: PeerId) -> RosterEntry | None:
        return next((entry for entry in self.entries if entry.peer == peer), None)


def why_unsound(entries: Sequence[RosterEntry], num_microbatches: int) -> str | None:
    """What makes the sum of these entries wrong, of a group as of a stage; None if the ledgers are pairwise disjoint."""
    if not entries:
        return "the roster is empty"
    if [entry.peer for entry in entries] != sorted({entry.peer for entry in entries}):
        return "the roster is not sorted by peer, or names a peer twice"
    union = 0
    for entry in entries:
        if entry.done & ~full(num_microbatches):
            return f"{entry.peer} holds microbatches beyond the step"
        if union & entry.done:
            return f"the ledger of {entry.peer} overlaps another"
        union |= entry.done
    return None


def why_inexact(entries: Sequence[RosterEntry], num_microbatches: int) -> str | None:
    """What makes a roster of these entries inexact; None if the ledgers are pairwise disjoint and cover the step."""
    is_covered = is_whole(entries, num_microbatches)
    return why_unsound(entries, num_microbatches) or (None if is_covered else "the ledgers do not cover the step")


def is_whole(entries: Sequence[RosterEntry], num_microbatches: int) -> bool:
    """Whether the sum of these entries is that of the step. Otherwise it is that of a group."""
    return union_of(entries) == full(num_microbatches)


def union_of(entries: Sequence[RosterEntry | PeerRecord]) -> int:
    """The microbatches that the sum of these ledgers holds."""
    union = 0
    for entry in entries:
        union |= entry.done
    return union


def entry_of(record: PeerRecord) -> RosterEntry:
    return RosterEntry(record.peer, record.incarnation, record.ledger_no, record.done)


def turns(members: Sequence[PeerRecord], last: Sequence[PeerId] = ()) -> list[PeerId]:
    """The members that stay, in the order in which they may propose: by their hash for this stage and step, and those in `last` after them.

    A member that can call all others comes before one that cannot.
    """
    staying, names = [m for m in members if not m.leaving] or members, {m.peer for m in members}
    place = {peer: 1 + number for number, peer in enumerate(last)}

    def key(m: PeerRecord) -> tuple[int, int, bytes]:
        return place.get(m.peer, 0), len(names.intersection(m.unreached)), peer_rank(m.peer, m.stage, m.step)

    return [m.peer for m in sorted(staying, key=key)]


def leader_of(members: Sequence[PeerRecord]) -> PeerId | None:
    """The member that proposes at once."""
    return next(iter(turns(members)), None)


def unreached_mates(live: LiveView, stage: int) -> dict[PeerId, dict[PeerId, None]]:
    """By live peer of a stage: the other live ones of it that it cannot call, in the order of its record."""
    records = live.of_stage(stage)
    names = {record.peer for record in records}
    return {m.peer: dict.fromkeys([peer for peer in m.unreached if peer in names and peer != m.peer]) for m in records if m.unreached}


def cut_links(live: LiveView, stage: int) -> tuple[tuple[PeerId, PeerId], ...]:
    """Pairs of live peers of a stage of which neither can call the other, as both say, in both orders."""
    away = unreached_mates(live, stage)
    return tuple([(one, other) for one, others in away.items() for other in others if one in away.get(other, ())])


def compose(
    mine: PeerRecord,
    live: LiveView,
    num_microbatches: int,
    attempt: int,
    ranks: int = 1,
    last: Sequence[PeerId] = (),
    group_size: int = 0,
    num_sections: int = 1,
) -> Roster | None:
    """Rule 7 (propose): the roster that this peer proposes; None if it has no turn among the first `ranks`, or it would be inexact.

    Where the stage has more than `group_size` members, the roster is that of a group, or of one holder of each group's sum, for a section
    of the average (groups.py).
    """
    stage = _standing(mine, live, num_microbatches, group_size)
    if stage is None:
        return None

    def has_turn(peers: Collection[PeerId]) -> bool:
        # The published records decide whose turn it is, this peer's own included. Otherwise two peers might both believe that they lead.
        return mine.peer in turns([m for m in stage.published if m.peer in peers], last)[:ranks]

    if num_sections > 1 and stage.levels.makes_sections:
        bare = Roster(mine.stage, mine.step, attempt, mine.peer, (), num_sections=num_sections)
        return _section(bare, stage.levels, num_microbatches, has_turn)
    mates = stage.levels.round_mates(mine)
    present = {m.peer for holders in mates for m in holders}
    if not has_turn(present) or not _can_begin(mates) or not stage.levels.are_exact(full(num_microbatches)):
        return None
    order = turns([m for m in stage.published if m.peer in present], last)
    place = {peer: number for number, peer in enumerate(order)} | {mine.peer: -1}
    chosen = [min(holders, key=lambda m: place.get(m.peer, len(place))) for holders in mates]
    entries = tuple(sorted(entry_of(m) for m in chosen))
    return Roster(mine.stage, mine.step, attempt, mine.peer, entries, credits=_credits_of([m for holders in mates for m in holders]))


def _standing(mine: PeerRecord, live: LiveView, num_microbatches: int, group_size: int) -> StageMembers | None:
    """How this peer's stage stands; None if it can make no average: something is missing, or this peer is in a round already."""
    if mine.phase is not Phase.ACCUMULATING:
        return None
    published = live.members(mine.stage, mine.step)
    stage = live.remembered((StageMembers, mine, group_size), lambda: StageMembers(mine, published, group_size))
    return None if full(num_microbatches) & ~stage.done or not stage.can_average else stage


def _can_begin(mates: Sequence[Sequence[PeerRecord]]) -> bool:
    """Whether no holder of these sums is in a round."""
    return all(m.phase is Phase.ACCUMULATING for holders in mates for m in holders)


def _section(bare: Roster, levels: Levels, num_microbatches: int, has_turn: Callable[[set[PeerId]], bool]) -> Roster | None:
    """The roster of the first section that nobody holds, that its leader makes with idle mates, and whose turn it has."""
    for number in indices(full(bare.num_sections) & ~levels.held):
        makers = levels.makers.of(number)
        if bare.leader not in {m.peer for m in makers} or levels.makers.before(number) & ~levels.held:
            continue
        if any(m.phase is not Phase.ACCUMULATING for m in makers) or not has_turn({m.peer for m in makers}):
            continue
        entries = tuple(sorted(map(entry_of, makers)))
        if why_inexact(entries, num_microbatches) is not None:
            return None
        return replace(bare, entries=entries, section=number, credits=_credits_of(levels.members) if number == 0 else ())
    return None


def whole_of(sections: Sequence[Roster], ids: Sequence[AverageId] = ()) -> Roster:
    """The roster of an average from those of its sections, in their order. `ids`: of the sections with their numbers, if they have any.

    The first says who has computed what, and the last, which has the parameters, whose mean they are.
    """
    parts, credits_told = tuple(ids) or tuple(roster.average_id for roster in sections), sections[0].credits
    return replace(sections[-1], section=0, num_sections=1, parts=parts, credits=credits_told)


def _credits_of(members: Sequence[PeerRecord]) -> tuple[Credit, ...]:
    """What the members of groups say that they have computed; of two that say so of the same microbatches the first by id counts."""
    found, told = list[Credit](), 0
    for member in sorted(members, key=lambda m: m.peer)[:MOST_CREDITS]:
        own = member.own_done & member.done & ~told if member.group else 0
        if own:
            found.append(Credit(member.peer, own))
            told |= own
    return tuple(found)


def why_wrong_credits(roster: Roster, mine: PeerRecord) -> str | None:
    """What is wrong with who is said to have computed what, as far as this peer can tell; None if nothing is."""
    if not roster.credits:
        return None
    if [credit.peer for credit in roster.credits] != sorted({credit.peer for credit in roster.credits}):
        return "its credits are not sorted by peer, or name a peer twice"
    told, held = 0, union_of(roster.entries)
    for credit in roster.credits:
        if told & credit.done or credit.done & ~held:
            return f"{credit.peer} is credited with another one's microbatches"
        told |= credit.done
    own = next((credit.done for credit in roster.credits if credit.peer == mine.peer), 0)
    return None if own & ~mine.own_done == 0 else "it credits this peer with more than it has computed"


def is_complete(mine: PeerRecord, live: LiveView, num_microbatches: int, group_size: int = 0, num_sections: int = 1) -> bool:
    """Whether this peer's round could be proposed now: the stage's ledgers are exact together, and no member of the round is in another."""
    stage = _standing(mine, live, num_microbatches, group_size)
    if stage is None or full(num_microbatches) & ~union_of(stage.published):
        return False
    everybody = len(live.records)
    if num_sections > 1 and stage.levels.makes_sections:
        return compose(mine, live, num_microbatches, 0, everybody, (), group_size, num_sections) is not None
    mates = stage.levels.round_mates(mine)
    if not _can_begin(mates) or not stage.levels.are_exact(full(num_microbatches)):
        return False
    present = {m.peer for holders in mates for m in holders}
    leaving = {m.peer: m.leaving for m in stage.published if m.peer in present}
    return mine.peer in leaving and (not leaving[mine.peer] or all(leaving.values()))


def why_refuse(mine: PeerRecord, roster: Roster, num_microbatches: int, in_groups: bool = False, num_sections: int = 1) -> str | None:
    """Rule 8 (exchange): why this peer refuses to join the round; None if it joins.

    `in_groups`: its stage averages in two levels, the second one by `num_sections` sections.
    """
    reason = why_never(mine, roster, num_microbatches, in_groups, num_sections)
    if reason is None and mine.phase is not Phase.ACCUMULATING:
        return f"this peer is {mine.phase.name.lower()}"
    return reason


def why_never(mine: PeerRecord, roster: Roster, num_microbatches: int, in_groups: bool = False, num_sections: int = 1) -> str | None:
    """Why this peer joins the round in no phase. What the roster says of it was true once, and is never again once it is not."""
    if (roster.stage, roster.step) != (mine.stage, mine.step):
        return f"this peer is at stage {mine.stage}, step {mine.step}"
    if roster.entry_of(mine.peer) != entry_of(mine):
        return "the ledger of this peer has changed since"
    if roster.leader not in roster.peers:
        return "the proposer is not in its roster"
    if reason := why_no_plan(roster):
        return reason
    if roster.num_sections not in (1, num_sections if in_groups else 1) or not 0 <= roster.section < roster.num_sections or roster.parts:
        return "this stage does not average by such sections"
    if reason := why_wrong_credits(roster, mine):
        return reason
    may_be_group = in_groups and not mine.group and len(roster.entries) > 1 and roster.num_sections == 1
    return why_unsound(roster.entries, num_microbatches) if may_be_group else why_inexact(roster.entries, num_microbatches)


def why_no_plan(roster: Roster) -> str | None:
    """Why nobody can tell from this roster which elements each chunk of its round is; None if one can."""
    if not 1 <= roster.num_chunks <= MOST_CHUNKS or not 0 <= roster.expected_s <= MOST_EXPECTED_S:
        return "its number of chunks, or the time that it expects, is out of range"
    if not are_whole(roster):
        return "its shares do not make a whole"
    if roster.codecs and len(roster.codecs) != len(roster.entries):
        return "it does not name one codec for each member"
    return None


def are_whole(roster: Roster) -> bool:
    """Whether the members' shares make a whole."""
    shares = roster.shares
    return not shares or (len(shares) == len(roster.entries) and min(shares) >= 0 and sum(shares) == WHOLE)


def group_within(roster: Roster, mine: PeerRecord) -> AverageId:
    """The group whose sum this peer holds, if it is in the average of this roster; otherwise NO_AVERAGE.

    An entry shows which microbatches a sum holds, and not in which round it was made.
    """
    return mine.group if any(entry.done == mine.done for entry in roster.entries) else NO_AVERAGE


def whom_to_void(roster: Roster, missed: Mapping[PeerId, int]) -> Void | None:
    """The member that the leader leaves out of further rounds of the step: rule 4 (close), hole 19. None while nobody was missed too often.

    `missed` counts, for each member, the rounds that this peer led and that failed because that member was absent. If two
    members cannot reach each other, both are counted, and leaving out one of them is enough.
    """
    able = [entry for entry in roster.entries if entry.peer != roster.leader and missed.get(entry.peer, 0) >= ROUNDS_BEFORE_VOID]
    if not able:
        return None
    worst = max(able, key=lambda entry: (missed[entry.peer], peer_rank(entry.peer, roster.stage, roster.step)))
    return Void(worst.peer, worst.incarnation, roster.step)


def why_not_adopt(mine: PeerRecord, step: int, lineage: Lineage) -> str | None:
    """Rule 5 (fetch): why this peer may not take an average of `step` made with parameters of `lineage`; None if it may."""
    if step != mine.step:
        return f"this peer is at step {mine.step}"
    return None if lineage == mine.lineage else "it was computed with parameters of another lineage than this peer holds"


def lineage_after(lineage: Lineage, average_id: AverageId, norm: float | None = None, tied_sum: AverageId | None = None) -> Lineage:
    """The lineage of parameters after an average is applied, with the step's gradient norm if the run shares norms.

    Two peers of a stage that applied one average with differently rounded norms, or with different sums for a tied weight,
    therefore have different lineages, and one of them reloads.
    """
    applied: list[bytes | str] = [average_id] if norm is None else [average_id, norm.hex()]
    applied += [] if tied_sum is None else ["tied", tied_sum]
    return Lineage(lineage.inexact, digest("lineage", lineage.chain, *applied))


def lineage_skipped(lineage: Lineage, step: int) -> Lineage:
    """The lineage after a step is given up: rule 11 (skip)."""
    return Lineage(lineage.inexact + 1, digest("skipped", lineage.chain, step))

"""Which averages count: rule 18 (certify) and what a peer believes of an average that a mate gives it.

Of an average it is not enough to know who and which bits are in it: a reducer may send each member another slice, and a peer may make up
the numbers. So the id of an average covers its numbers, slice by slice, as they travelled, and each reducer signs the hash of its slice.
Whoever holds other numbers holds another average, which all can see, and the lineage of its parameters is another one. Two hashes that
one reducer has signed for one slice of one round prove that it lies. An average counts once more than half of the voters hold it.

A voter's record is its vote: that it holds the average, or that it has gone on to the next step with it.

Where a large stage averages in groups, no record shows what came of the round of a group, or of one for a section. Its members tell each
other, and go by it once more than half of them say the same (confirming.py); their signatures go with a section to those who were not in
its round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from peerd.policy.hashing import digest
from peerd.policy.step.ledger import FEWEST, full
from peerd.policy.step.norms import told_by
from peerd.policy.step.roster import Roster, entry_of, lineage_after, union_of, why_inexact
from peerd.policy.step.tied import sum_told
from peerd.table.record import AverageId, Lineage, PeerId, PeerRecord, Phase, RunId
from peerd.table.view import LiveView

MOST_WAYS = 4
"""So many ways in which peers have finished a step are looked at, the most common ones."""
STATEMENT = b"peerd slice of a round\0"
"""What every text begins with that a reducer signs of its slice."""
ID_BYTES, ROOT_BYTES = 16, 32


@dataclass(frozen=True, slots=True)
class SignedSlice:
    """The hash of a slice of a round's sum, as its reducer signed it. `signature` is checked where it comes in."""

    reducer: PeerId
    root: bytes
    signature: bytes

    def statement(self, run: RunId, round_id: AverageId) -> bytes:
        """The text that the reducer signs. It signs one of a round."""
        return STATEMENT + round_id + self.root + run.encode() + b"\0" + self.reducer.encode()


def statement_in(text: bytes, run: RunId) -> tuple[AverageId, SignedSlice] | None:
    """The round and the slice of which this text is a statement, without the signature; None if it is none of this run."""
    said = text.removeprefix(STATEMENT)
    told_run, _, reducer = said[ID_BYTES + ROOT_BYTES :].partition(b"\0")
    if len(said) == len(text) or told_run != run.encode():
        return None
    try:
        named = PeerId(reducer.decode("ascii"))
    except UnicodeDecodeError:
        return None
    return AverageId(said[:ID_BYTES]), SignedSlice(named, said[ID_BYTES : ID_BYTES + ROOT_BYTES], b"")


Slices = tuple[SignedSlice, ...]


@dataclass(frozen=True, slots=True)
class Distrust:
    """Why a peer does not take an average. `is_lie`: whoever gave it has broken the protocol."""

    reason: str
    is_lie: bool


def average_id_of(roster: Roster, slices: Sequence[SignedSlice]) -> AverageId:
    """The id of an average with its numbers; that of its round where no slice is signed."""
    return AverageId(digest("slices", roster.average_id, *(each.root for each in slices))) if slices else roster.average_id


def needs_confirming(roster: Roster, num_microbatches: int) -> bool:
    """Whether the members of a round tell each other what has come of it before they go by it: of a group's sum, and of a section.

    An average of the whole stage shows in all its members' records, and each keeps its ledger until it counts. A group's sum takes the
    ledger's place, and what a section is shows in no record.
    """
    return roster.num_sections > 1 or union_of(roster.entries) != full(num_microbatches)


def is_confirmed(average_id: AverageId, told: Mapping[PeerId, AverageId], roster: Roster) -> bool | None:
    """Whether more than half of a round's members hold this of it, as this peer does; None while that may still be.

    `told`: what members say that they hold, this peer's own word included. Of two members both have to say the same.
    """
    members = roster.peers
    words = Counter(told[name] for name in members if name in told)
    if 2 * words[average_id] > len(members):
        return True
    silent = sum(name not in told for name in members)
    return None if 2 * (words[average_id] + silent) > len(members) else False


def told_twice(one: Sequence[SignedSlice], other: Sequence[SignedSlice]) -> tuple[SignedSlice, SignedSlice] | None:
    """Two slices that one reducer has signed, of two copies of one round's sum: proof that it lies. None if they agree."""
    known = {each.reducer: each for each in one}
    pairs = ((known[each.reducer], each) for each in other if each.reducer in known)
    return next((pair for pair in pairs if pair[0].root != pair[1].root), None)


def has_word(member: PeerRecord, step: int) -> bool:
    """Whether a peer of the stage has a word on the average of this step: it holds a part of it, is in a round or has finished the step.

    A newcomer that holds nothing can only believe others.
    """
    return member.step > step or bool(member.done) or member.phase is not Phase.ACCUMULATING


def present(live: LiveView, stage: int, step: int) -> list[PeerRecord]:
    """The members of a stage at this step, and its peers that are one step ahead."""
    return [*live.members(stage, step), *(m for m in live.serving(stage) if m.step == step + 1)]


def known(live: LiveView, stage: int) -> set[PeerId]:
    """Peers of a stage that are there, or were lately: silence and suspicions make no stage so small that one word is enough."""
    found = (*live.serving(stage), *(r for r in (*live.suspected, *live.expired) if r.stage == stage and r.phase is not Phase.JOINING))
    return {r.peer for r in found if not r.leaving}


def kept_out(live: LiveView, stage: int, step: int) -> list[PeerRecord]:
    """Peers of a stage that work at this step and are no members of it: others have voided or sidelined them."""
    names = {m.peer for m in live.members(stage, step)}
    return [m for m in live.serving(stage) if m.step == step and m.peer not in names and has_word(m, step)]


def voters(mine: PeerRecord, live: LiveView) -> list[PeerRecord]:
    """Return the peers whose word on the average of this peer's step counts. This peer comes first."""
    return [mine, *(m for m in present(live, mine.stage, mine.step) if m.peer != mine.peer and has_word(m, mine.step))]


def is_backed_by(voter: PeerRecord, average_id: AverageId, mine: PeerRecord) -> bool:
    """Whether a voter says that it holds this average of this peer's step, computed with the same parameters, or has applied it."""
    if voter.step == mine.step:
        return voter.phase is Phase.AVERAGED and (voter.average_id, voter.lineage) == (average_id, mine.lineage)
    return _applied_by(voter, mine.step).is_by(average_id, mine.lineage)


@dataclass(frozen=True, slots=True)
class Words:
    """What the voters say of the averages of one step, counted once: how many hold each, and with what others have gone on."""

    num_present: int
    """Members and peers ahead, with or without a word."""
    num_known: int
    """With those that are not heard now."""
    num_voters: int
    num_out: int
    """Those that work at the step, too, and have no vote, because others left them out of it."""
    held: Counter[AverageId]
    ahead: tuple[tuple[_Applied, int], ...]
    """The most common ways in which the step was finished, as far as records tell, and by how many voters each."""
    before: Lineage
    """Of the parameters that the step is computed with."""

    def backers(self, average_id: AverageId) -> int:
        """How many voters hold this average, or have applied it."""
        applied = (number for each, number in self.ahead if each.is_by(average_id, self.before))
        return self.held[average_id] + sum(applied)

    def certify(self, average_id: AverageId, is_late: bool = False) -> bool:
        """Whether more than half of the voters hold this average, and no fewer than half where those count that were left out (hole 59).

        In a stage of two one is enough, if the other holds no other one or this peer has waited for it long enough. Then those that are
        not heard count no more.
        """
        size = self.num_present if is_late else max(self.num_present, self.num_known)
        return _is_most(self.backers(average_id), self.num_voters, self.num_out, size, is_late or len(self.held) <= 1)


def _is_most(backers: int, num_voters: int, num_out: int, num_present: int, is_undisputed: bool) -> bool:
    """Whether more than half of the voters back an average; of too few peers for that one is enough, where nothing speaks against it."""
    if num_present < FEWEST:
        return backers > 0 and is_undisputed
    return 2 * backers > num_voters and 2 * backers >= num_voters + num_out


@dataclass(frozen=True, slots=True)
class _Applied:
    """The lineage of a peer that has finished the step, and what it tells of how."""

    lineage: Lineage
    norm: float | None
    tied_sum: AverageId | None

    def is_by(self, average_id: AverageId, before: Lineage) -> bool:
        return self.lineage == lineage_after(before, average_id, self.norm, self.tied_sum)


def _applied_by(voter: PeerRecord, step: int) -> _Applied:
    return _Applied(voter.lineage, told_by(voter, step), sum_told(voter, step))


def words_on(mine: PeerRecord, live: LiveView) -> Words:
    """What the voters say of the averages of this peer's step. Honest peers finish it alike, so a few ways of that are all that count."""
    found = voters(mine, live)
    held = Counter(m.average_id for m in found if m.step == mine.step and m.phase is Phase.AVERAGED and m.lineage == mine.lineage)
    ahead = Counter(_applied_by(m, mine.step) for m in found if m.step > mine.step)
    names = {mine.peer, *(m.peer for m in present(live, mine.stage, mine.step))}
    num_out = sum(m.peer != mine.peer for m in kept_out(live, mine.stage, mine.step))
    num_known = len(known(live, mine.stage) | {mine.peer})
    return Words(len(names), num_known, len(found), num_out, held, tuple(ahead.most_common(MOST_WAYS)), mine.lineage)


def apart_from_most(serving: Sequence[PeerRecord]) -> frozenset[PeerId]:
    """Peers of a stage by whose state no joiner of a certified run goes while there are others: those at a step that fewer than half of
    them have reached, or at the last one that half have reached with another lineage than most of those there."""
    if len(serving) < FEWEST:
        return frozenset()
    reached = sorted((m.step for m in serving), reverse=True)[(len(serving) - 1) // 2]
    lineages = Counter(m.lineage for m in serving if m.step == reached)
    [(lineage, number)] = lineages.most_common(1)
    is_most = 2 * number > lineages.total()
    return frozenset(m.peer for m in serving if m.step > reached or (is_most and m.step == reached and m.lineage != lineage))


def is_upheld(average_id: AverageId, roster: Roster, mine: PeerRecord, live: LiveView) -> bool:
    """Whether an average of which a reducer has signed two slices stands all the same: more than half of its members hold this one."""
    names = {entry.peer for entry in roster.entries}
    backers = sum(voter.peer in names and is_backed_by(voter, average_id, mine) for voter in voters(mine, live))
    return 2 * backers > len(names)


def can_count(average_id: AverageId, roster: Roster, holder: PeerId, mine: PeerRecord, voting: Sequence[PeerRecord]) -> bool:
    """Whether an average that `holder` gives may come to be held by more than half of the voters.

    Those may hold it that do already, or were in its round and do not leave its holder out of the stage for lies. `mine` was not in it.
    """
    members = {entry.peer for entry in roster.entries if entry.peer != mine.peer}
    in_round = {voter.peer for voter in voting if voter.peer in members and holder not in voter.sidelined}
    return 2 * len(in_round | {voter.peer for voter in voting if is_backed_by(voter, average_id, mine)}) > len(voting)


def why_unproven(live: LiveView, stage: int, step: int, is_late: bool = False) -> str:
    """Why the average of another stage does not count yet, though some peer there says that it has one; empty if it does.

    Of a stage that is far away only speakers are known, and they tell no averages.
    """
    if live.speakers(stage):
        return ""
    members = present(live, stage, step)
    held = Counter(m.average_id for m in members if m.step == step and m.phase is Phase.AVERAGED)
    most = max(held.values(), default=0) + sum(m.step > step for m in live.serving(stage))
    num_voters = sum(has_word(m, step) for m in members)
    num_out = len(kept_out(live, stage, step))
    is_proven = _is_most(most, num_voters, num_out, len(members), is_late or len(held) <= 1)
    return "" if is_proven else f"no average of stage {stage} is held by more than half of its members"


def why_distrust(
    roster: Roster, is_signed: bool, mine: PeerRecord, is_counted: bool, joined: Collection[AverageId], refuted: Collection[AverageId]
) -> Distrust | None:
    """Why this peer does not take the average that a mate gives it; None if it takes it.

    `is_signed`: each slice has the signature of its reducer. `is_counted`: more than half of the voters hold it. `joined`: the rounds of
    this step in which this peer was; `refuted`: those of which a reducer has signed two slices. A round in which this peer's present ledger
    is, and in which it never was, is made up.
    """
    if not is_signed:
        return Distrust("a slice of it is not signed by its reducer", is_lie=True)
    if roster.average_id not in joined and roster.entry_of(mine.peer) == entry_of(mine):
        return Distrust("this peer was in no such round", is_lie=True)
    if is_counted:
        return None
    if roster.average_id in refuted:
        return Distrust("one of its reducers has signed two slices of it", is_lie=False)
    if roster.average_id in joined:
        return None
    return Distrust("too few mates hold it, and this peer was in no such round", is_lie=False)


def why_distrust_section(
    roster: Roster,
    is_certified: bool,
    confirmed_by: Collection[PeerId],
    mine: PeerRecord,
    group: Collection[PeerId],
    num_microbatches: int,
) -> Distrust | None:
    """Why this peer does not take the section of an average that a mate gives it; None if it takes it.

    `is_certified`: more than half of its makers have signed these numbers. `group`: the members of the round that made the sum which this
    peer holds, if it holds one. What a roster says of other groups nobody here can see, and of this peer's own group it has to be right:
    so who makes a section up deceives the groups alone that it has members in, and not most of the stage.
    """
    if why_inexact(roster.entries, num_microbatches) or roster.num_sections == 1:
        return Distrust("its roster is not exact", is_lie=True)
    if not is_certified:
        return Distrust("most members of its round have not signed it", is_lie=True)
    if not mine.group:
        return None
    maker = next((entry.peer for entry in roster.entries if entry.done == mine.done), None)
    if maker is None or maker not in group or maker not in confirmed_by:
        return Distrust("no member of this peer's group has signed it with their sum in it", is_lie=False)
    return None

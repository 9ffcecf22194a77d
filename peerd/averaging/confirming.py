"""How the members of a round tell each other what came of it, before they go by it: rule 18 (certify) in groups.

Words go with the beats: a member tells the judges, and a judge everybody. So a word comes to a member that its author cannot call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from peerd.averaging.exchange import Exchange
from peerd.averaging.slices import why_unsigned
from peerd.averaging.surroundings import Surroundings
from peerd.errors import BadMessageError
from peerd.policy.step.certificates import SignedSlice, average_id_of, needs_confirming
from peerd.policy.step.confirming import RoundOutcomes, SignedOutcome
from peerd.table.record import PeerId
from peerd.wire.messages import Beat, OutcomeWord, PlacedSlice

MOST_WORDS = 64
"""Words that one beat has, and of these one with its slices."""


class Confirming:
    """The words of one round's members at this one. Other rounds are over once all sums are here."""

    def __init__(self, exchange: Exchange, around: Surroundings) -> None:
        roster = exchange.roster
        self.roster = roster
        self._exchange = exchange
        self._signatures, self._host, self._clock = around.signatures, around.host, around.clock
        self.is_due = self._signatures.certified_run is not None and needs_confirming(roster, around.num_microbatches)
        self._outcomes = RoundOutcomes(roster, around.averaging_s)
        self._place = {peer: number for number, peer in enumerate(roster.peers)}
        self._known_by: dict[PeerId, int] = {}
        """By member: whose words it has, as bits."""
        self._is_refuted = False
        self._turn = 0
        """Of the word whose slices the next beat has, where words differ."""
        self.news = asyncio.Event()
        """Set once others should hear at once what came of the round here."""
        self._over = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether this peer cannot go by the sum yet."""
        return self.is_due and not self._over.is_set()

    @property
    def agreeing(self) -> tuple[SignedOutcome, ...]:
        """What members have signed of the round that say the same as this peer; nothing where they need not."""
        return self._outcomes.agreeing

    async def until_settled(self) -> None:
        """All sums are here: wait until most members say that the same came of them."""
        if not self.is_due:
            return
        slices = self._exchange.slices.all
        mine = self._signatures.confirmed(self.roster, average_id_of(self.roster, slices))
        self._outcomes.hold(SignedOutcome(mine.member, mine.average_id, mine.signature, slices), self._clock())
        self.news.set()
        self._look()
        await self._over.wait()

    def fail(self) -> None:
        """The round ends by a bug: nobody waits any more."""
        self._over.set()

    # Words

    def words_for(self, peer: PeerId) -> tuple[OutcomeWord, ...]:
        """The words that this member does not have, as far as it has told."""
        known, told = self._known_by.get(peer, 0), self._outcomes.told
        due = [name for name in told if not known >> self._place[name] & 1][:MOST_WORDS]
        words = [self._word(told[name].bare) for name in due]
        shown = [each for each in told.values() if each.slices] if self._outcomes.is_disputed else []
        if shown:
            self._turn += 1
            each = shown[self._turn % len(shown)]
            words = [word for word in words if word.member != self._place[each.member]] + [self._word(each)]
        return tuple(words)

    @property
    def heard(self) -> int:
        """The members whose words are here, as bits."""
        return sum(1 << self._place[name] for name in self._outcomes.told)

    def lacking(self, peers: Collection[PeerId]) -> list[PeerId]:
        """Those of some members that may not know the words of most."""
        most = len(self.roster.entries) // 2
        return [peer for peer in peers if self._known_by.get(peer, 0).bit_count() <= most]

    def told(self, peer: PeerId, beat: Beat, now_s: float) -> None:
        """Take the words that a member passes on. Raises BadMessageError if one is not signed by its author."""
        if not self.is_due:
            return
        if beat.heard >> len(self.roster.entries):
            raise BadMessageError("a member that has heard of more members than there are")
        self._known_by[peer] = beat.heard | self._known_by.get(peer, 0)
        for word in beat.words:
            outcome = self._outcome_in(word)
            self._known_by[peer] |= 1 << word.member
            if self._is_news(outcome):
                self._check(outcome)
                self._outcomes.hear(outcome, now_s)
        layout, sums = self._exchange.layout, beat.sums
        if len(sums) == layout.num_members and all(here >= layout.chunks_of(k) for k, here in enumerate(sums)):
            self._outcomes.complete(peer, now_s)
        self._look()

    def answer(self, peer: PeerId, beat: Beat, now_s: float) -> Beat:
        """What a member that still waits hears of a round that is over here."""
        self.told(peer, beat, now_s)
        return Beat(self.roster.average_id, (), (), 0.0, words=self.words_for(peer), heard=self.heard)

    def _word(self, outcome: SignedOutcome) -> OutcomeWord:
        slices = (PlacedSlice(self._place[each.reducer], each.root, each.signature) for each in outcome.slices)
        return OutcomeWord(self._place[outcome.member], outcome.average_id, outcome.signature, tuple(slices))

    def _outcome_in(self, word: OutcomeWord) -> SignedOutcome:
        peers = self.roster.peers
        if max([word.member, *(each.member for each in word.slices)]) >= len(peers):
            raise BadMessageError("what came of a round at somebody that is no member of it")
        slices = tuple(SignedSlice(peers[each.member], each.root, each.signature) for each in word.slices)
        return SignedOutcome(peers[word.member], word.average_id, word.signature, slices)

    def _is_news(self, outcome: SignedOutcome) -> bool:
        known = self._outcomes.told.get(outcome.member)
        return known is None or known.average_id != outcome.average_id or bool(outcome.slices and not known.slices)

    def _check(self, outcome: SignedOutcome) -> None:
        if not self._signatures.has_confirmed(self.roster, outcome):
            raise BadMessageError("what came of a round, not signed by the member that it names")
        layout = self._exchange.layout
        if outcome.slices and why_unsigned(self.roster, outcome.slices, layout.length, self._signatures, layout.room):
            raise BadMessageError("slices of a round that their reducers have not signed")

    def _look(self) -> None:
        pair = self._outcomes.contradiction
        if pair is not None and not self._is_refuted:
            self._is_refuted = True
            first, second = ((each.statement(self._host.run, self.roster.average_id), each.signature) for each in pair)
            self._host.learn(first, second)
        if self._outcomes.settled():
            self._over.set()

    # Judging

    def at_fault(self, now_s: float, rank: int) -> tuple[int, str] | None:
        """The place of the member without which a judge of this rank ends the round, and why."""
        found = self._outcomes.at_fault(now_s, rank) if self.is_open else None
        return None if found is None else (self._place[found[0]], found[1])

    def is_given_up(self, now_s: float) -> bool:
        """Whether this peer leaves the round, as most members hold something else of it."""
        return self.is_open and self._outcomes.is_given_up(now_s)

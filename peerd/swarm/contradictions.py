"""Two texts that one key signed and that contradict each other prove that it lies: T7 (contradiction). They are kept and passed on.

They are two records under one (incarnation, version), or two statements of one slice of a round: rule 18 (certify).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from peerd.errors import BadMessageError
from peerd.link.peer_keys import public_key_of, verify
from peerd.policy.step.certificates import STATEMENT, statement_in
from peerd.policy.swarm.contradictions import Heard, Pair
from peerd.swarm.signed import SignedRecord, peek_record, read_record
from peerd.table.record import NO_RECORD, AverageId, PeerId, RawRecord, RunId

Proof = tuple[RawRecord, RawRecord]
MAX_TOLD = 16
"""Number of proofs that a newcomer gets with the table, and that wait to be passed on."""
MAX_REFUTED = 1024
"""Number of rounds that are known as ones of which a reducer has signed two slices."""


def is_proof(first: RawRecord, second: RawRecord, run: RunId) -> bool:
    """True if one key has signed both records under one pair for this run, and their bodies differ."""
    if first[0] == second[0]:
        return False
    try:
        one, other = read_record(*first, run).record, read_record(*second, run).record
    except BadMessageError:
        return False
    return (one.peer, one.pair) == (other.peer, other.pair)


def is_statement(raw: RawRecord) -> bool:
    """Whether this is no record, but what a reducer has signed of its slice."""
    return raw[0].startswith(STATEMENT)


class Contradictions:
    """What peers said lately, and the proofs that some of them lie."""

    def __init__(self, run: RunId) -> None:
        self._run = run
        self._heard: Heard[RawRecord] = Heard(lambda one, other: one[0] == other[0], lambda raw: len(raw[0]) + len(raw[1]))
        self.untold: asyncio.Queue[tuple[PeerId, Proof]] = asyncio.Queue(MAX_TOLD)
        """Proofs that this peer has not passed on yet."""
        self._proofs: OrderedDict[PeerId, Proof] = OrderedDict()
        self.refuted: OrderedDict[AverageId, None] = OrderedDict()
        """Rounds of which a reducer has signed two slices; the last ones."""

    @property
    def told(self) -> list[RawRecord]:
        """The records of the newest proofs, two for each peer, one after the other."""
        return [raw for proof in self._proofs.values() for raw in proof]

    def note(self, signed: SignedRecord, until_s: float) -> None:
        """Remember a verified record of a pair that had none yet."""
        self._heard.note(signed.record.peer, signed.record.pair, signed.raw, until_s)

    def other(self, peer: PeerId, pair: Pair, raw: RawRecord, now_s: float) -> RawRecord | None:
        """A verified record that differs from this one in all but its pair, if one is remembered."""
        return self._heard.other(peer, pair, raw, now_s)

    def beside(self, peer: PeerId, pair: Pair, raw: RawRecord, before: RawRecord) -> RawRecord | None:
        """`before` if it names the same peer and pair and is another text. It may not be verified."""
        differs = before != NO_RECORD and not is_statement(before) and before[0] != raw[0] and peek_record(before[0]) == (peer, pair)
        return before if differs else None

    def found(self, peer: PeerId, proof: Proof, *, is_to_tell: bool) -> None:
        """Keep a proof, and let it be passed on unless too many wait. What refutes a round is noted."""
        if (said := statement_in(proof[0][0], self._run)) is not None:
            self.refuted[said[0]] = None
            if len(self.refuted) > MAX_REFUTED:
                self.refuted.popitem(last=False)
        self._heard.forget(peer)
        self._proofs.pop(peer, None)
        self._proofs[peer] = proof
        if len(self._proofs) > MAX_TOLD:
            self._proofs.popitem(last=False)
        if is_to_tell and not self.untold.full():
            self.untold.put_nowait((peer, proof))

    def reducer_of_both(self, first: RawRecord, second: RawRecord) -> PeerId | None:
        """The reducer that has signed both of these statements of one round; None if they prove nothing, or nothing new."""
        one, other = (statement_in(text, self._run) for text, _ in (first, second))
        if one is None or other is None or one[0] in self.refuted:
            return None
        said, also = one[1], other[1]
        if (one[0], said.reducer) != (other[0], also.reducer) or said.root == also.root:
            return None
        try:
            key = public_key_of(said.reducer)
        except ValueError:
            return None
        return said.reducer if all(verify(key, *each) for each in (first, second)) else None

    def forget(self, peer: PeerId) -> None:
        """Forget what was heard of a peer. The proofs stay."""
        self._heard.forget(peer)

"""What a peer signs of its part of an average, and which microbatches the part must be made of: rule 20 (audit). Pure.

A part goes to its reducers in chunks, and its author signs each chunk: the round, the place of the chunk and its hash. A reducer keeps
one chunk of each mate's part, which a secret draws, so no author knows which. What the author signs of its microbatches says to which of
its ledgers each was added. So a mate that has all of them can compute the part again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from peerd.policy.hashing import digest
from peerd.policy.step.auditing import Item
from peerd.policy.step.groups import section_bounds
from peerd.policy.step.ledger import indices
from peerd.policy.step.receipts import HASH_BYTES, SignatureCheck, SignedPass, ledger_name
from peerd.policy.step.roster import Roster
from peerd.table.record import AverageId, PeerId, RunId

DOMAIN = b"peerd chunk of a round\0"


def chunk_text(average_id: AverageId, place: tuple[int, int, int], content: bytes, slice_signature: bytes = b"") -> bytes:
    """What the author of a chunk signs. `place`: slice, author and number, members by their places; `content`: the hash of its bytes."""
    return DOMAIN + average_id + b"".join(each.to_bytes(4) for each in place) + content + slice_signature


@dataclass(frozen=True, slots=True)
class SentPart:
    """One chunk of a peer's part of an average, as its author signed it."""

    author: PeerId
    stage: int
    step: int
    average_id: AverageId
    place: tuple[int, int, int]
    """The slice, the author's place in the roster, and the number of the chunk."""
    content: bytes
    """The hash of its bytes."""
    signature: bytes
    basis: bytes = b""
    """The hash of the receipts of its microbatches, by which somebody looks at the part (`basis_of`). The author has not signed it."""

    def signed(self, run: RunId) -> bytes:
        """The hash of what was signed, 32 bytes: who keeps the chunk finds it by it."""
        return digest("part", run, chunk_text(self.average_id, self.place, self.content), size=HASH_BYTES)

    def item(self, run: RunId) -> Item:
        """The author's whole part of the step, of which this chunk is looked at, as a sum of the microbatches of the basis."""
        return Item(self.author, self.stage, self.step, None, digest("item of part", self.signed(run), self.basis, size=HASH_BYTES))

    def why_unsigned(self, _run: RunId, is_of: SignatureCheck) -> str:
        """Why this binds the author to nothing; empty if it has signed it."""
        text = chunk_text(self.average_id, self.place, self.content)
        return "" if is_of(self.author, text, self.signature) else f"{self.author} has not signed this chunk"

    def why_not_judged(self, roster: Roster) -> str:
        """Why a peer that holds this average cannot judge the part; empty if it can."""
        slice_number, author, number = self.place
        if (self.average_id, self.stage, self.step) != (roster.average_id, roster.stage, roster.step):
            return "it is a part of another average"
        if author >= len(roster.entries) or roster.peers[author] != self.author or slice_number >= len(roster.entries):
            return "the average has no such part"
        return "" if number < roster.num_chunks else "the part has no such chunk"


def slice_bounds(roster: Roster, length: int, room: int = 0) -> list[tuple[int, int]]:
    """By member, the elements that it reduces, from and to; of a part of this length, whose last `room` elements are for parameters."""
    first, last = section_bounds(length - room, roster.section, max(1, roster.num_sections), room if roster.averages_parameters else 0)
    return [(first + start, first + end) for start, end in _bounds(last - first, roster.shares or (1,) * len(roster.entries))]


def _bounds(length: int, shares: tuple[int, ...]) -> list[tuple[int, int]]:
    whole, before, found = max(1, sum(shares)), 0, []  # nobody makes a round in which all shares are 0
    for share in shares:
        found.append((length * before // whole, length * (before + share) // whole))
        before += share
    return found


def even_cuts(start: int, end: int, num_chunks: int) -> list[int]:
    """The bounds of a slice's chunks, of about the same size."""
    return [start + (end - start) * number // num_chunks for number in range(num_chunks + 1)]


def kept_chunk(secret: bytes, average_id: AverageId, author: PeerId, num_chunks: int) -> int:
    """The number of the chunk of an author's part that this reducer keeps. `secret`: of its coins for the step."""
    return int.from_bytes(digest("kept chunk", secret, average_id, author, size=8)) % max(1, num_chunks)


def basis_of(passes: Iterable[SignedPass] | None, run: RunId) -> bytes:
    """The hash of the receipts of which a part is to be the sum, 32 bytes; empty where they are not known.

    Two accomplices can sign two receipts of one microbatch, and show one to each half of the mates. So only those say something of a part
    that have the same receipts: no honest peer's word contradicts another's.
    """
    return digest("basis", *(each.own.signed(run) for each in passes), size=HASH_BYTES) if passes is not None else b""


def passes_of_part(roster: Roster, author: PeerId, signed: Iterable[SignedPass], lineage: bytes) -> list[SignedPass] | None:
    """The signed microbatches of which a peer's part of an average is the sum, in the order of their indices.

    None if one is missing, or signed twice as added to this ledger: then nobody can say what the part must be, and nobody judges it.
    `lineage`: the hash of that of the step's parameters. One that its peer says to have computed with others is missing (hole 84): nobody
    else has those, and an honest peer drops its ledger when it gets other parameters.
    """
    entry = next((each for each in roster.entries if each.peer == author), None)
    if entry is None:
        return None
    found, due, ledger = dict[int, SignedPass](), set(indices(entry.done)), ledger_name(entry.incarnation, entry.ledger_no)
    for each in signed:
        asked, answered = each.own.asked, each.own.answered
        is_of_step = (asked.callee, asked.stage, asked.step) == (author, roster.stage, roster.step)
        is_its = is_of_step and (answered.ledger, answered.lineage) == (ledger, lineage)
        if not is_its or asked.index not in due or found.get(asked.index) == each:
            continue
        if asked.index in found:
            return None
        found[asked.index] = each
    return [found[index] for index in sorted(due)] if found.keys() == due else None

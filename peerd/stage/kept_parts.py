"""One chunk of each mate's part of an average, as its author signed it, kept until the next step ends: rule 20 (audit).

A reducer has each chunk of its slice anyway, for as long as it takes to add it. It keeps the one that its coins draw. So it keeps at most
as many bytes of a step as one part has, divided by the number of chunks of a slice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from blake3 import blake3

from peerd.errors import WrongStateError
from peerd.link.links import Bytes
from peerd.policy.step.parts import SentPart, kept_chunk
from peerd.policy.step.receipts import STEPS_KEPT
from peerd.policy.step.roster import Roster
from peerd.table.record import AverageId, PeerId, RunId
from peerd.wire.messages import TensorBytes

WORD_BYTES = 4


class KeptParts:
    """The chunks that one peer keeps. Any thread may use it."""

    def __init__(self, run: RunId, secret_at: Callable[[int], bytes]) -> None:
        """`secret_at`: the secret of this peer's coins for a step."""
        self._run, self._secret_at = run, secret_at
        self._guard = threading.Lock()
        self._kept: dict[bytes, tuple[SentPart, TensorBytes]] = {}
        """By the hash of what was signed."""
        self._odd: dict[AverageId, tuple[int, frozenset[PeerId]]] = {}
        """By average, its step, and the authors whose parts looked odd in this peer's slice."""

    def wants(self, roster: Roster, author: PeerId, number: int) -> bool:
        """Whether this chunk of an author's part is the one to keep. Its signature has to be checked first."""
        return number == kept_chunk(self._secret_at(roster.step), roster.average_id, author, roster.num_chunks)

    def put(self, roster: Roster, place: tuple[int, int, int], chunks: Sequence[Bytes], signature: bytes) -> None:
        """Keep a chunk, as a copy. Those of steps before the last ones go."""
        content = b"".join(chunks)
        author = roster.peers[place[1]]
        part = SentPart(author, roster.stage, roster.step, roster.average_id, place, blake3(content).digest(), signature)
        value = TensorBytes("int32", (len(content) // WORD_BYTES,), (content,))
        with self._guard:
            for key in [key for key, (old, _) in self._kept.items() if old.step <= roster.step - STEPS_KEPT]:
                del self._kept[key]
            self._kept[part.signed(self._run)] = part, value

    def note_odd(self, roster: Roster, authors: Collection[PeerId]) -> None:
        """Note whose parts of a round look odd. Those of steps before the last ones go."""
        with self._guard:
            self._odd = {key: each for key, each in self._odd.items() if each[0] > roster.step - STEPS_KEPT}
            self._odd[roster.average_id] = roster.step, frozenset(authors)

    def looked_odd(self, part: SentPart) -> bool:
        """Whether this part looked odd in this peer's slice."""
        with self._guard:
            return part.author in self._odd.get(part.average_id, (0, frozenset()))[1]

    def of(self, average_id: AverageId) -> list[SentPart]:
        """What is kept of an average's parts."""
        with self._guard:
            return [part for part, _ in self._kept.values() if part.average_id == average_id]

    def find(self, signed: bytes) -> TensorBytes:
        """The bytes of a chunk, as 32-bit words. Raises WrongStateError if they are not kept."""
        with self._guard:
            if signed not in self._kept:
                raise WrongStateError("that chunk is not kept")
            return self._kept[signed][1]


def is_as_signed(part: SentPart, value: TensorBytes) -> bool:
    """Whether these are the bytes that the author signed."""
    return blake3(b"".join(value.chunks)).digest() == part.content

"""What the services call: the parts of other rooms that answer a message which has passed the checks (`peerd/wire/services.py`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Sequence
from typing import Protocol

from peerd.link.links import Bytes
from peerd.policy.inference.paths import TextOffer
from peerd.policy.step.contributions import StageTally
from peerd.policy.step.evidence import Evidence
from peerd.policy.step.receipts import SentOn, SignedPass
from peerd.policy.step.roster import Roster
from peerd.table.record import AverageId, PeerId, RawRecord
from peerd.wire.accounts import AccountsTold, AccountsWanted
from peerd.wire.chunks import CutFile
from peerd.wire.deliveries import Lending
from peerd.wire.messages import (
    Average,
    Beat,
    Call,
    CallResult,
    Description,
    Frame,
    ProposalAnswer,
    Snapshot,
    StateRequest,
    TensorBytes,
    ToldMoves,
    ToldSketch,
    Verified,
)
from peerd.wire.text_messages import Extended, TextCall

Receive = Callable[[], Awaitable[Sequence[Bytes]]]
Frames = Callable[[Callable[[Frame], int]], AsyncGenerator[Frame]]
"""Receives chunks. Gets what tells how many bytes a chunk has, or raises BadMessageError if none such is due."""
Tell = Callable[[Verified], None]
Progress = Callable[[int, PeerId], None]


class SwarmHandler(Protocol):
    def gossip(self, caller: PeerId, records: Sequence[RawRecord]) -> Sequence[RawRecord]: ...

    def table(self, caller: PeerId, after: PeerId) -> tuple[Sequence[RawRecord], PeerId]:
        """Return a page of the table, from the first peer above `after` on, and the last peer of the page; an empty id ends the table."""
        ...

    def news(self, caller: PeerId, known: Collection[bytes]) -> Sequence[RawRecord]: ...

    async def reaches(self, caller: PeerId, accused: PeerId) -> bool:
        """Ask a peer that does not answer the caller. Returns whether it is there."""
        ...


class Described(Protocol):
    """Tells about this peer to any caller."""

    def describe(self) -> Description: ...

    async def tallies(self) -> Sequence[StageTally]:
        """Return the number of microbatches that each peer computed, as this peer counted them."""
        ...

    async def accounts(self, wanted: AccountsWanted) -> AccountsTold:
        """Return what the members of a stage have signed of it, as far as this peer keeps it."""
        ...


class StageHandler(Protocol):
    async def backpropagate(self, caller: PeerId, call: Call, receive: Receive, progress: Progress) -> CallResult:
        """Compute a call that has no tensor bytes yet. `receive` fetches those of inputs and labels, once the handler holds a slot."""
        ...

    def absorb(self, caller: PeerId, records: Sequence[RawRecord]) -> None: ...

    def cancel(self, caller: PeerId, call_id: bytes) -> None: ...


class AveragingHandler(Protocol):
    def mates(self) -> Iterable[PeerId]:
        """Return the peers that are known here as peers of the stage, this one included: a proposal may name them by their marks."""
        ...

    async def propose(self, caller: PeerId, roster: Roster) -> ProposalAnswer: ...

    async def give(self, caller: PeerId, average_id: AverageId, frames: Frames, tell: Tell) -> None:
        """Take the chunks that the caller sends, and tell it what has been verified."""
        ...

    def take(self, caller: PeerId, average_id: AverageId, words: AsyncGenerator[Verified]) -> AsyncGenerator[Frame]:
        """Yield this peer's chunks for the caller, which tells what it has verified."""
        ...

    def beat(self, caller: PeerId, beat: Beat) -> Beat: ...

    def abort(self, caller: PeerId, average_id: AverageId, left_out: PeerId, reason: str) -> None: ...

    async def get_average(self, stage: int, step: int, section: int | None) -> tuple[Average, CutFile, bool]:
        """Return the header of an average, or of one section of it, the file of which the caller asks for chunks, and whether mates wait
        until the caller has it."""
        ...

    async def get_tied(self, step: int, wanted: AverageId) -> tuple[bytes, CutFile]:
        """Return the BLAKE3 hash of a tied weight's gradients, and their file."""
        ...

    async def get_moves(self, incarnation: int, first: int) -> ToldMoves:
        """Return what this peer has done to its own parameters: from move `first` on, if its log is of that incarnation."""
        ...


class StateHandler(Protocol):
    async def snapshot(self, caller: PeerId, wanted: StateRequest) -> tuple[Snapshot, Lending]:
        """Return a snapshot's header, and its file for the caller to ask for chunks. All downloads share one copy of it in memory."""

    async def sketch(self, caller: PeerId, stage: int, seed: bytes, previous: bool) -> ToldSketch:
        """Return the sketch of the state that this peer holds now, or of the parameters of the step before alone.

        Raises BusyError if it is another one's turn.
        """
        ...


class TextHandler(Protocol):
    def offer_text(self, caller: PeerId, stage: int) -> TextOffer:
        """Return with the parameters of which steps this peer goes on with texts in its stage, and how soon."""
        ...

    async def extend_text(self, caller: PeerId, call: TextCall, receive: Receive) -> Extended:
        """Compute the next tokens of a text, which has no bytes yet. `receive` fetches them, once they are admitted."""
        ...

    async def forget_text(self, caller: PeerId, text: bytes) -> None: ...


class AuditHandler(Protocol):
    def receipts(self, stage: int, step: int, known: Collection[bytes]) -> tuple[Sequence[Evidence], Sequence[SignedPass]]:
        """Return the convictions whose items' ids are not known, and what is signed of this peer's own calls to a stage in a step."""
        ...

    def sent_on(self, stage: int, step: int, known: Collection[bytes]) -> Sequence[SentOn]:
        """Return what peers of a stage have sent on to this one in a step, but for the calls of these names."""
        ...

    def kept_pass(self, signed: bytes) -> tuple[TensorBytes, TensorBytes, TensorBytes | None]:
        """Return inputs, labels and gradient of a call, by the hash of its receipt or of what its caller has signed.

        Raises WrongStateError if they are not kept.
        """
        ...

    async def hear(self, evidence: Evidence) -> Evidence | None:
        """Take an accusation, and return what this peer knows of it. Raises BadMessageError if it is not signed."""
        ...

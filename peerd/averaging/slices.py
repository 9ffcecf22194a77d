"""The slices of an average: hashed as they travel, signed by their reducers, checked where a mate gives the average: rule 18 (certify).

All members hold the decoded form of each slice, with the same bits, so that is what is hashed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from blake3 import blake3
from torch import Tensor

from peerd.errors import BadMessageError
from peerd.policy.step.certificates import SignedSlice
from peerd.policy.step.confirming import RoundProof, SignedOutcome
from peerd.policy.step.parts import slice_bounds
from peerd.policy.step.roster import Roster, are_whole
from peerd.stage.kept_parts import KeptParts
from peerd.table.record import AverageId, PeerId, RunId
from peerd.wire.chunks import digest_of
from peerd.wire.tensors import views_of_flat


@dataclass(frozen=True, slots=True)
class Signatures:
    """Signs this peer's chunks and slices, and checks those of others."""

    me: PeerId
    sign: Callable[[bytes], bytes]
    is_of: Callable[[PeerId, bytes, bytes], bool]
    """Whether a message has this peer's signature."""
    certified_run: RunId | None = None
    """The run's id, if the run certifies. In another one no slice is hashed."""
    parts: KeptParts | None = None
    """Where mates' parts are kept for audits; None in a run without them."""

    def signed(self, roster: Roster, root: bytes) -> SignedSlice:
        """This peer's slice of a round, with its signature."""
        bare = SignedSlice(self.me, root, b"")
        return replace(bare, signature=self.sign(self._text_of(roster, bare)))

    def is_sound(self, roster: Roster, signed: SignedSlice) -> bool:
        """Whether a slice has its reducer's signature."""
        return self.is_of(signed.reducer, self._text_of(roster, signed), signed.signature)

    def confirmed(self, roster: Roster, average_id: AverageId) -> SignedOutcome:
        """What came of a round here, with this peer's signature."""
        bare = SignedOutcome(self.me, average_id, b"")
        return replace(bare, signature=self.sign(self._text_of(roster, bare)))

    def has_confirmed(self, roster: Roster, signed: SignedOutcome) -> bool:
        """Whether a member of a round has signed what came of it."""
        return self.is_of(signed.member, self._text_of(roster, signed), signed.signature)

    def _text_of(self, roster: Roster, signed: SignedSlice | SignedOutcome) -> bytes:
        if self.certified_run is None:
            raise ValueError("nothing is signed in a run that does not certify")
        return signed.statement(self.certified_run, roster.average_id)


class RoundSlices:
    """The slices of one round's sum at one member. The thread that computes uses it; others read `signed`, of slices that are here."""

    def __init__(self, roster: Roster, signatures: Signatures) -> None:
        self._roster = roster
        self._signatures = signatures
        self._hashers = [blake3() for _ in roster.entries] if signatures.certified_run is not None else []
        self.signed: dict[int, SignedSlice] = {}
        """By reducer, the slices that are whole."""

    def note(self, reducer: int, values: Tensor, signature: bytes, *, is_last: bool) -> None:
        """Hash the next chunk of a slice, as it stands in the accumulator.

        The last chunk of another's slice has to bring its signature of the whole. Raises BadMessageError if it does not.
        """
        if not self._hashers:
            return
        for view in views_of_flat(values):
            self._hashers[reducer].update(view)
        if not is_last:
            return
        root, name = self._hashers[reducer].digest(), self._roster.peers[reducer]
        if name == self._signatures.me:
            self.signed[reducer] = self._signatures.signed(self._roster, root)
            return
        found = SignedSlice(name, root, signature)
        if not self._signatures.is_sound(self._roster, found):
            raise BadMessageError("a slice that is not what its reducer has signed")
        self.signed[reducer] = found

    def signature_of(self, reducer: int) -> bytes:
        """What goes with the last chunk of a slice."""
        return self.signed[reducer].signature if reducer in self.signed else b""

    @property
    def all(self) -> tuple[SignedSlice, ...]:
        """Those of a round that is done, in the order of their reducers."""
        return tuple(self.signed[reducer] for reducer in sorted(self.signed))


def why_unsigned(roster: Roster, slices: Sequence[SignedSlice], length: int, signatures: Signatures, room: int = 0) -> str:
    """What is wrong with the signatures of the slices of a round's sum; empty if nothing is.

    `length`: elements of a member's part, the last `room` of them for parameters.
    """
    if signatures.certified_run is None:
        return "its slices are signed in a run that certifies nothing" if slices else ""
    if not are_whole(roster):
        return "its shares do not make a whole"
    due = [peer for peer, (start, end) in zip(roster.peers, slice_bounds(roster, length, room), strict=True) if start < end]
    if [each.reducer for each in slices] != due:
        return "its slices are not those of its round"
    return "" if all(signatures.is_sound(roster, each) for each in slices) else "a slice of it is not signed by its reducer"


def why_unproven(proof: RoundProof, length: int, signatures: Signatures, room: int) -> str:
    """What is wrong with the signatures of a section's slices, and of the members of its round; empty if nothing is.

    `length` and `room`: as in `why_unsigned`.
    """
    if reason := why_unsigned(proof.roster, proof.slices, length, signatures, room):
        return reason
    if signatures.certified_run is None:
        return "its outcome is signed in a run that certifies nothing" if proof.outcomes else ""
    if not all(signatures.has_confirmed(proof.roster, each) for each in proof.outcomes):
        return "its outcome is not signed by a member that it names"
    return "" if proof.is_certified else "most members of its round have not signed it"


def are_of(roster: Roster, slices: Sequence[SignedSlice], flat: Tensor, first: int = 0, length: int = 0, room: int = 0) -> bool:
    """Whether these are the slices of a round's sum: what was signed is what is here.

    `flat`: the elements of a member's part from `first` on, of `length` together (0: all are here), the last `room` of them for parameters.
    """
    bounds = dict(zip(roster.peers, slice_bounds(roster, length or len(flat), room), strict=True))
    places = (slice(*(place - first for place in bounds[each.reducer])) for each in slices)
    return all(digest_of(views_of_flat(flat[place])) == each.root for place, each in zip(places, slices, strict=True))

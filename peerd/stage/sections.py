"""The sections of a step's average that a member of a large stage holds, until it has all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from peerd.link.links import Bytes
from peerd.policy.step.certificates import Slices
from peerd.policy.step.confirming import RoundProof, SignedOutcome
from peerd.policy.step.groups import section_bounds
from peerd.policy.step.roster import Roster, whole_of
from peerd.table.record import Lineage


@dataclass(frozen=True, slots=True, eq=False)
class SectionOfAverage:
    """One section, as its round made it or a mate gave it."""

    roster: Roster
    values: Tensor
    """Its elements: [length of the section] on the CPU."""
    encoded: tuple[Bytes, ...] = ()
    """The same as its reducers sent it, in pieces, for mates; empty where the run's codec loses nothing."""
    slices: Slices = ()
    """As its reducers signed them, where the run certifies."""
    outcomes: tuple[SignedOutcome, ...] = ()
    """What members of its round have signed of it, where the run certifies."""

    @property
    def proof(self) -> RoundProof:
        return RoundProof(self.roster, self.slices, self.outcomes)


@dataclass(frozen=True, slots=True, eq=False)
class HeldSections:
    """Any thread may read it: `flat` is written only where no section is yet. One that is made again is written into a copy."""

    lineage: Lineage
    """Of the parameters that the average was computed with."""
    flat: Tensor
    """The average, as far as its sections are here, with room for the parameters that go with the last one: [length + room] on the CPU."""
    length: int
    """Number of elements of the average without parameters."""
    proofs: Mapping[int, RoundProof] = field(default_factory=dict)
    """The rounds that made them, by section."""
    encoded: Mapping[int, tuple[Bytes, ...]] = field(default_factory=dict)
    """By section, its bytes in the run's codec, where that loses something."""

    def with_one(self, one: SectionOfAverage) -> HeldSections:
        """Its values may be that part of `flat` itself."""
        roster, values = one.roster, one.values
        flat = self.flat.clone() if roster.section in self.proofs else self.flat  # a mate may be getting it
        place = self._place(flat, roster)
        if place.data_ptr() != values.data_ptr():
            place.copy_(values)
        encoded = {**self.encoded, roster.section: one.encoded}
        return replace(self, flat=flat, proofs={**self.proofs, roster.section: one.proof}, encoded=encoded)

    def values_of(self, section: int) -> Tensor:
        return self._place(self.flat, self.proofs[section].roster)

    def _place(self, flat: Tensor, roster: Roster) -> Tensor:
        behind = len(flat) - self.length if roster.averages_parameters else 0
        start, end = section_bounds(self.length, roster.section, roster.num_sections, behind)
        return flat[start:end]

    @property
    def whole(self) -> tuple[Roster, Tensor, tuple[RoundProof, ...]]:
        """The average, once all sections are here: its roster, its elements, and what proves each section."""
        proofs = tuple(self.proofs[section] for section in sorted(self.proofs))
        roster = whole_of([proof.roster for proof in proofs], [proof.id for proof in proofs])
        return roster, self.flat if roster.averages_parameters else self.flat[: self.length], proofs

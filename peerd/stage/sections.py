"""The sections of a step's average that a member of a large stage holds, until it has all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from peerd.policy.step.groups import section_bounds
from peerd.policy.step.roster import Roster, whole_of
from peerd.table.record import Lineage


@dataclass(frozen=True, slots=True, eq=False)
class HeldSections:
    """Any thread may read it: `flat` is written only where no section is yet. One that is made again is written into a copy."""

    lineage: Lineage
    """Of the parameters that the average was computed with."""
    flat: Tensor
    """The average, as far as its sections are here: [length] on the CPU."""
    rosters: Mapping[int, Roster] = field(default_factory=dict)
    """The rounds that made them, by section."""

    def with_one(self, roster: Roster, values: Tensor) -> HeldSections:
        """`values` may be that part of `flat` itself."""
        flat = self.flat.clone() if roster.section in self.rosters else self.flat  # a mate may be getting it
        start, end = section_bounds(len(flat), roster.section, roster.num_sections)
        place = flat[start:end]
        if place.data_ptr() != values.data_ptr():
            place.copy_(values)
        return replace(self, flat=flat, rosters={**self.rosters, roster.section: roster})

    def values_of(self, section: int) -> Tensor:
        roster = self.rosters[section]
        start, end = section_bounds(len(self.flat), section, roster.num_sections)
        return self.flat[start:end]

    @property
    def roster(self) -> Roster:
        """The roster of the whole, once all sections are here."""
        return whole_of([self.rosters[section] for section in sorted(self.rosters)])

"""The sections that a member holds are given to mates while others come."""

from __future__ import annotations

import torch

from peerd.policy.step.roster import Roster, RosterEntry
from peerd.stage.sections import HeldSections
from peerd.table.record import Lineage, PeerId

LENGTH, NUM_SECTIONS = 12, 3


def roster_of(section: int, attempt: int = 0) -> Roster:
    entries = (RosterEntry(PeerId("p0"), 0, 0, 1),)
    return Roster(0, 0, attempt, PeerId("p0"), entries, section=section, num_sections=NUM_SECTIONS)


def test_what_is_given_to_a_mate_stays_as_it_is_while_the_section_is_made_again() -> None:
    held = HeldSections(Lineage(), torch.zeros(LENGTH))
    for section in range(NUM_SECTIONS):
        held = held.with_one(roster_of(section), torch.full((4,), float(section)))
    given = held.values_of(1)
    again = held.with_one(roster_of(1, attempt=1), torch.full((4,), 9.0))
    assert given.tolist() == 4 * [1.0]
    assert again.values_of(1).tolist() == 4 * [9.0]
    assert again.flat.tolist() == [*4 * [0.0], *4 * [9.0], *4 * [2.0]]
    assert again.rosters[1].attempt == 1

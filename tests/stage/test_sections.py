"""The sections that a member holds are given to mates while others come."""

from __future__ import annotations

import pytest
import torch

from peerd.policy.step.roster import Roster, RosterEntry
from peerd.stage.sections import HeldSections, SectionOfAverage
from peerd.table.record import Lineage, PeerId

LENGTH, NUM_SECTIONS = 12, 3


def roster_of(section: int, attempt: int = 0, averages_parameters: bool = False) -> Roster:
    entries = (RosterEntry(PeerId("p0"), 0, 0, 1),)
    return Roster(0, 0, attempt, PeerId("p0"), entries, section=section, num_sections=NUM_SECTIONS, averages_parameters=averages_parameters)


def test_what_is_given_to_a_mate_stays_as_it_is_while_the_section_is_made_again() -> None:
    held = HeldSections(Lineage(), torch.zeros(LENGTH), LENGTH)
    for section in range(NUM_SECTIONS):
        held = held.with_one(SectionOfAverage(roster_of(section), torch.full((4,), float(section))))
    given = held.values_of(1)
    again = held.with_one(SectionOfAverage(roster_of(1, attempt=1), torch.full((4,), 9.0)))
    assert given.tolist() == 4 * [1.0]
    assert again.values_of(1).tolist() == 4 * [9.0]
    assert again.flat.tolist() == [*4 * [0.0], *4 * [9.0], *4 * [2.0]]
    assert again.proofs[1].roster.attempt == 1


@pytest.mark.parametrize("averages_parameters", [True, False])
def test_parameters_stand_behind_the_last_section_where_its_round_averaged_them(averages_parameters: bool) -> None:
    held, room = HeldSections(Lineage(), torch.zeros(LENGTH + 5), LENGTH), 5 * averages_parameters
    for section in range(NUM_SECTIONS):
        is_last = section == NUM_SECTIONS - 1
        roster = roster_of(section, averages_parameters=averages_parameters and is_last)
        held = held.with_one(SectionOfAverage(roster, torch.full((4 + room * is_last,), float(section))))
    roster, flat, _ = held.whole
    assert roster.averages_parameters is averages_parameters
    assert flat.tolist() == [*4 * [0.0], *4 * [1.0], *(4 + room) * [2.0]]

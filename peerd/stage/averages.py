"""What the averages of a stage are like: how long, of how many sections, and by how many rounds they are made."""

from __future__ import annotations

from collections.abc import Callable

from peerd.config.manifest import Manifest
from peerd.policy.step.groups import forms_groups, num_sections_of
from peerd.policy.step.roster import Roster, is_whole
from peerd.stage.accumulator import Accumulator
from peerd.stage.holdings import Holdings
from peerd.stage.sums import Sums
from peerd.table.record import PeerRecord
from peerd.table.view import LiveView


class StageAverages:
    """Reads a stage's state and changes nothing (`StageState` is one)."""

    record: PeerRecord
    holdings: Holdings
    num_microbatches: int
    _manifest: Manifest
    _live: Callable[[], LiveView]
    _sums: list[Sums]

    @property
    def accumulator(self) -> Accumulator:
        """This step's main one."""
        return self._sums[0].main

    def average_length(self, step: int) -> int:
        """Number of elements in an average of this stage: the accumulator, at some steps followed by the parameters."""
        parameters = self.holdings.module.parameters() if self._manifest.train.averages_parameters_at(step) else ()
        return self.accumulator.flat.numel() + sum(parameter.numel() for parameter in parameters)

    def round_length(self, roster: Roster) -> int:
        """Number of elements that a round of this roster adds up. Groups sum gradients alone; parameters are averaged with their sums."""
        return self.average_length(roster.step) if is_whole(roster.entries, self.num_microbatches) else self.accumulator.flat.numel()

    @property
    def averages_by(self) -> tuple[int, bool, int]:
        """Microbatches, whether this stage averages in two levels, as far as this peer knows its members, and then by how many sections."""
        members = self._live().members(self.record.stage, self.record.step)
        return self.num_microbatches, forms_groups(members, self._manifest.swarm.group_size), self.num_sections

    @property
    def num_sections(self) -> int:
        """The number of sections of an average in two levels: one where parameters are averaged, too, as their mean is over one round."""
        is_one = self._manifest.train.averages_parameters_at(self.record.step)
        return 1 if is_one else num_sections_of(self._manifest.swarm.group_size)

"""What the averages of a stage are like: how long, of how many sections, and by how many rounds they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.policy.step.groups import forms_groups, num_sections_of, section_bounds
from peerd.policy.step.roster import Roster, is_whole
from peerd.policy.swarm.devices import kinds_of
from peerd.stage.accumulator import Accumulator
from peerd.stage.holdings import Holdings
from peerd.stage.parameters import flat_parameters
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

    def with_parameters(self, roster: Roster) -> Roster:
        """What this peer proposes: whether the members average parameters, too. Groups sum gradients alone."""
        if not self._manifest.may_average_parameters or not is_whole(roster.entries, self.num_microbatches) or len(roster.entries) < 2:
            return roster
        members = [record for record in self._live().of_stage(roster.stage) if record.peer in roster.peers]
        are_unlike = len(kinds_of(members)) > 1
        return replace(roster, averages_parameters=are_unlike or self._manifest.train.average_parameters == "always")

    def why_not_averaged(self, roster: Roster) -> str | None:
        """Why this peer averages no parameters in this round; None if it does, or they are not to be averaged."""
        if not roster.averages_parameters or (self._manifest.may_average_parameters and roster.num_sections == 1):
            return None
        return "this run does not average parameters there"

    def parameter_bounds(self, roster: Roster) -> tuple[int, int]:
        """Which of the stage's parameters, in their order, the round of this roster averages: from, to."""
        if not roster.averages_parameters:
            return 0, 0
        every = self._manifest.train.average_parameters_every_steps
        return section_bounds(sum(parameter.numel() for parameter in self.holdings.module.parameters()), roster.step % every, every)

    def round_length(self, roster: Roster) -> int:
        """Number of elements that a round of this roster adds up: the accumulator, and the parameters that are averaged."""
        start, end = self.parameter_bounds(roster)
        return self.accumulator.flat.numel() + end - start

    def contribution(self, roster: Roster) -> Tensor:
        """A copy of what this peer adds in a round, in the machine's memory. Its length is `round_length`."""
        start, end = self.parameter_bounds(roster)
        sums = section_bounds(self.accumulator.flat.numel(), roster.section, roster.num_sections)
        share = self.accumulator.copied(sums, spare=end - start)
        flat_parameters(self.holdings.module, start, share[len(share) - (end - start) :])
        return share

    @property
    def averages_by(self) -> tuple[int, bool, int]:
        """Microbatches, whether this stage averages in two levels, as far as this peer knows its members, and then by how many sections."""
        members = self._live().members(self.record.stage, self.record.step)
        return self.num_microbatches, forms_groups(members, self._manifest.swarm.group_size), self.num_sections

    @property
    def num_sections(self) -> int:
        """The number of sections of an average in two levels: one where parameters are averaged, too, as their mean is over one round."""
        return 1 if self._manifest.may_average_parameters else num_sections_of(self._manifest.swarm.group_size)

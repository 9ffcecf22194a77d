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
from peerd.stage.results import HeldAverage
from peerd.stage.sums import Sums
from peerd.table.record import NO_AVERAGE, AverageId, PeerRecord
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

    @property
    def certifies(self) -> bool:
        """Whether the ids of averages cover their numbers: rule 18 (certify)."""
        return self._manifest.swarm.certifies

    @property
    def looks_at_sizes(self) -> bool:
        """Whether parts of averages are compared by their norms: rule 22 (size).

        In float16 a part may overflow, and where steps are local it is a change of parameters.
        """
        train = self._manifest.train
        return self.certifies and train.precision != "float16" and not train.local_batch

    def with_parameters(self, roster: Roster) -> Roster:
        """What this peer proposes: whether parameters are averaged, too. They go with the last section; groups sum gradients alone."""
        is_last = roster.section == roster.num_sections - 1 and is_whole(roster.entries, self.num_microbatches)
        if not self._manifest.may_average_parameters or not is_last or len(roster.entries) < 2:
            return roster
        takes_mean = [r for r in self._live().of_stage(roster.stage) if r.peer in roster.peers or roster.num_sections > 1]
        are_unlike = len(kinds_of(takes_mean)) > 1
        return replace(roster, averages_parameters=are_unlike or self._manifest.train.average_parameters == "always")

    def _known_of(self, held: HeldAverage) -> tuple[float | None, AverageId]:
        """This stage's norm, once it can be known, and the id of the sum of a tied weight's gradients held here."""
        train, tied = self._manifest.train, held.tied
        tied_sum = tied.id if tied else NO_AVERAGE
        if not train.shares_norms or (tied is None and self.accumulator.norm_needs_tied):
            return None, tied_sum
        gradients = held.flat_sum[: self.accumulator.flat.numel()]
        return self.accumulator.norm(gradients, train.microbatches_per_step, tied.values if tied else None), tied_sum

    def why_not_averaged(self, roster: Roster) -> str | None:
        """Why this peer averages no parameters in this round; None if it does, or they are not to be averaged."""
        if not roster.averages_parameters or (self._manifest.may_average_parameters and roster.section == roster.num_sections - 1):
            return None
        return "this run does not average parameters there"

    def parameter_bounds(self, step: int) -> tuple[int, int]:
        """Which of the stage's parameters, in their order, are averaged with this step's gradients, if any are: from, to."""
        if not self._manifest.may_average_parameters:
            return 0, 0
        every = self._manifest.train.average_parameters_every_steps
        return section_bounds(sum(parameter.numel() for parameter in self.holdings.module.parameters()), step % every, every)

    def num_behind(self, roster: Roster) -> int:
        """The number of parameters that the members average with this roster's gradients."""
        start, end = self.parameter_bounds(roster.step)
        return end - start if roster.averages_parameters else 0

    def room_behind(self, roster: Roster) -> int:
        """The number of elements after the accumulator's in this peer's part: parameters that it averages, now or with the last section."""
        start, end = self.parameter_bounds(roster.step)
        return end - start if roster.averages_parameters or roster.num_sections > 1 else 0

    def bounds_of(self, roster: Roster) -> tuple[int, int]:
        """Which elements a round of this roster adds up, from and to: the accumulator's, and parameters behind them."""
        return section_bounds(self.accumulator.flat.numel(), roster.section, roster.num_sections, self.num_behind(roster))

    def round_length(self, roster: Roster) -> int:
        """Number of elements of a member's part in a round of this roster: the accumulator, and room for parameters behind it."""
        return self.accumulator.flat.numel() + self.room_behind(roster)

    def contribution(self, roster: Roster) -> Tensor:
        """A copy of what this peer adds in a round, in the machine's memory. Its length is `round_length`."""
        length = self.accumulator.flat.numel()
        sums = section_bounds(length, roster.section, roster.num_sections)
        share = self.accumulator.copied(sums, spare=self.room_behind(roster))
        if roster.averages_parameters:
            flat_parameters(self.holdings.module, self.parameter_bounds(roster.step)[0], share[length:])
        return share

    @property
    def averages_by(self) -> tuple[int, bool, int]:
        """Microbatches, whether this stage averages in two levels, as far as this peer knows its members, and then by how many sections."""
        members, size = self._live().members(self.record.stage, self.record.step), self._manifest.swarm.group_size
        return self.num_microbatches, forms_groups(members, size), num_sections_of(size)

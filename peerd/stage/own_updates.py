"""Local steps at a peer of a swarm: the parameters that it computes with, and its own updates of them (rule 19, seal).

The parameters that all peers of the stage begin a step with stay as they are in its holdings: evaluations, downloads, checkpoints and
the step's own update use those. A peer computes with a copy, which each sealed batch changes. The copy as it was at one moment is a
*version*. A microbatch's backward pass uses the version of its forward pass, so a version is kept while a microbatch of the step that is
on its way needs it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.errors import WrongStateError
from peerd.models.module import StageModule
from peerd.policy.step.batches import MOST_EARLIER
from peerd.stage.accumulator import Accumulator
from peerd.stage.holdings import Holdings
from peerd.stage.local_steps import change_of
from peerd.stage.moves import BEGUN, MoveLog, VersionId
from peerd.stage.optimizer import Optimizer
from peerd.stage.results import HeldMicrobatch
from peerd.table.record import PeerId, PeerRecord


class Version:
    """The parameters of one stage as they are between two of a peer's own updates."""

    def __init__(self, module: StageModule, name: VersionId = BEGUN) -> None:
        self.name = name
        self._module: StageModule | None = module
        """None once a round has opened, or the step is over."""
        self._users: list[weakref.ref[HeldMicrobatch]] = []
        """A microbatch whose call has failed is gone without a job: nobody says so."""

    @property
    def module(self) -> StageModule:
        """Raises WrongStateError once it is gone."""
        if self._module is None:
            raise WrongStateError("the step is about to be over, and the parameters of the forward pass are gone")
        return self._module

    @property
    def is_used(self) -> bool:
        """Whether a microbatch is on its way that was computed forward with it."""
        return any(batch is not None and batch.version is self for batch in [user() for user in self._users])

    def hold_for(self, batch: HeldMicrobatch) -> None:
        self._users = [user for user in self._users if user() is not None]
        self._users.append(weakref.ref(batch))
        batch.version = self

    def let_go(self) -> None:
        """Free the memory: the microbatches that were computed forward with it are given up here."""
        self._module = None
        for batch in [user() for user in self._users]:
            if batch is not None and batch.version is self:
                batch.output = batch.module = None


class OwnUpdates:
    """Every method is a job for the executor's thread; other threads may read `keeps_versions`."""

    def __init__(self, manifest: Manifest, holdings: Holdings, moves: MoveLog) -> None:
        self.moves = moves
        self._manifest = manifest
        self._holdings = holdings
        self._inner = self._fresh()
        """Its moments are this peer's own. They go on from step to step, and no other peer learns them."""
        self._has_begun = False
        """Whether an update was made with them since the step began."""
        self._present: Version | None = None
        """None until the step's first pass, and again once all updates are dropped."""
        self._earlier: list[Version] = []
        self.keeps_versions = False
        """Whether microbatches on their way need as many earlier versions as are kept."""

    def _fresh(self) -> Optimizer:
        return Optimizer(self._manifest.inner, dict(self._holdings.module.named_parameters()), self._holdings.places.host)

    def version(self) -> Version:
        """The version that a pass computes with now."""
        self.look()
        if self._present is None:
            self._present = Version(copy.deepcopy(self._holdings.module))
        return self._present

    def begin(self) -> None:
        """Begin a step. This cannot fail."""
        if self._present is not None:
            self._present.let_go()
        self._present, self._has_begun = None, False
        self._let_go_of_earlier()
        self.moves.restart(anew=False)

    def end(self) -> None:
        """A round opens, so that all microbatches are added somewhere: those that are still on their way here go back to their callers."""
        if self._present is not None and self._present.is_used:
            module = self._present.module
            self._present.let_go()
            self._present = Version(module, self._present.name)
        self._let_go_of_earlier()

    def _let_go_of_earlier(self) -> None:
        for version in self._earlier:
            version.let_go()
        self._earlier, self.keeps_versions = [], False

    def take_back(self) -> None:
        """Go back to the parameters that the step began with. Microbatches on their way keep the versions that they need."""
        self._put_aside()
        self._present = None
        self.moves.take_back()

    def forget(self) -> None:
        """Another state was loaded: moments of updates that led elsewhere count no more."""
        self.begin()
        self._inner = self._fresh()
        self.moves.restart(anew=True)

    def update(self, mine: PeerRecord, batch: PeerId, sums: Mapping[str, Tensor], num_microbatches: int) -> None:
        """Make an update of the mean of a batch's summed gradients. After an error the parameters are as the step began."""
        before = self.version()
        try:
            module = copy.deepcopy(before.module) if before.is_used else before.module
            self._inner.move_to(dict(module.named_parameters()))
            if not self._has_begun and mine.step == self._manifest.train.local_steps_after > 0:
                self._inner.begin_from(self._holdings.optimizer)
            self._has_begun = True
            self._inner.update(mine.step, sums, lambda total: total / num_microbatches)
        except BaseException:
            self.forget()
            raise
        self._put_aside()
        self._present = Version(module, self.moves.seal(mine, batch))

    def put_change(self, into: Accumulator, num_microbatches: int) -> None:
        """Write this peer's change of the parameters since the step began, downhill, times so many microbatches, in place of gradients."""
        now = None if self._present is None else dict(self._present.module.named_parameters())
        views = into.sums(into.flat)
        with torch.no_grad():
            for name, begun in self._holdings.module.named_parameters():
                if now is None:
                    views[name].zero_()
                else:
                    views[name].copy_(change_of(begun, now[name], num_microbatches, into.flat.dtype))

    def look(self) -> None:
        """Let versions go that no microbatch needs."""
        self._earlier = [version for version in self._earlier if version.is_used]
        self.keeps_versions = len(self._earlier) >= MOST_EARLIER and self._present is not None and self._present.is_used

    def _put_aside(self) -> None:
        if self._present is not None and self._present.is_used:
            self._earlier.append(self._present)
        self.look()

"""What a peer does for the run with its data: launch microbatches, evaluate, give the data to others; or fetch it first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from peerd.config.manifest import Manifest
from peerd.config.paths import cache_folder
from peerd.daemon.run_data import SWARM
from peerd.errors import PeerdError
from peerd.policy.route.evaluating import newest_evaluation
from peerd.policy.route.launching import first_step_owned
from peerd.swarm.membership import Membership
from peerd.table.record import Evaluation
from peerd.train.corpus import Corpus
from peerd.train.evaluator import Evaluator
from peerd.train.samples import Microbatches
from peerd.train.sharing import DataFetcher, DataGiver
from peerd.train.trainer import Trainer
from peerd.wire.clients import DataClient
from peerd.wire.dispatch import Dispatcher

LOG = structlog.get_logger()


class Training:
    """Without the data nothing but what the swarm tells of evaluations; `run` serves for as long as the stage."""

    def __init__(self, manifest: Manifest, membership: Membership, dispatcher: Dispatcher, client: DataClient, patience_s: float) -> None:
        self._manifest = manifest
        self._membership = membership
        self._dispatcher = dispatcher
        self.giver = DataGiver(manifest.data, cache_folder())
        self.fetcher = DataFetcher(client, membership, manifest.data, cache_folder(), patience_s)
        self.fetches = False
        """Told to fetch the data from a peer."""
        self.trainer: Trainer | None = None
        self.trains_from = 0
        self._evaluator: Evaluator | None = None
        self.on_change: Callable[[], None] = lambda: None
        """The data has come, or an evaluation was made."""

    def begin(self, corpus: Microbatches) -> None:
        """The data is here. Where others train already, it is theirs for a while."""
        self._own_from_now()
        self.giver.has_tokens = isinstance(corpus, Corpus)
        self.trainer = Trainer(self._manifest, corpus, self._membership, self._dispatcher)
        if self._manifest.train.evaluate_every_steps:
            self._evaluator = Evaluator(self._manifest, corpus, self._membership, self._dispatcher, self.on_change)

    async def run(self) -> None:
        if self.trainer is None and self.fetches:
            try:
                self.begin(await asyncio.to_thread(Corpus, await self.fetcher.fetch(), self._manifest))
            except PeerdError as error:  # without the data this peer serves its stage all the same
                LOG.warning("the data cannot be fetched", reason=str(error))
                return
            self.on_change()
        elif self.trainer is not None:
            self._own_from_now()  # entering may have taken as long as a step
        async with asyncio.TaskGroup() as group:
            for part in (self.trainer, self._evaluator):
                if part is not None:
                    group.create_task(part.run())

    def _own_from_now(self) -> None:
        train = self._manifest.train
        self.trains_from = first_step_owned(self._membership.live(), train.num_stages, train.overlaps_steps)

    @property
    def data_state(self) -> str:
        """Whether the run's data is here, in words."""
        if self.trainer is not None:
            return "here: launches microbatches, and gives it to peers that fetch it"
        if self.fetches:
            return f"being fetched from peers: {self.fetcher.bytes_done / 1e6:.1f} of {self.fetcher.bytes_total / 1e6:.1f} MB"
        return f"not here: launches no microbatches (`peerd join --data {SWARM}` fetches it)"

    @property
    def evaluation(self) -> Evaluation | None:
        """The newest that this peer has made or heard of."""
        if not self._manifest.train.evaluate_every_steps:
            return None
        mine = self._evaluator.newest if self._evaluator else None
        return newest_evaluation(self._membership.live(), self._manifest.train.num_stages, mine)

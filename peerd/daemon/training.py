"""The work of a peer with the run's data: it launches microbatches, evaluates, and gives the data to others, or fetches it first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from peerd.background import keep
from peerd.config.manifest import Manifest
from peerd.daemon.run_data import SWARM
from peerd.errors import PeerdError
from peerd.policy.route.launching import first_step_owned
from peerd.swarm.membership import Membership
from peerd.table.record import Evaluation
from peerd.train.corpus import Corpus
from peerd.train.evaluator import Evaluator, evaluation_of
from peerd.train.samples import Microbatches
from peerd.train.sharing import DataFetcher, DataGiver
from peerd.train.trainer import Trainer
from peerd.wire.call_tracing import CallTracing
from peerd.wire.dispatch import Dispatcher

LOG = structlog.get_logger()


class HeldData:
    """The run's data on this machine. It stays when this peer moves to another stage."""

    def __init__(self, manifest: Manifest, corpus: Microbatches | None, fetcher: DataFetcher | None, giver: DataGiver) -> None:
        """`fetcher` is given if the data is fetched from peers."""
        self._manifest = manifest
        self._fetcher = fetcher
        self._giver = giver
        self.corpus: Microbatches | None = None
        if corpus is not None:
            self._take(corpus)

    async def get(self) -> Microbatches | None:
        """Return the data, fetched first if that was asked for; None if there is none."""
        if self.corpus is None and self._fetcher is not None:
            try:
                self._take(await asyncio.to_thread(Corpus, await self._fetcher.fetch(), self._manifest))
            except PeerdError as error:  # this peer serves its stage also without the data
                LOG.warning("the data cannot be fetched", reason=str(error))
        return self.corpus

    def _take(self, corpus: Microbatches) -> None:
        self.corpus = corpus
        self._giver.has_tokens = isinstance(corpus, Corpus)

    @property
    def tokens(self) -> Corpus | None:
        """The run's tokens, if they are here. Samples that a model makes itself may be rounded in another way elsewhere."""
        return self.corpus if isinstance(self.corpus, Corpus) else None

    @property
    def state(self) -> str:
        """States in words whether the run's data is here."""
        if self.corpus is not None:
            return "here: launches microbatches, and gives it to peers that fetch it"
        if self._fetcher is not None:
            return f"being fetched from peers: {self._fetcher.bytes_done / 1e6:.1f} of {self._fetcher.bytes_total / 1e6:.1f} MB"
        return f"not here: launches no microbatches (`peerd join --data {SWARM}` fetches it)"


@dataclass(eq=False)
class Training:
    """Launches and evaluates while a stage is served. Without the data it only knows evaluations that other peers report."""

    _manifest: Manifest
    _membership: Membership
    _dispatcher: Dispatcher
    _data: HeldData
    _announce: Callable[[], None]
    """Tells others that the data has come, or that an evaluation was made."""
    _tracing: CallTracing
    trainer: Trainer | None = None
    trains_from: int = 0
    _evaluator: Evaluator | None = None

    def __post_init__(self) -> None:
        if self._data.corpus is not None:
            self._begin(self._data.corpus)

    def _begin(self, corpus: Microbatches) -> None:
        self._own_from_now()
        self.trainer = Trainer(self._manifest, corpus, self._membership, self._dispatcher, self._tracing)
        if self._manifest.train.evaluate_every_steps:
            self._evaluator = Evaluator(self._manifest, corpus, self._membership, self._dispatcher, self._announce)

    async def run(self) -> None:
        if self.trainer is None:
            corpus = await self._data.get()
            if corpus is None:
                return
            self._begin(corpus)
            self._announce()
        else:
            self._own_from_now()  # entering may have taken longer than a step
        async with asyncio.TaskGroup() as group:
            for part in (self.trainer, self._evaluator):
                if part is not None:
                    group.create_task(keep(part.run))

    def _own_from_now(self) -> None:
        """Begin with a later step if others train already: the current step is theirs."""
        train = self._manifest.train
        self.trains_from = first_step_owned(self._membership.live(), train.num_stages, train.overlaps_steps)

    @property
    def evaluation(self) -> Evaluation | None:
        """The newest evaluation that this peer has made or believes."""
        if not self._manifest.train.evaluate_every_steps:
            return None
        return evaluation_of(self._membership.live(), self._manifest, self.evaluated)

    @property
    def evaluated(self) -> Evaluation | None:
        """The newest evaluation that this peer has made."""
        return self._evaluator.newest if self._evaluator else None

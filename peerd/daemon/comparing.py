"""Compares a stage's state that a peer downloads, without serving that stage, with those of other peers of the stage: rule 21 (prove)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from peerd.background import Tasks
from peerd.errors import BadMessageError
from peerd.policy.step.certificates import apart_from_most
from peerd.policy.step.proving import Opinion, StateVerdict, drawn, verdict
from peerd.stage.download import Downloader
from peerd.stage.sketches import Sketch, StateResidual, distances, new_seed, sketch_of
from peerd.stage.snapshots import Downloaded
from peerd.table.record import PeerId
from peerd.table.view import LiveView
from peerd.wire.messages import Snapshot

LOG = structlog.get_logger()
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Compared:
    """A stage's state, and what its other peers say of it."""

    found: Downloaded
    opinion: Opinion


class Comparing:
    """One download. As soon as a donor has named the hashes of all chunks, it can give nothing else any more.

    Then this peer draws a seed, and asks others for the sketch of their state of that step under the seed, before they go on to the next
    one.
    """

    def __init__(self, downloader: Downloader, live: Callable[[], LiveView], stage: int, patience_s: float) -> None:
        """`patience_s`: for how long others are waited for once the state is here."""
        self._downloader = downloader
        self._live = live
        self._stage = stage
        self._patience_s = patience_s
        self._tasks = Tasks()
        self._seed, self._asked, self._silent = b"", list[PeerId](), set[PeerId]()
        self._sums: dict[PeerId, bytes] = {}
        """Of the sketches that were told of the step in question."""

    async def download(self) -> Compared:
        """Download the state. Raises StageError if no donor can give it."""
        try:
            found = await self._downloader.download(self._stage, begun=self._ask_all)
            givers = self._downloader.givers
            own = await asyncio.to_thread(sketch_of, found.tensors, self._seed)
            return await self._judged(found, own, givers)
        finally:
            self._tasks.cancel()

    def _ask_all(self, header: Snapshot) -> None:
        live = self._live()
        serving = [record for record in live.serving(self._stage) if record.peer != live.me]
        others = apart_from_most(serving)
        self._tasks.cancel()
        self._seed, self._sums, self._silent = new_seed(), {}, set()
        self._asked = drawn(self._seed, [record for record in serving if record.peer not in others])
        for peer in self._asked:
            self._tasks.start(self._ask(peer, header.step, self._seed))

    async def _ask(self, peer: PeerId, step: int, seed: bytes) -> None:
        """Ask until it tells its state of this step. One that is past it, or refuses, is silent."""
        while True:
            answer = await self._downloader.sketch(peer, self._stage, seed)
            told = answer.told
            if not answer.is_busy and (told is None or told[0] >= step):
                break
            await asyncio.sleep(answer.again_s)
        if seed != self._seed:
            return
        if told is not None and told[0] == step:
            self._sums[peer] = told[1]
        else:
            self._silent.add(peer)

    async def _judged(self, found: Downloaded, own: Sketch, givers: frozenset[PeerId]) -> Compared:
        """Wait until enough have told their states, or all have had their time."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._patience_s
        while True:
            residuals = self._residuals(own, givers)
            known = [peer for peer in self._asked if peer in residuals or peer in givers]
            is_over = loop.time() >= until_s or all(peer in self._silent or peer in known for peer in self._asked)
            found_verdict = verdict(known, len(self._asked), distances(residuals), is_over=is_over) if self._asked else StateVerdict.OPEN
            if found_verdict in (StateVerdict.RIGHT, StateVerdict.WRONG) or is_over:
                return Compared(found, Opinion(found_verdict, len(self._asked), givers))
            await asyncio.sleep(LOOK_S)

    def _residuals(self, own: Sketch, givers: frozenset[PeerId]) -> dict[PeerId, StateResidual]:
        """By how much others' states are off this one. Those that gave it hold it."""
        found: dict[PeerId, StateResidual] = {}
        for peer, sums in list(self._sums.items()):
            try:
                if peer not in givers:
                    found[peer] = own.residual(sums)
            except BadMessageError as error:
                LOG.warning("a peer's sketch of its state is refused", peer=peer, error=error.message)
                del self._sums[peer]
                self._silent.add(peer)
        return found

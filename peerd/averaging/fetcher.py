"""Fetches from other peers what a finished average lacks here: a mate's average, or gradients of a tied weight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence

import structlog
from torch import Tensor

from peerd.averaging.compression import Compression
from peerd.averaging.handover import finite, unpacked, unpacked_section
from peerd.averaging.partial_average import Believe, PartialAverage, believed
from peerd.averaging.slices import Signatures
from peerd.errors import BadMessageError, PeerGoneError, RemoteError, WrongStateError
from peerd.policy.route.admission import MOST_DONORS
from peerd.stage.executor import Executor, Priority
from peerd.stage.gathering import Gathering
from peerd.stage.results import HeldAverage
from peerd.stage.sections import SectionOfAverage
from peerd.stage.state import StageState
from peerd.table.record import AverageId, PeerId
from peerd.timeline.spans import SpanKind, SpanRing
from peerd.wire.chunks import digest_of
from peerd.wire.clients import AveragingClient
from peerd.wire.messages import Average
from peerd.wire.tensors import decode_flat

LEAST_OF_EACH = 1 << 20
"""One mate more is asked for so many bytes of an average: a small one comes sooner than others could be compared."""
LOOK_S = 1.0
LOG = structlog.get_logger()


Failed = Callable[[PeerId, RemoteError], object]
"""Is told of each mate that was asked for a part of an average and did not give it, or gave something else."""


def _unheeded(_peer: PeerId, _error: RemoteError) -> None: ...


class AverageFetcher:
    """What it returns is checked; it changes nothing."""

    def __init__(
        self,
        state: StageState,
        arithmetic: Executor,
        client: AveragingClient,
        averaging_s: float,
        spans: SpanRing,
        signatures: Signatures,
        compression: Compression,
    ) -> None:
        self._state = state
        self._arithmetic = arithmetic
        self._client = client
        self._averaging_s = averaging_s
        self._spans = spans
        self._signatures = signatures
        self._compression = compression

    async def fetch(
        self, peer: PeerId, step: int, others: Sequence[PeerId] = (), failed: Failed = _unheeded, believe: Believe = believed
    ) -> HeldAverage:
        """Fetch and check a finished average of this stage, of several mates at once, with the tied sum that they applied.

        Nothing is downloaded of one that this peer does not `believe` by its header.
        `others` are asked for chunks, too, as far as there are enough. `failed` hears of those of them that do not give it. Raises the
        error of `peer` if nobody gives it: WrongStateError, among others, if this peer cannot adopt it.
        """
        most = min(MOST_DONORS, -(-self._state.accumulator.flat.nbytes // LEAST_OF_EACH))
        partial = PartialAverage(self._state, self._signatures, self._compression, step, believe=believe)
        average, givers = await self._gather(partial, (peer, *others)[:most], None, failed)
        try:
            return await self._arithmetic.run(Priority.CONTROL, lambda: unpacked(average, partial.whole, self._state))
        except BadMessageError as error:
            for giver in givers:
                failed(giver, error)
            raise PeerGoneError(f"no sound average came: {error.message}") from None

    async def fetch_section(self, peer: PeerId, step: int, section: int) -> SectionOfAverage:
        """Fetch and check one section of a mate's average. Raises RemoteError."""
        partial = PartialAverage(self._state, self._signatures, self._compression, step, section)
        average, _ = await self._gather(partial, (peer,), section, _unheeded)
        given = average, partial.whole, self._state, self._compression
        return await self._arithmetic.run(Priority.CONTROL, lambda: unpacked_section(*given))

    async def _gather(
        self, partial: PartialAverage, peers: Sequence[PeerId], section: int | None, failed: Failed
    ) -> tuple[Average, Collection[PeerId]]:
        """Get all chunks from these mates. Returns the header, and those that have given it and chunks.

        Raises the first one's error if they do not give them.
        """
        state, patience_s = self._state, 2 * self._averaging_s
        first, errors = peers[0], dict[PeerId, RemoteError]()
        gathering = Gathering(lambda peer: self._client.open_average(peer, state.record.stage, partial.step, section, patience_s), partial)
        for peer in peers:
            gathering.ask(peer)
        try:
            while gathering.donors and not partial.is_complete:
                for peer, error in (await gathering.ended(LOOK_S)).items():
                    if error is not None:
                        errors[peer] = error
            errors |= dict.fromkeys(gathering.silent, PeerGoneError("it offered nothing while others gave all of it"))
        finally:
            await gathering.close()
        for peer, error in errors.items():
            if isinstance(error, BadMessageError):
                LOG.warning("what a mate gives of an average is wrong: others are asked for it", mate=peer, error=error.message)
            if peer != first or partial.is_complete:
                failed(peer, error)
        if partial.header is None or not partial.is_complete:
            raise errors.get(first) or PeerGoneError("the average ended early")
        return partial.header, gathering.givers

    async def _hashes_of_tied(self, peers: Sequence[PeerId], step: int, wanted: AverageId) -> list[bytes]:
        """What those that answer tell."""
        asked = (self._client.get_tied_hash(peer, step, wanted, 2 * self._averaging_s) for peer in peers)
        told = await asyncio.gather(*asked, return_exceptions=True)
        for error in told:
            if isinstance(error, BaseException) and not isinstance(error, RemoteError):
                raise error
        return [each for each in told if isinstance(each, bytes)]

    async def fetch_tied(self, peer: PeerId, step: int, wanted: AverageId, others: Sequence[PeerId] = (), least: int = 1) -> Tensor:
        """Fetch and check gradients of a tied weight by their id: [num_tied] on the CPU.

        `others` hold the same: `least` peers have to tell the hash of what has come, its giver among them. Raises WrongStateError if not.
        """
        dtype, length = self._state.accumulator.flat.dtype, self._state.accumulator.num_tied
        began_s = time.monotonic()
        chunks = await self._client.get_tied(peer, step, wanted, length * dtype.itemsize, 2 * self._averaging_s)
        self._spans.add(SpanKind.EXCHANGE, began_s, step, -1, peer, length * dtype.itemsize)
        if least > 1:
            came, told = await asyncio.to_thread(digest_of, chunks), await self._hashes_of_tied(others, step, wanted)
            if 1 + told.count(came) < least:
                raise WrongStateError("too few of the peers that hold gradients of a tied weight hold these")
        return await self._arithmetic.run(Priority.CONTROL, lambda: finite(decode_flat(chunks, dtype)))

"""Fetches from other peers what a finished average lacks here: a mate's average, or gradients of a tied weight."""

from __future__ import annotations

import time

from torch import Tensor

from peerd.averaging.handover import finite, unpacked, unpacked_section
from peerd.errors import WrongStateError
from peerd.policy.step.groups import section_bounds
from peerd.policy.step.roster import Roster, why_not_adopt
from peerd.stage.executor import Executor, Priority
from peerd.stage.results import HeldAverage
from peerd.stage.state import StageState
from peerd.table.record import AverageId, PeerId
from peerd.timeline.spans import SpanKind, SpanRing
from peerd.wire.clients import AveragingClient
from peerd.wire.messages import Average
from peerd.wire.tensors import decode_flat


class AverageFetcher:
    """What it returns is checked, on the thread of `arithmetic`; it changes nothing."""

    def __init__(self, state: StageState, arithmetic: Executor, client: AveragingClient, averaging_s: float, spans: SpanRing) -> None:
        self._state = state
        self._arithmetic = arithmetic
        self._client = client
        self._averaging_s = averaging_s
        self._spans = spans

    async def fetch(self, peer: PeerId, step: int) -> HeldAverage:
        """Fetch and check a mate's finished average of this stage, with the tied sum that it applied if it has finished the step.

        Raises WrongStateError if this peer cannot adopt it.
        """
        received = await self._client.get_average(peer, self._state.record.stage, step, self._num_bytes, 2 * self._averaging_s)
        reason = why_not_adopt(self._state.record, step, received[0].lineage)
        if reason is not None:
            raise WrongStateError(reason)
        return await self._arithmetic.run(Priority.CONTROL, lambda: unpacked(received, self._state, step))

    def _num_bytes(self, average: Average) -> int:
        """What an average has, with the parameters that were averaged with it and a tied weight's gradients."""
        sums = self._state.accumulator
        return (self._state.round_length(average.roster) + (sums.num_tied if average.tied_sum else 0)) * sums.flat.itemsize

    async def fetch_section(self, peer: PeerId, step: int, section: int) -> tuple[Roster, Tensor]:
        """Fetch and check one section of a mate's average. Returns its round's roster and its elements.

        Raises WrongStateError if this peer cannot adopt it.
        """
        state = self._state
        start, end = section_bounds(state.accumulator.flat.numel(), section, state.num_sections)
        num_bytes = (end - start) * state.accumulator.flat.itemsize
        received = await self._client.get_average(peer, state.record.stage, step, lambda _: num_bytes, 2 * self._averaging_s, section)
        if reason := why_not_adopt(state.record, step, received[0].lineage):
            raise WrongStateError(reason)
        return await self._arithmetic.run(Priority.CONTROL, lambda: unpacked_section(received, state, step, section))

    async def fetch_tied(self, peer: PeerId, step: int, wanted: AverageId) -> Tensor:
        """Fetch and check gradients of a tied weight by their id: [num_tied] on the CPU."""
        dtype, length = self._state.accumulator.flat.dtype, self._state.accumulator.num_tied
        began_s = time.monotonic()
        chunks = await self._client.get_tied(peer, step, wanted, length * dtype.itemsize, 2 * self._averaging_s)
        self._spans.add(SpanKind.EXCHANGE, began_s, step, -1, peer, length * dtype.itemsize)
        return await self._arithmetic.run(Priority.CONTROL, lambda: finite(decode_flat(chunks, dtype)))

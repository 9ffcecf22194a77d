"""The calling side of a state's download."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from peerd.errors import BadMessageError
from peerd.generated import state_pb2, state_pb2_grpc
from peerd.link.traffic import PeerRole
from peerd.table.forms import MAX_COUNT
from peerd.table.record import PeerId
from peerd.wire import convert
from peerd.wire.chunk_streams import Offer, Source, offer
from peerd.wire.clients import Client
from peerd.wire.messages import MOST_SKETCH_BYTES, Snapshot, StateRequest, ToldSketch


class StateClient(Client):
    stub_of = state_pb2_grpc.StateStub

    @contextlib.asynccontextmanager
    async def open(self, peer: PeerId, request: StateRequest, patience_s: float) -> AsyncIterator[Offer[Snapshot]]:
        """Open a donor's snapshot. It is closed with the block. Raises RemoteError."""
        first = state_pb2.StateRequest(
            run=self._run, stage=request.stage, snapshot=request.snapshot, step=request.step, tied_only=request.tied_only
        )
        source = Source(peer, "state", PeerRole.DONOR, self._links.traffic, patience_s)
        async with offer((await self._stub(peer)).GetState, first, source, convert.snapshot_from) as opened:
            yield opened

    async def sketch(self, peer: PeerId, stage: int, seed: bytes, previous: bool, timeout_s: float) -> ToldSketch:
        """Ask a peer for the sketch of the state that it holds now, or of the parameters of the step before alone. Raises RemoteError."""
        request = state_pb2.SketchRequest(run=self._run, stage=stage, seed=seed, previous=previous)
        reply = await self._ask(peer, "GetSketch", request, timeout_s)
        if len(reply.sums) > MOST_SKETCH_BYTES or reply.step >= MAX_COUNT:
            raise BadMessageError("the sketch of a state is damaged")
        return ToldSketch(reply.step, reply.sums)

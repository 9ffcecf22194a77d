"""The called side of direct connections: each end shows the other its certificate."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from peerd.errors import BusyError, PeerGoneError
from peerd.generated import direct_pb2, direct_pb2_grpc
from peerd.link.bundle import Bundles
from peerd.link.direct import Showing
from peerd.link.local import Neighbours
from peerd.link.pins import Pins
from peerd.link.punching import Holes
from peerd.table.record import PeerId
from peerd.wire.door import Door
from peerd.wire.services import BehindDoor


class DirectServicer(BehindDoor, direct_pb2_grpc.DirectServicer):
    register = staticmethod(direct_pb2_grpc.add_DirectServicer_to_server)

    def __init__(
        self,
        door: Door,
        pins: Pins,
        showing: Showing,
        neighbours: Neighbours | None = None,
        is_known: Callable[[PeerId], bool] = lambda _peer: True,
        bundles: Bundles | None = None,
        holes: Holes | None = None,
    ) -> None:
        """`is_known` tells whether a peer is in the table; the certificates of all others go first where there are too many.

        `bundles`: None where a path has one connection. `holes`: None where no connections through routers are made.
        """
        self._door = door
        self._pins = pins
        self._showing = showing
        self._neighbours = neighbours
        self._is_known = is_known
        self._bundles = bundles
        self._holes = holes

    async def Show(self, request: direct_pb2.ShowRequest, context: Any) -> direct_pb2.ShowReply:
        async with self._door.answering(context) as caller:
            if not self._showing.port or not self._pins.show(caller, request.certificate):
                return direct_pb2.ShowReply()
            if not self._is_known(caller):
                self._pins.release(caller)
        reply = direct_pb2.ShowReply(port=self._showing.port, certificate=self._showing.certificate.der)
        if self._neighbours is not None and self._showing.socket and (token := self._neighbours.token_for(caller, request.neighbour)):
            reply.socket, reply.token = self._showing.socket, token
        return reply

    async def Carry(self, blocks: AsyncIterator[direct_pb2.Block], context: Any) -> AsyncIterator[direct_pb2.Block]:
        async with self._door.answering(context) as caller:
            if self._bundles is None:
                raise BusyError("one connection at a time is taken here")
            first = await self._door.read(blocks)
            if first is None:
                raise PeerGoneError("the call ended before its first message")
            async with contextlib.aclosing(self._bundles.carry(caller, first, blocks)) as carried:
                async for block in carried:
                    yield block

    async def Punch(self, request: direct_pb2.End, context: Any) -> direct_pb2.End:
        async with self._door.answering(context) as caller:
            return await self._holes.answer(caller, request) if self._holes is not None else direct_pb2.End()

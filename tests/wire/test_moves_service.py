"""Moves of local steps, as one mate tells them to another."""

from __future__ import annotations

from typing import cast

import pytest

from peerd.errors import BadMessageError
from peerd.link.traffic import Traffic
from peerd.table.record import PeerId
from peerd.wire.clients import AveragingClient
from peerd.wire.door import Door
from peerd.wire.handlers import AveragingHandler
from peerd.wire.messages import MOST_TOLD_BYTES, ToldMoves
from peerd.wire.services import AveragingServicer
from tests.link.local_peers import serving
from tests.wire.callee import DOOR_PATIENCE_S, PATIENCE_S, RUN, Callee


class Notes:
    """Tells so many bytes of moves."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    async def get_moves(self, incarnation: int, first: int) -> ToldMoves:
        return ToldMoves(incarnation + 1, first + 2, bytes(self._num_bytes))


@pytest.mark.parametrize("num_bytes", [0, 300, MOST_TOLD_BYTES])
async def test_moves_of_local_steps_come_as_they_were_told(num_bytes: int) -> None:
    door = Door(RUN, DOOR_PATIENCE_S, Traffic())
    async with serving([AveragingServicer(door, cast(AveragingHandler, Notes(num_bytes)))]) as served:
        links = served.links_of("caller")
        client = AveragingClient(links, RUN)
        assert await client.get_moves(PeerId("caller"), 6, 40, PATIENCE_S) == ToldMoves(7, 42, bytes(num_bytes))
        for traffic, way in ((door.traffic, "sent"), (links.traffic, "received")):
            assert traffic.tensors["moves", "none", "stage_peer", way] == num_bytes


async def test_more_moves_than_may_be_told_at_once_are_refused() -> None:
    door, notes = Door(RUN, DOOR_PATIENCE_S, Traffic()), cast(AveragingHandler, Notes(MOST_TOLD_BYTES + 1))
    async with serving([AveragingServicer(door, notes)]) as served:
        with pytest.raises(BadMessageError, match="more moves"):
            await AveragingClient(served.links_of("caller"), RUN).get_moves(PeerId("caller"), 6, 40, PATIENCE_S)


async def test_a_peer_whose_steps_are_not_local_has_no_moves(callee: Callee) -> None:
    assert await AveragingClient(callee.links(), RUN).get_moves(callee.caller.peer, 0, 0, PATIENCE_S) == ToldMoves()

"""Direct connections by QUIC: what TLS accepts inside them is what it accepts elsewhere, and a hole that closes is noticed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from peerd.errors import BusyError, PeerGoneError
from peerd.generated import direct_pb2
from peerd.link import punched_line, punching, quic
from peerd.link.streams import Stream
from peerd.link.throttle import Throttles
from peerd.policy.route import holes as holes_policy
from peerd.policy.route.holes import QuicCounts
from peerd.table.record import PeerId
from tests.link.direct_peers import WITHIN_S, caller_through, endpoint, given_up, tried
from tests.wire.callee import new_identity

pytestmark = pytest.mark.skipif(not quic.is_installed(), reason="needs the package iroh")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():  # noqa: ASYNC110 - what the library does is only to be looked at
            await asyncio.sleep(0.01)


async def test_a_path_to_a_peer_without_an_address_opens_by_quic_and_the_callee_knows_who_calls() -> None:
    async with endpoint() as there:
        caller = new_identity()
        links, paths, holes = there.paths_through_routers(caller, throttles := Throttles())
        channel = await tried(paths, there.peer)
        assert await links.channel_for_tensors(there.peer) is channel is not None
        assert await caller_through(channel) == caller.peer
        assert paths.is_punched(there.peer)
        assert (paths.num_punched, paths.num_local, paths.num_connections, paths.widening(there.peer)) == (1, 0, 0, None)
        assert throttles.upload.total == there.throttles.download.total > 0
        assert throttles.download.total == there.throttles.upload.total > len(caller.peer)
        line = holes.line(there.peer)
        assert line is not None
        assert line.connection.address == f"127.0.0.1:{there.holes.port}"
        assert min(holes.num_bytes) > throttles.upload.total


async def test_the_other_end_uses_the_connection_that_there_is() -> None:
    async with endpoint() as there:
        caller = new_identity()
        _, paths, holes = there.paths_through_routers(caller)
        assert await tried(paths, there.peer) is not None
        await until(lambda: there.holes.line(caller.peer) is not None)
        before = list(there.holes._lines), holes.num_lines
        assert (await there.holes.target(caller.peer)).startswith("unix:")
        assert (list(there.holes._lines), holes.num_lines) == before


async def test_a_cap_ends_the_path_and_its_end_brings_one_back() -> None:
    async with endpoint() as there:
        links, paths, _ = there.paths_through_routers(new_identity(), throttles := Throttles())
        assert await tried(paths, there.peer) is not None
        throttles.upload.rate = 1e6
        assert await links.channel_for_tensors(there.peer) is await links.channel(there.peer, for_tensors=True)
        assert not paths.is_punched(there.peer)
        throttles.upload.rate = 0.0
        assert paths.is_punched(there.peer)
        there.throttles.download.rate = 1e6
        await there.endpoint._look()
        assert not (await there.holes.answer(PeerId("somebody"), direct_pb2.End(node=bytes(32), addresses=["127.0.0.1:9"]))).node


async def test_a_connection_that_breaks_ends_the_path_and_the_calls_on_it() -> None:
    async with endpoint() as there:
        caller = new_identity()
        links, paths, holes = there.paths_through_routers(caller)
        channel = await tried(paths, there.peer)
        there.callers.may_answer.clear()
        call = asyncio.ensure_future(caller_through(channel))
        await there.callers.asked.wait()
        connected = list(there.holes._lines)  # perhaps two: both ends may have dialled, and the second may come after the cut
        holes.cut(there.peer)
        with pytest.raises(Exception, match="UNAVAILABLE"):
            await call
        await given_up(paths, there.peer)
        assert await links.channel_for_tensors(there.peer) is await links.channel(there.peer, for_tensors=True)
        await until(lambda: any(line not in there.holes._lines for line in connected))


async def test_a_hole_that_closes_is_noticed_by_who_has_data_to_send_and_the_other_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for an answer has nothing to send, by which it would notice."""
    monkeypatch.setattr(punched_line, "WATCH_S", 0.02)
    monkeypatch.setattr(holes_policy, "DOUBT_S", 0.1)
    monkeypatch.setattr(holes_policy, "ASK_EACH_S", 0.05)
    async with endpoint() as there:
        caller = new_identity()
        _, paths, holes = there.paths_through_routers(caller)
        assert await tried(paths, there.peer) is not None
        await until(lambda: there.holes.line(caller.peer) is not None)
        told, looks, node = list[PeerId](), itertools.count(1), await there.holes._own_node()
        measured: Any = quic.QuicConnection.carried.fget  # type: ignore[attr-defined]

        def carried(connection: quic.QuicConnection) -> QuicCounts:
            """Of the caller's: packets go out, and none comes."""
            now: QuicCounts = measured(connection)
            return QuicCounts(now.sent + next(looks), 7) if connection.node == node.key else now

        monkeypatch.setattr(there.holes, "_end_silent", told.append)
        monkeypatch.setattr(quic.QuicConnection, "carried", property(carried))
        await given_up(paths, there.peer)
        await until(lambda: holes.line(there.peer) is None)
        await until(lambda: caller.peer in told)


async def test_who_is_told_that_nothing_comes_back_ends_its_connections_with_the_teller_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with endpoint() as there:
        callers = [new_identity() for _ in range(2)]
        paths = [there.paths_through_routers(caller)[1] for caller in callers]
        for each in paths:
            assert await tried(each, there.peer) is not None
        await until(lambda: all(there.holes.line(caller.peer) is not None for caller in callers))
        closed = direct_pb2.End(node=bytes(32), closed=True)
        assert not (await there.holes.answer(callers[0].peer, closed)).node
        assert paths[0].is_punched(there.peer), "it is younger than what the caller has found silent"
        monkeypatch.setattr(punching, "SILENT_S", 0.0)
        await there.holes.answer(callers[0].peer, closed)
        await given_up(paths[0], there.peer)
        assert there.holes.line(callers[0].peer) is None
        assert there.holes.line(callers[1].peer) is not None
        assert paths[1].is_punched(there.peer)


async def test_a_node_that_nobody_has_told_of_gets_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(punching, "MEET_TIMEOUT_S", 0.2)
    async with endpoint() as there:
        known, stranger = (there.holes_of(new_identity()) for _ in range(2))
        end = await there.holes.answer(known_peer := PeerId("known"), direct_pb2.End())
        node = await stranger._own_node()
        connection = await node.dial(end.node, list(end.addresses))
        await connection.closed()
        assert there.holes.num_lines == 0
        assert there.holes.line(known_peer) is None
        for each in (known, stranger):
            await each.close()


async def unasked(_peer: PeerId) -> bool:
    raise AssertionError("the hole is open")


class QuietConnection:
    """A connection over which only signs of life go, each of them answered."""

    def __init__(self) -> None:
        self.carried, self.round_trip_s, self.is_open = QuicCounts(3_000, 2_000), 0.04, True

    async def streams(self) -> AsyncIterator[Stream]:
        await asyncio.Event().wait()
        for each in list[Stream]():
            yield each

    async def closed(self) -> None:
        await asyncio.Event().wait()

    def close(self) -> None:
        self.is_open = False


async def test_a_connection_without_streams_is_kept_until_its_signs_of_life_have_cost_what_making_it_again_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(punched_line, "WATCH_S", 0.01)
    monkeypatch.setattr(punched_line, "NEW_S", 0.0)
    connection = QuietConnection()
    line = punched_line.PunchedLine(PeerId("peer"), cast(quic.QuicConnection, connection), lambda: ("", 0), unasked)
    running = asyncio.ensure_future(line.run())
    for num_open, carried in ((0, (5_000, 4_999)), (1, (9_000, 9_000)), (0, (11_500, 11_499))):
        line.num_open, connection.carried = num_open, QuicCounts(*carried)
        await asyncio.wait({running}, timeout=0.1)
        assert connection.is_open
    connection.carried = QuicCounts(11_500, 11_500)
    await asyncio.wait_for(running, WITHIN_S)
    assert not connection.is_open


async def test_a_peer_that_can_be_dialled_tells_from_where_packets_come() -> None:
    async with endpoint() as there:
        holes = there.holes_of(new_identity(), mirrors=[there.peer])
        end = await holes.answer(PeerId("somebody"), direct_pb2.End())
        assert list(end.addresses) == [f"127.0.0.1:{holes.port}"]
        assert not holes.seen_at, "nobody was asked"
        node = await holes._own_node()
        assert await holes._find_out(node) == f"127.0.0.1:{holes.port}" == holes.seen_at
        holes.cut_all()
        assert not holes.seen_at
        await holes.close()


async def test_a_caller_is_dialled_a_few_times_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    async with endpoint() as there:
        dialled = []

        async def meet(*arguments: object) -> None:
            dialled.append(arguments)

        monkeypatch.setattr(there.holes, "_meet_at", meet)
        told = direct_pb2.End(node=bytes(32), addresses=["127.0.0.1:9"])
        for _ in range(there.holes._ration.each):
            await there.holes.answer(PeerId("caller"), told)
        with pytest.raises(BusyError, match="within a minute"):
            await there.holes.answer(PeerId("caller"), told)
        assert (await there.holes.answer(PeerId("caller"), direct_pb2.End())).node, "asking costs nothing"
        await asyncio.sleep(0)
        assert len(dialled) == there.holes._ration.each


async def test_without_the_package_all_goes_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(punching, "is_installed", lambda: False)
    async with endpoint() as there:
        _, paths, holes = there.paths_through_routers(new_identity())
        assert await tried(paths, there.peer) is None
        assert "pip install" in holes.why
        assert not (await there.holes.answer(PeerId("caller"), direct_pb2.End())).node
        with pytest.raises(PeerGoneError, match="pip install"):
            await holes.target(there.peer)
        assert (holes.port, there.holes.port) == (0, 0)

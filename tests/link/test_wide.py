"""Several connections at once to a peer: calls on them see one, whichever end sends, and end with the path."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import sys
import tempfile
import termios
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from peerd.errors import BadMessageError, BusyError
from peerd.generated import direct_pb2
from peerd.link import segments, wide
from peerd.link.bundle import ID_BYTES, MOST_OF_ONE, Bundles
from peerd.link.direct import DirectPaths
from peerd.link.line import OwnLine
from peerd.link.links import Links
from peerd.link.segments import KERNELS, SegmentCounts, Segments, UnderWayBounds
from peerd.link.streams import Stream
from peerd.policy.route.parallel import LOOKS_LOSSY
from peerd.table.record import PeerId
from tests.link.direct_peers import WITHIN_S, Endpoint, caller_through, endpoint, tried
from tests.wire.callee import new_identity

NUMBER = 5
MANY = 1000
LARGEST_SEGMENT = 64 << 10
"""Of TCP on this machine: one may be begun where there is any room."""
LOST = Segments(200, 4, busy_s=8.0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def widened(there: Endpoint) -> AsyncIterator[tuple[PeerId, DirectPaths]]:
    """A caller whose path has several connections."""
    with tempfile.TemporaryDirectory(prefix="peerd-t-") as folder:  # names of sockets are short
        caller = new_identity()
        links, paths = there.paths_of(caller)
        paths._folder = Path(folder)
        await widen(paths, links, there.peer)
        yield caller.peer, paths


async def widen(paths: DirectPaths, links: Links, peer: PeerId) -> None:
    plain = await tried(paths, peer)
    waiting = asyncio.ensure_future(links.until_other_way(peer))
    widening = paths._paths[peer].widening
    while widening.parallel.number == 1:
        widening.counted(dict.fromkeys(widening.hosts, LOST), 0.0)
        await asyncio.sleep(0.01)
    widening.parallel.number = NUMBER
    await asyncio.wait_for(waiting, WITHIN_S)
    assert paths.channel(peer) is not plain
    assert await links.quickest_channel(peer) is plain


async def test_calls_over_several_connections_are_the_callers_and_end_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "LONGEST_CALL_S", 0.1)
    async with endpoint() as there, widened(there) as (caller, paths):
        assert await caller_through(paths.channel(there.peer)) == caller
        (bundle,) = [each.result() for each in there.bundles._bundles.values()]
        await until(lambda: bundle.num_strands == NUMBER)
        assert paths.num_connections == 1 + NUMBER
        assert paths._paths[there.peer].widening.parallel.resent == pytest.approx(0.02, rel=0.3)
        there.callers.asked.clear()
        there.callers.may_answer.clear()
        asking = asyncio.ensure_future(caller_through(paths.channel(there.peer)))
        await asyncio.wait_for(there.callers.asked.wait(), WITHIN_S)
        paths._paths[there.peer].widening._failed()
        (ended,) = await asyncio.wait_for(asyncio.gather(asking, return_exceptions=True), WITHIN_S)
        assert isinstance(ended, asyncio.CancelledError | grpc.aio.AioRpcError)
        await asyncio.wait_for(bundle.over.wait(), WITHIN_S)
        there.callers.may_answer.set()
        assert await caller_through(paths.channel(there.peer)) == caller


async def test_a_call_that_lasts_long_keeps_its_connections_while_new_ones_come_and_go() -> None:
    async with endpoint() as there, widened(there) as (caller, paths):
        there.callers.may_answer.clear()
        there.callers.asked.clear()
        asking = asyncio.ensure_future(caller_through(paths.channel(there.peer)))
        await asyncio.wait_for(there.callers.asked.wait(), WITHIN_S)
        widening = paths._paths[there.peer].widening
        for number in (1, NUMBER):
            other_way = asyncio.ensure_future(widening.until_other_way())
            await asyncio.sleep(0)
            widening.parallel.number = number
            widening._changed.set()
            await asyncio.wait_for(other_way, WITHIN_S)
        there.callers.may_answer.set()
        assert await asyncio.wait_for(asking, WITHIN_S) == caller
        assert await caller_through(paths.channel(there.peer)) == caller


async def test_where_no_socket_can_be_made_the_path_keeps_its_one_connection(tmp_path: Path) -> None:
    async with endpoint() as there:
        links, paths = there.paths_of(new_identity())
        paths._folder = tmp_path / (100 * "x")
        plain = await tried(paths, there.peer)
        parallel = paths._paths[there.peer].widening.parallel
        for _ in range(LOOKS_LOSSY):
            paths._paths[there.peer].widening.counted(dict.fromkeys(paths._paths[there.peer].widening.hosts, LOST), 0.0)
        assert parallel.number > 1
        await until(lambda: parallel.number == 1)
        assert paths.channel(there.peer) is plain
        assert await links.quickest_channel(there.peer) is plain


async def nothing() -> AsyncIterator[direct_pb2.Block]:
    await asyncio.Event().wait()
    yield direct_pb2.Block()


async def test_a_caller_has_few_bundles_with_names_of_one_length() -> None:
    ends: list[socket.socket] = []

    async def connect(_peer: PeerId) -> Stream:
        here, there = socket.socketpair()
        ends.append(there)
        return await asyncio.open_unix_connection(sock=here)

    bundles, caller = Bundles(connect), PeerId("caller")
    for number in range(MOST_OF_ONE):
        await bundles._bundle(caller, bytes([number]) * ID_BYTES)
    with pytest.raises(BusyError):
        await anext(bundles.carry(caller, direct_pb2.Block(bundle=b"n" * ID_BYTES), nothing()))
    with pytest.raises(BadMessageError):
        await anext(bundles.carry(caller, direct_pb2.Block(bundle=b"short"), nothing()))
    bundles.close()
    for end in ends:
        end.close()
    await until(lambda: not bundles._bundles)
    with pytest.raises(BusyError, match="is over"):
        await bundles._bundle(caller, bytes([0]) * ID_BYTES)


def test_segments_are_counted_by_the_address_they_go_to() -> None:
    counts = SegmentCounts()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            before = counts.look()
            if not before:
                pytest.skip("this kernel does not tell")
            one.sendall(b"data")
            assert other.recv(4) == b"data"
            found = counts.look()["127.0.0.1"]
            assert (found.sent, found.again) == (1, 0)
            assert 0 < found.least_s <= found.round_trip_s < 1
            again = counts.look()["127.0.0.1"]
            assert (again.sent, again.again, again.round_trip_s) == (0, 0, 0.0)


def sent_window(connection: socket.socket) -> int:
    """What the other end lets a connection have under way: `tcpi_snd_wnd`, which Linux tells since 5.4."""
    told = connection.getsockopt(socket.IPPROTO_TCP, KERNELS["linux"].option, 232)
    if len(told) < 232:
        pytest.skip("this kernel does not tell the window")
    return int(struct.unpack_from("=I", told, 228)[0])


@pytest.mark.skipif(sys.platform != "linux", reason="bounds windows on Linux alone")
def test_a_look_bounds_what_others_may_have_under_way_to_this_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def window(round_trip_s: float) -> int:
        asked.append(round_trip_s)
        return 40_000

    def pass_to_and_fro(one: socket.socket, other: socket.socket) -> None:
        for sender, receiver in ((one, other), (other, one)) * 2:
            sender.sendall(bytes(30_000))
            assert len(receiver.recv(30_000, socket.MSG_WAITALL)) == 30_000

    counts = SegmentCounts()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            pass_to_and_fro(one, other)
            counts.look(UnderWayBounds(to_here=window))
            pass_to_and_fro(one, other)
            assert not asked  # what stays on this machine crosses no line
            assert sent_window(one) > 40_000
            monkeypatch.setattr(segments, "_is_here", lambda _host: False)
            for _ in range(MANY):  # what was allowed before may still be sent
                counts.look(UnderWayBounds(to_here=window))
                pass_to_and_fro(one, other)
                if max(sent_window(one), sent_window(other)) <= 40_960:
                    break
            else:
                pytest.fail(f"windows of {sent_window(one)} and {sent_window(other)} bytes")
            assert all(0 < each < 1 for each in asked)


@pytest.mark.skipif(sys.platform != "linux", reason="bounds buffers on Linux alone")
def test_a_look_bounds_what_this_peer_has_under_way_until_its_line_needs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(room: int) -> None:
        SegmentCounts().look(UnderWayBounds(from_here=lambda _round_trip_s: room))

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            one.sendall(b"data")
            assert other.recv(4) == b"data"
            usual = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            look(60_000)
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == usual  # what stays on this machine crosses no line
            monkeypatch.setattr(segments, "_is_here", lambda _host: False)
            look(60_000)
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    one.send(bytes(16_384))
            waiting = bytearray(4)
            fcntl.ioctl(one, termios.TIOCOUTQ, waiting)
            assert 0 < int.from_bytes(waiting, sys.byteorder) < 60_000 + LARGEST_SEGMENT
            assert one.getsockopt(socket.SOL_SOCKET, segments.BUFFER_LOCK)
            look(1 << 40)  # more than a program may ask for
            assert not one.getsockopt(socket.SOL_SOCKET, segments.BUFFER_LOCK)


async def test_bounds_follow_the_line_and_are_left_alone_while_that_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    line, told = OwnLine(), asyncio.Queue[UnderWayBounds | None]()

    class Counts(SegmentCounts):
        def look(self, bounds: UnderWayBounds | None = None) -> dict[str, Segments]:
            told.put_nowait(bounds)
            return {}

    monkeypatch.setattr(wide, "LOOK_S", 0.0)
    counting = asyncio.ensure_future(wide.count_losses(Counts(), list, line))
    try:
        assert await asyncio.wait_for(told.get(), WITHIN_S) == UnderWayBounds()
        line.received_from(PeerId("other"), 4_000_000, 5.0)
        line.delivered_to(PeerId("other"), 4_000_000, 5.0)  # shows no more than a lower bound
        async with asyncio.timeout(WITHIN_S):
            while (bounds := await told.get()) is None or bounds.to_here is None:
                pass
            assert bounds.to_here(0.3) == pytest.approx(800_000 * 0.5, rel=0.01)
            assert bounds.from_here is None
            line.probes.saw(1_600_000.0, 1.0, 0.0)
            while (bounds := await told.get()) is None or bounds.from_here is None:
                pass
        assert bounds.from_here(0.3) == pytest.approx(1_600_000 * 1.5 * 0.4, rel=0.01)
    finally:
        counting.cancel()


async def test_counting_takes_at_most_a_hundredth_of_the_loop_however_many_files_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """In virtual time: a look takes as long as it says, and the loop sleeps as long as it is asked to."""
    takes_s, pauses_s, spent_s = [0.0, 0.3, 2.0, 0.05, 0.004, 0.001], list[float](), [0.0]

    class Counts(SegmentCounts):
        def look(self, bounds: UnderWayBounds | None = None) -> dict[str, Segments]:
            spent_s[0] += takes_s.pop()
            return {}

    async def sleep(seconds: float) -> None:
        assert spent_s[0] <= 0.01 * (sum(pauses_s) + seconds)
        pauses_s.append(seconds)
        if not takes_s:
            raise asyncio.CancelledError

    monkeypatch.setattr(wide, "time", SimpleNamespace(thread_time=lambda: spent_s[0]))
    monkeypatch.setattr(wide, "asyncio", SimpleNamespace(sleep=sleep))
    with pytest.raises(asyncio.CancelledError):
        await wide.count_losses(Counts(), list, OwnLine())
    assert pauses_s == pytest.approx([1.0, 1.0, 1.0, 5.0, 200.0, 30.0, 1.0])


@pytest.mark.parametrize(
    ("kernel", "layout", "values", "told"),
    [
        (  # struct tcp_info of linux/tcp.h
            "linux",
            "=68xI28xI16xQ20xI4xI8xQ16x",
            (10_000, 3, 140_000, 4_000, 100, 7_000_000),
            Segments(sent=100, again=3, round_trip_s=0.01, busy_s=7.0, least_s=0.004, acked=140_000),
        ),
        (  # struct tcp_connection_info of netinet/tcp.h
            "darwin",
            "=4x12I4xQ40xQ",
            (*range(12), 100, 3),
            Segments(sent=100, again=3, round_trip_s=0.01),
        ),
    ],
)
def test_each_kernel_tells_how_many_segments_were_sent_and_sent_again_and_the_round_trip(
    kernel: str, layout: str, values: tuple[int, ...], told: Segments
) -> None:
    answer = struct.pack(layout, *values)
    assert KERNELS[kernel].num_bytes == len(answer)
    assert KERNELS[kernel].parsed(answer) == told
    assert KERNELS[kernel].parsed(answer[:90]) is None

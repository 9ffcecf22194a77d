"""The checkup service: it connects back only to the caller's own address and believes only the caller's own key; favours are rationed."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from peerd.errors import BusyError, WrongStateError
from peerd.generated import checkup_pb2, checkup_pb2_grpc
from peerd.link.certificate import holder_of, make_certificate
from peerd.link.dialling import answers_as
from peerd.link.direct import Showing
from peerd.link.libp2p import P2PD
from peerd.link.pins import Pins
from peerd.link.throttle import Throttles
from peerd.link.traffic import Traffic
from peerd.swarm.identity import Identity
from peerd.table.circuit import host_in
from peerd.table.record import PeerId, RunId
from peerd.wire.checkup import MAX_PROBE_BYTES, CheckupClient, CheckupServicer
from peerd.wire.door import Door
from peerd.wire.grpc_server import DirectEndpoint
from tests.link.local_peers import Served, serving
from tests.wire.callee import BAD, BUSY, RUN, drain, new_identity

TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def listening() -> Iterator[tuple[PeerId, int]]:
    """A real p2pd on loopback: its peer id and its port."""
    with tempfile.TemporaryDirectory(prefix="peerd-t-", dir="/tmp") as folder:
        identity = Identity.load_or_create(Path(folder) / "key")
        port = free_port()
        command = [str(P2PD), f"-id={folder}/key", f"-listen=/unix{folder}/s", f"-hostAddrs=/ip4/127.0.0.1/tcp/{port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            assert any(line.startswith("Peer ID:") for line in process.stdout)
            yield identity.peer, port
            process.kill()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def callee(origin: str | None = "/ip4/127.0.0.1/tcp/4000") -> AsyncIterator[tuple[Served, Door]]:
    """A servicer that sees all its callers at `origin`."""
    door = Door(RUN, 5.0, Traffic())
    async with serving([CheckupServicer(door, lambda _grpc_peer: origin)]) as served:
        yield served, door


def client(served: Served, peer: PeerId, run: RunId = RUN) -> CheckupClient:
    return CheckupClient(served.links_of(peer), run)


async def test_who_listens_under_its_own_key_is_reached(listening: tuple[PeerId, int]) -> None:
    peer, port = listening
    async with callee() as (served, _):
        found = await client(served, peer).dial_back(peer, port)
    assert (found.observed, found.reached) == ("127.0.0.1", True)


async def test_somebody_elses_port_does_not_count_and_tells_nothing(listening: tuple[PeerId, int]) -> None:
    _, port = listening
    stranger = new_identity().peer
    async with callee() as (served, _):
        asking = client(served, stranger)
        answers = [await asking.dial_back(stranger, wanted) for wanted in (port, free_port())]
    assert answers[0] == answers[1]
    assert not answers[0].reached


async def test_an_endpoint_for_direct_connections_is_reached_as_such_and_under_its_own_key() -> None:
    owner, stranger = new_identity(), new_identity().peer
    showing = Showing(make_certificate(owner.peer, owner.sign))
    endpoint = DirectEndpoint("127.0.0.1", 0, showing, Pins(), Throttles())
    await endpoint.open(())
    port = showing.port
    try:
        async with callee() as (served, _):
            asking = client(served, owner.peer)
            answers = [await asking.dial_back(owner.peer, port, direct=direct) for direct in (True, False)]
            assert [(each.observed, each.reached) for each in answers] == [("127.0.0.1", True), ("127.0.0.1", False)]
            assert not (await client(served, stranger).dial_back(stranger, port, direct=True)).reached
    finally:
        await endpoint.close()
    assert not await answers_as(owner.peer, "127.0.0.1", port, TIMEOUT_S, direct=True)


async def test_a_callee_that_knows_of_no_direct_connections_has_not_said() -> None:
    class Older(CheckupServicer):
        async def DialBack(self, request: checkup_pb2.DialBackRequest, context: object) -> checkup_pb2.DialBackReply:
            return checkup_pb2.DialBackReply(observed="127.0.0.1", reached=False)

    peer = new_identity().peer
    async with serving([Older(Door(RUN, 5.0, Traffic()), lambda _grpc_peer: None)]) as served:
        with pytest.raises(WrongStateError, match="direct connections"):
            await client(served, peer).dial_back(peer, 4000, direct=True)
        assert not (await client(served, peer).dial_back(peer, 4000)).reached


@pytest.mark.parametrize(
    "origin", [None, "", "/ip6/::1/tcp/4000", "/ip4/127.0.0.1/tcp/4000/p2p/Qm/p2p-circuit", "/ip4/localhost/tcp/1", "/dns4/a.example/tcp/1"]
)
async def test_a_caller_whose_own_address_is_not_known_is_not_dialled(listening: tuple[PeerId, int], origin: str | None) -> None:
    peer, port = listening
    assert host_in(origin) == ""
    async with callee(origin) as (served, _):
        found = await client(served, peer).dial_back(peer, port)
    assert (found.observed, found.reached) == ("", False)


async def test_dialling_back_is_rationed(listening: tuple[PeerId, int]) -> None:
    peer, port = listening
    async with callee() as (served, door):
        asking = client(served, peer)
        for _ in range(4):
            assert (await asking.dial_back(peer, port)).reached
        with pytest.raises(BusyError, match="within a minute"):
            await asking.dial_back(peer, port)
        other = new_identity().peer
        assert not (await client(served, other).dial_back(other, port)).reached
        assert door.refused == 0


async def test_another_runs_peers_are_done_no_favours() -> None:
    peer = new_identity().peer
    async with callee() as (served, _):
        with pytest.raises(WrongStateError):
            await client(served, peer, RunId("b" * 32)).dial_back(peer, 4000)
        with pytest.raises(WrongStateError):
            await client(served, peer, RunId("b" * 32)).download(peer, 1024)


@pytest.mark.parametrize("port", [0, 65536, 2**32 - 1])
async def test_a_port_that_is_none_is_refused(port: int) -> None:
    async with callee() as (served, door):
        stub = await served.stub(checkup_pb2_grpc.CheckupStub, new_identity().peer)
        assert await status_of(stub.DialBack(checkup_pb2.DialBackRequest(run=RUN, port=port))) is BAD
        assert door.refused == 1


async def test_bytes_are_measured_both_ways_and_counted() -> None:
    peer, num_bytes = new_identity().peer, 256 * 1024
    async with callee() as (served, door):
        asking = client(served, peer)
        up, down = await asking.upload(peer, num_bytes), await asking.download(peer, num_bytes)
        assert up.num_bytes == down.num_bytes == num_bytes - 64 * 1024
        assert up.took_s >= 0
        assert down.took_s >= 0
        assert door.traffic.sent_bytes == num_bytes


async def test_no_more_than_a_measurements_bytes_are_sent_or_taken() -> None:
    async with callee() as (served, _):
        stub = await served.stub(checkup_pb2_grpc.CheckupStub, new_identity().peer)
        assert await status_of(stub.Source(checkup_pb2.SourceRequest(run=RUN, num_bytes=MAX_PROBE_BYTES + 1))) is BAD

        async def too_much() -> AsyncIterator[checkup_pb2.Chunk]:
            for _ in range(MAX_PROBE_BYTES // 2**20 + 1):
                yield checkup_pb2.Chunk(data=bytes(2**20))

        other = await served.stub(checkup_pb2_grpc.CheckupStub, new_identity().peer)
        assert await status_of(other.Sink(too_much())) in (BAD, BUSY)


async def test_only_one_connection_is_measured_at_a_time() -> None:
    peer, other = new_identity().peer, new_identity().peer
    async with callee() as (served, _):
        stub = await served.stub(checkup_pb2_grpc.CheckupStub, peer)
        begun: asyncio.Event = asyncio.Event()
        ended: asyncio.Event = asyncio.Event()

        async def slow() -> AsyncIterator[checkup_pb2.Chunk]:
            yield checkup_pb2.Chunk(data=b"x")
            begun.set()
            await ended.wait()

        first = asyncio.ensure_future(drain(stub.Sink(slow())))
        await begun.wait()
        asking = client(served, other)
        await until_busy(lambda: asking.download(other, 1024))
        ended.set()
        await first
        await asking.download(other, 1024)


async def until_busy(ask: Callable[[], Awaitable[object]]) -> None:
    """The first call may arrive before the one that it has to find there."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                await ask()
            except BusyError as error:
                assert "being measured" in str(error)
                return


async def status_of(rpc: object) -> object:
    import grpc

    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await drain(rpc)
    return refusal.value.code()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x13/multistream/1.0.0\n\x03na\n", b"\x00" * 64])
async def test_whatever_else_answers_at_a_port_is_not_the_peer(said: bytes) -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            writer.write(said)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        assert not await answers_as(new_identity().peer, "127.0.0.1", server.sockets[0].getsockname()[1], 5.0)


async def test_who_never_answers_is_given_up() -> None:
    async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            await reader.read()

    server = await asyncio.start_server(keep_silent, "127.0.0.1", 0)
    async with server:
        assert not await answers_as(new_identity().peer, "127.0.0.1", server.sockets[0].getsockname()[1], 0.1)


def test_a_certificate_that_names_a_key_without_its_signature_proves_nothing() -> None:
    claimed = new_identity()
    for extension in (None, b"", b"junk", libp2p_extension(claimed, bytes(64)), libp2p_extension(claimed, b"\1" * 64) + b"more"):
        assert holder_of(certificate(extension)) is None


def libp2p_extension(identity: Identity, signature: bytes) -> bytes:
    import base58

    return bytes.fromhex("30680424") + base58.b58decode(identity.peer)[2:] + bytes.fromhex("0440") + signature


def certificate(extension: bytes | None) -> bytes:
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding

    key, name, now = ec.generate_private_key(ec.SECP256R1()), x509.Name([]), datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1))
    if extension is not None:
        unknown = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1"), extension)
        builder = builder.add_extension(unknown, critical=False)
    return builder.sign(key, SHA256()).public_bytes(Encoding.DER)

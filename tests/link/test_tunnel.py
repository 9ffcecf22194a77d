"""Who calls: the name of a connection's socket holds the peer id that libp2p authenticated, and nothing else counts."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.link.p2pd import P2pd
from peerd.link.tunnel import MOST_INWARD, Tunnel, caller_of
from peerd.table.record import PeerId

PEER = "12D3KooWEXTUXiqjRrCJRZ1AJuwYtJ7E1hENCwDBAFpVVjKpVHJd"


@pytest.mark.parametrize("name", [f"unix:/tmp/run/from-{PEER}.0", f"unix:/a/from-b/from-{PEER}.99999"])
def test_the_caller_is_the_peer_in_the_sockets_name(name: str) -> None:
    assert caller_of(name) == PEER


@pytest.mark.parametrize("name", ["", "unix:", "unix:/tmp/run/to-x", "ipv4:127.0.0.1:4000", f"ipv4:from-{PEER}.0", f"/tmp/from-{PEER}.0"])
def test_a_call_that_did_not_come_through_the_tunnel_has_no_caller(name: str) -> None:
    assert caller_of(name) is None


@given(st.text(max_size=60))
def test_no_name_is_too_odd_to_be_asked_about(name: str) -> None:
    caller = caller_of(name)
    assert caller is None or name.startswith("unix:")


async def test_one_peer_has_few_streams_and_another_has_its_own() -> None:
    """Each takes three open files. One that is refused is closed at once."""
    async with asyncio.timeout(20):
        with tempfile.TemporaryDirectory(prefix="peerd-t-", dir="/tmp") as folder:
            grpc, served = Path(folder) / "grpc.sock", asyncio.Semaphore(0)
            here = cast(P2pd, SimpleNamespace(p2p=SimpleNamespace(peer_id=SimpleNamespace(to_base58=lambda: "me"))))
            tunnel = Tunnel(here, Path(folder), grpc, lambda _peer: ())

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                served.release()
                await reader.read()
                writer.close()

            server = await asyncio.start_unix_server(serve, grpc)
            inward = await asyncio.start_unix_server(
                lambda reader, writer: tunnel._streams.track(tunnel.serve_inward(callers.pop(), "", reader, writer)), Path(folder) / "p2pd"
            )
            callers, lines = [PeerId("other"), *MOST_INWARD * [PeerId("many")]], []
            for _ in range(MOST_INWARD + 1):
                lines.append(await asyncio.open_unix_connection(Path(folder) / "p2pd"))
                await served.acquire()
            callers.append(PeerId("many"))
            reader, writer = await asyncio.open_unix_connection(Path(folder) / "p2pd")
            assert await reader.read() == b""
            for _, each in [*lines, (reader, writer)]:
                each.close()
                await each.wait_closed()
            await asyncio.gather(*tunnel._streams.running, return_exceptions=True)
            assert tunnel._inwards.num_callers == 0
            for listening in (server, inward):
                listening.close()
                await listening.wait_closed()

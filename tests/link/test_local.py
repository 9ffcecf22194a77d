"""Local sockets: for this user's other daemons on this machine and for nobody else, and where there is none TLS stays the way."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from peerd.errors import BadMessageError
from peerd.link import local
from peerd.link.local import SOCKET, TOKEN, Neighbours, checked_target, machine_key
from peerd.link.throttle import Throttles
from peerd.link.traffic import Way
from peerd.table.record import PeerId
from tests.link.direct_peers import WITHIN_S, caller_through, endpoint, given_up, tried
from tests.wire.callee import new_identity

HERE, ELSEWHERE = b"here" * 8, b"else" * 8


async def test_a_neighbours_path_is_a_local_socket_and_the_callee_knows_who_calls() -> None:
    async with endpoint(key=HERE) as there:
        caller = new_identity()
        links, paths = there.paths_of(caller, throttles := Throttles(), key=HERE)
        channel = await tried(paths, there.peer)
        assert await links.way_for_tensors(there.peer) == (channel, Way.DIRECT)
        assert paths.is_local(there.peer)
        assert (paths.num_open, paths.num_local) == (1, 1)
        assert await caller_through(channel) == caller.peer
        counted = throttles, there.throttles
        assert {each.upload.total for each in counted} == {each.download.total for each in counted} == {0}


async def test_two_neighbours_are_told_apart() -> None:
    async with endpoint(key=HERE) as there:
        for caller in (new_identity(), new_identity()):
            assert await caller_through(await tried(there.paths_of(caller, key=HERE)[1], there.peer)) == caller.peer


@pytest.mark.parametrize(("callers", "callees"), [(ELSEWHERE, HERE), (None, HERE), (HERE, None)])
async def test_whoever_is_none_or_wants_none_goes_by_tls_and_is_told_no_socket(callers: bytes | None, callees: bytes | None) -> None:
    async with endpoint(key=callees) as there:
        caller = new_identity()
        paths = there.paths_of(caller, key=callers)[1]
        offer = await paths._show(there.peer)
        assert (offer.port, offer.socket, offer.token) == (there.showing.port, "", "")
        assert await caller_through(await tried(paths, there.peer)) == caller.peer
        assert not paths.is_local(there.peer)


async def test_anothers_proof_is_worth_nothing() -> None:
    async with endpoint(key=HERE) as there:
        assert there.neighbours is not None
        neighbour, other = new_identity(), new_identity()
        theirs = Neighbours(neighbour.peer, there.served.folder, lambda: HERE)
        assert there.neighbours.token_for(neighbour.peer, theirs.proof_for(there.peer))
        assert not there.neighbours.token_for(other.peer, theirs.proof_for(there.peer))
        assert not there.neighbours.token_for(neighbour.peer, theirs.proof_for(other.peer))


@pytest.mark.parametrize("token", [None, "", "0" * 32])
async def test_a_call_without_a_token_that_was_given_is_nobodys(token: str | None) -> None:
    async with endpoint(key=HERE) as there:
        assert there.neighbours is not None
        headers = ((TOKEN, token),) if token is not None else ()
        async with grpc.aio.insecure_channel(f"unix:{there.neighbours.socket}") as channel:
            call: Any = channel.unary_unary("/peerd.Checkup/DialBack", request_serializer=bytes)
            with pytest.raises(grpc.aio.AioRpcError, match="calls come through the tunnel") as refusal:
                await call(b"", metadata=headers, timeout=WITHIN_S)
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_socket_that_leads_elsewhere_leaves_tls() -> None:
    """A callee may tell any path: that of another daemon of this user, who knows nothing of the token."""
    async with endpoint(key=HERE) as there, endpoint(key=HERE) as other:
        caller = new_identity()
        paths = there.paths_of(caller, key=HERE)[1]
        there.showing.socket = other.showing.socket
        assert await caller_through(await tried(paths, there.peer)) == caller.peer
        assert not paths.is_local(there.peer)


async def test_a_socket_where_nobody_listens_leaves_tls() -> None:
    async with endpoint(key=HERE) as there:
        caller = new_identity()
        paths = there.paths_of(caller, key=HERE)[1]
        assert there.neighbours is not None
        there.neighbours.socket.unlink()
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(there.neighbours.socket))
        assert await caller_through(await tried(paths, there.peer)) == caller.peer
        assert not paths.is_local(there.peer)


async def test_an_endpoint_whose_socket_cannot_be_takes_everybody_by_tls() -> None:
    async with endpoint(key=HERE) as there:
        assert there.neighbours is not None
        await there.endpoint.close()
        there.neighbours.socket = there.served.folder / "gone" / SOCKET
        await there.endpoint._look()
        caller = new_identity()
        paths = there.paths_of(caller, key=HERE)[1]
        assert await caller_through(await tried(paths, there.peer)) == caller.peer
        assert not paths.is_local(there.peer)


async def test_a_neighbour_that_goes_leads_back_into_the_tunnel_and_one_that_comes_back_is_found() -> None:
    async with endpoint(key=HERE) as there:
        links, paths = there.paths_of(new_identity(), key=HERE)
        assert await tried(paths, there.peer) is not None
        await there.endpoint.close()
        await given_up(paths, there.peer)
        assert await links.channel_for_tensors(there.peer) is await links.channel(there.peer, for_tensors=True)
        await there.endpoint._look()
        paths._paths[there.peer].retry_s = 0.0
        assert await tried(paths, there.peer) is not None
        assert paths.is_local(there.peer)


async def test_what_stays_on_the_machine_goes_on_past_caps() -> None:
    async with endpoint(key=HERE) as there:
        _, paths = there.paths_of(new_identity(), throttles := Throttles(), key=HERE)
        others = there.paths_of(new_identity(), Throttles())[1]
        channel = await tried(paths, there.peer)
        assert await tried(others, there.peer) is not None
        there.throttles.download.rate = throttles.upload.rate = 1e5
        await there.endpoint._look()
        assert (there.showing.port, bool(there.showing.socket)) == (0, True)
        assert paths.channel(there.peer) is channel
        assert await caller_through(channel)
        await given_up(others, there.peer)
        assert not others.leads_to(there.peer)


async def test_a_neighbour_is_found_while_caps_are_set_and_nobody_else() -> None:
    async with endpoint(key=HERE) as there:
        capped = Throttles()
        capped.upload.rate = 1e5
        paths = there.paths_of(new_identity(), capped, key=HERE)[1]
        assert await tried(paths, there.peer) is not None
        assert paths.is_local(there.peer)
        elsewhere = there.paths_of(new_identity(), capped, key=ELSEWHERE)[1]
        assert await tried(elsewhere, there.peer) is None
        capped.upload.rate = 0.0
        assert await tried(elsewhere, there.peer) is not None


def test_a_token_stays_the_same_and_there_is_room_for_so_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local, "MAX_TOKENS", 1)
    callee, one, other = (Neighbours(PeerId(name), tmp_path, lambda: HERE) for name in ("callee", "one", "other"))
    token = callee.token_for(PeerId("one"), one.proof_for(PeerId("callee")))
    assert token
    assert callee.token_for(PeerId("one"), one.proof_for(PeerId("callee"))) == token
    assert callee.token_for(PeerId("other"), other.proof_for(PeerId("callee"))) == ""


def test_a_machine_has_one_key_and_another_network_namespace_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert machine_key() == machine_key()
    assert len(machine_key()) == 32
    here = machine_key()
    monkeypatch.setattr(local, "_NETWORK", tmp_path)
    assert machine_key() != here
    monkeypatch.setattr(local, "_BOOT_ID", tmp_path / "none")
    assert len({here, machine_key()}) == 2
    assert machine_key() == machine_key()


def test_only_a_socket_in_a_folder_of_this_users_alone_is_dialled(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    place = tmp_path / SOCKET
    with pytest.raises(BadMessageError, match="there is no such"):
        checked_target(str(place))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place))
    assert checked_target(str(place)) == f"unix:{place}"
    tmp_path.chmod(0o755)
    with pytest.raises(BadMessageError, match="not the socket of a neighbour"):
        checked_target(str(place))
    tmp_path.chmod(0o700)
    other = tmp_path / "docker.sock"
    place.rename(other)
    place.write_text("")
    for wrong in (str(other), str(place), "", "\0", "x" * 9999):
        with pytest.raises(BadMessageError):
            checked_target(wrong)


@pytest.mark.parametrize("token", ["", "0" * 31, "0" * 33, "\n" * 32, "\u0660" * 32, "F" * 32])
def test_what_is_no_token_is_not_sent(token: str) -> None:
    with pytest.raises(BadMessageError):
        local.checked_token(token)

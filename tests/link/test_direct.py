"""Direct connections: only what the tunnel has proven is taken by TLS, and where there is no way the tunnel stays the way."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest

from peerd.errors import BadMessageError, RemoteError
from peerd.link import direct as wire_direct
from peerd.link import pins as pins_module
from peerd.link.certificate import make_certificate
from peerd.link.direct import Showing, _Path, hosts_in
from peerd.link.pins import Pins
from peerd.link.throttle import Throttles
from peerd.link.traffic import Way
from peerd.table.record import PeerId
from peerd.wire.grpc_server import DirectEndpoint
from tests.link import direct_peers
from tests.link.direct_peers import WAYS, WITHIN_S, Endpoint, Opens, caller_through, certificate_of, given_up, tried
from tests.wire.callee import new_identity


@pytest.fixture(params=WAYS)
def endpoint(request: pytest.FixtureRequest) -> Opens:
    """Whatever holds of direct connections holds in both ways: to a TCP port, and through routers."""
    return partial(direct_peers.endpoint, way=request.param)


async def test_a_path_opens_beside_the_tunnel_and_the_callee_knows_who_calls(endpoint: Opens) -> None:
    async with endpoint() as there:
        caller = new_identity()
        links, paths = there.paths_of(caller, throttles := Throttles())
        assert await links.channel_for_tensors(there.peer) is await links.channel(there.peer, for_tensors=True)
        channel = await tried(paths, there.peer)
        assert await links.channel_for_tensors(there.peer) is channel
        assert await links.channel(there.peer) is not channel
        assert await caller_through(channel) == caller.peer
        assert throttles.upload.total == there.throttles.download.total > 0
        assert throttles.download.total == there.throttles.upload.total > len(caller.peer)


async def test_what_is_pushed_takes_the_path_there_is_and_looks_for_none(endpoint: Opens) -> None:
    async with endpoint() as there:
        links, paths = there.paths_of(new_identity())
        assert await links.quickest_channel(there.peer) is await links.channel(there.peer)
        assert paths._paths == {}
        channel = await tried(paths, there.peer)
        assert await links.quickest_channel(there.peer) is channel is not None


async def test_only_a_certificate_that_was_shown_in_the_tunnel_is_taken_and_only_the_last(endpoint: Opens) -> None:
    async with endpoint() as there:
        caller = new_identity()
        first, second = certificate_of(caller), certificate_of(caller)
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await there.call(first)
        await there.show(caller, first)
        assert await there.call(first) == caller.peer
        await there.show(caller, second)
        assert await there.call(second) == caller.peer
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await there.call(first)


async def test_a_connection_whose_certificate_was_replaced_is_nobodys(endpoint: Opens) -> None:
    async with endpoint() as there:
        caller = new_identity()
        channel = await tried(there.paths_of(caller)[1], there.peer)
        assert await caller_through(channel) == caller.peer
        await there.show(caller, certificate_of(caller))
        with pytest.raises(grpc.aio.AioRpcError, match="a certificate that was shown there") as refusal:
            await caller_through(channel)
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_stolen_certificate_is_neither_shown_nor_answered_under(endpoint: Opens) -> None:
    async with endpoint() as there:
        victim, thief = new_identity(), new_identity()
        theirs, own = certificate_of(victim), certificate_of(thief)
        await there.show(victim, theirs)
        with pytest.raises(grpc.aio.AioRpcError, match=f"not that of {thief.peer}") as refusal:
            await there.show(thief, theirs)
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert there.door.bans.until_s.keys() == {thief.peer}
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await there.call(replace(theirs, key_pem=own.key_pem))
        assert await there.call(theirs) == victim.peer


async def test_an_expired_certificate_is_not_taken(endpoint: Opens) -> None:
    async with endpoint() as there:
        caller = new_identity()
        with pytest.raises(grpc.aio.AioRpcError, match="the certificate has expired"):
            await there.show(caller, make_certificate(caller.peer, caller.sign, days=-1))


async def test_no_path_leads_to_who_answers_under_another_certificate_than_its_own(endpoint: Opens) -> None:
    async with endpoint(voucher=new_identity()) as there:
        links, paths = there.paths_of(new_identity())
        with pytest.raises(BadMessageError, match=f"not that of {there.peer}"):
            await paths._open_any(there.peer, paths._paths.setdefault(there.peer, _Path()), await paths._show(there.peer))
        assert await tried(paths, there.peer) is None
        assert await links.channel_for_tensors(there.peer) is await links.channel(there.peer, for_tensors=True)


async def test_no_path_leads_to_who_listens_in_the_peers_place(endpoint: Opens) -> None:
    async with endpoint() as there, endpoint() as impostor:
        paths = there.paths_of(new_identity())[1]
        there.showing.port = impostor.showing.port
        with pytest.raises(RemoteError, match="under the certificate that was shown"):
            await paths._open_any(there.peer, paths._paths.setdefault(there.peer, _Path()), await paths._show(there.peer))


async def test_a_closed_port_leaves_the_tunnel_and_is_tried_again_only_after_a_while(endpoint: Opens) -> None:
    async with endpoint() as there:
        links, paths = there.paths_of(new_identity())
        there.showing.port, open_port = 1, there.showing.port
        assert await tried(paths, there.peer) is None
        assert await caller_through(await links.channel_for_tensors(there.peer))
        there.showing.port = open_port
        assert await tried(paths, there.peer) is None, "too soon"
        paths._paths[there.peer].retry_s = 0.0
        assert await tried(paths, there.peer) is not None


async def test_a_certificate_that_was_forgotten_is_shown_again(endpoint: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_direct, "SHOW_AGAIN_S", 0.05)
    async with endpoint() as there:
        caller = new_identity()
        channel = await tried(there.paths_of(caller)[1], there.peer)
        show, shown = there.pins.show, asyncio.Event()

        def note(peer: PeerId, certificate: bytes) -> bool:
            shown.set()
            return show(peer, certificate)

        monkeypatch.setattr(there.pins, "show", note)
        there.pins.forget(caller.peer)
        await asyncio.wait_for(shown.wait(), WITHIN_S)
        assert await caller_through(channel) == caller.peer


async def test_a_path_that_nothing_uses_is_closed_and_the_calls_on_it_end_in_peace_until_it_is_asked_for_again(
    endpoint: Opens,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire_direct, "SHOW_AGAIN_S", 0.05)
    async with endpoint() as there:
        caller = new_identity()
        _, paths = there.paths_of(caller)
        channel = await tried(paths, there.peer)
        call = asyncio.ensure_future(caller_through(channel))
        monkeypatch.setattr(wire_direct, "UNUSED_S", 0.2)
        await given_up(paths, there.peer)
        assert await call == caller.peer
        monkeypatch.undo()
        paths._paths[there.peer].retry_s = 0.0
        assert await tried(paths, there.peer) is not None


async def test_a_broken_path_leads_back_into_the_tunnel(endpoint: Opens) -> None:
    async with endpoint() as there:
        links, paths = there.paths_of(new_identity())
        assert await tried(paths, there.peer) is not None
        await there.endpoint.close()
        await given_up(paths, there.peer)
        assert await links.channel_for_tensors(there.peer) is await links.channel(there.peer, for_tensors=True)
        assert not paths.leads_to(there.peer)


async def test_a_path_that_is_cut_is_closed_with_its_calls_at_once_and_the_next_is_opened_without_a_pause(endpoint: Opens) -> None:
    async with endpoint() as there:
        links, paths = there.paths_of(caller := new_identity())
        first = await tried(paths, there.peer)
        work = paths._paths[there.peer].work
        assert work is not None
        await links.leave_address(there.peer)
        assert not paths.leads_to(there.peer)
        await asyncio.wait({work}, timeout=WITHIN_S)
        await asyncio.gather(*paths._closing.tasks.values())
        with pytest.raises((grpc.aio.UsageError, asyncio.CancelledError)):
            await caller_through(first)
        second = await tried(paths, there.peer)
        assert second is not first
        assert await caller_through(second) == caller.peer


async def held_call(there: Endpoint, channel: Any) -> asyncio.Task[str]:
    """A call that is under way until `there.callers.may_answer` is set."""
    there.callers.may_answer.clear()
    there.callers.asked.clear()
    call = asyncio.ensure_future(caller_through(channel))
    await asyncio.wait_for(there.callers.asked.wait(), WITHIN_S)
    return call


async def test_a_call_under_way_ends_on_the_path_that_is_given_up_meanwhile(endpoint: Opens) -> None:
    """A microbatch of minutes, say, while the tunnel turns out to be faster."""
    async with endpoint() as there:
        _, paths = there.paths_of(caller := new_identity())
        call = await held_call(there, await tried(paths, there.peer))
        paths.drop(there.peer)
        await asyncio.wait({call}, timeout=0.3)
        (closing,) = paths._closing.tasks.values()
        assert not closing.done()
        there.callers.may_answer.set()
        assert await call == caller.peer
        await asyncio.wait_for(closing, WITHIN_S)


async def test_a_call_under_way_ends_over_tls_though_a_cap_is_set_and_not_for_longer_than_calls_take(endpoint: Opens) -> None:
    async with endpoint() as there:
        _, paths = there.paths_of(caller := new_identity())
        running = asyncio.ensure_future(there.endpoint.run())
        call = await held_call(there, channel := await tried(paths, there.peer))
        there.throttles.upload.rate = 1e6
        there.endpoint.look_again(call_s=600.0)
        await asyncio.wait({call}, timeout=6.0)
        assert not there.showing.port
        assert not call.done()
        with pytest.raises((grpc.aio.AioRpcError, grpc.aio.UsageError)):
            await caller_through(channel)
        there.callers.may_answer.set()
        assert await call == caller.peer
        running.cancel()


async def test_a_path_that_is_much_slower_than_the_tunnel_was_is_left_for_ever_longer(
    endpoint: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_direct, "SHOW_AGAIN_S", 0.05)
    async with endpoint() as there:
        links, paths = there.paths_of(new_identity())
        links.traffic.told((there.peer, Way.TUNNEL), 1e6)
        for failures in (1, 2):
            assert await tried(paths, there.peer) is not None
            links.traffic.told((there.peer, Way.DIRECT), 0.9e6)
            path = paths._paths[there.peer]
            work = path.work
            assert work is not None
            assert not (await asyncio.wait({work}, timeout=0.2))[0], "noise"
            links.traffic.told((there.peer, Way.DIRECT), 0.1e6)
            await asyncio.wait_for(work, WITHIN_S)
            assert await links.way_for_tensors(there.peer) == (await links.channel(there.peer, for_tensors=True), Way.TUNNEL)
            assert links.traffic.rates(there.peer, Way.DIRECT) == (None, None)
            assert path.failures == failures
            path.retry_s = 0.0


async def test_while_a_cap_is_set_the_tunnel_carries_everything_both_ways(endpoint: Opens) -> None:
    async with endpoint() as there:
        links, paths = there.paths_of(new_identity(), throttles := Throttles())
        assert await tried(paths, there.peer) is not None
        throttles.upload.rate = 1e6
        assert await links.channel_for_tensors(there.peer) is await links.channel(there.peer, for_tensors=True)
        throttles.upload.rate = 0.0
        assert paths.leads_to(there.peer)
        there.throttles.download.rate = 1e6
        await there.endpoint._look()
        assert not there.showing.port
        assert not (await there.show(other := new_identity(), certificate_of(other))).port
        there.throttles.download.rate = 0.0
        await there.endpoint._look()
        assert (await there.show(other, certificate_of(other))).port == there.showing.port > 0


async def test_a_taken_port_is_no_obstacle(endpoint: Opens) -> None:
    async with endpoint() as there:
        second = DirectEndpoint("127.0.0.1", there.showing.port, showing := Showing(there.showing.certificate), Pins(), Throttles())
        await second.open([])
        assert 0 < showing.port != there.showing.port
        await second.close()


async def test_there_is_room_for_so_many_and_who_is_gone_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins_module, "MAX_PINS", 1)
    pins, first, second = Pins(), new_identity(), new_identity()
    assert pins.show(first.peer, certificate_of(first).der)
    assert not pins.show(second.peer, certificate_of(second).der)
    assert pins.show(first.peer, certificate_of(first).der)
    pins.release(first.peer)
    assert pins.pems, "nobody needs its place yet"
    assert pins.show(first.peer, certificate_of(first).der)
    assert not pins.show(second.peer, certificate_of(second).der), "it is back"
    pins.release(first.peer)
    assert pins.show(second.peer, certificate_of(second).der)
    assert pins.pems.count(b"BEGIN") == 1


async def test_who_takes_a_caller_for_gone_still_serves_it_over_the_connection_there_is(endpoint: Opens) -> None:
    async with endpoint() as there:
        caller = new_identity()
        channel = await tried(there.paths_of(caller)[1], there.peer)
        there.pins.release(caller.peer)
        assert await caller_through(channel) == caller.peer


@pytest.mark.parametrize(
    ("addresses", "hosts"),
    [
        ((), []),
        (("/ip4/127.0.0.1/tcp/4",), ["127.0.0.1"]),
        (("/ip4/203.0.113.5/tcp/4", "/ip4/192.168.1.2/tcp/4", "/ip4/127.0.0.1/tcp/4"), ["203.0.113.5", "192.168.1.2"]),
        (("/ip4/203.0.113.5/tcp/4/p2p/X/p2p-circuit",), []),
        (("/dns4/example.org/tcp/4", "/ip4/1.2.3/tcp/4", "junk"), []),
        (tuple(f"/ip4/10.0.0.{i}/tcp/4" for i in range(9)), [f"10.0.0.{i}" for i in range(4)]),
    ],
)
def test_a_peer_is_dialled_at_the_addresses_of_its_record(addresses: tuple[str, ...], hosts: list[str]) -> None:
    assert hosts_in(addresses) == hosts


async def test_certificates_of_peers_that_nobody_knows_keep_no_member_out(endpoint: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins_module, "MAX_PINS", 2)
    async with endpoint() as there:
        member, *strangers = (new_identity() for _ in range(4))
        there.known = {member.peer}
        for each in (*strangers, member, *strangers):
            assert (await there.show(each, certificate_of(each))).port
        assert member.peer in there.pins._pems
        assert len(there.pins._pems) == 2

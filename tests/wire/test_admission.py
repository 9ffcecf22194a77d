"""Calls of peers that the organiser does not let take part: refused before a message of theirs is read, and nobody is banned for asking."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.config.access import NO_END, NO_LIST, RawList, banning, lifting, sign_invitation, sign_list
from peerd.config.organiser import public_bytes
from peerd.errors import BadMessageError, BusyError, UnwelcomeError
from peerd.generated import swarm_pb2
from peerd.swarm.access import RunAccess
from peerd.swarm.signed import sign_record
from peerd.table.record import PeerId, PeerRecord, Phase
from peerd.wire.budgets import allowance_of
from peerd.wire.clients import StageClient
from peerd.wire.door import Door
from peerd.wire.swarm_client import SwarmClient
from tests.wire.callee import DOOR_PATIENCE_S, PATIENCE_S, RUN, Callee, new_identity

ORGANISER = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
SHUT_OUT = grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture
def access(callee: Callee, by_invitation: bool) -> RunAccess:
    """The callee's, which has a door and a table behind it."""
    access = RunAccess(callee.me, RUN, public_bytes(ORGANISER), by_invitation=by_invitation)
    callee.door.admission = callee.membership.access = access
    return access


by_invitation = pytest.mark.parametrize("by_invitation", [True])
open_to_all = pytest.mark.parametrize("by_invitation", [False])


def ban(peer: PeerId) -> RawList:
    return sign_list(banning(NO_LIST, [peer], "noise"), RUN, ORGANISER)


def caller_of(callee: Callee, access: RunAccess | None = None) -> tuple[SwarmClient, RunAccess]:
    """A client of the caller, with what it knows of the run."""
    own = access or RunAccess(callee.caller.peer, RUN, public_bytes(ORGANISER))
    return SwarmClient(callee.links(), RUN, own), own


async def backpropagate(callee: Callee, index: int = 0) -> Any:
    call = callee.call(index=index)
    return await StageClient(callee.links(), RUN).backpropagate(callee.me, call, (), PATIENCE_S, lambda _stage, _peer: None)


async def assert_refuses_work(callee: Callee, index: int = 0) -> None:
    """A stream that ends before the callee had all of it may lose its reason (`links.was_cut_short`); then a caller asks again."""
    with pytest.raises((UnwelcomeError, BusyError)):
        await backpropagate(callee, index)
    assert not callee.state.record.done >> index & 1


METHODS = [
    *("/peerd.Swarm/Gossip", "/peerd.Swarm/Converse", "/peerd.Swarm/Contributions", "/peerd.Swarm/Accounts", "/peerd.Swarm/Timeline"),
    *("/peerd.Stage/Backpropagate", "/peerd.Stage/Cancel", "/peerd.State/GetState", "/peerd.State/GetSketch"),
    *("/peerd.Averaging/Propose", "/peerd.Averaging/Give", "/peerd.Averaging/Take", "/peerd.Averaging/Beat", "/peerd.Averaging/Abort"),
    *("/peerd.Averaging/GetAverage", "/peerd.Averaging/GetTied", "/peerd.Averaging/GetMoves"),
]


@open_to_all
@pytest.mark.parametrize("method", METHODS)
async def test_a_banned_peers_call_is_refused_before_its_message_is_read(callee: Callee, access: RunAccess, method: str) -> None:
    """A message that is too long is not even found to be so."""
    access.take(ban(callee.caller.peer))
    channel = await callee.links().channel(callee.caller.peer)
    rpc = channel.unary_unary(method)(bytes(allowance_of(method.rpartition("/")[2]).num_bytes + 1))
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await rpc
    assert refusal.value.code() is SHUT_OUT
    assert refusal.value.details() == "this run's organiser does not let the caller take part: banned"
    assert (callee.door.refused, access.refused) == (0, 1)
    await callee.assert_lives()


@open_to_all
async def test_a_banned_peer_is_told_why_and_may_come_back_once_the_ban_is_lifted(callee: Callee, access: RunAccess) -> None:
    await backpropagate(callee)
    access.take(ban(callee.caller.peer))
    await assert_refuses_work(callee, 1)
    client, own = caller_of(callee)
    callee.servicers[0]._described = Described(access)
    await client.learn_list(callee.me, PATIENCE_S)
    assert own.listed.banned == {callee.caller.peer: "noise"}
    access.take(sign_list(lifting(access.listed, [callee.caller.peer]), RUN, ORGANISER))
    await backpropagate(callee, 1)


class Described:
    """Tells its list, as `Peer.describe` does."""

    def __init__(self, access: RunAccess) -> None:
        self._access = access

    def describe(self) -> Any:
        from peerd.daemon.network import describe_self

        return describe_self([], self._access.newer_than(b""))


@open_to_all
async def test_a_stream_that_is_open_ends_once_its_caller_is_banned(callee: Callee, access: RunAccess) -> None:
    client, own = caller_of(callee)
    await client.tell(callee.me, [], PATIENCE_S)
    access.take(ban(callee.caller.peer))
    with pytest.raises(UnwelcomeError):
        await client.tell(callee.me, [], PATIENCE_S)
    assert own.number == 0, "it is refused, and learns the list in another call"


@open_to_all
async def test_lists_come_with_calls_and_with_answers(callee: Callee, access: RunAccess) -> None:
    somebody = new_identity().peer
    client, own = caller_of(callee)
    access.take(ban(somebody))
    await client.tell(callee.me, [], PATIENCE_S)
    assert own.listed == access.listed
    newer = sign_list(lifting(own.listed, [somebody]), RUN, ORGANISER)
    await client.tell_list(callee.me, newer, PATIENCE_S)
    assert access.raw == newer
    async for _page in client.table(callee.me, PATIENCE_S):
        assert own.raw == newer, "the answer brings it"


@open_to_all
@pytest.mark.parametrize("sound", [False, True])
async def test_a_forged_list_is_counted_as_a_broken_message_and_an_old_one_changes_nothing(
    callee: Callee, access: RunAccess, sound: bool
) -> None:
    old = ban(callee.caller.peer)
    access.take(newer := sign_list(lifting(banning(NO_LIST, [], ""), []), RUN, ORGANISER))
    client, _own = caller_of(callee)
    if sound:
        await client.tell_list(callee.me, old, PATIENCE_S)
    else:
        with pytest.raises(BadMessageError, match="has not signed"):
            await client.tell_list(callee.me, (old[0], bytes(64)), PATIENCE_S)
    assert access.raw == newer
    assert callee.door.refused == (not sound)


@by_invitation
async def test_only_invited_peers_get_the_table_news_and_work(callee: Callee, access: RunAccess) -> None:
    client, own = caller_of(callee)
    for asks in (client.ask_for_news(callee.me, (), PATIENCE_S), client.reaches(callee.me, callee.me, PATIENCE_S)):
        with pytest.raises(UnwelcomeError, match="not invited"):
            await asks
    with pytest.raises(UnwelcomeError):
        async for _page in client.table(callee.me, PATIENCE_S):
            pass
    await assert_refuses_work(callee)
    assert callee.door.bans.left() == {}, "who asks is no liar"
    assert own.use(sign_invitation(callee.caller.peer, NO_END, RUN, ORGANISER))
    async for _page in client.table(callee.me, PATIENCE_S):
        pass
    await backpropagate(callee)


@by_invitation
async def test_a_peer_is_let_in_by_the_invitation_in_its_record_alone(callee: Callee, access: RunAccess) -> None:
    client, _own = caller_of(callee)
    record = PeerRecord(peer=callee.caller.peer, incarnation=1, version=1, phase=Phase.ACCUMULATING)
    with pytest.raises(UnwelcomeError):
        await client.gossip(callee.me, [sign_record(record, callee.caller, RUN).raw], PATIENCE_S)
    assert callee.membership.find(callee.caller.peer) is None
    invited = PeerRecord(
        peer=callee.caller.peer, incarnation=1, version=2, invitation=sign_invitation(callee.caller.peer, NO_END, RUN, ORGANISER)
    )
    await client.gossip(callee.me, [sign_record(invited, callee.caller, RUN).raw], PATIENCE_S)
    assert callee.membership.find(callee.caller.peer) == invited
    await backpropagate(callee)


@by_invitation
async def test_an_uninvited_peer_may_bring_a_list(callee: Callee, access: RunAccess) -> None:
    """The organiser need not be a peer of the run."""
    client, _own = caller_of(callee)
    await client.tell_list(callee.me, ban(new_identity().peer), PATIENCE_S)
    assert access.number == 1


def test_without_a_list_the_door_lets_everybody_in() -> None:
    admission = Door(RUN, DOOR_PATIENCE_S, None).admission  # type: ignore[arg-type]
    admission.check(PeerId("anybody"))
    admission.show(PeerId("anybody"), b"")
    assert not admission.take((b"", b""))
    assert admission.newer_than(b"") is None
    assert swarm_pb2.GossipRequest(invitation=admission.invitation, listed=admission.version) == swarm_pb2.GossipRequest()

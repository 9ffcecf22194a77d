"""What a relay takes on, when it relays at all, and which relays a peer asks: bounds hold whatever comes, each refusal has a reason."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.owner.governor import Limits, Pause
from peerd.policy.swarm.checkup import Dialled
from peerd.policy.swarm.reaching import can_be_dialled, whom_to_ask
from peerd.policy.swarm.relaying import Bounds, VolunteerState, relays_to_ask, why_not_connect, why_not_relay, why_not_reserve
from peerd.table.circuit import circuit_address, direct, is_circuit, relay_in
from peerd.table.record import PeerId, Reach
from tests.strategies import member, view_of

BOUNDS = Bounds(reservations=2, circuits=4, circuits_each=2, daily=1000)
peers = st.sampled_from("abcde").map(PeerId)


@given(st.lists(peers, max_size=12))
def test_no_more_places_are_given_than_there_are_and_a_place_may_be_renewed(asking: list[PeerId]) -> None:
    reserved: set[PeerId] = set()
    for peer in asking:
        refusal = why_not_reserve(BOUNDS, reserved, peer)
        assert bool(refusal) == (peer not in reserved and len(reserved) == 2)
        if not refusal:
            reserved.add(peer)


@given(st.lists(st.tuples(peers, peers), max_size=12))
def test_circuits_are_bounded_in_all_and_for_each_peer(asking: list[tuple[PeerId, PeerId]]) -> None:
    circuits: list[tuple[PeerId, PeerId]] = []
    for caller, callee in asking:
        if not why_not_connect(BOUNDS, circuits, caller, callee):
            circuits.append((caller, callee))
    assert len(circuits) <= BOUNDS.circuits
    assert all(sum(peer in ends for ends in circuits) <= BOUNDS.circuits_each for peer in "abcde")


def standing(
    limits: Limits | None = None, pause: Pause | None = None, reach: Reach = Reach.DIRECT, relayed_today: int = 0
) -> VolunteerState:
    return VolunteerState(limits=limits or Limits(), pause=pause, leaving=False, reach=reach, relayed_today=relayed_today)


def test_a_volunteer_relays_unless_its_owner_or_its_place_speaks_against_it() -> None:
    assert why_not_relay(standing(), BOUNDS) == ""
    assert why_not_relay(standing(reach=Reach.UNKNOWN), BOUNDS) == ""
    reasons = [
        why_not_relay(standing(pause=Pause("it is outside the hours allowed", "later")), BOUNDS),
        why_not_relay(standing(reach=Reach.RELAYED), BOUNDS),
        why_not_relay(standing(reach=Reach.CLIENT), BOUNDS),
        why_not_relay(standing(Limits(upload=1e6)), BOUNDS),
        why_not_relay(standing(Limits(download=1e6)), BOUNDS),
        why_not_relay(standing(Limits(daily=1)), BOUNDS),
        why_not_relay(standing(Limits(monthly=1)), BOUNDS),
        why_not_relay(standing(relayed_today=1000), BOUNDS),
    ]
    for reason, word in zip(reasons, ("hours", "dial", "dial", "cap", "cap", "quota", "quota", "used up"), strict=True):
        assert word in reason


def test_relays_are_asked_in_an_order_of_each_peers_own_and_none_that_cannot_help() -> None:
    here = ("/ip4/1.2.3.4/tcp/1/p2p/x",)
    able = [member(f"relay{n}", relays=True, addresses=here) for n in range(6)]
    unable = [
        member("does-not-volunteer", addresses=here),
        member("leaves", relays=True, leaving=True, addresses=here),
        member("is-behind-one-itself", relays=True, addresses=(circuit_address(here[0], "y"),)),
    ]
    orders = set()
    for name in "abcdefgh":
        asked = [record.peer for record in relays_to_ask(view_of(member(name, relays=True, addresses=here), *able, *unable), (), ())]
        assert sorted(asked) == [record.peer for record in able]
        orders.add(tuple(asked))
    assert len(orders) > 1
    view = view_of(member("a"), *able)
    assert {r.peer for r in relays_to_ask(view, [PeerId("relay0")], [PeerId("relay1")])} == {r.peer for r in able} - {"relay0", "relay1"}


@given(st.lists(st.sampled_from([True, False, None]), max_size=6))
def test_most_of_those_that_could_say_decide_whether_a_peer_can_be_dialled(said: list[bool | None]) -> None:
    found = can_be_dialled([Dialled(PeerId("a"), "", each) for each in said])
    yes, no = said.count(True), said.count(False)
    assert found is (None if not yes + no else yes > no)


def test_those_are_asked_first_to_dial_back_that_can_be_called_for_sure() -> None:
    others = [member("b"), member("c", reach=Reach.RELAYED), member("d", reach=Reach.CLIENT), member("e", reach=Reach.DIRECT)]
    view = view_of(member("a"), *others, member("f", leaving=True))
    assert whom_to_ask(view, 9) == ("e", "b", "c", "d")
    assert whom_to_ask(view, 1) == ("e",)


def test_no_peer_is_everybodys_first_to_dial_back_by_its_id() -> None:
    others = [member(f"p{number}") for number in range(20)]
    assert len({whom_to_ask(view_of(member(f"me{number}"), *others), 1) for number in range(20)}) > 5


def test_an_address_behind_a_relay_names_both() -> None:
    plain = "/ip4/1.2.3.4/tcp/5/p2p/relay"
    address = circuit_address(plain, "peer")
    assert address == "/ip4/1.2.3.4/tcp/5/p2p/relay/p2p-circuit/p2p/peer"
    assert relay_in(address) == (plain, "relay")
    assert (is_circuit(address), is_circuit(plain)) == (True, False)
    assert direct([address, plain]) == (plain,)

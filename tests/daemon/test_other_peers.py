"""What a seat knows of other peers: which of them no line leads to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from peerd.daemon.other_peers import OtherPeers
from peerd.table.record import PeerId, PeerRecord
from tests.strategies import view_of

ME = PeerId("me")
LOOPBACK, ELSEWHERE = "/ip4/127.0.0.1/tcp/4001", "/ip4/203.0.113.7/tcp/4001"
"""Of documents about networks: 203.0.113.0/24 belongs to nobody."""


def seen_from_here(*others: PeerRecord, by_local_socket: frozenset[PeerId] = frozenset()) -> OtherPeers:
    """Others as a peer of addresses elsewhere sees them."""
    live = view_of(PeerRecord(peer=ME, addresses=(LOOPBACK, ELSEWHERE)), *others)
    membership = SimpleNamespace(me=ME, find=live.find)
    peer: Any = SimpleNamespace(
        membership=membership, network=SimpleNamespace(links=SimpleNamespace(is_local=by_local_socket.__contains__))
    )
    return OtherPeers(peer, 0)


def test_this_peer_itself_is_near_whatever_addresses_it_has() -> None:
    assert seen_from_here().is_near(ME)


def test_a_peer_to_which_tensors_take_a_local_socket_is_near_though_others_reach_it_by_a_line() -> None:
    here = PeerRecord(peer=PeerId("here"), addresses=(LOOPBACK, ELSEWHERE))
    assert seen_from_here(here, by_local_socket=frozenset({here.peer})).is_near(here.peer)


@pytest.mark.parametrize(
    ("addresses", "is_near"), [((LOOPBACK,), True), ((LOOPBACK, ELSEWHERE), False), ((ELSEWHERE,), False), ((), False)]
)
def test_a_peer_without_a_local_socket_is_near_only_if_it_names_this_machine_alone(addresses: tuple[str, ...], is_near: bool) -> None:
    other = PeerRecord(peer=PeerId("other"), addresses=addresses)
    assert seen_from_here(other).is_near(other.peer) == is_near


def test_a_peer_whose_record_has_not_come_is_not_near() -> None:
    assert not seen_from_here().is_near(PeerId("unknown"))

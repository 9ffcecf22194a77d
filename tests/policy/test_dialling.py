"""Where a peer is dialled: at addresses that it names itself, and at a bounded number of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.swarm.dialling import MAX_KEPT, MOST_NEW, MOST_NEW_IN_ALL, DialRation, is_dialable, is_on_this_machine
from peerd.table.record import PeerId

A = PeerId("a")


def lan(number: int) -> str:
    return f"/ip4/192.168.{number // 250}.{1 + number % 250}/tcp/22"


def test_a_peer_that_names_ever_new_addresses_has_few_of_them_dialled() -> None:
    ration = DialRation()
    dialled = {address for second in range(60) for address in ration.among(A, [lan(8 * second + n) for n in range(8)], float(second))}
    assert len(dialled) == MOST_NEW
    assert ration.among(A, [lan(0)], 59.0) == (lan(0),), "what it named before may be tried again"
    assert ration.among(A, [lan(999)], 61.0) == (lan(999),)


def test_many_keys_together_have_a_bounded_number_dialled() -> None:
    ration = DialRation()
    dialled = [ration.among(PeerId(f"ghost{key}"), [lan(8 * key + n) for n in range(8)], 0.0) for key in range(2 * MAX_KEPT // 8)]
    assert sum(map(len, dialled)) == MOST_NEW_IN_ALL
    assert len(ration._dialled) <= MAX_KEPT


def test_a_peer_is_looked_for_on_loopback_only_if_it_names_nothing_else() -> None:
    loopback, there = "/ip4/127.0.0.1/tcp/9", "/ip4/203.0.113.5/tcp/9"
    ration = DialRation()
    assert ration.among(A, [there, loopback], 0.0) == (there,)
    assert ration.among(A, [loopback], 0.0) == (loopback,)
    circuit = f"{loopback}/p2p/R/p2p-circuit/p2p/a"
    assert ration.among(A, [circuit], 0.0) == (circuit,)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("/ip4/203.0.113.5/tcp/31337", True),
        ("/ip4/10.1.2.3/tcp/31337/p2p/12D3KooW", True),
        ("/ip6/2001:4860::1/tcp/1", True),
        ("/dns4/host.example/tcp/1", True),
        ("/ip4/203.0.113.5/udp/53", False),
        ("/ip4/203.0.113.5/tcp/70000", False),
        ("/ip4/203.0.113.5/tcp/0", False),
        ("/ip4/0.0.0.0/tcp/1", False),
        ("/ip4/224.0.0.1/tcp/1", False),
        ("/ip4/255.255.255.255/tcp/1", False),
        ("/ip4/169.254.169.254/tcp/80", False),
        ("/unix/var/run/docker.sock", False),
        ("203.0.113.5:1", False),
        ("", False),
    ],
)
def test_only_tcp_at_a_host_is_dialled(address: str, expected: bool) -> None:
    assert is_dialable(address) is expected


@given(st.text(max_size=40), st.text(max_size=40))
def test_whatever_a_peer_calls_an_address_raises_nothing(text: str, other: str) -> None:
    DialRation().among(A, [text, f"/ip4/{text}/tcp/{other}", f"/ip6/{text}/tcp/1"], 0.0)


@pytest.mark.parametrize(
    ("addresses", "is_here"),
    [
        (("/ip4/127.0.0.1/tcp/4001",), True),
        (("/ip4/127.0.0.1/tcp/4001", "/ip6/::1/tcp/4001"), True),
        (("/ip4/127.0.0.1/tcp/4001", "/ip4/192.0.2.1/tcp/4001"), False),
        (("/ip4/127.0.0.1/tcp/4001/p2p/abc/p2p-circuit/p2p/def",), False),
        ((), False),
    ],
)
def test_a_peer_that_names_loopback_alone_is_on_this_machine(addresses: tuple[str, ...], is_here: bool) -> None:
    assert is_on_this_machine(addresses) == is_here

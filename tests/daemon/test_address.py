"""The address that a volunteer pastes: what is read from it, and that nothing else passes for one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from peerd.daemon.address import Address, of_one_run, parse_address
from peerd.errors import AddressError, ExitCode
from peerd.link.peer_keys import peer_id_of
from peerd.table.record import RunId

PEER = peer_id_of(Ed25519PrivateKey.from_private_bytes(bytes(range(32))).public_key().public_bytes_raw())
RUN = RunId("0123456789abcdef" * 2)
hosts = st.ip_addresses(v=4).map(str)
ports = st.integers(1, 65535)


@given(hosts, ports, st.none() | st.just(RUN))
def test_what_start_prints_is_read_back(host: str, port: int, run: RunId | None) -> None:
    multiaddr = f"/ip4/{host}/tcp/{port}/p2p/{PEER}"
    assert parse_address(multiaddr + (f"#{run}" if run else "")) == Address(multiaddr, PEER, run)


def test_the_address_of_a_peer_behind_a_relay_is_of_that_peer() -> None:
    relay = peer_id_of(Ed25519PrivateKey.generate().public_key().public_bytes_raw())
    multiaddr = f"/ip4/1.2.3.4/tcp/5/p2p/{relay}/p2p-circuit/p2p/{PEER}"
    assert parse_address(f"{multiaddr}#{RUN}") == Address(multiaddr, PEER, RUN)
    for broken in (multiaddr.replace("p2p-circuit", "circuit"), f"{multiaddr}/p2p-circuit/p2p/{PEER}", multiaddr.replace(relay, "x")):
        with pytest.raises(AddressError):
            parse_address(broken)


def test_a_name_instead_of_a_number_and_white_space_around_are_fine() -> None:
    assert parse_address(f"  /dns4/peerd.example/tcp/4001/p2p/{PEER}\n").multiaddr.startswith("/dns4/peerd.example/")


def test_an_empty_run_is_none_at_all() -> None:
    assert parse_address(f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}#").run is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "#",
        "peerd",
        PEER,
        f"/p2p/{PEER}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}/",
        f"ip4/1.2.3.4/tcp/1/p2p/{PEER}",
        f"/ip6/::1/tcp/1/p2p/{PEER}",
        f"/ip4/1.2.3.4/udp/1/p2p/{PEER}",
        f"/ip4/1.2.3/tcp/1/p2p/{PEER}",
        f"/ip4/1.2.3.400/tcp/1/p2p/{PEER}",
        f"/ip4/1.2.3.4/tcp/0/p2p/{PEER}",
        f"/ip4/1.2.3.4/tcp/65536/p2p/{PEER}",
        f"/ip4/1.2.3.4/tcp/x/p2p/{PEER}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER[:-1]}",
        "/ip4/1.2.3.4/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "/ip4/1.2.3.4/tcp/1/p2p/0OIl",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}#{RUN[:-1]}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}#{RUN.upper()}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}#{RUN}#{RUN}",
    ],
)
def test_anything_else_is_told_with_what_to_paste(text: str) -> None:
    with pytest.raises(AddressError, match=r"paste the whole line|not a run id") as error:
        parse_address(text)
    assert error.value.exit_code == ExitCode.ADDRESS


@given(st.text(max_size=80) | st.lists(st.sampled_from(["ip4", "1.2.3.4", "tcp", "1", "p2p", PEER, "", "#"])).map("/".join))
def test_no_text_is_worse_than_not_an_address(text: str) -> None:
    try:
        found = parse_address(text)
    except AddressError:
        return
    assert found.peer == PEER


def test_an_address_without_a_run_gets_that_which_the_others_name() -> None:
    """Else whoever answers first there decides which run is joined."""
    plain, named = parse_address(f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"), parse_address(f"/ip4/127.0.0.1/tcp/4002/p2p/{PEER}#{'a' * 32}")
    other = replace(named, run=RunId("b" * 32))
    assert [each.run for each in of_one_run([plain, named])] == [named.run, named.run]
    assert of_one_run([plain, named, other]) == (plain, named, other), "which one is meant nobody can say"
    assert of_one_run([plain]) == (plain,)

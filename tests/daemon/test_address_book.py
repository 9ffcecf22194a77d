"""Whom a daemon tries: those at the addresses given, else those that it met when it was last in the run, each at all of its addresses."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.config.organiser import create_key, load_key
from peerd.config.paths import Home
from peerd.daemon.address import parse_address
from peerd.daemon.enter import _address_book, _met_before
from peerd.link.peer_keys import peer_id_of
from peerd.swarm.identity import LocalState
from peerd.swarm.signed import sign_manifest
from peerd.table.record import RunId
from tests.tiny_run import tiny_manifest

ONE, OTHER = (peer_id_of(Ed25519PrivateKey.generate().public_key().public_bytes_raw()) for _ in range(2))
BEHIND = f"/ip4/9.9.9.9/tcp/1/p2p/{OTHER}/p2p-circuit/p2p/{ONE}"
FAR, NEAR, ELSEWHERE = f"/ip4/8.8.8.8/tcp/40/p2p/{ONE}", f"/ip4/192.168.1.5/tcp/4001/p2p/{ONE}", f"/ip4/9.9.9.9/tcp/1/p2p/{OTHER}"


def test_a_peer_that_was_met_is_tried_at_all_of_its_addresses(tmp_path: Path) -> None:
    create_key(tmp_path / "organiser.key")
    signed = sign_manifest(tiny_manifest(), load_key(tmp_path / "organiser.key"))
    state = LocalState(Home(tmp_path))
    state.remember(signed.run, b"", 0)
    state.remember_peers([FAR, NEAR, ELSEWHERE])
    assert _address_book(state, signed, ()) == {ONE: (FAR, NEAR), OTHER: (ELSEWHERE,)}
    assert _address_book(state, signed, [parse_address(ELSEWHERE)]) == {OTHER: (ELSEWHERE,)}
    assert _address_book(state, signed, [parse_address(FAR), parse_address(NEAR)]) == {ONE: (FAR, NEAR)}
    assert _address_book(state, None, ()) == {}


def test_peers_of_another_run_are_not_tried(tmp_path: Path) -> None:
    create_key(tmp_path / "organiser.key")
    signed = sign_manifest(tiny_manifest(), load_key(tmp_path / "organiser.key"))
    state = LocalState(Home(tmp_path))
    state.remember(RunId("f" * 32), b"", 0)
    state.remember_peers([FAR])
    assert _address_book(state, signed, ()) == {}


def test_whoever_was_met_in_the_run_is_asked_where_the_addresses_given_are_silent(tmp_path: Path) -> None:
    """A service is installed with one address, which may be gone years later."""
    run = RunId("a" * 32)
    state = LocalState(Home(tmp_path))
    gone = parse_address(f"/ip4/8.8.4.4/tcp/40/p2p/{ONE}#{run}")
    assert _met_before(state, [gone]) == ()
    state.remember(run, b"", 0)
    state.remember_peers([FAR, BEHIND, ELSEWHERE])
    assert [each.multiaddr for each in _met_before(state, [gone])] == [FAR, BEHIND, ELSEWHERE]
    assert {each.run for each in _met_before(state, [gone])} == {run}
    assert [each.multiaddr for each in _met_before(state, [parse_address(ELSEWHERE)])] == [FAR, BEHIND]
    assert _met_before(state, [parse_address(f"{ELSEWHERE}#{'b' * 32}")]) == ()
    assert _met_before(state, []) == ()

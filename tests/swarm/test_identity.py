"""Who a daemon is: a key that is made once, an id that holds it, one daemon per home, and what it remembers."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from peerd.config.paths import Home
from peerd.errors import DiskError, IdentityInUseError, SignatureError
from peerd.link.peer_keys import peer_id_of, public_key_of, verify
from peerd.swarm.identity import LOCAL_STATE, Identity, LocalState, lock_home
from peerd.table.record import RunId
from peerd.unwritten import UNWRITTEN
from tests.small_disk import fill, needs_root, small_disk

RUN, OTHER_RUN = RunId("a" * 32), RunId("b" * 32)
KEY, OTHER_KEY = b"k" * 32, b"o" * 32


# The key


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_holds_its_public_key(public_key: bytes) -> None:
    peer = peer_id_of(public_key)
    assert public_key_of(peer) == public_key
    assert peer.startswith("12D3KooW")
    assert len(peer) == 52


@given(st.text(max_size=70))
def test_no_other_text_holds_a_key(text: str) -> None:
    try:
        assert peer_id_of(public_key_of(text)) == text
    except ValueError:
        return


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_a_signature_holds_for_its_message_alone(message: bytes, other: bytes) -> None:
    identity = Identity(Ed25519PrivateKey.from_private_bytes(bytes(32)))
    signature = identity.sign(message)
    key = public_key_of(identity.peer)
    assert verify(key, message, signature)
    assert verify(key, other, signature) is (message == other)
    assert not verify(key, message, signature[:-1])
    assert not verify(b"short", message, signature)


def test_a_key_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    made = Identity.load_or_create(path)
    assert Identity.load_or_create(path).peer == made.peer
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"junk", bytes(68), b"\x08\x01\x12\x40" + bytes(63)])
def test_a_file_that_is_no_key_is_told_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    with pytest.raises(SignatureError, match="move it away"):
        Identity.load_or_create(path)
    assert path.read_bytes() == content


def test_a_key_that_cannot_be_read_or_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(DiskError):
        Identity.load_or_create(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(DiskError):
        Identity.load_or_create(tmp_path / "file" / "identity.key")


# The lock


def test_a_home_has_one_daemon_at_a_time(tmp_path: Path) -> None:
    home = Home(tmp_path / "deep" / "home")
    lock = lock_home(home)
    with pytest.raises(IdentityInUseError, match="peerd leave"):
        lock_home(home)
    lock.release()
    lock_home(home).release()
    assert stat.S_IMODE(home.folder.stat().st_mode) == 0o700


def test_a_home_in_the_place_of_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError):
        lock_home(Home(tmp_path / "file"))


# The memory


def test_an_incarnation_is_higher_than_any_before_and_on_disk_before_it_is_used(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert LocalState(home).raise_incarnation() == 1
    assert LocalState(home).incarnation == 1
    assert LocalState(home).raise_incarnation(seen=7) == 8
    assert LocalState(home).raise_incarnation(seen=3) == 9


def test_an_organiser_is_pinned_at_first_sight_and_another_is_refused_for_good(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert LocalState(home).pin(RUN, KEY) is True
    assert LocalState(home).pin(RUN, KEY) is False
    assert LocalState(home).pin(OTHER_RUN, OTHER_KEY) is True
    for _ in range(2):
        with pytest.raises(SignatureError, match="another organiser"):
            LocalState(home).pin(RUN, OTHER_KEY)


def test_names_are_remembered_until_they_are_replaced_or_taken_away(tmp_path: Path) -> None:
    home = Home(tmp_path)

    def after(nickname: str | None, team: str | None) -> tuple[str, str]:
        state = LocalState(home)
        state.remember_names(nickname, team)
        again = LocalState(home)
        assert (again.nickname, again.team) == (state.nickname, state.team)
        return again.nickname, again.team

    for wanted, expected in ((None, False), (True, True), (None, True), (False, False)):
        LocalState(home).remember_names(None, None, wanted)
        assert LocalState(home).unlisted is expected
    told = [after(*names) for names in ((None, None), ("anna", None), (None, "rust"), ("bob", None), (None, None), ("", "c"))]
    assert told == [("", ""), ("anna", ""), ("anna", "rust"), ("bob", "rust"), ("bob", "rust"), ("", "c")]
    home.state.write_text(home.state.read_text().replace('"c"', '"a\\u202e"'))
    with pytest.raises(DiskError, match="damaged"):
        LocalState(home)


def test_what_one_part_writes_no_other_loses(tmp_path: Path) -> None:
    home = Home(tmp_path)
    state = LocalState(home)
    state.pin(RUN, KEY)
    state.raise_incarnation()
    assert (LocalState(home).incarnation, LocalState(home).pin(RUN, KEY)) == (1, False)


def test_two_threads_write_and_neither_fails_nor_undoes_what_the_other_wrote(tmp_path: Path) -> None:
    state, rounds = LocalState(Home(tmp_path)), 400

    def meet() -> None:
        for number in range(rounds):
            state.remember_peers([f"/ip4/127.0.0.1/tcp/{number}"])

    with ThreadPoolExecutor(2) as pool:
        met = pool.submit(meet)
        assert [state.raise_incarnation() for _ in range(rounds)][-1] == rounds
        met.result()
    found = LocalState(Home(tmp_path))
    assert (found.incarnation, found.peers[0]) == (rounds, f"/ip4/127.0.0.1/tcp/{rounds - 1}")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"incarnation": 1}',
        b'{"incarnation": Infinity, "organisers": {}}',
        b'{"incarnation": NaN, "organisers": {}}',
        b'{"incarnation": -1, "organisers": {}}',
        b'{"incarnation": "1", "organisers": {}}',
        b'{"incarnation": true, "organisers": {}}',
        json.dumps({"incarnation": 1 << 62, "organisers": {}}).encode(),
        b'{"incarnation": 1, "organisers": []}',
    ],
    ids=lambda content: content[:45].decode(errors="replace"),
)
def test_a_damaged_memory_is_told_and_never_guessed(tmp_path: Path, content: bytes) -> None:
    home = Home(tmp_path)
    home.state.write_bytes(content)
    with pytest.raises(DiskError, match="is damaged"):
        LocalState(home)


def test_a_memory_that_cannot_be_written_is_told_and_leaves_no_draft(tmp_path: Path) -> None:
    home = Home(tmp_path)
    state = LocalState(home)
    home.state.mkdir()
    with pytest.raises(DiskError):
        state.raise_incarnation()
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


@needs_root
def test_on_a_full_disk_a_home_that_has_been_written_goes_on_and_is_written_later(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", kilobytes=64) as disk:
        home = Home(disk / "home")
        ballast = fill(disk)
        with pytest.raises(DiskError, match="the disk is full"):
            LocalState(home).raise_incarnation()
        ballast.unlink()
        state = LocalState(home)
        assert state.raise_incarnation() == 1
        ballast = fill(disk)
        assert state.raise_incarnation() == 2
        state.remember_peers(["/ip4/127.0.0.1/tcp/9"])
        assert "the disk is full" in UNWRITTEN.errors()[LOCAL_STATE].message
        assert LocalState(home).incarnation == 1, "the old content is whole"
        ballast.unlink()
        state.remember_peers(["/ip4/127.0.0.1/tcp/9"])
        assert (LocalState(home).incarnation, LocalState(home).peers) == (2, ["/ip4/127.0.0.1/tcp/9"])
        assert LOCAL_STATE not in UNWRITTEN

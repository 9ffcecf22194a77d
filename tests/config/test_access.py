"""What an organiser signs: lists and invitations, how they are read, and what is refused of what strangers send."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.config.access import (
    INVITATION_BYTES,
    MAX_END_S,
    MAX_LIST_BYTES,
    NO_END,
    NO_LIST,
    AccessList,
    RawList,
    allowing,
    banning,
    describe_list,
    invitation_text,
    invitations_in,
    invited_until,
    is_peer_id,
    lifting,
    list_in,
    list_on_disk,
    organisers_peer,
    read_list,
    sign_invitation,
    sign_list,
    write_list,
)
from peerd.config.organiser import public_bytes
from peerd.errors import BadMessageError
from peerd.link.peer_keys import peer_id_of
from peerd.policy.swarm.access import MAX_LISTED
from peerd.table.record import PeerId

KEY, OTHER_KEY = (Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(2))
ORGANISER = public_bytes(KEY)
RUN, OTHER_RUN = "a" * 32, "b" * 32
PEERS = [peer_id_of(bytes([number]) * 32) for number in range(5)]
LISTED = banning(allowing(NO_LIST, PEERS[:2]), PEERS[2:4], "sends noise, \u00e4")
PIECES = (b'"', b"{", b"[", b"]", b"}", b",", b"0", b"null", b"1e9", b"\\ud800", b"\xff\x00")


def test_a_list_travels_and_names_what_is_on_it() -> None:
    assert read_list(sign_list(LISTED, RUN, KEY), RUN, ORGANISER) == LISTED
    assert describe_list(lifting(LISTED, PEERS[3:])) == {
        "number": 3,
        "allowed": sorted(PEERS[:2]),
        "banned": [{"peer": PEERS[2], "reason": "sends noise, \u00e4"}],
    }


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (sign_list(LISTED, RUN, OTHER_KEY), "has not signed"),
        (sign_list(LISTED, OTHER_RUN, KEY), "has not signed"),
        ((sign_list(LISTED, RUN, KEY)[0] + b" ", sign_list(LISTED, RUN, KEY)[1]), "has not signed"),
        ((b"", bytes(64)), "has not signed"),
        ((sign_list(LISTED, RUN, KEY)[0], b""), "a signature of 0"),
        ((bytes(MAX_LIST_BYTES + 1), bytes(64)), "131073 bytes"),
    ],
    ids=["another organiser", "another run", "changed", "nothing", "not signed", "too long"],
)
def test_a_list_counts_only_if_this_runs_organiser_has_signed_it(raw: RawList, told: str) -> None:
    with pytest.raises(BadMessageError, match=told):
        read_list(raw, RUN, ORGANISER)


def body(**fields: object) -> bytes:
    return json.dumps({"number": 1, "allowed": [], "banned": {}, **fields}).encode()


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"[]",
        b"\xff",
        b"{}",
        b"[" * 100_000,
        b'{"number": 1, "allowed": []}',
        body(more=1),
        body(number=0),
        body(number=-1),
        body(number=True),
        body(number=1.5),
        body(number=1 << 60),
        b'{"number": 1e999, "allowed": [], "banned": {}}',
        b'{"number": ' + b"9" * 10_000 + b', "allowed": [], "banned": {}}',
        body(allowed={}),
        body(allowed=[1]),
        body(allowed=["peer"]),
        body(allowed=[PEERS[0] + "x"]),
        body(banned=[]),
        body(banned={"peer": ""}),
        body(banned={PEERS[0]: 1}),
        body(banned={PEERS[0]: None}),
        body(banned={PEERS[0]: "\x1b[2J"}),
        body(banned={PEERS[0]: "\ud800"}),
        body(banned={PEERS[0]: "x" * 121}),
        body(banned={PEERS[0]: ""}, allowed=[PEERS[0]]),
        body(banned={organisers_peer(ORGANISER): ""}),
        body(allowed=[peer_id_of(number.to_bytes(32, "big")) for number in range(MAX_LISTED + 1)]),
    ],
    ids=str,
)
def test_what_is_no_list_is_refused_although_it_is_signed(wrong: bytes) -> None:
    with pytest.raises(BadMessageError, match="bad access list"):
        list_in(wrong, ORGANISER)


def test_no_change_of_a_list_makes_its_reader_fail_in_another_way() -> None:
    random, sound = Random(0), sign_list(LISTED, RUN, KEY)[0]
    read = 0
    for _ in range(4000):
        changed = bytearray(sound)
        for _change in range(random.randint(1, 4)):
            place = random.randrange(len(changed))
            kind = random.random()
            if kind < 0.4:
                changed[place] = random.randrange(256)
            elif kind < 0.7:
                del changed[place : place + random.randint(1, 8)]
            else:
                changed[place:place] = random.choice(
                    (b'"', b"{", b"[", b"]", b"}", b",", b"0", b"null", b"1e9", b"\\ud800", random.randbytes(3))
                )
        try:
            found = list_in(bytes(changed), ORGANISER)
        except BadMessageError:
            continue
        read += 1
        assert isinstance(found, AccessList)
        assert all(map(is_peer_id, (*found.allowed, *found.banned)))
    assert 0 < read < 2000


def test_random_bytes_are_no_list_and_no_invitation() -> None:
    random = Random(1)
    for _ in range(2000):
        noise = random.randbytes(random.randrange(200))
        with pytest.raises(BadMessageError):
            list_in(noise, ORGANISER)
        with pytest.raises(BadMessageError):
            read_list((noise, random.randbytes(random.choice((0, 63, 64, 65)))), RUN, ORGANISER)
        assert invited_until(noise[:INVITATION_BYTES], PEERS[0], RUN, ORGANISER) is None
        assert isinstance(invitations_in(noise.decode(errors="replace")), list)


def test_an_organiser_cannot_sign_a_list_that_no_daemon_would_take() -> None:
    with pytest.raises(ValueError, match="cannot ban the organiser's own key"):
        sign_list(banning(NO_LIST, [organisers_peer(ORGANISER)], ""), RUN, KEY)
    many = [peer_id_of(number.to_bytes(32, "big")) for number in range(MAX_LISTED)]
    assert read_list(sign_list(banning(NO_LIST, many, ""), RUN, KEY), RUN, ORGANISER).banned.keys() == set(many)
    with pytest.raises(ValueError, match="takes at most 131072 bytes"):
        sign_list(banning(NO_LIST, many, "x" * 120), RUN, KEY)


def test_a_list_is_kept_on_disk_and_one_that_was_changed_there_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "access" / "list"
    assert list_on_disk(path, RUN, ORGANISER) is None
    raw = sign_list(LISTED, RUN, KEY)
    write_list(path, raw)
    assert list_on_disk(path, RUN, ORGANISER) == (raw, LISTED)
    with pytest.raises(BadMessageError, match="has not signed"):
        list_on_disk(path, OTHER_RUN, ORGANISER)
    for wrong in (b"", b"x", path.read_bytes()[:-1], path.read_bytes() + b"x", bytes(MAX_LIST_BYTES + 100)):
        path.write_bytes(wrong)
        with pytest.raises(BadMessageError):
            list_on_disk(path, RUN, ORGANISER)


def test_an_invitation_lets_one_peer_into_one_run_until_its_end() -> None:
    for until_s in (NO_END, 1, 2_000_000_000, MAX_END_S):
        invitation = sign_invitation(PEERS[0], until_s, RUN, KEY)
        assert len(invitation) == INVITATION_BYTES
        assert invited_until(invitation, PEERS[0], RUN, ORGANISER) == until_s
        assert invited_until(invitation, PEERS[1], RUN, ORGANISER) is None
        assert invited_until(invitation, PEERS[0], OTHER_RUN, ORGANISER) is None
        assert invited_until(invitation, PEERS[0], RUN, public_bytes(OTHER_KEY)) is None
    later = (3_000_000_000).to_bytes(8, "big") + sign_invitation(PEERS[0], 5, RUN, KEY)[8:]
    assert invited_until(later, PEERS[0], RUN, ORGANISER) is None
    assert invited_until(sign_invitation(PEERS[0], MAX_END_S + 1, RUN, KEY), PEERS[0], RUN, ORGANISER) is None


def test_a_list_is_no_invitation_and_the_other_way_round() -> None:
    """A signature of the one kind never stands for the other: each begins with its own words."""
    text, signature = sign_list(LISTED, RUN, KEY)
    assert invited_until(text[:8] + signature, PEERS[0], RUN, ORGANISER) is None
    invitation = sign_invitation(PEERS[0], 5, RUN, KEY)
    with pytest.raises(BadMessageError, match="has not signed"):
        read_list((invitation[:8], invitation[8:]), RUN, ORGANISER)


def test_invitations_are_found_among_other_words() -> None:
    some = [sign_invitation(peer, NO_END, RUN, KEY) for peer in PEERS]
    text = "Hello,\n" + "\n".join(map(invitation_text, some)) + "\n\nsee you soon!\n"
    assert invitations_in(text) == some
    assert invitations_in("see you soon") == invitations_in("") == invitations_in(invitation_text(some[0])[:-4]) == []


def test_peer_ids_are_known_by_their_form() -> None:
    assert all(map(is_peer_id, PEERS))
    assert organisers_peer(bytes([3]) * 32) == PeerId(PEERS[3])
    assert not any(map(is_peer_id, ("", "12D3KooW", PEERS[0][:-1], PEERS[0] + "1", PEERS[0][:-1] + "0", PEERS[0] + "\n", None, 7)))

"""A list of runs: only a run's organiser can describe it, a list has bounds, and a bad line harms no other."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from peerd.config.about import AboutConfig
from peerd.config.manifest import run_id
from peerd.config.organiser import public_bytes
from peerd.config.run_list import HEAD, MAX_ADDRESSES, MAX_LINE_BYTES, MAX_LIST_BYTES, read_runs, sign_run, with_run
from peerd.errors import BadMessageError
from peerd.link.peer_keys import peer_id_of

ANNA, BEN = (Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (1, 2))
PLACE = f"/dns4/peers.example.org/tcp/31337/p2p/{peer_id_of(bytes(32))}"
ABOUT = AboutConfig(purpose="A small model of poems, in zw\u00f6lf languages.", licence="Apache-2.0", contact="anna@example.org")


def id_of(key: Ed25519PrivateKey, name: str = "poems") -> str:
    return run_id(public_bytes(key), name)


def line_of(key: Ed25519PrivateKey = ANNA, name: str = "poems", signed_s: int = 5, **changes: Any) -> str:
    given = {"addresses": [f"{PLACE}#{id_of(key, name)}"], "about": ABOUT, **changes}
    return sign_run(key, name, given["addresses"], given["about"], signed_s)


def listed(*lines: str) -> bytes:
    return "\n".join((HEAD, *lines)).encode()


def test_a_line_says_what_its_organiser_signed() -> None:
    found = read_runs(listed("# runs of example.org", "", line_of(), line_of(BEN, "songs"), ""))
    assert found.wrong == ()
    assert [(run.name, run.run, run.about, run.signed_s) for run in found.runs] == [
        ("poems", id_of(ANNA), ABOUT, 5),
        ("songs", id_of(BEN, "songs"), ABOUT, 5),
    ]
    assert found.runs[0].addresses == (f"{PLACE}#{id_of(ANNA)}",)
    assert read_runs(HEAD.encode()).runs == ()


@pytest.mark.parametrize("place", [PLACE, f"{PLACE}/p2p-circuit/p2p/{peer_id_of(bytes(31) + b'1')}", "https://train.example.org:8443/join"])
def test_addresses_and_short_links_are_taken(place: str) -> None:
    assert read_runs(listed(line_of(addresses=[f"{place}#{id_of(ANNA)}"]))).runs[0].addresses == (f"{place}#{id_of(ANNA)}",)


@pytest.mark.parametrize(
    "addresses",
    [
        [],
        [f"{PLACE}#{'0' * 32}"],
        [PLACE],
        [f"{PLACE}#{id_of(ANNA)}"] * (MAX_ADDRESSES + 1),
        [f"http://example.org#{id_of(ANNA)}"],
        [f"https://example.org/$(reboot)#{id_of(ANNA)}"],
        [f"/ip4/1.2.3.4;reboot/tcp/1/p2p/x#{id_of(ANNA)}"],
    ],
)
def test_a_run_is_joined_at_addresses_of_its_own_that_a_shell_leaves_alone(addresses: list[str]) -> None:
    with pytest.raises(ValueError, match=r"address"):
        line_of(addresses=addresses)


def test_the_organiser_of_another_run_cannot_describe_this_one() -> None:
    key, signature, body = line_of().split(" ", 2)
    forged = line_of(BEN, addresses=[f"{PLACE}#{id_of(BEN)}"]).split(" ", 2)
    wrong = read_runs(listed(f"{key} {forged[1]} {forged[2]}", f"{forged[0]} {signature} {body}", f"{key} {signature}")).wrong
    assert [told.partition(": ")[2] for told in wrong] == ["it is not signed by the key that it names"] * 2 + [
        "it has no key, signature and run"
    ]


def test_of_two_lines_about_a_run_the_later_counts_wherever_it_stands() -> None:
    old, new = line_of(about=AboutConfig(purpose="old")), line_of(signed_s=6)
    for lines in ((old, new), (new, old)):
        assert [run.about for run in read_runs(listed(*lines)).runs] == [ABOUT]


@given(place=st.integers(0, 399), bit=st.integers(0, 7))
def test_a_changed_line_is_left_out_and_harms_no_other(place: int, bit: int) -> None:
    line = bytearray(line_of().encode())
    line[place] ^= 1 << bit
    found = read_runs(HEAD.encode() + b"\n" + bytes(line) + b"\n" + line_of(BEN, "songs").encode())
    names = [run.name for run in found.runs]
    assert names == ["songs"] or (names == ["poems", "songs"] and found.runs[0].about == ABOUT)  # spare bits of base64


@given(raw=st.binary(max_size=300))
def test_any_bytes_are_a_list_or_told(raw: bytes) -> None:
    assert read_runs(HEAD.encode() + b"\n" + raw).runs == ()
    with pytest.raises(BadMessageError):
        read_runs(b"x" + raw)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "a b"},
        {"name": 7},
        {"about": {"purpose": "x\x1b[2J"}},
        {"about": {"colour": "red"}},
        {"signed": -1},
        {"signed": True},
        {"more": 1},
    ],
)
def test_a_signed_line_that_breaks_a_rule_is_left_out(change: dict[str, Any]) -> None:
    body = json.dumps({**json.loads(line_of().split(" ", 2)[2]), **change})
    words = (public_bytes(ANNA), ANNA.sign(b"peerd run listed\0" + body.encode()))
    line = " ".join((*(base64.urlsafe_b64encode(word).decode() for word in words), body))
    assert (read_runs(listed(line)).runs, len(read_runs(listed(line)).wrong)) == ((), 1)


def test_lists_and_lines_have_bounds() -> None:
    with pytest.raises(BadMessageError, match="more than"):
        read_runs(HEAD.encode() + b"\n" * MAX_LIST_BYTES)
    assert "more than" in read_runs(listed("x" * (MAX_LINE_BYTES + 1))).wrong[0]


def test_a_line_takes_the_place_of_those_about_the_same_run() -> None:
    before = listed("# kept", line_of(), line_of(BEN, "songs"), "not understood")
    after = with_run(before, line_of(signed_s=9))
    assert after.decode().splitlines() == [HEAD, "# kept", line_of(BEN, "songs"), "not understood", line_of(signed_s=9)]
    with pytest.raises(BadMessageError):
        with_run(b"a page", line_of())

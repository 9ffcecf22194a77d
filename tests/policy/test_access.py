"""Who may take part in a run: the organiser's list, and invitations."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from peerd.policy.swarm.access import (
    ENDS_SOON_S,
    MAX_LISTED,
    MAX_NUMBER,
    MAX_REASON_CHARS,
    NO_END,
    NO_LIST,
    NO_VERSION,
    AccessList,
    AccessState,
    ends_later,
    ends_soon,
    standing_of,
    version_of,
)
from peerd.policy.swarm.health import HealthNote, health
from peerd.table.record import PeerId
from tests.policy.test_health import ME, facts_of

A, B, C = map(PeerId, "ABC")
NOW_S = 1e9


def standing(peer: PeerId, listed: AccessList = NO_LIST, *, by_invitation: bool = True, until_s: float | None = None) -> AccessState:
    return standing_of(peer, listed, by_invitation=by_invitation, invited_until_s=until_s, now_s=NOW_S)


@pytest.mark.parametrize(
    ("by_invitation", "until_s", "expected"),
    [
        (False, None, AccessState.IN),
        (False, NOW_S - 1, AccessState.IN),
        (True, None, AccessState.UNINVITED),
        (True, NOW_S + 1, AccessState.IN),
        (True, NO_END, AccessState.IN),
        (True, NOW_S, AccessState.ENDED),
    ],
)
def test_in_an_open_run_everybody_takes_part_and_else_those_that_are_invited_and_a_ban_goes_before_both(
    by_invitation: bool, until_s: float | None, expected: AccessState
) -> None:
    assert standing(A, by_invitation=by_invitation, until_s=until_s) is expected
    listed = NO_LIST.allowing([A]).banning([B], "noise")
    assert standing(A, listed, by_invitation=by_invitation, until_s=until_s) is AccessState.IN
    assert standing(B, listed, by_invitation=by_invitation, until_s=until_s) is AccessState.BANNED


def test_each_change_of_a_list_makes_the_next_one_and_the_last_word_on_a_peer_counts() -> None:
    lists, changes = [NO_LIST], list[Callable[[AccessList], AccessList]]()
    changes.append(lambda listed: listed.allowing([A, B]))
    changes.append(lambda listed: listed.banning([A, C], "noise"))
    changes.append(lambda listed: listed.banning([C], "worse"))
    changes.append(lambda listed: listed.lifting([C]))
    changes.append(lambda listed: listed.allowing([A]))
    for change in changes:
        lists.append(change(lists[-1]))
    assert [each.number for each in lists] == [0, 1, 2, 3, 4, 5]
    assert [dict(each.banned) for each in lists[1:]] == [{}, {A: "noise", C: "noise"}, {A: "noise", C: "worse"}, {A: "noise"}, {}]
    assert [each.allowed for each in lists[1:]] == [{A, B}, {B}, {B}, {B}, {A, B}]
    versions = [version_of(each, b"body") for each in lists]
    assert versions[0] == NO_VERSION
    assert versions == sorted(set(versions))


def test_of_two_lists_of_one_number_all_peers_keep_the_same_one_and_the_next_one_supersedes_both() -> None:
    one, other = (version_of(AccessList(number=7), body) for body in (b"one", b"other"))
    assert one != other
    assert version_of(AccessList(number=6), b"x") < min(one, other) < max(one, other) < version_of(AccessList(number=8), b"x")


def test_a_list_has_bounds() -> None:
    peers = [PeerId(str(number)) for number in range(MAX_LISTED)]
    full = NO_LIST.allowing(peers[:600]).banning(peers[600:], "x" * MAX_REASON_CHARS)
    assert len(full.allowed) + len(full.banned) == MAX_LISTED
    with pytest.raises(ValueError, match="has room for 1024 peers"):
        full.banning([A], "")
    assert full.banning([peers[0]], "").banned[peers[0]] == "", "one that was allowed makes room for itself"
    for reason in ("x" * (MAX_REASON_CHARS + 1), "two\nlines", "\x1b[31m", "\u202e"):
        with pytest.raises(ValueError, match="a reason is a printable text of at most 120 characters"):
            NO_LIST.banning([A], reason)
    with pytest.raises(ValueError, match="both allowed and banned"):
        AccessList(1, frozenset([A]), {A: ""})
    for number in (-1, MAX_NUMBER + 1):
        with pytest.raises(ValueError, match="has a number between"):
            AccessList(number)


def test_invitations_that_last_longer_are_used_and_those_that_end_soon_are_told() -> None:
    ends = [NOW_S, NOW_S + 1, NO_END]
    for one, other in itertools.combinations(range(3), 2):
        assert ends_later(ends[other], ends[one])
        assert not ends_later(ends[one], ends[other])
    assert not any(ends_later(end, end) for end in ends)
    assert all(ends_later(end, None) for end in ends)
    assert [ends_soon(end, NOW_S) for end in (None, NO_END, NOW_S - 1, NOW_S + ENDS_SOON_S - 1, NOW_S + ENDS_SOON_S)] == [
        False,
        False,
        True,
        True,
        False,
    ]


def notes(**fields: Any) -> dict[str, HealthNote]:
    return {note.code: note for note in health(facts_of(ME, **fields))}


def test_health_names_those_that_are_banned_with_the_reasons_and_an_invitation_that_ends_soon() -> None:
    assert not {"banned", "invitation-ends"} & notes().keys()
    found = notes(banned={A: "noise", B: ""})["banned"]
    assert (found.title, found.severity) == ("banned by the organiser: A (noise), B", "info")
    many = {PeerId(name): "" for name in "ABCDE"}
    assert notes(banned=many)["banned"].title == "banned by the organiser: A, B, C and 2 more"
    assert notes(invitation_ends=True)["invitation-ends"].severity == "warning"

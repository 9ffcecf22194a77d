"""Who takes part, as a daemon knows it: lists and invitations that come, what becomes of records, and what is passed on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.config.access import (
    NO_END,
    NO_LIST,
    AccessList,
    RawList,
    allowing,
    banning,
    lifting,
    organisers_peer,
    sign_invitation,
    sign_list,
)
from peerd.config.organiser import public_bytes
from peerd.errors import BadMessageError, PeerGoneError, ShutOutError, UnwelcomeError
from peerd.policy.swarm.access import AccessState
from peerd.swarm.access import ACCESS_LIST, RunAccess
from peerd.swarm.liveness import Liveness
from peerd.swarm.membership import Membership
from peerd.swarm.signed import sign_record
from peerd.swarm.telling import Telling
from peerd.table.record import PeerId, PeerRecord, Phase, RawRecord
from peerd.unwritten import UNWRITTEN
from peerd.wire.swarm_client import SwarmClient
from tests.swarm.fixed_row import FixedRow
from tests.swarm.test_membership import MATE, ME, RUN, THIRD

ORGANISER = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
KEY = public_bytes(ORGANISER)
BANNED = banning(NO_LIST, [MATE.peer], "noise")


def signed(listed: AccessList) -> RawList:
    return sign_list(listed, RUN, ORGANISER)


def access(by_invitation: bool = False, kept_at: Path | None = None) -> RunAccess:
    return RunAccess(ME.peer, RUN, KEY, by_invitation=by_invitation, kept_at=kept_at)


def invitation(peer: PeerId, until_s: int = NO_END) -> bytes:
    return sign_invitation(peer, until_s, RUN, ORGANISER)


def membership(mine: RunAccess) -> Membership:
    row = FixedRow(PeerRecord(peer=ME.peer, incarnation=4, phase=Phase.ACCUMULATING))
    return Membership(ME, RUN, ttl_s=60, row=row, access=mine)


def raw(version: int = 1, whose: Any = MATE, **fields: Any) -> RawRecord:
    record = PeerRecord(peer=whose.peer, incarnation=1, version=version, phase=Phase.ACCUMULATING)
    return sign_record(replace(record, **fields), whose, RUN).raw


def live(mine: Membership) -> set[PeerId]:
    return {record.peer for record in mine.live().records}


# Lists


def test_the_newest_list_counts_and_an_older_one_never_comes_back(tmp_path: Path) -> None:
    older, newer = BANNED, lifting(BANNED, [MATE.peer])
    mine = access(kept_at=tmp_path / "list")
    assert mine.take(signed(older))
    assert mine.standing(MATE.peer) is AccessState.BANNED
    assert mine.take(signed(newer))
    assert not mine.take(signed(newer))
    assert not mine.take(signed(older))
    assert mine.standing(MATE.peer) is AccessState.IN
    again = access(kept_at=tmp_path / "list")
    assert again.number == 2
    assert not again.take(signed(older)), "nor after a restart"
    assert again.told == again.version, "the others know it"
    assert mine.newer_than(access().version) == signed(newer)
    assert mine.newer_than(mine.version) is None


def test_of_two_lists_of_one_number_all_keep_the_same_whichever_comes_first() -> None:
    one, other = signed(BANNED), signed(banning(NO_LIST, [THIRD.peer], ""))
    first, second = access(), access()
    for raw_list in (one, other):
        first.take(raw_list)
    for raw_list in (other, one):
        second.take(raw_list)
    assert first.raw == second.raw
    assert first.newer_than(second.version) is None


@pytest.mark.parametrize(
    "wrong",
    [
        (signed(BANNED)[0], bytes(64)),
        sign_list(BANNED, "b" * 32, ORGANISER),
        sign_list(BANNED, RUN, Ed25519PrivateKey.generate()),
        (bytes(1 << 20), bytes(64)),
    ],
    ids=["forged", "another run's", "another organiser's", "oversized"],
)
def test_a_list_that_this_runs_organiser_has_not_signed_is_refused_and_changes_nothing(wrong: RawList) -> None:
    mine = access()
    mine.take(signed(allowing(NO_LIST, [MATE.peer])))
    with pytest.raises(BadMessageError):
        mine.take(wrong)
    assert mine.number == 1
    assert not mine.is_banned(MATE.peer)


def test_no_list_bans_the_organisers_own_key() -> None:
    body = signed(banning(NO_LIST, [MATE.peer], ""))[0].replace(MATE.peer.encode(), organisers_peer(KEY).encode())
    with pytest.raises(BadMessageError, match="the organiser's own key"):
        access().take((body, ORGANISER.sign(b"peerd access list\0" + RUN.encode() + body)))


def test_a_damaged_list_in_the_home_stops_nobody_and_the_next_one_replaces_it(tmp_path: Path) -> None:
    (tmp_path / "list").write_bytes(b"junk")
    mine = access(kept_at=tmp_path / "list")
    assert mine.number == 0
    assert mine.take(signed(BANNED))
    assert access(kept_at=tmp_path / "list").number == 1


async def test_a_list_that_the_disk_does_not_take_counts_and_is_written_later(tmp_path: Path) -> None:
    (tmp_path / "in the way").write_bytes(b"")
    mine = access(kept_at=tmp_path / "in the way" / "list")
    assert mine.take(signed(BANNED))
    assert ACCESS_LIST in UNWRITTEN
    assert mine.is_banned(MATE.peer)
    (tmp_path / "in the way").unlink()
    await mine.changed(0.0)
    assert ACCESS_LIST not in UNWRITTEN
    assert access(kept_at=tmp_path / "in the way" / "list").number == 1


# Invitations


def test_a_peer_is_let_in_by_its_own_invitation_and_by_no_other() -> None:
    mine, now_s = access(by_invitation=True), int(time.time())
    wrong = (b"", bytes(72), invitation(THIRD.peer), sign_invitation(MATE.peer, NO_END, "b" * 32, ORGANISER))
    found = []
    for shown in (*wrong, invitation(MATE.peer, now_s - 5), invitation(MATE.peer, now_s + 500)):
        mine.show(MATE.peer, shown)
        found.append(mine.standing(MATE.peer))
    assert found == [AccessState.UNINVITED] * len(wrong) + [AccessState.ENDED, AccessState.IN]
    mine.take(signed(BANNED))
    mine.show(MATE.peer, invitation(MATE.peer))
    assert not mine.admits(MATE.peer)


def test_what_a_caller_may_do_before_it_has_shown_its_invitation() -> None:
    mine = access(by_invitation=True)
    mine.check(MATE.peer, is_to_show=True)
    with pytest.raises(UnwelcomeError, match="not invited"):
        mine.check(MATE.peer)
    mine.take(signed(BANNED))
    with pytest.raises(UnwelcomeError, match="banned"):
        mine.check(MATE.peer, is_to_show=True)
    assert mine.refused == 2


def test_this_peer_uses_the_invitation_that_lasts_longest_and_says_what_to_do_without_one() -> None:
    mine, now_s = access(by_invitation=True), int(time.time())
    with pytest.raises(ShutOutError, match=f"only invited peers take part in this run; send the organiser this peer's id, {ME.peer}, and"):
        mine.check_own()
    assert not mine.use(invitation(MATE.peer))
    assert mine.use(invitation(ME.peer, now_s - 1))
    with pytest.raises(ShutOutError, match="invitation has ended"):
        mine.check_own()
    ends_soon = [mine.ends_soon]
    assert mine.use(longest := invitation(ME.peer, now_s + (1 << 20)))
    assert mine.use(invitation(ME.peer, now_s + 100))
    mine.check_own()
    assert mine.invitation == longest
    assert [*ends_soon, mine.ends_soon] == [True, False]
    mine.take(signed(banning(NO_LIST, [ME.peer], "noise")))
    with pytest.raises(ShutOutError, match="the organiser has banned this peer from the run: noise; ask the organiser"):
        mine.check_own()


# Records


async def test_a_banned_peer_is_dropped_and_what_it_says_counts_for_nothing_until_the_ban_is_lifted() -> None:
    mine = access()
    table = membership(mine)
    table.publish()
    table.absorb([raw(), raw(whose=THIRD)], THIRD.peer)
    table.called_by(MATE.peer)
    assert live(table) == {ME.peer, MATE.peer, THIRD.peer}
    mine.take(signed(BANNED))
    assert table.drop_shut_out() == [MATE.peer]
    assert table.drop_shut_out() == []
    assert table.absorb([raw(2)], THIRD.peer) == []
    assert live(table) == {ME.peer, THIRD.peer}
    assert table.live().expired == ()
    assert not table.is_known(MATE.peer)
    assert MATE.peer not in table.raws
    mine.take(signed(lifting(BANNED, [MATE.peer])))
    table.absorb([raw(2)], THIRD.peer)
    assert live(table) == {ME.peer, MATE.peer, THIRD.peer}


async def test_in_a_run_by_invitation_records_count_that_show_one_and_no_longer_than_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, now_s = access(by_invitation=True), int(time.time())
    mine.use(invitation(ME.peer))
    table = membership(mine)
    published = table.publish()
    assert published is not None
    assert published.record.invitation == mine.invitation
    table.absorb([raw(), raw(whose=THIRD, invitation=invitation(THIRD.peer, now_s + 60))], THIRD.peer)
    table.absorb([raw(2, invitation=invitation(THIRD.peer))], MATE.peer)
    assert live(table) == {ME.peer, THIRD.peer}
    assert table.find(MATE.peer) is None
    assert table.messages_refused == 0, "who passes it on is not blamed"
    table.absorb([raw(3, invitation=invitation(MATE.peer))], MATE.peer)
    assert live(table) == {ME.peer, MATE.peer, THIRD.peer}
    monkeypatch.setattr("peerd.swarm.access.time", SimpleNamespace(time=lambda: now_s + 61.0))
    assert table.drop_shut_out() == [THIRD.peer]
    assert live(table) == {ME.peer, MATE.peer}
    table.absorb([raw(2, whose=THIRD, invitation=invitation(THIRD.peer, now_s + 600))], THIRD.peer)
    assert live(table) == {ME.peer, MATE.peer, THIRD.peer}


# Telling


class Client:
    """Notes what it is given to tell."""

    def __init__(self, admission: RunAccess, they_have: RawList | None = None) -> None:
        self.lists: list[tuple[PeerId, RawList]] = []
        self._admission, self._they_have = admission, they_have

    async def tell_list(self, peer: PeerId, raw_list: RawList, _timeout_s: float) -> None:
        self.lists.append((peer, raw_list))
        raise PeerGoneError("nobody there")

    async def gossip(self, peer: PeerId, _records: Sequence[RawRecord], _timeout_s: float) -> tuple[RawRecord, ...]:
        raise UnwelcomeError("banned")

    async def learn_list(self, _peer: PeerId, _timeout_s: float) -> None:
        assert self._they_have is not None
        self._admission.take(self._they_have)


async def test_a_new_list_is_told_to_all_at_once_and_to_those_that_it_shuts_out() -> None:
    mine = access()
    table = membership(mine)
    table.publish()
    table.absorb([raw()], MATE.peer)
    client = Client(mine)
    telling = asyncio.ensure_future(Telling(table, cast(SwarmClient, client), lambda: [THIRD.peer], 5.0).run())
    await asyncio.sleep(0)
    mine.take(signed(BANNED))
    for _ in range(10):
        await asyncio.sleep(0)
    assert sorted(client.lists) == sorted((peer, signed(BANNED)) for peer in (MATE.peer, THIRD.peer))
    assert live(table) == {ME.peer}
    mine.take(signed(BANNED))
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(client.lists) == 2
    telling.cancel()


async def test_a_peer_whose_calls_are_refused_learns_why() -> None:
    mine = access()
    table = membership(mine)
    table.publish()
    table.absorb([raw()], MATE.peer)
    client = Client(mine, they_have=signed(banning(NO_LIST, [ME.peer], "noise")))
    record = table.find(MATE.peer)
    assert record is not None
    assert await Liveness(table, cast(SwarmClient, client), {}, cast(Any, None)).answers(record), "it lives"
    with pytest.raises(ShutOutError, match="noise"):
        mine.check_own()

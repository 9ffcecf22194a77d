"""The organiser's daemon signs accounts whose signers it has in its table, and tells them; no other daemon does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.config.access import organisers_peer
from peerd.config.organiser import KEY_FILE, create_key
from peerd.config.settings import Settings
from peerd.daemon.peer import Peer
from peerd.daemon.watching.anchoring import Anchoring
from peerd.policy.step.accounts import EVERY, SignedAccount, Vouch, WorkDone, Works, account_of, is_anchored, why_not_certified
from peerd.swarm.identity import Identity
from peerd.swarm.signed import has_signed, sign_manifest
from peerd.table.record import PeerId
from peerd.wire.accounts import AccountsTold, AccountsWanted
from tests.strategies import member, view_of
from tests.tiny_run import tiny_manifest


class Books:
    """Accounts of stage 1, which others serve."""

    def __init__(self, told: list[SignedAccount]) -> None:
        self.told, self.taken, self.heard = told, list[SignedAccount](), dict[PeerId, SignedAccount]()
        self.lies: dict[PeerId, list[SignedAccount]] = {}
        """What a peer tells in place of these."""

    async def own(self, stage: int) -> list[SignedAccount]:
        assert stage == 0
        return []

    async def gather(self, signed: SignedAccount) -> str:
        self.taken.append(signed)
        return ""

    async def told_by(self, peer: PeerId, wanted: AccountsWanted) -> AccountsTold | None:
        if wanted.told is not None:
            self.heard[peer] = wanted.told
        return AccountsTold(tuple(self.lies.get(peer, self.told)))


class Office:
    """An organiser's daemon, of stage 0, and the peers of stage 1."""

    def __init__(self, folder: Path) -> None:
        key = create_key(folder / KEY_FILE)
        self.folder, self.signed = folder, sign_manifest(tiny_manifest(num_stages=2), key)
        self.organiser = organisers_peer(self.signed.organiser_key)
        self.mates = [Identity(Ed25519PrivateKey.generate()) for _ in range(3)]
        self.books = Books([self.account(2 * EVERY), self.account(EVERY)])

    def account(self, step: int, num_signed: int = 2) -> SignedAccount:
        works = {each.peer: WorkDone(step, step, step) for each in self.mates}
        return self.account_of(works, step, num_signed)

    def account_of(self, works: Works, step: int, num_signed: int) -> SignedAccount:
        account = account_of(self.signed.run, 1, (0, step), step, works, works)
        vouches = [Vouch(each.peer, 5, each.sign(account.text(5))) for each in self.mates[:num_signed]]
        return SignedAccount(account, tuple(sorted(vouches)))

    async def sign(self, num_serving: int = 3, folder: Path | None = None) -> dict[PeerId, SignedAccount]:
        """What mates are told once the daemon has signed."""
        live = view_of(member("me", stage=0), *(member(each.peer, stage=1) for each in self.mates[:num_serving]))
        membership = SimpleNamespace(me="me", live=lambda: live)
        place = SimpleNamespace(manifest=self.signed.manifest, signed=self.signed)
        settings = Settings(home=str(self.folder), organiser=str(folder or self.folder))
        peer = cast(Peer, SimpleNamespace(settings=settings, membership=membership, place=place))
        self.books.heard.clear()
        await Anchoring(self.books, peer, self.organiser).sign()
        return self.books.heard


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


async def test_the_newest_account_of_a_stage_is_signed_once_and_its_signers_are_told(office: Office) -> None:
    heard = await office.sign()
    assert heard.keys() == {each.peer for each in office.mates}
    (signed,) = {each.account.id: each for each in heard.values()}.values()
    assert (signed.account.step, is_anchored(signed, office.organiser)) == (2 * EVERY, True)
    assert why_not_certified(signed, has_signed) == ""
    assert office.books.taken == [signed]
    office.books.told.append(signed)
    assert not await office.sign(), "it is signed already"


async def test_an_account_whose_signers_are_not_in_the_table_is_not_signed(office: Office) -> None:
    assert not await office.sign(num_serving=1), "one of three"
    assert await office.sign(num_serving=2)


async def test_an_account_that_too_few_have_signed_or_whose_signatures_are_wrong_is_not_signed(office: Office) -> None:
    office.books.told = [office.account(EVERY, num_signed=1)]
    assert not await office.sign()
    sound = office.account(EVERY)
    office.books.told = [SignedAccount(sound.account, tuple(Vouch(each.signer, 6, each.signature) for each in sound.vouches))]
    assert not await office.sign()


async def test_an_account_that_one_peer_has_made_up_is_not_signed(office: Office) -> None:
    """It is its only signer and serves the stage, so the account alone looks right. Before, the newest one was signed."""
    liar = office.mates[0].peer
    office.books.lies[liar] = [office.account_of({liar: WorkDone(3 * EVERY, 9_999, 9_999)}, 3 * EVERY, num_signed=1)]
    heard = await office.sign()
    assert {each.account.step for each in heard.values()} == {2 * EVERY}
    office.books.told = []
    assert not await office.sign(), "the others tell nothing, so nobody confirms it"


async def test_only_the_organisers_daemon_signs(office: Office, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    assert not await office.sign(folder=other), "there is no key"
    create_key(other / KEY_FILE)
    assert not await office.sign(folder=other), "it is another run's"

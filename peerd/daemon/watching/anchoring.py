"""The organiser's daemon signs accounts of all stages with the organiser's key: that their signers are peers of the run.

Keys cost nothing, so signatures alone do not tell a run's peers from a crowd of one. The organiser's daemon has the run's peers in its
table. It signs an account if it counts and most of its signers serve the stage there, and tells them. A receipt whose chain leads through
one of these accounts needs no other word: the organiser's key is in the run's manifest. The organiser does not say that counts are true.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import structlog

from peerd.config.organiser import KEY_FILE, load_key, public_bytes
from peerd.daemon.admission import organisers_folder
from peerd.errors import PeerdError
from peerd.policy.step.accounts import SignedAccount, Vouch, is_anchored, told_by_most, why_not_certified
from peerd.swarm.signed import has_signed
from peerd.table.record import PeerId
from peerd.wire.accounts import AccountsTold, AccountsWanted

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from peerd.daemon.peer import Peer

ASKED = 3
"""Peers of a stage that are asked at a time."""
LOG = structlog.get_logger()


class Books(Protocol):
    """This daemon's accounts, and those of others."""

    async def own(self, stage: int) -> Sequence[SignedAccount]: ...

    async def gather(self, signed: SignedAccount) -> str: ...

    async def told_by(self, peer: PeerId, wanted: AccountsWanted) -> AccountsTold | None: ...


class Anchoring:
    """Signs for the organiser. Nothing happens where the daemon is not the organiser's."""

    def __init__(self, books: Books, peer: Peer, organiser: PeerId) -> None:
        self._books, self._peer, self._organiser = books, peer, organiser
        self._key = self._own_key()

    def _own_key(self) -> Ed25519PrivateKey | None:
        folder, key = organisers_folder(self._peer.settings), None
        if folder is not None:
            with contextlib.suppress(PeerdError):
                key = load_key(folder / KEY_FILE)
        return key if key is not None and public_bytes(key) == self._peer.place.signed.organiser_key else None

    async def sign(self) -> None:
        """Sign the newest account of each stage, where that is not done yet."""
        if self._key is not None:
            for stage in range(self._peer.place.manifest.train.num_stages):
                await self._sign_stage(self._key, stage)

    async def _sign_stage(self, key: Ed25519PrivateKey, stage: int) -> None:
        there = {record.peer for record in self._peer.membership.live().serving(stage)}
        copies = told_by_most(*await self._known(stage, there))
        whys = [await asyncio.to_thread(why_not_certified, copy, has_signed) for copy in copies]
        found = next((copy for copy, why in zip(copies, whys, strict=True) if not why), None)
        for why in filter(None, whys):
            LOG.warning("an account is not signed for the organiser", stage=stage, reason=why)
        if found is None or is_anchored(found, self._organiser):
            return
        signers = there.intersection(found.account.signers)
        if 2 * len(signers) <= len(found.account.signers):
            return
        now_s = int(time.time())
        own = Vouch(self._organiser, now_s, key.sign(found.account.text(now_s)))
        anchored = SignedAccount(found.account, tuple(sorted([*found.vouches, own])))
        await self._books.gather(anchored)
        wanted = AccountsWanted(stage, found.account.step, told=anchored)
        await asyncio.gather(*(self._books.told_by(peer, wanted) for peer in signers - {self._peer.membership.me}))
        LOG.debug("an account is signed for the organiser", stage=stage, step=found.account.step, told=len(signers))

    async def _known(self, stage: int, there: Collection[PeerId]) -> tuple[list[Sequence[SignedAccount]], int]:
        """The last accounts of a stage, by this daemon or by each of the peers that serve it and were asked; and how many were asked."""
        if self._peer.membership.me in there:
            return [await self._books.own(stage)], 1
        asked = random.sample(sorted(there), min(ASKED, len(there)))
        told = await asyncio.gather(*(self._books.told_by(peer, AccountsWanted(stage)) for peer in asked))
        return [each.accounts for each in told if each is not None], len(asked)

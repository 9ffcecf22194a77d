"""A daemon's part in the accounts of its stage, and the receipts that it writes from them. All work is done on the history's thread."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from peerd.config.access import organisers_peer
from peerd.config.manifest import Manifest
from peerd.config.receipt_file import counts_too_much, pack_receipt
from peerd.control.protocol import SCHEMA
from peerd.control.server import Say, Verb
from peerd.daemon.watching.anchoring import ASKED, Anchoring
from peerd.errors import RemoteError, WrongStateError
from peerd.observe.account_store import AccountStore
from peerd.observe.accounts import AccountKeeper, Needs
from peerd.observe.archive import Archive
from peerd.policy.step.accounts import SignedAccount, Works, are_rows_of, told_by_most, why_not_certified
from peerd.policy.step.leaderboard import WEEK_S, SignedStage, of_week
from peerd.policy.step.roster import Roster
from peerd.policy.step.work_receipts import AuditTold, StageReceipt, WorkReceipt, fitted
from peerd.swarm.clock import clock_s
from peerd.swarm.signed import has_signed
from peerd.table.record import PeerId
from peerd.wire.accounts import AccountsTold, AccountsWanted

if TYPE_CHECKING:
    from peerd.daemon.peer import Peer

ASK_TIMEOUT_S = 5.0
MOST_PAUSE = 16
"""While signatures are missing a daemon asks again after one announce period, then after twice that, and so on up to so many."""
SIGNED_KEPT_S = 10.0
MOST_WAITING = 10_000
"""Rosters that wait for the history's thread."""
LOG = structlog.get_logger()
Found = TypeVar("Found")


class Accounting:
    """Keeps, tells and asks for accounts while the daemon is in the swarm."""

    def __init__(self, peer: Peer, archive: Archive) -> None:
        self._peer, self._archive = peer, archive
        self._run, self._me = peer.place.signed.run, peer.membership.me
        manifest, self._organiser = peer.place.manifest, organisers_peer(peer.place.signed.organiser_key)
        self._keeper = AccountKeeper(self._run, self._me, peer.membership.identity.sign, has_signed, manifest.train.steps, self._organiser)
        self._anchoring = Anchoring(self, peer, self._organiser)
        self._waiting: list[tuple[Roster, int]] = []
        self._signed: dict[int, tuple[float, SignedStage | None]] = {}
        """What is shown of each stage, and when it was asked for."""
        self._noted = asyncio.Event()
        self._has_counted = False
        self._period_s = manifest.swarm.announce_period_s
        self._seen = float("inf"), 0, 0
        """The stage that this daemon served when it last looked, its step, and when that was."""

    def verbs(self) -> dict[str, Verb]:
        return {"receipt": self.receipt, "accounts": self.known}

    def applied(self, roster: Roster, tokens: int) -> None:
        """An average was applied, of so many tokens a microbatch."""
        self._waiting = [*self._waiting[-MOST_WAITING:], (roster, tokens)]
        self._noted.set()

    async def run(self) -> None:
        """Count, sign, and ask for what is missing."""
        pause_s, ask_at_s = self._period_s, time.monotonic() + self._period_s
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._noted.wait(), max(0.0, ask_at_s - time.monotonic()))
            self._noted.clear()
            if await self._count():
                pause_s, ask_at_s = self._period_s, time.monotonic() + self._period_s * random.random()
            if time.monotonic() >= ask_at_s:
                await self._ask()
                await self._anchoring.sign()
                pause_s = min(2 * pause_s, MOST_PAUSE * self._period_s)
                ask_at_s = time.monotonic() + pause_s

    async def _count(self) -> bool:
        """Hand what was applied to the history's thread. Returns whether an account has become due."""
        rosters, self._waiting = self._waiting, []
        if not rosters:
            return False
        self._has_counted = True
        now_s = int(time.time())
        return bool(await self._on(lambda store: self._keeper.applied(store, rosters, now_s)))

    async def _on(self, work: Callable[[AccountStore], Found]) -> Found | None:
        return await self._archive.read(lambda store: work(store.accounts(self._run, self._me, self._organiser)))

    async def _ask(self) -> None:
        """Ask a few mates for what this peer lacks."""
        await self._look_at_step()
        needs = await self._on(lambda _store: self._keeper.needs()) if self._has_counted else None
        if needs is None or needs.since is None:
            return
        mates = [record.peer for record in self._peer.membership.live().serving(needs.stage) if record.peer != self._me]
        asked = random.sample(mates, min(ASKED, len(mates)))
        await asyncio.gather(*(self._hear(needs, mate, needs.since) for mate in asked))
        if (now := await self._on(lambda _store: self._keeper.needs())) is not None and now.rows_of is not None:
            await self._take(now, now.rows_of)
        await self._on(lambda _store: self._keeper.begin(is_alone=not mates))

    async def _look_at_step(self) -> None:
        """Tell the keeper the step that was reached a period ago: what was applied until then is counted meanwhile."""
        if not self._has_counted:
            return
        now_s, (seen_s, stage, step) = time.monotonic(), self._seen
        if now_s - seen_s >= self._period_s:
            await self._on(lambda _store: self._keeper.reached(stage, step))
        if now_s - seen_s >= self._period_s or seen_s > now_s:
            record = self._peer.seat.state.record
            self._seen = now_s, record.stage, record.step

    async def _hear(self, needs: Needs, mate: PeerId, since: int) -> None:
        told = await self.told_by(mate, AccountsWanted(needs.stage, since))
        if told is not None and (why := await self._on(lambda store: self._keeper.hear(store, needs.stage, mate, told.accounts))):
            LOG.warning("a mate's accounts are wrong", peer=mate, reason=why)

    async def _take(self, needs: Needs, wanted: SignedAccount) -> None:
        """Take the rows of an account over from one of those that hold it."""
        holder = random.choice(sorted(needs.holders))
        told = await self.told_by(holder, AccountsWanted(needs.stage, wanted.account.step, rows=True))
        if told is not None and not await self._on(lambda store: self._keeper.take(store, wanted, told.rows)):
            LOG.warning("a mate's rows are not those of the account", peer=holder, step=wanted.account.step)

    async def told_by(self, peer: PeerId, wanted: AccountsWanted) -> AccountsTold | None:
        with contextlib.suppress(RemoteError):
            return await self._peer.swarm_client.accounts(peer, wanted, ASK_TIMEOUT_S)
        return None

    async def own(self, stage: int) -> Sequence[SignedAccount]:
        """This daemon's last accounts of a stage."""
        return await self._on(lambda store: self._keeper.told(store, stage, 0)) or ()

    async def gather(self, signed: SignedAccount) -> str:
        """Take the signatures of an account, if this daemon has it. Returns what is wrong with them; empty if nothing is."""
        return await self._on(lambda store: self._keeper.gather(store, signed.account.stage, [signed])) or ""

    # What others ask

    async def told(self, wanted: AccountsWanted) -> AccountsTold:
        """Answer a peer."""
        if wanted.told is not None and (why := await self.gather(wanted.told)):
            LOG.warning("signatures of an account are wrong", reason=why)
        if not wanted.rows:
            accounts = await self._on(lambda store: self._keeper.told(store, wanted.stage, wanted.since))
            return AccountsTold(accounts or (), audits=self._audits_of(wanted.audited, wanted.stage))
        step = wanted.since or None
        found = await self._on(lambda store: store.with_rows(wanted.stage, None if wanted.before_s else step, wanted.before_s))
        return AccountsTold((found[0],), found[1]) if found is not None else AccountsTold()

    def _audits_of(self, audited: PeerId, stage: int) -> AuditTold | None:
        """What this peer's own audits of another one have found since it serves the stage, signed."""
        seat = self._peer.seat if self._peer.has_served else None
        if not audited or seat is None or seat.auditor is None or seat.stage != stage:
            return None
        found = AuditTold(self._me, stage, seat.state.record.step, *seat.auditor.tallies.of_peers.get(audited, (0, 0)))
        return replace(found, signature=self._peer.membership.identity.sign(found.text(self._run, audited)))

    async def _audited(self, parts: Sequence[StageReceipt]) -> tuple[AuditTold, ...]:
        """What the signers of these stages that are there say of their audits of this peer."""
        if not self._peer.place.manifest.swarm.audits:
            return ()
        there, found = {record.peer for record in self._peer.membership.live().records} - {self._me}, list[AuditTold]()
        for part in parts:
            account = part.accounts[-1].account
            wanted = AccountsWanted(account.stage, account.step, audited=self._me)
            asked = (self.told_by(peer, wanted) for peer in account.signers if peer in there)
            told = [each.audits for each in await asyncio.gather(*asked) if each is not None and each.audits is not None]
            found += [word for word in told if has_signed(word.auditor, word.text(self._run, self._me), word.signature)]
        return tuple(found)

    async def rows(self, stage: int, tellers: Sequence[PeerId], before_s: int = 0) -> tuple[SignedAccount, Works] | None:
        """The rows of the newest account of a stage signed before a time (0: now): this daemon's own, or what most tellers have."""
        found = await self._on(lambda store: store.with_rows(stage, None, before_s))
        if found is not None:
            return found
        answers = await self._told_by_each(tellers, AccountsWanted(stage, rows=bool(before_s), before_s=before_s))
        copies = told_by_most([told.accounts for told in answers.values()], len(tellers))
        ids = {copy.account.id for copy in copies}
        for teller in (peer for peer, told in answers.items() if ids.intersection(signed.account.id for signed in told.accounts)):
            told = await self.told_by(teller, AccountsWanted(stage, copies[0].account.step, rows=True))
            if told is None or not told.accounts or told.accounts[0].account.id not in ids:
                continue
            if await asyncio.to_thread(_is_sound, told, self._peer.place.manifest):
                return told.accounts[0], told.rows
        return None

    async def _told_by_each(self, tellers: Sequence[PeerId], wanted: AccountsWanted) -> dict[PeerId, AccountsTold]:
        """The answer of each teller that gives one."""
        told = await asyncio.gather(*(self.told_by(teller, wanted) for teller in tellers))
        return {teller: each for teller, each in zip(tellers, told, strict=True) if each is not None}

    async def signed_stage(self, stage: int, tellers: Sequence[PeerId]) -> SignedStage | None:
        """What is signed of a stage, by what this daemon keeps or a teller tells; asked at most once in a while."""
        asked_s, known = self._signed.get(stage, (float("-inf"), None))
        if clock_s() - asked_s > SIGNED_KEPT_S:
            newest = await self.rows(stage, tellers)
            if newest is not None:
                known = of_week(newest, await self.rows(stage, tellers, before_s=int(time.time()) - WEEK_S))
            self._signed[stage] = (clock_s(), known)
        return known

    # What its user asks

    async def receipt(self, request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
        """A receipt of this peer's own work: of the last seconds, or of all that was counted."""
        last_s = request.get("last_s") or 0
        since_s = max(1, int(time.time() - last_s)) if last_s else 0
        signed, sign = self._peer.place.signed, self._peer.membership.identity.sign

        parts = await self._on(lambda store: self._keeper.parts(store, since_s)) or ()
        receipt = WorkReceipt(self._run, self._me, parts, await self._audited(parts), self._organiser)

        def written(_store: AccountStore) -> bytes | None:
            found = fitted(receipt, lambda each: len(pack_receipt(each, signed.raw, lambda _text: bytes(64)))) if receipt.parts else None
            return pack_receipt(found, signed.raw, sign) if found is not None else None

        raw = await self._on(written)
        if raw is None:
            raise WrongStateError("nothing of this peer's work is signed yet; its stage signs every 16 steps what it has counted")
        return {"schema": SCHEMA, "receipt": base64.b64encode(raw).decode()}

    async def known(self, _request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
        """The ids of all accounts that this daemon keeps: it knows by itself that they count."""
        found = await self._on(lambda store: [stored.signed.account for stage in store.stages() for stored in store.of_stage(stage)])
        accounts = [{"stage": account.stage, "step": account.step, "id": account.id.hex()} for account in found or ()]
        return {"schema": SCHEMA, "run": self._run, "accounts": accounts}


def _is_sound(told: AccountsTold, manifest: Manifest) -> bool:
    """Whether rows of another stage are those that its signers have signed, and its steps can have had. It checks up to 62 signatures."""
    signed = told.accounts[0]
    is_possible = are_rows_of(signed.account, told.rows) and not counts_too_much(signed.account, manifest)
    return is_possible and not why_not_certified(signed, has_signed)

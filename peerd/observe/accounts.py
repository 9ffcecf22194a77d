"""A daemon's accounts: counts what is applied, signs, takes what mates tell, and answers who asks. All on the history's thread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from peerd.observe.account_store import AccountStore, StoredAccount
from peerd.policy.step.account_book import RECENT, AccountBook
from peerd.policy.step.accounts import NOBODY, SignatureCheck, SignedAccount, Vouch, Works, chain_to, is_anchored
from peerd.policy.step.roster import Roster
from peerd.policy.step.work_receipts import StageReceipt
from peerd.table.record import PeerId, RunId

Sign = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a daemon asks its stage's peers for."""

    stage: int
    since: int | None
    """Accounts from this step on; None: nothing."""
    rows_of: SignedAccount | None
    """And the rows of this one, of one of `holders`."""
    holders: Collection[PeerId] = ()


class AccountKeeper:
    """Keeps the accounts of the stage that the daemon serves. Contract: it signs only what it has counted, once an account."""

    def __init__(self, run: RunId, me: PeerId, sign: Sign, is_of: SignatureCheck, last_step: int = 0, organiser: PeerId = NOBODY) -> None:
        """`last_step`: where the run ends; 0: nowhere. `organiser`: the name of the run's organiser as a signer."""
        self._run, self._me, self._sign, self._is_of = run, me, sign, is_of
        self._last_step, self._organiser = last_step, organiser
        self._book: AccountBook | None = None
        self._stage = -1
        self._kept: dict[tuple[int, bytes], int] = {}
        """How many signatures each of the last accounts had when it was kept."""

    def applied(self, store: AccountStore, rosters: Iterable[tuple[Roster, int]], now_s: int) -> bool:
        """Count applied averages, each with the tokens of one of its microbatches. Returns whether an account has become due, also one
        that this peer has not counted."""
        is_due = False
        for roster, tokens in rosters:
            book = self._book_of(store, roster.stage)
            before = book.boundary
            account = book.applied(roster, tokens)
            is_due = is_due or book.boundary != before
            if account is not None and book.may_sign(account, self._me):
                book.vouch(account.id, Vouch(self._me, now_s, self._sign(account.text(now_s))))
        self._save(store)
        return is_due

    def reached(self, stage: int, step: int) -> None:
        """The stage that the daemon serves is at this step, and whatever was applied before is counted."""
        if self._book is not None and stage == self._stage:
            self._book.reached(step)

    def _book_of(self, store: AccountStore, stage: int) -> AccountBook:
        if self._book is None or stage != self._stage:
            last = store.with_rows(stage)
            self._stage, self._kept = stage, {}
            self._book = AccountBook(self._run, stage, *(last or (None, None)), last_step=self._last_step, organiser=self._organiser)
        return self._book

    def _save(self, store: AccountStore) -> None:
        """Keep on disk what counts."""
        if self._book is None:
            return
        for kept in self._book.recent.values():
            name, number = (kept.account.step, kept.account.id), len(kept.vouches)
            if kept.signed.is_certified and self._kept.get(name, 0) < number:
                self._kept[name] = number
                store.keep(kept)
        for old in list(self._kept)[: -2 * RECENT]:
            del self._kept[old]

    def needs(self) -> Needs | None:
        """What this peer lacks; None: nothing."""
        if self._book is None:
            return None
        rows_of, holders = self._book.wanted() or (None, ())
        since = self._book.lacks
        return Needs(self._stage, since, rows_of, holders) if since is not None or rows_of is not None else None

    def hear(self, store: AccountStore, stage: int, teller: PeerId, accounts: Sequence[SignedAccount]) -> str:
        """Take what a mate tells. Returns what is wrong with it; empty if nothing is."""
        if self._book is None or stage != self._stage:
            return ""
        why = self._book.hear(teller, accounts, self._is_of)
        self._save(store)
        return why

    def gather(self, store: AccountStore, stage: int, accounts: Sequence[SignedAccount]) -> str:
        """Take signatures that somebody tells of its own accord. Returns what is wrong with them; empty if nothing is."""
        if self._book is None or stage != self._stage:
            return ""
        why = self._book.gather(accounts, self._is_of)
        self._save(store)
        return why

    def take(self, store: AccountStore, signed: SignedAccount, works: Works) -> bool:
        """Take rows over. Returns whether they are those of the account."""
        is_taken = self._book is not None and signed.account.stage == self._stage and self._book.take(signed, works)
        self._save(store)
        return is_taken

    def begin(self, is_alone: bool) -> None:
        """Nobody has told an account so far; `is_alone`: nobody else serves the stage."""
        if self._book is not None:
            self._book.found(is_alone)

    def told(self, store: AccountStore, stage: int, since: int) -> tuple[SignedAccount, ...]:
        """The last accounts of a stage from this step on, also those that too few have signed so far."""
        if self._book is not None and stage == self._stage:
            found = [kept.signed for step, kept in self._book.recent.items() if step >= since]
        else:
            found = [stored.signed for stored in store.of_stage(stage, since)]
        return tuple(found[-RECENT:])

    def parts(self, store: AccountStore, since_s: int) -> tuple[StageReceipt, ...]:
        """What a receipt of this peer's own work is made of: of what came after a time, or of all (0)."""
        parts = (_part(store.of_stage(stage), since_s, self._organiser) for stage in store.stages())
        return tuple(part for part in parts if part is not None)


def _part(stored: Sequence[StoredAccount], since_s: int, organiser: PeerId) -> StageReceipt | None:
    """What proves the work in a stage. The chain begins at the newest account that the organiser has signed, or leads through it."""
    last = next((at for at in reversed(range(len(stored))) if stored[at].own is not None), None)
    until = stored[last].own if last is not None else None
    if last is None or until is None or (since_s and stored[last].signed.time_s <= since_s):
        return None
    accounts = [each.signed for each in stored]
    begun = next((at for at in reversed(range(last)) if stored[at].signed.time_s <= since_s and _is_one_count(stored, at, last)), None)
    since = stored[begun].own if begun is not None else None
    anchor = next((at for at in reversed(range(last + 1)) if is_anchored(accounts[at], organiser)), 0)
    if begun is None or since is None:
        return StageReceipt(tuple(accounts[at] for at in chain_to(accounts, last, first=anchor)), until)
    before, between = chain_to(accounts, begun, first=min(anchor, begun)), max(anchor, begun)
    places = [*before, *chain_to(accounts, between, first=begun)[1:], *chain_to(accounts, last, first=between)[1:]]
    return StageReceipt(tuple(accounts[at] for at in places), until, len(before) - 1, since)


def _is_one_count(stored: Sequence[StoredAccount], one: int, other: int) -> bool:
    return stored[one].signed.account.first_step == stored[other].signed.account.first_step

"""How a member of a stage keeps the stage's accounts: it counts rosters, signs, and takes over what it has missed. Pure.

All members count the same rosters, so all of them come to the same accounts, and only hashes and signatures travel. A member that has
missed a roster, or that came later, signs nothing until it has the rows of an account that most of the mates it asked hold. From there it
counts on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from peerd.policy.step.accounts import (
    EVERY,
    MOST_COUNT,
    MOST_SIGNERS,
    NOBODY,
    Account,
    SignatureCheck,
    SignedAccount,
    Vouch,
    WorkDone,
    Works,
    account_of,
    are_rows_of,
    is_anchored,
    why_not_certified,
    why_unsound,
)
from peerd.policy.step.ledger import FEWEST
from peerd.policy.step.roster import Roster
from peerd.table.record import PeerId, RunId

RECENT = 4
"""Accounts whose signatures are still gathered. An account that has too few by then counts for nothing, and loses no count: later ones have
all of it."""
MOST_TAKEN = MOST_COUNT >> 1
"""Microbatches and tokens of an account that is taken over: what is counted after it has room below MOST_COUNT."""
MOST_HEARD = 64
"""Mates whose accounts are compared, for one boundary."""


@dataclass(slots=True)
class Kept:
    """An account of this peer's own count, or one that it has taken over, with its rows and the signatures that have come so far."""

    account: Account
    works: Works
    vouches: dict[PeerId, Vouch] = field(default_factory=dict)

    @property
    def signed(self) -> SignedAccount:
        return SignedAccount(self.account, tuple(self.vouches[peer] for peer in sorted(self.vouches)))


@dataclass(slots=True)
class _Tally:
    """What was counted up to the last boundary."""

    first_step: int
    num_averages: int
    works: dict[PeerId, WorkDone]


@dataclass(slots=True)
class _Range:
    """The steps since the last boundary."""

    start: int
    next: int
    is_complete: bool
    num_averages: int = 0
    counts: dict[PeerId, WorkDone] = field(default_factory=dict)
    present: set[PeerId] | None = None
    """Those that were in all of its averages."""


class AccountBook:
    """The accounts of one stage. Contract: a step is counted once, and only where nothing before it is missing."""

    def __init__(
        self,
        run: RunId,
        stage: int,
        before: SignedAccount | None = None,
        rows: Works | None = None,
        *,
        last_step: int = 0,
        organiser: PeerId = NOBODY,
    ) -> None:
        """`before`: the last account that this peer has on disk, with its rows. `last_step`: where the run ends; 0: nowhere.

        `organiser`: the name of the run's organiser as a signer.
        """
        self._run, self._stage = run, stage
        self._last_step, self._organiser = last_step, organiser
        self._tally: _Tally | None = None
        self._range = _Range(-1, -1, is_complete=False)
        self.recent: dict[int, Kept] = {}
        """By step, the newest last."""
        self._last: Account | None = None
        """The newest account that counts; its signers may sign the next ones, too."""
        self._heard: dict[PeerId, SignedAccount] = {}
        """By mate the newest account that it tells and this peer does not have, one that counts before others."""
        self._checked: dict[bytes, SignedAccount] = {}
        """Those of them that count, by id, with signatures that were checked."""
        self._asked: set[PeerId] = set()
        """Mates that have answered since the last boundary."""
        if before is not None and rows is not None:
            self._keep(before, rows)
            self._range = _Range(before.account.step, before.account.step, is_complete=True)

    @property
    def newest(self) -> SignedAccount | None:
        """The newest account that counts, of the last few."""
        return next((kept.signed for kept in reversed(self.recent.values()) if kept.signed.is_certified), None)

    @property
    def boundary(self) -> int:
        """The step of the last account that was due; -1: this peer has counted nothing so far."""
        return self._range.start

    @property
    def is_late(self) -> bool:
        """Whether half of the steps until the next account are over, or none comes."""
        return self._range.next - self._range.start >= EVERY // 2 or 0 < self._last_step == self._range.start

    def is_due(self, step: int) -> bool:
        """Whether an account is due at this step: each `EVERY`, and at the end of the run."""
        return step % EVERY == 0 or 0 < self._last_step == step

    def applied(self, roster: Roster, tokens: int) -> Account | None:
        """Count an applied average, of so many tokens a microbatch. Returns the account that is due with it, to be signed."""
        step, now = roster.step, self._range
        start = step // EVERY * EVERY
        if roster.stage != self._stage or start < now.start:
            return None  # the run was set back: these steps are counted already
        if start > now.start:
            self._tally = _Tally(0, 0, {}) if step == 0 else None
            self._begin(start, is_complete=step == start)
        elif step == start:
            self._begin(start, is_complete=True)
        elif step != now.next:
            now.is_complete = False
        self._count(roster, tokens)
        return self._close() if self.is_due(self._range.next) else None

    def reached(self, step: int) -> None:
        """This peer's stage is at a step. If averages before the last account are not counted here, they never will be: it had the state of
        a later step from a mate. At the end of a run no other average tells."""
        boundary = step if self.is_due(step) else step // EVERY * EVERY
        if 0 <= self._range.start < boundary:
            self._tally = None
            self._begin(boundary, is_complete=step == boundary)
            self._heard, self._checked, self._asked = {}, {}, set()

    def _begin(self, start: int, is_complete: bool) -> None:
        self._range = _Range(start, start, is_complete)

    def _count(self, roster: Roster, tokens: int) -> None:
        now, there = self._range, set(roster.peers)
        for peer, done in roster.computed.items():
            if number := done.bit_count():
                now.counts[peer] = now.counts.get(peer, WorkDone()) + WorkDone(1, number, number * tokens)
            there.add(peer)
        now.present = there if now.present is None else now.present & there
        now.num_averages += 1
        now.next = roster.step + 1

    def _close(self) -> Account | None:
        """Add the steps of this range to those before, where none is missing. All that comes next is another range."""
        ended, tally = self._range, self._tally
        self._begin(ended.next, is_complete=True)
        self._heard, self._checked, self._asked = {}, {}, set()
        if tally is None or not ended.is_complete:
            self._tally = None
            return None
        works = {peer: tally.works.get(peer, WorkDone()) + row for peer, row in ended.counts.items()}
        works = {**tally.works, **works}
        num_averages = tally.num_averages + ended.num_averages
        there = (ended.present or set()) & works.keys() or ended.counts.keys()
        self._tally = _Tally(tally.first_step, num_averages, works)
        account = account_of(self._run, self._stage, (tally.first_step, ended.next), num_averages, works, there)
        self._note(Kept(account, works))
        return account

    def _note(self, kept: Kept) -> None:
        step = kept.account.step
        self.recent = {at: each for at, each in self.recent.items() if at < step} | {step: kept}
        for old in list(self.recent)[:-RECENT]:
            del self.recent[old]
        self._settle()

    def _settle(self) -> None:
        newest = self.newest
        self._last = newest.account if newest is not None else self._last

    def may_sign(self, account: Account, peer: PeerId) -> bool:
        """Whether a peer's signature counts for an account of this book: it is a signer of it, or of one before it, or the organiser."""
        before = self._last.signers if self._last is not None else ()
        earlier = (signer for step, kept in self.recent.items() if step < account.step for signer in kept.account.signers)
        return peer in account.signers or peer in before or peer in earlier or peer == self._organiser != NOBODY

    def vouch(self, account_id: bytes, vouch: Vouch) -> bool:
        """Add a signature, which is checked, to the account of this id. Returns whether it is new, and counts."""
        kept = next((each for each in self.recent.values() if each.account.id == account_id), None)
        if kept is None or vouch.signer in kept.vouches or not self.may_sign(kept.account, vouch.signer):
            return False
        if len(kept.vouches) >= 2 * MOST_SIGNERS:
            return False
        kept.vouches[vouch.signer] = vouch
        self._settle()
        return True

    def hear(self, teller: PeerId, accounts: Sequence[SignedAccount], is_of: SignatureCheck) -> str:
        """Take what a mate tells of its accounts. Returns what is wrong with it; empty if nothing is."""
        own = {kept.account.id: kept for kept in self.recent.values()}
        if len(self._asked) < MOST_HEARD:
            self._asked.add(teller)
        for signed in accounts[:RECENT]:
            account = signed.account
            if (account.run, account.stage) != (self._run, self._stage) or not self.is_due(account.step) or why_unsound(account):
                return why_unsound(account) or "an account of another run, stage or step"
            kept = own.get(account.id)
            why = self._compare(teller, signed, is_of) if kept is None else self._gather(kept, signed, is_of)
            if why:
                return why
        return ""

    def gather(self, accounts: Sequence[SignedAccount], is_of: SignatureCheck) -> str:
        """Take the signatures that somebody tells of accounts that this peer has. Returns what is wrong with them; empty if nothing is."""
        own = {kept.account.id: kept for kept in self.recent.values()}
        found = (self._gather(own[signed.account.id], signed, is_of) for signed in accounts[:RECENT] if signed.account.id in own)
        return next(filter(None, found), "")

    def _gather(self, kept: Kept, signed: SignedAccount, is_of: SignatureCheck) -> str:
        """Take the signatures that an account of this peer's own lacks."""
        for each in signed.vouches[: 2 * MOST_SIGNERS]:
            if each.signer not in kept.vouches and self.may_sign(kept.account, each.signer):
                if not is_of(each.signer, kept.account.text(each.time_s), each.signature):
                    return f"the signature of {each.signer} is not its own"
                self.vouch(kept.account.id, each)
        return ""

    def _compare(self, teller: PeerId, signed: SignedAccount, is_of: SignatureCheck) -> str:
        """Remember who holds another account than this peer's own."""
        account = signed.account
        if account.step > self._range.start or teller not in self._asked:
            return ""
        if signed.is_certified and account.id not in self._checked:
            if why := why_not_certified(signed, is_of):
                return why
            self._checked[account.id] = signed
        known = self._heard.get(teller)
        if known is None or self._worth(known) < self._worth(signed):
            self._heard[teller] = signed
        told = {each.account.id for each in self._heard.values()}
        self._checked = {name: each for name, each in self._checked.items() if name in told}
        return ""

    def _worth(self, signed: SignedAccount) -> tuple[bool, int]:
        return signed.account.id in self._checked, signed.account.step

    def wanted(self) -> tuple[SignedAccount, Collection[PeerId]] | None:
        """The account whose rows this peer needs, and who holds it; None: it needs none, or too few tell the same.

        One of the last boundary that counts. Once half of the steps to the next are over, also the newest one there is; and where none
        counts, what most of those hold that have any: else a stage most of whose members missed a step would never have an account again.
        """
        if not self._needs_rows:
            return None
        boundary, mine = self._range.start, self.recent.get(self._range.start)
        least = mine.account.counted.microbatches if mine is not None and mine.signed.is_certified else -1
        told: dict[bytes, list[PeerId]] = {}
        for teller, signed in self._heard.items():
            told.setdefault(signed.account.id, []).append(teller)
        for tellers in sorted(told.values(), key=len, reverse=True):
            signed = self._heard[tellers[0]]
            account, counts = signed.account, signed.account.id in self._checked
            is_due = account.step == boundary or self.is_late
            if counts and is_due and 2 * len(tellers) > len(self._asked) and account.counted.microbatches > least:
                return self._checked[account.id], tellers
            if not counts and self._tally is None and self.is_late and 2 * len(tellers) > len(self._heard):
                return SignedAccount(account, ()), tellers
        return None

    @property
    def _needs_rows(self) -> bool:
        """Whether it has no account of the last boundary that counts. Of two signers one is enough, so there the larger count is taken."""
        mine = self.recent.get(self._range.start)
        if mine is None or not mine.signed.is_certified:
            return self._range.is_complete
        signers = mine.account.signers
        return len(signers) < FEWEST and not mine.vouches.keys() >= set(signers)

    @property
    def lacks(self) -> int | None:
        """From which step on this peer asks for accounts; None: it has all signatures that there can be.

        The organiser signs one now and then: for its signature nobody asks alone, but who asks gets it.
        """
        steps = [step for step, kept in self.recent.items() if not kept.vouches.keys() >= set(kept.account.signers)]
        if steps and self._organiser != NOBODY:
            steps += [step for step, kept in self.recent.items() if not is_anchored(kept.signed, self._organiser)]
        if self._tally is None and self._range.is_complete:
            steps.append(max(0, self._range.start - RECENT * EVERY))
        return min(steps, default=None)

    def take(self, signed: SignedAccount, works: Works) -> bool:
        """Take over an account that `wanted` has named. Returns whether the rows are its own, and can be counted on."""
        account, counted = signed.account, signed.account.counted
        has_room = max(counted.microbatches, counted.tokens) <= MOST_TAKEN
        if account.step > self._range.start or not has_room or not are_rows_of(account, works):
            return False
        self._keep(signed, works)
        return True

    def _keep(self, signed: SignedAccount, works: Works) -> None:
        account = signed.account
        self._tally = _Tally(account.first_step, account.counted.steps, dict(works))
        self._note(Kept(account, dict(works), {each.signer: each for each in signed.vouches}))

    def found(self, is_alone: bool) -> bool:
        """Begin a count where nobody has one: from the last account that this peer has, or anew. Returns whether it is needed.

        `is_alone`: nobody else serves the stage, who could tell.
        """
        is_answered = is_alone or bool(self._asked)
        if self._tally is not None or self._heard or not is_answered or not (self.is_late and self._range.is_complete):
            return False
        last = next(reversed(self.recent.values()), None)
        if last is not None:
            self._tally = _Tally(last.account.first_step, last.account.counted.steps, dict(last.works))
        else:
            self._tally = _Tally(self._range.start, 0, {})
        return True


def rows_of(told: Mapping[PeerId, WorkDone], most: int) -> Works | None:
    """Rows as a mate tells them; None if they cannot be true."""
    return told if len(told) <= most and all(row.is_possible for row in told.values()) else None

"""Members of a stage that keep its accounts, with signatures that are hashes: what tests of accounts and receipts share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random

from peerd.policy.hashing import digest
from peerd.policy.step.account_book import AccountBook
from peerd.policy.step.accounts import EVERY, Account, SignedAccount, Vouch, WorkDone, account_of, place_of
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.policy.step.work_receipts import AuditTold, ProvenRow, StageReceipt, WorkReceipt
from peerd.table.record import PeerId, RunId

RUN, OTHER_RUN = RunId("a" * 32), RunId("b" * 32)
ORGANISER = PeerId("organiser")
TOKENS, PER_STEP = 256, 64


def names(number: int) -> list[PeerId]:
    return [PeerId(f"peer{at:04}") for at in range(number)]


def sign(peer: PeerId, text: bytes) -> bytes:
    return digest("signed", peer, text, size=64)


def is_of(peer: PeerId, text: bytes, signature: bytes) -> bool:
    return signature == sign(peer, text)


def signed_by(account: Account, signers: Iterable[PeerId], time_s: int = 1_000) -> SignedAccount:
    return SignedAccount(account, tuple(Vouch(peer, time_s, sign(peer, account.text(time_s))) for peer in sorted(signers)))


def roster(step: int, members: Iterable[PeerId], random: Random | None = None, stage: int = 0, per_step: int = PER_STEP) -> Roster:
    """A roster whose microbatches are shared out at random, or equally."""
    there = sorted(members)
    done = dict.fromkeys(there, 0)
    for index in range(per_step):
        done[random.choice(there) if random else there[index % len(there)]] |= 1 << index
    return Roster(stage, step, 0, there[0], tuple(RosterEntry(peer, 1, step, done[peer]) for peer in there))


def anchored(signed: SignedAccount, organiser: PeerId = ORGANISER) -> SignedAccount:
    """The same account with the organiser's signature."""
    own = Vouch(organiser, 9_000, sign(organiser, signed.account.text(9_000)))
    return SignedAccount(signed.account, tuple(sorted([*signed.vouches, own])))


class Members:
    """Books of a stage's members, among which whatever one has goes to all others at once."""

    def __init__(self, peers: Iterable[PeerId], stage: int = 0, last_step: int = 0) -> None:
        self.stage, self.last_step = stage, last_step
        self.books: dict[PeerId, AccountBook] = {}
        self.kept: dict[int, tuple[SignedAccount, Mapping[PeerId, WorkDone]]] = {}
        """What counts, by step, with its rows."""
        for peer in peers:
            self.join(peer)

    def join(self, peer: PeerId) -> None:
        self.books[peer] = AccountBook(RUN, self.stage, last_step=self.last_step, organiser=ORGANISER)

    def step(self, step: int, random: Random | None = None, missed_by: Iterable[PeerId] = (), *, talk: bool = True) -> None:
        """All members apply the average of this step but for those that miss it."""
        found, missing, time_s = roster(step, self.books, random, self.stage), set(missed_by), 1_000 + step
        for peer, book in self.books.items():
            account = book.applied(found, TOKENS) if peer not in missing else None
            if account is not None and book.may_sign(account, peer):
                book.vouch(account.id, Vouch(peer, time_s, sign(peer, account.text(time_s))))
        if talk:
            self.talk()

    def talk(self) -> None:
        for peer, book in self.books.items():
            for other, theirs in self.books.items():
                if other != peer:
                    assert book.hear(other, [kept.signed for kept in theirs.recent.values()], is_of) == ""
            wanted = book.wanted()
            if wanted is not None:
                signed, holders = wanted
                held = [self.books[each].recent.get(signed.account.step) for each in holders if each in self.books]
                assert all(kept is None or book.take(signed, kept.works) for kept in held[:1])
        for book in self.books.values():
            for step, kept in book.recent.items():
                if kept.signed.is_certified and len(kept.vouches) >= len(self.kept[step][0].vouches if step in self.kept else ()):
                    self.kept[step] = kept.signed, kept.works


def row_in(works: Mapping[PeerId, WorkDone], peer: PeerId) -> ProvenRow:
    place, path = place_of(works, peer)
    return ProvenRow(works[peer], place, len(works), path)


def receipt_of(members: Members, peer: PeerId, since: int | None = None, until: int | None = None) -> WorkReceipt:
    """A receipt of all accounts that count, up to step `until`; of what came after step `since`."""
    steps = [step for step in sorted(members.kept) if until is None or step <= until]
    since_at = -1 if since is None else steps.index(since)
    part = StageReceipt(
        accounts=tuple(members.kept[step][0] for step in steps),
        until=row_in(members.kept[steps[-1]][1], peer),
        since_at=since_at,
        since=None if since is None else row_in(members.kept[since][1], peer),
    )
    return WorkReceipt(RUN, peer, (part,))


def audit_word(auditor: PeerId, peer: PeerId, step: int, right: int = 3, differed: int = 0) -> AuditTold:
    word = AuditTold(auditor, 0, step, right, differed)
    return AuditTold(auditor, 0, step, right, differed, sign(auditor, word.text(RUN, peer)))


def some_account(step: int, works: Mapping[PeerId, WorkDone], present: Iterable[PeerId] | None = None, run: RunId = RUN) -> Account:
    return account_of(run, 0, (0, step), step, works, list(works) if present is None else list(present))


LAST = 4 * EVERY

"""How accounts, their signatures and receipts of work are drawn: whatever passes the checks of their form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from peerd.policy.step.account_book import AccountBook
from peerd.policy.step.accounts import EVERY, MOST_COUNT, MOST_SIGNERS, MOST_TIME_S, Account, SignedAccount, Vouch, WorkDone, account_of
from peerd.policy.step.work_receipts import AuditTold, ProvenRow, StageReceipt, WorkReceipt
from peerd.table.record import RunId
from tests.policy.fuzz_records import World

RUN = RunId("run")


def _work(world: World) -> WorkDone:
    microbatches = world.count(MOST_COUNT - 1)
    return WorkDone(world.count(microbatches), microbatches, world.count(MOST_COUNT - 1))


def _works(world: World) -> Mapping[Any, WorkDone]:
    return {world.some_peer(): _work(world) for _ in range(world.random.choice((1, 2, 40)))}


def _account(world: World) -> Account:
    first, steps = world.random.choice((0, world.count(MOST_COUNT // EVERY))), world.random.choice((1, 2, 1 << 40))
    step = min(first // EVERY + steps, MOST_COUNT // EVERY - 1) * EVERY
    works = _works(world)
    if world.random.random() < 0.5:
        return account_of(RUN, world.some_stage(), (min(first, step - 1), step), min(EVERY, step), works, works.keys())
    signers = tuple(sorted({world.some_peer() for _ in range(world.random.randint(1, MOST_SIGNERS))}))
    return Account(RUN, world.some_stage(), min(first, step - 1), step, world.raw(32), _work(world), signers)


def _vouch(world: World) -> Vouch:
    return Vouch(world.some_peer(), world.count(MOST_TIME_S - 1), world.raw(64))


def _signed(world: World) -> SignedAccount:
    account = _account(world)
    known = [Vouch(peer, world.count(1 << 40), world.raw(64)) for peer in account.signers if world.random.random() < 0.7]
    strange = [_vouch(world) for _ in range(world.random.choice((0, 0, 1, 30)))]
    return SignedAccount(account, tuple(sorted([*known, *strange])))


def _accounts(world: World) -> list[SignedAccount]:
    return [_signed(world) for _ in range(12)]


def _book(world: World) -> AccountBook:
    book = AccountBook(RUN, world.own.stage)
    if world.random.random() < 0.7:
        signed = _signed(world)
        book = AccountBook(RUN, signed.account.stage, signed, _works(world))
    book.hear(world.some_peer(), _accounts(world)[:4], lambda *_: True)
    return book


def _row(world: World) -> ProvenRow:
    return ProvenRow(
        _work(world), world.count(1 << 40), world.count(1 << 40), tuple(world.raw(32) for _ in range(world.random.choice((0, 9, 40))))
    )


def _part(world: World) -> StageReceipt:
    accounts = tuple(_signed(world) for _ in range(world.random.randint(1, 9)))
    since = world.maybe(lambda: _row(world))
    return StageReceipt(accounts, _row(world), -1 if since is None else world.random.randrange(len(accounts)), since)


def _receipt(world: World) -> WorkReceipt:
    audits = tuple(
        AuditTold(world.some_peer(), world.some_stage(), world.some_step(), world.count(), world.count(), world.raw(64)) for _ in range(2)
    )
    return WorkReceipt(world.random.choice((RUN, RunId("other"))), world.some_peer(), tuple(_part(world) for _ in range(2)), audits)


def _size(receipt: WorkReceipt) -> int:
    return sum(2_000 * len(part.accounts) for part in receipt.parts)


MAKERS: Mapping[type, Callable[[World], Any]] = {AccountBook: _book}

ARGUMENTS: Mapping[str | tuple[str, str], Callable[[World], Any]] = {
    "account": _account,
    **dict.fromkeys((("before", "Account"), ("before", "Account | None")), _account),
    ("before", "tuple[SignedAccount, Works] | None"): lambda w: w.maybe(lambda: (_signed(w), _works(w))),
    ("newest", "tuple[SignedAccount, Works]"): lambda w: (_signed(w), _works(w)),
    ("signed", "SignedAccount"): _signed,
    "accounts": _accounts,
    ("answers", "Sequence[Sequence[SignedAccount]]"): lambda w: [_accounts(w) for _ in range(w.random.randrange(4))],
    "num_asked": lambda w: w.random.randint(1, 5),
    "at": lambda _w: 11,
    ("first", "int"): lambda w: w.random.randrange(12),
    "account_id": lambda w: w.raw(32),
    "organiser": lambda w: w.some_peer(),
    "vouch": _vouch,
    "works": _works,
    "is_alone": lambda w: w.random.random() < 0.5,
    "tokens": lambda w: w.random.choice((0, 1, 1 << 30)),
    "receipt": _receipt,
    "receipts": lambda w: {name: _receipt(w) for name in "abc"},
    ("known", "Collection[bytes]"): lambda w: {w.raw(32)},
    "measure": lambda _w: _size,
    "most_bytes": lambda w: w.random.choice((0, 10_000, 1 << 16)),
}

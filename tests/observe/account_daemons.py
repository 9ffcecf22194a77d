"""Daemons' keepers of accounts with their files, and without anything else of a daemon: tests of receipts share them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.config.access import organisers_peer
from peerd.config.receipt_file import has_signed, pack_receipt
from peerd.observe.account_store import DAY_S, AccountStore
from peerd.observe.accounts import AccountKeeper
from peerd.observe.store import HistoryStore
from peerd.policy.step.accounts import EVERY, SignedAccount, Vouch
from peerd.policy.step.work_receipts import WorkReceipt, fitted
from peerd.swarm.identity import Identity
from peerd.swarm.signed import sign_manifest
from tests.policy.account_world import roster
from tests.tiny_run import tiny_manifest

OFFICE = Ed25519PrivateKey.generate()
SIGNED = sign_manifest(tiny_manifest(num_stages=2, microbatches_per_step=12), OFFICE)
ORGANISER = organisers_peer(SIGNED.organiser_key)
RUN = SIGNED.run
PER_STEP, TOKENS = SIGNED.manifest.train.microbatches_per_step, SIGNED.manifest.tokens_per_microbatch_at(0)


class Daemon:
    """A member with its store, and what it does after each step."""

    def __init__(self, folder: Path, name: str) -> None:
        self.me = Identity(Ed25519PrivateKey.generate())
        self.path = folder / f"{name}.history"
        self.keeper = self.new_keeper()

    def new_keeper(self) -> AccountKeeper:
        return AccountKeeper(RUN, self.me.peer, self.me.sign, has_signed, organiser=ORGANISER)

    @contextmanager
    def store(self) -> Iterator[AccountStore]:
        with closing(HistoryStore(self.path)) as history:
            yield history.accounts(RUN, self.me.peer, ORGANISER)

    def told(self) -> tuple[SignedAccount, ...]:
        with self.store() as store:
            return self.keeper.told(store, 0, 0)

    def receipt(self, since_s: int = 0) -> bytes:
        with self.store() as store:
            receipt = WorkReceipt(RUN, self.me.peer, self.keeper.parts(store, since_s), organiser=ORGANISER)
        found = fitted(receipt, lambda each: len(pack_receipt(each, SIGNED.raw, lambda _text: bytes(64))))
        assert found is not None
        return pack_receipt(found, SIGNED.raw, self.me.sign)


def train(daemons: list[Daemon], steps: range, time_s: int = 1000) -> None:
    """All apply the averages of these steps, and then tell each other what they have signed."""
    members = [each.me.peer for each in daemons]
    for daemon in daemons:
        with daemon.store() as store:
            daemon.keeper.applied(store, [(roster(step, members, per_step=PER_STEP), TOKENS) for step in steps], time_s)
    for daemon in daemons:
        for other in daemons:
            if other is not daemon:
                told = other.told()
                with daemon.store() as store:
                    assert daemon.keeper.hear(store, 0, other.me.peer, told) == ""


def anchor(daemon: Daemon) -> None:
    """The organiser signs the newest account of a daemon."""
    (*_, signed), time_s = daemon.told(), 5_000
    vouch = Vouch(ORGANISER, time_s, OFFICE.sign(signed.account.text(time_s)))
    with daemon.store() as store:
        assert daemon.keeper.gather(store, 0, [SignedAccount(signed.account, (vouch,))]) == ""


def days(daemons: list[Daemon], number: int) -> None:
    """One account a day."""
    for day in range(number):
        train(daemons, range(day * EVERY, (day + 1) * EVERY), (day + 1) * DAY_S)

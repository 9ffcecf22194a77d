"""How large the file of a receipt is, whatever it tells of."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from peerd.config.receipt_file import pack_receipt, peer_of
from peerd.policy.hashing import digest
from peerd.policy.step.accounts import EVERY, MOST_SIGNERS, WorkDone, chain_to, follows
from peerd.policy.step.work_receipts import MOST_BYTES, WorkReceipt, fitted, proven, why_refused
from peerd.table.record import PeerId
from tests.policy.account_world import RUN, Members, is_of, receipt_of, signed_by, some_account

STRIDE = 90 * EVERY
MANIFEST = (bytes(4096), bytes(32), bytes(64))


def peer_number(number: int) -> PeerId:
    return peer_of(digest("peer", number, size=32))


def size_of(receipt: WorkReceipt) -> int:
    return len(pack_receipt(receipt, MANIFEST, lambda _text: bytes(64)))


@pytest.mark.parametrize(("leaves", "most_bytes"), [(0.0, 16_000), (0.01, 40_000), (0.1, MOST_BYTES)])
def test_a_day_of_300_peers_fits_whatever_comes_and_goes(leaves: float, most_bytes: int) -> None:
    """Steps of two seconds for two days, 86,400, of which the second is told; a daemon is left by so many of its mates an account."""
    random, peers, accounts = Random(3), [peer_number(at) for at in range(300)], []
    me = peers[7]
    works = {peer: WorkDone(1, 1 + at, 8) for at, peer in enumerate(peers)}
    before: list[PeerId] = []
    kept = {}
    for number, step in enumerate(range(EVERY, 86_401, STRIDE)):
        for at in range(300):
            if random.random() < leaves and peers[at] != me:
                peers[at] = peer_number(1000 * (number + 1) + at)
        works = {**works, **{peer: works.get(peer, WorkDone()) + WorkDone(EVERY, 64 + random.randrange(64), 8 * EVERY) for peer in peers}}
        account = some_account(step, works, peers)
        kept[step] = signed_by(account, {*account.signers, *before}), works
        accounts.append(kept[step][0])
        before = list(account.signers)
    middle = next(at for at, each in enumerate(accounts) if each.account.step >= 43_200)
    places = [*chain_to(accounts, middle), *chain_to(accounts, len(accounts) - 1, first=middle)[1:]]
    members = Members(())
    members.kept = {accounts[at].account.step: kept[accounts[at].account.step] for at in places}
    receipt = fitted(receipt_of(members, me, since=accounts[middle].account.step), size_of)
    assert receipt is not None
    assert why_refused(receipt, RUN, is_of) == ""
    chain = receipt.parts[0].accounts
    assert len(chain[-1].account.signers) == MOST_SIGNERS
    assert all(follows(after, before.account) for before, after in pairwise(chain))
    assert size_of(receipt) <= most_bytes
    assert proven(receipt)[0].work.steps == (accounts[-1].account.step - accounts[middle].account.step) // (STRIDE) * EVERY

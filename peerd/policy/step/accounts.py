"""The accounts of a stage: who has computed how much up to a step, and whose signatures make that count. Pure.

Every `EVERY` steps, and at the end of the run, the members of a stage sign one hash of what each peer has computed in the stage so far,
from the rosters of the averages that they have applied. So what is signed has one size, whatever the number of peers and steps, and one
account with the path from a peer's row to its hash proves all that the peer has done until then. An account names its signers: who may
sign it, and who may sign what comes after it. So accounts form a chain of standing, and one may be skipped if the signers before it have
signed a later one. The run's organiser signs some, too: not the counts, but that the signers are peers of its run. There a chain may begin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median_low

from peerd.policy.hashing import digest
from peerd.policy.step.ledger import FEWEST
from peerd.table.record import PeerId, RunId

NOBODY = PeerId("")
EVERY = 16
"""Steps between two accounts. What it costs does not grow with the time that a step takes, nor with the run."""
MOST_SIGNERS = 31
"""An account has so many signers at most, however large the stage: those that have computed the most. A majority of them lies only where
as many liars have outworked all others."""
ID_BYTES = 32
MOST_COUNT = 1 << 62
"""Counts and steps are below this."""
MOST_TIME_S = 1 << 37
"""A signer tells a time below this: one in the year 6325, which every calendar knows."""
DOMAIN = b"peerd account of a stage\0"
KEPT_EACH = 64
"""Of old accounts the newest ones of this number are kept, of those before every second one of so many, and so on."""
SignatureCheck = Callable[[PeerId, bytes, bytes], bool]
"""Whether a text has this peer's signature: (peer, text, signature)."""


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Averages that a peer has brought something into, its microbatches in them, and their tokens."""

    steps: int = 0
    microbatches: int = 0
    tokens: int = 0

    def __add__(self, other: WorkDone) -> WorkDone:
        return WorkDone(self.steps + other.steps, self.microbatches + other.microbatches, self.tokens + other.tokens)

    def __sub__(self, other: WorkDone) -> WorkDone:
        return WorkDone(self.steps - other.steps, self.microbatches - other.microbatches, self.tokens - other.tokens)

    @property
    def is_possible(self) -> bool:
        """Whether these are counts, of which no more is zero than may be."""
        return 0 <= self.steps <= self.microbatches < MOST_COUNT and 0 <= self.tokens < MOST_COUNT and (self.steps > 0 or not self.tokens)


Works = Mapping[PeerId, WorkDone]


@dataclass(frozen=True)
class Account:
    """What the members of a stage sign: the counts of the averages of the steps from `first_step` up to `step`, without `step` itself."""

    run: RunId
    stage: int
    first_step: int
    step: int
    root: bytes
    """The hash of all rows (`root_of`)."""
    counted: WorkDone
    """Averages counted, and what all peers have computed in them."""
    signers: tuple[PeerId, ...]
    """Sorted: who may sign this account, and make the next one follow it."""

    @cached_property
    def id(self) -> bytes:
        counts = (self.counted.steps, self.counted.microbatches, self.counted.tokens)
        return digest("account", self.run, self.stage, self.first_step, self.step, self.root, *counts, *self.signers, size=ID_BYTES)

    def text(self, time_s: int) -> bytes:
        """What a signer signs; `time_s`: when, by its clock, in seconds since the epoch."""
        return DOMAIN + self.id + time_s.to_bytes(8, "big")


@dataclass(frozen=True, slots=True, order=True)
class Vouch:
    """A signature under an account."""

    signer: PeerId
    time_s: int
    signature: bytes


@dataclass(frozen=True, slots=True)
class SignedAccount:
    """An account with signatures, sorted by signer."""

    account: Account
    vouches: tuple[Vouch, ...]

    @property
    def time_s(self) -> int:
        """When it was signed: the median of what its signers say; 0 without any."""
        return median_low(each.time_s for each in self.vouches) if self.vouches else 0

    @property
    def is_certified(self) -> bool:
        """Whether enough of its signers have signed it. Their signatures are checked elsewhere."""
        return _has_most(self.account.signers, self.vouches)


def is_anchored(signed: SignedAccount, organiser: PeerId) -> bool:
    """Whether the run's organiser has signed an account: that its signers are peers of its run. Signatures are checked elsewhere."""
    return organiser != NOBODY and any(each.signer == organiser for each in signed.vouches)


def needed_of(num_signers: int) -> int:
    """How many of so many signers have to sign: more than half; of fewer than three one, since no majority can say who of two lies."""
    return num_signers // 2 + 1 if num_signers >= FEWEST else 1


def _has_most(signers: Collection[PeerId], vouches: Sequence[Vouch]) -> bool:
    return len({each.signer for each in vouches}.intersection(signers)) >= needed_of(len(signers))


def signers_of(works: Works, present: Collection[PeerId]) -> tuple[PeerId, ...]:
    """The signers of an account with these rows, sorted: those of the peers that are there that have computed the most."""
    ranked = sorted((peer for peer in present if peer in works), key=lambda peer: (-works[peer].microbatches, peer))
    return tuple(sorted(ranked[:MOST_SIGNERS]))


def account_of(run: RunId, stage: int, steps: tuple[int, int], num_averages: int, works: Works, present: Collection[PeerId]) -> Account:
    """The account of these rows, of the steps from the first up to the second, of which so many averages were counted."""
    microbatches, tokens = sum(row.microbatches for row in works.values()), sum(row.tokens for row in works.values())
    counted = WorkDone(num_averages, microbatches, tokens)
    return Account(run, stage, *steps, root_of(works), counted, signers_of(works, present))


# The rows' hash


def root_of(works: Works) -> bytes:
    """The hash of all rows, 32 bytes. It takes some microseconds a row."""
    levels = _levels(works)
    return _root(len(works), levels[-1][0])


def are_rows_of(account: Account, works: Works) -> bool:
    """Whether these are the rows of an account: they have its hash, and add up to what it has counted."""
    counted, rows = account.counted, works.values()
    is_whole = (sum(row.microbatches for row in rows), sum(row.tokens for row in rows)) == (counted.microbatches, counted.tokens)
    return is_whole and all(row.steps <= counted.steps for row in rows) and root_of(works) == account.root


def place_of(works: Works, peer: PeerId) -> tuple[int, tuple[bytes, ...]]:
    """A peer's place among the rows, and the hashes beside its way to the root. Raises KeyError for one without a row."""
    if peer not in works:
        raise KeyError(peer)
    place = at = sorted(works).index(peer)
    path = []
    for level in _levels(works)[:-1]:
        if at ^ 1 < len(level):
            path.append(level[at ^ 1])
        at >>= 1
    return place, tuple(path)


def root_by(peer: PeerId, work: WorkDone, place: tuple[int, int], path: Sequence[bytes]) -> bytes:
    """The root to which a row's way leads; `place`: its place, and the number of rows. Empty for what is no way."""
    at, size = place
    if not 0 <= at < size:
        return b""
    num_rows, left, node = size, list(path), _row(peer, work)
    while num_rows > 1:
        if at ^ 1 < num_rows:
            if not left:
                return b""
            beside = left.pop(0)
            node = _node(beside, node) if at & 1 else _node(node, beside)
        at, num_rows = at >> 1, (num_rows + 1) >> 1
    return b"" if left else _root(size, node)


def _levels(works: Works) -> list[list[bytes]]:
    levels = [[_row(peer, works[peer]) for peer in sorted(works)] or [b""]]
    while len(level := levels[-1]) > 1:
        pairs = [_node(level[at], level[at + 1]) for at in range(0, len(level) - 1, 2)]
        levels.append(pairs + level[-1:] if len(level) % 2 else pairs)
    return levels


def _row(peer: PeerId, work: WorkDone) -> bytes:
    return digest("row", peer, work.steps, work.microbatches, work.tokens, size=ID_BYTES)


def _node(left: bytes, right: bytes) -> bytes:
    return digest("pair", left, right, size=ID_BYTES)


def _root(num_rows: int, top: bytes) -> bytes:
    return digest("rows", num_rows, top, size=ID_BYTES)


# What counts


def why_unsound(account: Account) -> str:
    """What cannot be in an account; empty if it may be true."""
    if not 0 <= account.first_step < account.step < MOST_COUNT:
        return "an account of no such steps"
    if len(account.root) != ID_BYTES or not 0 <= account.stage < MOST_COUNT:
        return "an account without rows"
    if not account.counted.is_possible or account.counted.steps > account.step - account.first_step:
        return "an account of more than its steps had"
    if not 0 < len(account.signers) <= MOST_SIGNERS or list(account.signers) != sorted(set(account.signers)):
        return "an account without signers that are in order"
    return ""


def why_not_certified(signed: SignedAccount, is_of: SignatureCheck) -> str:
    """Why an account does not count; empty if it does: each signature is its signer's, and enough of its own signers have signed."""
    account, names = signed.account, [each.signer for each in signed.vouches]
    if why := why_unsound(account):
        return why
    if names != sorted(set(names)) or len(names) > 2 * MOST_SIGNERS:
        return "signatures that are not in order, or too many"
    for each in signed.vouches:
        if not 0 <= each.time_s < MOST_TIME_S or not is_of(each.signer, account.text(each.time_s), each.signature):
            return f"the signature of {each.signer} is not its own"
    if not signed.is_certified:
        return f"{len(set(names).intersection(account.signers))} of {len(account.signers)} signers have signed, which are too few"
    return ""


def told_by_most(answers: Sequence[Sequence[SignedAccount]], num_asked: int) -> list[SignedAccount]:
    """The copies of the newest account that more than half of `num_asked` peers tell, those with most signatures first; empty: none is.

    An account names its own signers, so one peer can make one up that it alone has signed. `answers`: what each of these peers tells. The
    signatures are checked elsewhere.
    """
    copies: dict[bytes, list[SignedAccount]] = {}
    for answer in answers:
        for account_id, signed in {signed.account.id: signed for signed in answer if signed.is_certified}.items():
            copies.setdefault(account_id, []).append(signed)
    told = [each for each in copies.values() if 2 * len(each) > num_asked]
    newest = max(told, key=lambda each: (each[0].account.step, each[0].account.id), default=[])
    return sorted(newest, key=lambda signed: len(signed.vouches), reverse=True)


def follows(signed: SignedAccount, before: Account) -> bool:
    """Whether enough signers of an earlier account have signed this one. Their signatures are checked elsewhere."""
    account = signed.account
    is_later = (account.run, account.stage, account.first_step) == (before.run, before.stage, before.first_step)
    return is_later and account.step > before.step and _has_most(before.signers, signed.vouches)


def chain_to(accounts: Sequence[SignedAccount], at: int, first: int = 0) -> list[int]:
    """The places of a short chain of accounts from one at or behind `first` to that at `at`, as few as a greedy search finds.

    `accounts` are in the order of steps. Where none follows, the one just before is in the chain, and there it is broken.
    """
    found = [at]
    while at > first:
        at = next((earlier for earlier in range(first, at) if follows(accounts[at], accounts[earlier].account)), at - 1)
        found.append(at)
    return found[::-1]


def thinned(accounts: Sequence[SignedAccount], organiser: PeerId = NOBODY) -> list[SignedAccount]:
    """What is kept of these accounts, which are in the order of steps: fewer of the older ones, all that the chain needs, and the newest
    that the organiser has signed."""
    if not accounts:
        return []
    newest, kept = accounts[-1].account.step // EVERY, [accounts[0]]
    anchor = next((each for each in reversed(accounts) if is_anchored(each, organiser)), None)
    for each, after in pairwise(accounts[1:]):
        number = each.account.step // EVERY
        spacing = number & -number
        is_wanted = newest - number < KEPT_EACH * spacing or each is anchor
        if is_wanted or not follows(after, kept[-1].account):
            kept.append(each)
    return kept + list(accounts[1:][-1:])


def shortened(signed: SignedAccount, before: Account | None, organiser: PeerId = NOBODY) -> SignedAccount:
    """The same account with no more signatures than it needs to count, and to follow `before` if it does; of two signers those of both.

    The signature of the run's organiser stays.
    """
    kept = {each for each in signed.vouches if is_anchored(signed, organiser) and each.signer == organiser}
    for signers in (account.signers for account in (before, signed.account) if account is not None):
        wanted = [each for each in signed.vouches if each.signer in signers]
        lacking = (len(signers) if len(signers) < FEWEST else needed_of(len(signers))) - len(kept.intersection(wanted))
        kept.update([each for each in wanted if each not in kept][: max(0, lacking)])
    return SignedAccount(signed.account, tuple(sorted(kept)))

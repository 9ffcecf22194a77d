"""A receipt of one peer's work: what it holds, what it proves, and why one is refused. Pure.

For each stage that the peer served a receipt has a few accounts, each of which follows the one before, and the peer's row in the last one;
where it is of a part of the run, also its row in the account where that part begins. The difference is what the peer has done between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from peerd.policy.step.accounts import (
    MOST_COUNT,
    NOBODY,
    SignatureCheck,
    SignedAccount,
    WorkDone,
    follows,
    is_anchored,
    root_by,
    shortened,
    why_not_certified,
)
from peerd.policy.step.ledger import FEWEST
from peerd.table.record import MAX_STAGES, PeerId, RunId

MOST_BYTES = 1 << 16
"""A receipt is at most so long, whatever it tells of."""
AUDIT_DOMAIN = b"peerd audits of a peer\0"


@dataclass(frozen=True, slots=True)
class ProvenRow:
    """A peer's row in an account, with its way to the root."""

    work: WorkDone
    place: int
    size: int
    path: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class StageReceipt:
    """What a receipt has of one stage."""

    accounts: tuple[SignedAccount, ...]
    """In the order of steps; the last one has `until`."""
    until: ProvenRow
    since_at: int = -1
    """The place among the accounts of the one with `since`; -1: all that was counted until the last account."""
    since: ProvenRow | None = None


@dataclass(frozen=True, slots=True)
class AuditTold:
    """What a mate says of its own audits of the peer in a stage: how many items it computed again, and how many of them differed."""

    auditor: PeerId
    stage: int
    step: int
    """Up to which."""
    right: int
    differed: int
    signature: bytes = b""

    def text(self, run: RunId, audited: PeerId) -> bytes:
        """What the auditor signs."""
        numbers = ",".join(map(str, (self.stage, self.step, self.right, self.differed)))
        return AUDIT_DOMAIN + f"{run},{audited},{self.auditor},{numbers}".encode()


@dataclass(frozen=True, slots=True)
class WorkReceipt:
    """A peer's receipt, of one run. The manifest travels beside it."""

    run: RunId
    peer: PeerId
    parts: tuple[StageReceipt, ...]
    """By stage."""
    audits: tuple[AuditTold, ...] = ()
    organiser: PeerId = NOBODY
    """The name under which the run's organiser signs accounts. It follows from the manifest."""


@dataclass(frozen=True, slots=True)
class Proven:
    """What a receipt proves of one stage, and on whose word."""

    stage: int
    steps: tuple[int, int]
    """From the first, up to the second without it."""
    times_s: tuple[int, int]
    """When the accounts at both ends were signed, in seconds since the epoch; 0 for the beginning of a count."""
    work: WorkDone
    whole: WorkDone
    """What all peers together have done there meanwhile."""
    num_signed: int
    num_signers: int
    """Of the last account."""
    chain_from: int
    """The step of the first account of the unbroken chain that ends there. What its signers say is taken as it is."""
    is_anchored: bool
    """Whether that chain begins at, or leads through, an account that the reader knows by itself, or that the organiser has signed."""
    is_by_organiser: bool
    """Whether the run's organiser has signed an account of that chain: that its signers are peers of its run."""
    audits: tuple[AuditTold, ...]

    @property
    def is_by_one(self) -> bool:
        """Whether fewer than three peers could sign: then nobody can say whether they lie."""
        return self.num_signers < FEWEST


def why_refused(receipt: WorkReceipt, run: RunId, is_of: SignatureCheck) -> str:
    """Why a receipt proves nothing; empty if it does. `run`: the run that it has to be of."""
    if receipt.run != run:
        return f"it is of another run, {receipt.run}"
    if not 0 < len(receipt.parts) <= MAX_STAGES:
        return "it tells of no stage"
    stages = [part.accounts[-1].account.stage for part in receipt.parts if part.accounts]
    if len(stages) < len(receipt.parts) or stages != sorted(set(stages)):
        return "it tells of a stage twice, or of none"
    reasons = (_why_unproven(receipt, part, is_of) for part in receipt.parts)
    return next(filter(None, reasons), "") or _why_unheard(receipt, is_of)


def _why_unproven(receipt: WorkReceipt, part: StageReceipt, is_of: SignatureCheck) -> str:
    accounts = [signed.account for signed in part.accounts]
    last = accounts[-1]
    steps = [account.step for account in accounts]
    if any((account.run, account.stage) != (receipt.run, last.stage) for account in accounts):
        return "an account in it is of another run or stage"
    if steps != sorted(set(steps)):
        return "its accounts are not in the order of their steps"
    signers: set[PeerId] = set()
    for signed in part.accounts:
        if why := why_not_certified(signed, is_of):
            return why
        known = {receipt.organiser, *signers, *signed.account.signers}
        strangers = [each.signer for each in signed.vouches if each.signer not in known]
        if strangers:
            return f"a stranger has signed: {strangers[0]} is no signer of this stage"
        signers = set(signed.account.signers)
    if not _is_in(receipt.peer, part.until, part.accounts[-1]):
        return "the counts are not those that were signed"
    if part.since is None:
        return "" if part.since_at == -1 else "it begins nowhere"
    if not 0 <= part.since_at < len(accounts) - 1 or not _is_in(receipt.peer, part.since, part.accounts[part.since_at]):
        return "the counts at its beginning are not those that were signed"
    begun = accounts[part.since_at]
    is_one_count = begun.first_step == last.first_step
    done, whole = part.until.work - part.since.work, last.counted - begun.counted
    is_possible = is_one_count and done.is_possible and whole.is_possible and done.microbatches <= whole.microbatches
    return "" if is_possible else "its accounts are not of one count"


def _is_in(peer: PeerId, row: ProvenRow, signed: SignedAccount) -> bool:
    work, counted = row.work, signed.account.counted
    is_possible = work.is_possible and work.steps <= counted.steps and work.microbatches <= counted.microbatches
    return is_possible and root_by(peer, work, (row.place, row.size), row.path) == signed.account.root


def _why_unheard(receipt: WorkReceipt, is_of: SignatureCheck) -> str:
    """What is wrong with the words of auditors."""
    signers = {part.accounts[-1].account.stage: part.accounts[-1].account.signers for part in receipt.parts}
    told = {(each.auditor, each.stage) for each in receipt.audits}
    for each in receipt.audits:
        if each.auditor == receipt.peer or each.auditor not in signers.get(each.stage, ()) or len(told) < len(receipt.audits):
            return f"a word on audits of {each.auditor}, which is no signer or is told twice"
        is_count = 0 <= each.right < MOST_COUNT and 0 <= each.differed < MOST_COUNT
        if not is_count or not is_of(each.auditor, each.text(receipt.run, receipt.peer), each.signature):
            return f"the word of {each.auditor} on audits is not its own"
    return ""


def proven(receipt: WorkReceipt, known: Collection[bytes] = ()) -> tuple[Proven, ...]:
    """What a receipt proves that is not refused. `known`: ids of accounts that the reader knows by itself."""
    return tuple(_proven(part, known, receipt.audits, receipt.organiser) for part in receipt.parts)


def _proven(part: StageReceipt, known: Collection[bytes], audits: Iterable[AuditTold], organiser: PeerId) -> Proven:
    chain, last = part.accounts, part.accounts[-1]
    first = len(chain) - 1
    while first > 0 and follows(chain[first], chain[first - 1].account):
        first -= 1
    begun = chain[part.since_at] if part.since is not None else None
    account, before = last.account, part.since.work if part.since is not None else WorkDone()
    is_by_organiser = any(is_anchored(signed, organiser) for signed in chain[first:])
    return Proven(
        stage=account.stage,
        steps=(begun.account.step if begun is not None else account.first_step, account.step),
        times_s=(begun.time_s if begun is not None else 0, last.time_s),
        work=part.until.work - before,
        whole=account.counted - (begun.account.counted if begun is not None else WorkDone()),
        num_signed=len({each.signer for each in last.vouches}.intersection(account.signers)),
        num_signers=len(account.signers),
        chain_from=chain[first].account.step,
        is_anchored=is_by_organiser or any(signed.account.id in known for signed in chain[first:]),
        is_by_organiser=is_by_organiser,
        audits=tuple(each for each in audits if each.stage == account.stage),
    )


def why_not_added(receipts: Mapping[str, WorkReceipt]) -> str:
    """Why receipts, by the names of their files, cannot be added up; empty if they can: none of them tells what another one tells, too."""
    for (one, first), (other, second) in combinations(receipts.items(), 2):
        if first.run != second.run:
            return f"{one} and {other} are of two runs"
        if first.peer != second.peer:
            continue
        spans = {told.stage: told.steps for told in proven(first)}
        for told in proven(second):
            begin, end = spans.get(told.stage, (0, 0))
            if max(begin, told.steps[0]) < min(end, told.steps[1]):
                steps = f"steps {max(begin, told.steps[0])} to {min(end, told.steps[1]) - 1}"
                return f"{one} and {other} both tell of {steps} of stage {told.stage}: work counts once"
    return ""


def fitted(receipt: WorkReceipt, measure: Callable[[WorkReceipt], int], most_bytes: int = MOST_BYTES) -> WorkReceipt | None:
    """The receipt with no more than it needs, and without the oldest accounts that do not fit; None if what is left does not fit either.

    `measure` gives the bytes of a receipt. Without its first accounts the chain of standing begins later, and a reader is told so.
    """
    parts = [_trimmed(part, receipt.organiser) for part in receipt.parts]
    while measure(found := replace(receipt, parts=tuple(parts))) > most_bytes:
        longest = max(range(len(parts)), key=lambda at: _spare(parts[at]), default=None)
        if longest is None or not _spare(parts[longest]):
            return None
        parts[longest] = _without_first(parts[longest], receipt.organiser)
    return found


def _spare(part: StageReceipt) -> int:
    """How many of the oldest accounts nothing but the chain needs."""
    return part.since_at if part.since is not None else len(part.accounts) - 1


def _without_first(part: StageReceipt, organiser: PeerId) -> StageReceipt:
    since_at = part.since_at - 1 if part.since is not None else -1
    return replace(part, accounts=(shortened(part.accounts[1], None, organiser), *part.accounts[2:]), since_at=since_at)


def _trimmed(part: StageReceipt, organiser: PeerId) -> StageReceipt:
    befores: Sequence[SignedAccount | None] = [None, *part.accounts[:-1]]
    pairs = zip(part.accounts, befores, strict=True)
    return replace(part, accounts=tuple(shortened(each, before.account if before else None, organiser) for each, before in pairs))

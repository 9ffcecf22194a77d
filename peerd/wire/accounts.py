"""Accounts of a stage as messages, and the checks that each passes before it is used. Signatures are checked by who takes an account."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from peerd.errors import BadMessageError
from peerd.generated import swarm_pb2
from peerd.policy.step.account_book import RECENT
from peerd.policy.step.accounts import (
    MOST_COUNT,
    MOST_SIGNERS,
    MOST_TIME_S,
    NOBODY,
    Account,
    SignedAccount,
    Vouch,
    WorkDone,
    Works,
    why_unsound,
)
from peerd.policy.step.work_receipts import AuditTold
from peerd.table.record import MAX_STAGES, PeerId, RunId
from peerd.wire.convert import MAX_PEER_CHARS, MAX_TALLIES

SIGNATURE_BYTES = 64


@dataclass(frozen=True, slots=True)
class AccountsWanted:
    """What one peer asks another of the accounts of a stage."""

    stage: int
    since: int = 0
    """The last few of this step and later; with `rows` the one of this step."""
    rows: bool = False
    before_s: int = 0
    """With `rows`: the newest that was signed before this time, in place of the one of a step; 0: that of the step."""
    audited: PeerId = NOBODY
    """And what the callee's audits of this peer have found."""
    told: SignedAccount | None = None
    """An account of this stage with signatures that the callee may lack."""


@dataclass(frozen=True, slots=True)
class AccountsTold:
    """The answer."""

    accounts: tuple[SignedAccount, ...] = ()
    rows: Works = field(default_factory=dict)
    """Of the account, if there is one, where they were asked for."""
    audits: AuditTold | None = None


def wanted_to(run: RunId, wanted: AccountsWanted) -> swarm_pb2.AccountsRequest:
    return swarm_pb2.AccountsRequest(
        run=run,
        stage=wanted.stage,
        since=wanted.since,
        rows=wanted.rows,
        before_s=wanted.before_s,
        audited=wanted.audited,
        told=_account_to(wanted.told) if wanted.told is not None else None,
    )


def wanted_from(request: swarm_pb2.AccountsRequest) -> AccountsWanted:
    """Raises BadMessageError."""
    if request.stage >= MAX_STAGES or max(request.since, request.before_s) > MOST_COUNT or len(request.audited) > MAX_PEER_CHARS:
        raise BadMessageError("a question for accounts that are none")
    told = _account_from(request.told, RunId(request.run), request.stage) if request.HasField("told") else None
    return AccountsWanted(request.stage, request.since, request.rows, request.before_s, PeerId(request.audited), told)


def told_to(told: AccountsTold) -> swarm_pb2.AccountsReply:
    rows = [
        swarm_pb2.Tally(peer=peer, steps=row.steps, microbatches=row.microbatches, tokens=row.tokens) for peer, row in told.rows.items()
    ]
    word = told.audits
    audits = (
        swarm_pb2.PeerAudits(step=word.step, right=word.right, differed=word.differed, signature=word.signature)
        if word is not None
        else None
    )
    return swarm_pb2.AccountsReply(accounts=map(_account_to, told.accounts), rows=rows, audits=audits)


def told_from(reply: swarm_pb2.AccountsReply, run: RunId, wanted: AccountsWanted, teller: PeerId) -> AccountsTold:
    """Check the form of an answer. Raises BadMessageError."""
    if len(reply.accounts) > RECENT or len(reply.rows) > MAX_TALLIES or (reply.rows and len(reply.accounts) != 1):
        raise BadMessageError(f"{len(reply.accounts)} accounts with {len(reply.rows)} rows")
    accounts = tuple(_account_from(each, run, wanted.stage) for each in reply.accounts)
    rows = {_peer(each.peer): WorkDone(each.steps, each.microbatches, each.tokens) for each in reply.rows}
    if len(rows) < len(reply.rows) or not all(row.is_possible for row in rows.values()):
        raise BadMessageError("a row of an account is out of range, or told twice")
    return AccountsTold(accounts, rows, _audits_from(reply, wanted, teller))


def _audits_from(reply: swarm_pb2.AccountsReply, wanted: AccountsWanted, teller: PeerId) -> AuditTold | None:
    if not reply.HasField("audits") or not wanted.audited:
        return None
    word = reply.audits
    if max(word.step, word.right, word.differed) >= MOST_COUNT or len(word.signature) != SIGNATURE_BYTES:
        raise BadMessageError("a word on audits is out of range")
    return AuditTold(teller, wanted.stage, word.step, word.right, word.differed, word.signature)


def _account_to(signed: SignedAccount) -> swarm_pb2.Account:
    account, counted = signed.account, signed.account.counted
    vouches = [swarm_pb2.Vouch(signer=each.signer, time_s=each.time_s, signature=each.signature) for each in signed.vouches]
    return swarm_pb2.Account(
        first_step=account.first_step,
        step=account.step,
        root=account.root,
        averages=counted.steps,
        microbatches=counted.microbatches,
        tokens=counted.tokens,
        signers=account.signers,
        vouches=vouches,
    )


def _account_from(message: swarm_pb2.Account, run: RunId, stage: int) -> SignedAccount:
    if len(message.signers) > MOST_SIGNERS or len(message.vouches) > 2 * MOST_SIGNERS:
        raise BadMessageError("an account of too many signers")
    counted = WorkDone(message.averages, message.microbatches, message.tokens)
    account = Account(run, stage, message.first_step, message.step, message.root, counted, tuple(_peers(message.signers)))
    if why := why_unsound(account):
        raise BadMessageError(why)
    if any(each.time_s >= MOST_TIME_S or len(each.signature) != SIGNATURE_BYTES for each in message.vouches):
        raise BadMessageError("a signature of an account is none")
    return SignedAccount(account, tuple(Vouch(_peer(each.signer), each.time_s, each.signature) for each in message.vouches))


def _peers(names: Iterable[str]) -> list[PeerId]:
    return [_peer(name) for name in names]


def _peer(name: str) -> PeerId:
    if len(name) > MAX_PEER_CHARS or not name.isalnum():
        raise BadMessageError("a peer of an account has no name")
    return PeerId(name)

"""The table of who has computed how much: it has what reporters have counted and what is signed, without names that are to be left out.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from peerd.policy.step.accounts import SignedAccount, WorkDone, Works
from peerd.policy.step.contributions import Contribution, StageContributions
from peerd.table.record import PeerId

WEEK_S = 7 * 86_400
NAMELESS = PeerId("")
"""Stands for all peers that are not to be named."""


@dataclass(frozen=True, slots=True)
class SignedStage:
    """The newest account of a stage, and what of it is of the last week."""

    signed: SignedAccount
    rows: Works
    week: Works
    since_s: int
    """When the week begins, or the count if that is younger: then 0."""


def of_week(newest: tuple[SignedAccount, Works], before: tuple[SignedAccount, Works] | None) -> SignedStage:
    """What was done since an account of about a week ago; None: the whole count is younger than a week."""
    signed, rows = newest
    if before is None or before[0].account.first_step != signed.account.first_step or before[0].account.step >= signed.account.step:
        return SignedStage(signed, rows, rows, 0)
    done = {peer: work - before[1].get(peer, WorkDone()) for peer, work in rows.items()}
    week = {peer: work for peer, work in done.items() if work.is_possible and work.steps}
    return SignedStage(signed, rows, week, before[0].time_s)


def with_signed(stage: StageContributions, signed: SignedStage, span: int, microbatches_per_step: int) -> StageContributions:
    """A stage's rows, with those of the account in place of smaller ones: what is signed covers the time before any reporter came.

    The account also bounds them: a peer has computed no more than what is signed, and all of the run's `span` steps that it does not cover.
    A larger row is not told by an honest reporter, and the signed one takes its place.
    """
    account, rows = signed.signed.account, {row.peer: row for row in stage.rows}
    room = (account.first_step + max(0, span - account.step)) * microbatches_per_step
    teller = signed.signed.vouches[0].signer if signed.signed.vouches else NAMELESS
    for peer in {PeerId(name) for name in rows} | signed.rows.keys():
        known, work = rows.get(peer), signed.rows.get(peer, WorkDone())
        if known is not None and work.microbatches <= known.microbatches <= work.microbatches + room:
            continue
        reporter = known.reporter if known is not None and known.reporter != peer and known.microbatches < work.microbatches else teller
        counts = {"steps": work.steps, "microbatches": work.microbatches, "tokens": work.tokens}
        rows[peer] = Contribution(peer=peer, **counts, stage=stage.stage, reporter=reporter)
    return replace(
        stage,
        first_step=min(stage.first_step, account.first_step),
        last_step=max(stage.last_step, account.step - 1),
        steps=max(stage.steps, account.counted.steps),
        rows=tuple(sorted((row for row in rows.values() if row.microbatches), key=lambda row: (-row.microbatches, row.peer))),
    )


def nameless(works: Mapping[PeerId, WorkDone], unlisted: Collection[PeerId]) -> Works:
    """The same work, that of peers which are not to be named in one row."""
    found: dict[PeerId, WorkDone] = {}
    for peer, work in works.items():
        name = NAMELESS if peer in unlisted else peer
        found[name] = found.get(name, WorkDone()) + work
    return found


def without_names(stage: StageContributions, unlisted: Collection[PeerId]) -> StageContributions:
    """The same rows, those of peers that are not to be named added up in one."""
    kept = [row for row in stage.rows if row.peer not in unlisted]
    hidden = [row for row in stage.rows if row.peer in unlisted]
    if hidden:
        kept.append(
            Contribution(
                peer=NAMELESS,
                steps=max(row.steps for row in hidden),
                microbatches=sum(row.microbatches for row in hidden),
                tokens=sum(row.tokens for row in hidden),
                stage=stage.stage,
                reporter=NAMELESS,
            )
        )
    named = [replace(row, reporter=NAMELESS) if row.reporter in unlisted and row.reporter != row.peer else row for row in kept]
    return replace(stage, rows=tuple(sorted(named, key=lambda row: (-row.microbatches, row.peer))))

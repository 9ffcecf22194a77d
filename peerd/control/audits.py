"""What the control verb `audit` and the field `audits` of `status` and `peers` tell: plain values of rule 20 (audit)."""

from __future__ import annotations

from typing import TypedDict


class AuditsInfo(TypedDict):
    """This daemon's audits since it took its stage."""

    items: int  # microbatches of mates of which it had receipts, and parts of which it had a signed chunk
    drawn: int  # of those its coins drew
    counts: dict[
        str, int
    ]  # audits by outcome: right, differs, accused, missed, withheld; and cases by ruling: convicted, cleared, disputed
    kept: int  # its own microbatches' calls whose tensors it kept for auditors
    offered: int  # all of those calls
    kept_bytes: int
    most_kept_bytes: int
    standing: list[str]  # mates whose word and work count, as it sees them
    lost: list[str]  # peers that have lost their standing
    own_fault: str  # why this peer itself has lost it, in words; empty: it has not


class AuditInfo(TypedDict):
    """One audit that this daemon made."""

    peer: str  # whose work it was
    stage: int
    step: int
    index: int | None  # the microbatch; None: its whole part of the step's average
    outcome: str
    deviation: float | None  # |a - b| / |b| of the results; None: not computed
    reason: str  # why it was missed


class JudgeInfo(TypedDict):
    peer: str
    deviation: float
    tolerance: float
    differs: bool


class CaseInfo(TypedDict):
    """One case that this daemon knows."""

    peer: str  # whose work is said to be wrong
    accuser: str
    stage: int
    step: int
    index: int | None
    ruling: str  # open, convicted, cleared, disputed
    judges: list[JudgeInfo]
    losers: list[str]


class AuditReply(TypedDict):
    schema: int
    audits: AuditsInfo | None  # None: peers of this run do not audit each other
    last: list[AuditInfo]  # the oldest first
    cases: list[CaseInfo]

"""What both ends of a call sign of a microbatch, so that each is held to what it got and gave: the receipts of rule 20 (audit). Pure.

The caller signs what it asks: the hashes of inputs and labels, for this callee. The callee signs its answer: the hash of the gradient that
it gives back, the lineage of its parameters, the ledger to which it has added the microbatch, and the hash of the receipt that it got from
the next stage. That receipt has what the callee sent on and what it was given back. So one receipt binds a peer to its inputs, its output
and both gradients, and a path is a chain of them.

No honest peer can be convicted by what another one shows later: what does not have the signed hash is not what was asked or answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from peerd.policy.hashing import digest
from peerd.policy.step.auditing import Item
from peerd.table.record import PeerId, RunId

HASH_BYTES = 32
LEDGER_BYTES = 8
NAME_BYTES = 8
"""Of the hash of what a caller has signed: so much names a call among those to one peer."""
NOTHING = b""
"""In place of a hash: the first stage gives no gradient back, and the last one has no stage after it."""
STEPS_KEPT = 2
"""Steps of which a peer keeps the tensors of its calls: the one under way, and the one before, which is audited meanwhile."""
RECEIPTS_KEPT = 4
"""Steps of which a peer keeps the receipts, which are small: a mate that is late may still ask for them."""
KEPT_TENSORS = 4
"""A microbatch has so many at one peer: two between it and its caller, and two between it and the next stage."""
MEMORY_SHARE = 4
"""They take at most one part in so many of the memory that a peer may take."""
SignatureCheck = Callable[[PeerId, bytes, bytes], bool]
"""Whether a text has this peer's signature: (peer, text, signature)."""


def ledger_name(incarnation: int, ledger_no: int) -> bytes:
    """What a callee calls its ledger in what it signs, 8 bytes."""
    return digest("ledger", incarnation, ledger_no, size=LEDGER_BYTES)


def wanted_kept_bytes(num_microbatches: int, boundary_bytes: int) -> int:
    """The bytes of tensors that a peer keeps for audits if it does all microbatches of its stage alone.

    `boundary_bytes`: of one tensor between stages.
    """
    return STEPS_KEPT * num_microbatches * KEPT_TENSORS * boundary_bytes


@dataclass(frozen=True, slots=True)
class AskedPass:
    """What the caller signs of one call. Hashes are of the bytes as they travel."""

    stage: int
    """The callee's."""
    step: int
    index: int
    caller: PeerId
    callee: PeerId
    inputs: bytes
    labels: bytes
    above: bytes = NOTHING
    """The hash of the call that the caller got itself for this microbatch; NOTHING at the first stage, whose caller launches it."""
    lineage: bytes = NOTHING
    """Of the parameters with which the caller made the inputs; NOTHING at the first stage, and where it got others meanwhile."""

    def text(self, run: RunId) -> bytes:
        """The text that the caller signs."""
        ends, made = (self.caller, self.callee), (self.inputs, self.labels, self.above, self.lineage)
        return digest("asked", run, self.stage, self.step, self.index, *ends, *made, size=HASH_BYTES)

    def name(self, run: RunId) -> bytes:
        """What names this call to its callee, 8 bytes."""
        return self.text(run)[:NAME_BYTES]


@dataclass(frozen=True, slots=True)
class SignedAsk:
    """A call as its caller has signed it."""

    asked: AskedPass
    signature: bytes

    def why_unsigned(self, run: RunId, is_of: SignatureCheck) -> str:
        caller = self.asked.caller
        return "" if is_of(caller, self.asked.text(run), self.signature) else f"{caller} has not signed the call"


@dataclass(frozen=True, slots=True)
class AnsweredPass:
    """What the callee signs in its reply."""

    gradient: bytes
    """The hash of the gradient of its inputs; NOTHING at the first stage."""
    below: bytes
    """The hash of the receipt that it got from the next stage; NOTHING at the last one."""
    lineage: bytes
    """Of the parameters with which it computed."""
    ledger: bytes = NOTHING
    """The name of its ledger to which it has added the microbatch's gradients; NOTHING: to none."""

    def text(self, asked: AskedPass, run: RunId) -> bytes:
        """The text that the callee signs: its answer to this very call."""
        return digest("answered", asked.text(run), self.gradient, self.below, self.lineage, self.ledger, size=HASH_BYTES)


@dataclass(frozen=True, slots=True)
class Receipt:
    """A call with both signatures."""

    asked: AskedPass
    answered: AnsweredPass
    caller_signature: bytes
    callee_signature: bytes

    @property
    def ask(self) -> SignedAsk:
        """The caller's half."""
        return SignedAsk(self.asked, self.caller_signature)

    def signed(self, run: RunId) -> bytes:
        """The hash of it all, 32 bytes: what an item is named by, and what the stage before puts into its own answer."""
        return digest("receipt", self.answered.text(self.asked, run), size=HASH_BYTES)

    def item(self, run: RunId) -> Item:
        """The callee's work on this microbatch, which others may compute again."""
        return Item(self.asked.callee, self.asked.stage, self.asked.step, self.asked.index, self.signed(run))

    def why_unsigned(self, run: RunId, is_of: SignatureCheck) -> str:
        """Why this is no receipt; empty if both ends have signed it."""
        asked = self.asked
        if (reason := self.ask.why_unsigned(run, is_of)) != "":
            return reason
        if not is_of(asked.callee, self.answered.text(asked, run), self.callee_signature):
            return f"{asked.callee} has not signed the answer"
        return ""


@dataclass(frozen=True, slots=True)
class SignedPass:
    """One peer's work on a microbatch, as it is signed: its own receipt, and the one that it got from the next stage."""

    own: Receipt
    below: Receipt | None = None
    """None at the last stage."""

    def item(self, run: RunId) -> Item:
        """The peer's work on the microbatch."""
        return self.own.item(run)

    @property
    def gave(self) -> tuple[bytes, bytes]:
        """The hashes of what the peer gave: its output, and the gradient of its inputs. NOTHING where its stage gives no such tensor."""
        return NOTHING if self.below is None else self.below.asked.inputs, self.own.answered.gradient

    def why_unsigned(self, run: RunId, is_of: SignatureCheck) -> str:
        """Why this binds the peer to nothing; empty if both receipts are signed, and the peer has named the second in the first."""
        if self.own.answered.below != (NOTHING if self.below is None else self.below.signed(run)):
            return "the receipt of the next stage is another one"
        return self.own.why_unsigned(run, is_of) or (self.below.why_unsigned(run, is_of) if self.below is not None else "")

    def why_incomplete(self, num_stages: int) -> str:
        """Why nobody could compute this work again, whatever is kept of it; empty if the receipts name all that it takes.

        An honest peer signs no such receipts. So its caller refuses them, and a mate that shows them has shown nothing.
        """
        own, below = self.own, self.below
        asked, answered = own.asked, own.answered
        if below is None:
            return "" if asked.stage == num_stages - 1 else "it does not say what the next stage got"
        if asked.stage >= num_stages - 1 or not is_next_call(asked, below.asked):
            return "the next stage's receipt is of another call"
        needs_back = (answered.gradient, answered.ledger) != (NOTHING, NOTHING)
        return "the next stage has given nothing back" if needs_back and below.answered.gradient == NOTHING else ""


def why_not_sent_on(got: SignedAsk | None, ask: SignedAsk, run: RunId, is_of: SignatureCheck) -> str:
    """Why a call to a later stage does not show what its caller made it of; empty if it does, and at the first stage.

    `got`: the call that the caller got itself. Both are signed, so the caller is bound to its inputs and its output.
    """
    if ask.asked.stage == 0:
        return ""
    if got is None or ask.asked.above != got.asked.text(run) or not is_next_call(got.asked, ask.asked):
        return "the call does not say what it was made of"
    if got.asked.labels != ask.asked.labels:
        return "the call has other labels than its caller got"
    return got.why_unsigned(run, is_of)


@dataclass(frozen=True, slots=True)
class SentOn:
    """A forward pass, as the next stage's peer shows it: what a peer got, and what that peer has added that it sent on.

    A peer that makes microbatches up has no caller to show them. One that has may answer it with something else, or not at all. The next
    stage has both signatures all the same.
    """

    got: SignedAsk
    gave: Receipt
    """Of the peer's own call to the next stage."""

    def item(self, run: RunId) -> Item:
        """The peer's forward pass, which others may compute again."""
        asked = self.got.asked
        return Item(asked.callee, asked.stage, asked.step, asked.index, digest("sent on", self.gave.asked.text(run), size=HASH_BYTES))

    def why_unsigned(self, run: RunId, is_of: SignatureCheck) -> str:
        """Why this binds the peer to nothing; empty if it has signed what it sent on, and named what it got."""
        return why_not_sent_on(self.got, self.gave.ask, run, is_of) or self.gave.why_unsigned(run, is_of)

    def why_not_judged(self, inputs: bytes, lineage: bytes) -> str:
        """Why inputs of this hash say nothing about the peer; empty if it is bound to them. `lineage`: of the judge's parameters."""
        if self.gave.asked.lineage != lineage:
            return "it was computed with other parameters"
        return "" if inputs == self.got.asked.inputs else "these are not the tensors that both ends have signed"


def is_next_call(asked: AskedPass, below: AskedPass) -> bool:
    """Whether `below` is the callee's own call to the next stage for the microbatch of `asked`."""
    due = asked.callee, asked.stage + 1, asked.step, asked.index
    return (below.caller, below.stage, below.step, below.index) == due


def signed_ones(pairs: Iterable[SignedPass], run: RunId, num_stages: int, is_of: SignatureCheck) -> list[SignedPass]:
    """Those that bind their peers, and name all that it takes to compute the work again."""
    return [each for each in pairs if not (each.why_incomplete(num_stages) or each.why_unsigned(run, is_of))]


@dataclass(frozen=True, slots=True)
class ShownTensors:
    """The hashes of what somebody shows of an item: what its peer got. NOTHING where a stage has no such tensor, or none is needed.

    What the peer gave need not be shown: both ends have signed its hash (`SignedPass.gave`).
    """

    inputs: bytes
    labels: bytes = NOTHING
    output_gradient: bytes = NOTHING


def why_not_judged(own: Receipt, below: Receipt | None, shown: ShownTensors, lineage: bytes, run: RunId) -> str:
    """Why what is shown of an item says nothing about its peer; empty if that peer is bound to all of it.

    `own`: the item's receipt; `below`: that of the stage after it, None at the last one. Both are signed. `lineage`: of the parameters with
    which the judge would compute it again.
    """
    asked, answered = own.asked, own.answered
    if answered.lineage != lineage:
        return "it was computed with other parameters"
    if answered.below != (NOTHING if below is None else below.signed(run)):
        return "the receipt of the next stage is another one"
    if (shown.inputs, shown.labels or asked.labels) != (asked.inputs, asked.labels):
        return "these are not the tensors that both ends have signed"
    if below is None:
        return "" if shown.output_gradient == NOTHING else "the last stage sends nothing on"
    if not is_next_call(asked, below.asked):
        return "the next stage's receipt is of another call"
    if shown.output_gradient not in (NOTHING, below.answered.gradient):
        return "this is not the gradient that the peer and the next stage have signed"
    return ""

"""What this peer signs of microbatches, and keeps of them until the next step ends, for mates to compute them again: rule 20 (audit).

Both ends of a call keep its tensors. So a peer that falsified something cannot get rid of what shows that.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from peerd.config.manifest import Manifest
from peerd.errors import BadMessageError
from peerd.link.links import Bytes
from peerd.policy.hashing import digest
from peerd.policy.step.coins import secret_of
from peerd.policy.step.receipts import (
    HASH_BYTES,
    MEMORY_SHARE,
    NOTHING,
    RECEIPTS_KEPT,
    STEPS_KEPT,
    AnsweredPass,
    AskedPass,
    Receipt,
    SentOn,
    SignedAsk,
    SignedPass,
    wanted_kept_bytes,
    why_not_sent_on,
)
from peerd.stage.kept_calls import KeptCalls
from peerd.stage.kept_parts import KeptParts
from peerd.stage.state import StageState
from peerd.table.record import Lineage, PeerId, Phase, RunId
from peerd.wire.messages import Call, CallResult, TensorBytes
from peerd.wire.receipts import tensor_hash
from peerd.wire.tensors import take


def most_kept_bytes(manifest: Manifest, free_bytes: int) -> int:
    """The bytes of tensors that a peer keeps: those of STEPS_KEPT steps, if it does all microbatches alone, as far as memory allows.

    `free_bytes`: the machine's memory that this peer may take.
    """
    return min(wanted_kept_bytes(manifest.train.microbatches_per_step, manifest.boundary_bytes), free_bytes // MEMORY_SHARE)


UNANSWERED_SHARE = 8
"""Of what is kept, calls without an answer take at most one part in so many."""


class Signer(Protocol):
    """This peer's key, as a witness uses it."""

    @property
    def run(self) -> RunId: ...

    @property
    def coins_seed(self) -> bytes:
        """The seed of this peer's coins, which nobody else knows."""

    def sign(self, message: bytes) -> bytes: ...

    def has_signed(self, peer: PeerId, message: bytes, signature: bytes) -> bool: ...


@dataclass(frozen=True, slots=True)
class KeptPass:
    """One call with the tensors that its two ends exchanged, as they travelled."""

    signed: SignedPass
    inputs: TensorBytes
    labels: TensorBytes
    gradient: TensorBytes | None
    """What the callee gave back; None at the first stage, and where nobody needed it."""

    @property
    def num_bytes(self) -> int:
        return self.inputs.num_bytes + self.labels.num_bytes + (self.gradient.num_bytes if self.gradient is not None else 0)

    @property
    def caller(self) -> PeerId:
        return self.signed.own.asked.caller

    @property
    def is_added(self) -> bool:
        """Whether its callee has signed that it has added the microbatch to a ledger."""
        return self.signed.own.answered.ledger != NOTHING


@dataclass(frozen=True, slots=True)
class ReceivedPass:
    """A call whose caller has signed what came."""

    ask: SignedAsk
    above: SignedAsk | None
    """The call that the caller got itself; None at the first stage."""
    inputs: TensorBytes
    labels: TensorBytes
    lineage: bytes
    """Of this peer's parameters as it came."""

    @property
    def launched(self) -> bytes:
        """At the second stage, the hash of the tokens that the first one got."""
        return self.above.asked.inputs if self.above is not None and self.above.asked.stage == 0 else NOTHING


class KeptPasses:
    """Calls of the last steps by the hash of their receipts, in memory bounded in bytes.

    What does not fit is not kept: first calls that were added to no ledger, as anybody can make many of these, and then those of the caller
    that has most. So no caller decides what of others is audited (hole 76).
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self.num_offered = self.num_kept = 0
        """Calls since this peer serves its stage, and how many of them were kept."""
        self._kept: dict[bytes, KeptPass] = {}
        self._receipts: dict[int, dict[bytes, SignedPass]] = {}
        """Of calls that were added to a ledger, by step and hash, also those whose tensors are not kept."""

    def put(self, run: RunId, kept: KeptPass) -> None:
        """Keep a call, if it fits. Calls of steps before the last ones go first."""
        newest, signed = kept.signed.own.asked.step, kept.signed.own.signed(run)
        if kept.is_added:
            self._receipts.setdefault(newest, {})[signed] = kept.signed
        for old in [old for old in self._receipts if old <= newest - RECEIPTS_KEPT]:
            del self._receipts[old]
        for key, each in list(self._kept.items()):
            if each.signed.own.asked.step <= newest - STEPS_KEPT:
                self._drop(key)
        if signed in self._kept:
            return
        self.num_offered += 1
        if self._makes_room(kept):
            self.num_kept += 1
            self.num_bytes += kept.num_bytes
            self._kept[signed] = kept

    def _makes_room(self, kept: KeptPass) -> bool:
        """Whether there is room for a call, once some of those have gone that count less."""
        if kept.num_bytes > self.most_bytes:
            return False
        while self.num_bytes + kept.num_bytes > self.most_bytes:
            rest = [key for key, each in self._kept.items() if not each.is_added]
            if kept.is_added and rest:
                going = rest
            else:
                going = self._of_the_largest(list(self._kept) if kept.is_added else rest, kept)
            if not going:
                return False
            self._drop(random.choice(going))  # not the oldest: a caller must not choose which of its calls stays
            self.num_kept -= 1
        return True

    def _of_the_largest(self, keys: Sequence[bytes], kept: KeptPass) -> list[bytes]:
        """Choose of these calls those of the caller that has most, if it has more than that of `kept` would have. Otherwise none."""
        of = Counter[PeerId]()
        for key in keys:
            of[self._kept[key].caller] += self._kept[key].num_bytes
        if not of:
            return []
        (largest, most), own = of.most_common(1)[0], of[kept.caller] + kept.num_bytes
        return [key for key in keys if self._kept[key].caller == largest] if own < most else []

    def _drop(self, key: bytes) -> None:
        self.num_bytes -= self._kept.pop(key).num_bytes

    def find(self, signed: bytes) -> KeptPass | None:
        return self._kept.get(signed)

    def asked_by(self, caller: PeerId, stage: int, step: int) -> list[SignedPass]:
        """What is signed of the calls that this caller made to a stage in a step, and whose tensors are kept."""
        found = (each.signed for each in self._kept.values())
        return [each for each in found if (each.own.asked.caller, each.own.asked.stage, each.own.asked.step) == (caller, stage, step)]

    def answered_by(self, callee: PeerId, stage: int, step: int) -> list[SignedPass]:
        """By index, the last receipt of a microbatch that this callee has added to a ledger of a step. The tensors may be gone."""
        found = self._receipts.get(step, {}).values()
        last = {each.own.asked.index: each for each in found if (each.own.asked.callee, each.own.asked.stage) == (callee, stage)}
        return list(last.values())


class PassWitness:
    """Signs both ends of this peer's calls. All methods run on the event loop; hashes and signatures are made on other threads."""

    def __init__(self, state: StageState, signer: Signer, most_bytes: int) -> None:
        self._state = state
        self._signer = signer
        self.kept = KeptPasses(most_bytes - most_bytes // UNANSWERED_SHARE)
        self.calls = KeptCalls(signer.run, most_bytes // UNANSWERED_SHARE)
        self.parts = KeptParts(signer.run, lambda step: secret_of(signer.coins_seed, step))
        self._lineages: dict[int, tuple[int, Lineage]] = {}
        """By step, the generation of the parameters and their lineage, as far as this peer was at that step."""

    def note_lineage(self) -> None:
        """Note with which parameters this peer computes now."""
        generation = self._state.holdings.generation  # first: a state is loaded with a new generation, and then the record says so
        record = self._state.record
        if record.phase is not Phase.JOINING:
            self._lineages[record.step] = generation, record.lineage
        for step in [step for step in self._lineages if step <= record.step - STEPS_KEPT]:
            del self._lineages[step]

    def lineage_at(self, step: int) -> bytes:
        """The hash of the lineage of the parameters of a step, 32 bytes. NOTHING if this peer does not know it, or has others by now."""
        self.note_lineage()
        generation, lineage = self._lineages.get(step, (-1, None))
        return NOTHING if lineage is None or generation != self._state.holdings.generation else hash_of_lineage(lineage)

    # The caller's end

    async def asks(self, call: Call, peer: PeerId) -> tuple[Call, AskedPass | None]:
        """Sign a call. An evaluation changes no parameter, so nothing is signed of it."""
        if call.evaluation:
            return call, None
        me, run, now = self._state.record.peer, self._signer.run, self.lineage_at(call.step)
        call = replace(call, lineage=call.lineage if call.above is not None and call.lineage == now else NOTHING)

        def signed() -> SignedAsk:
            asked = _asked(call, run, (me, peer), call.inputs, call.labels)
            return SignedAsk(asked, self._signer.sign(asked.text(run)))

        ask = await asyncio.to_thread(signed)
        self.calls.asked(ask, call.inputs, call.labels)
        return replace(call, signature=ask.signature), ask.asked

    async def took(self, call: Call, asked: AskedPass | None, result: CallResult) -> None:
        """Keep what both ends have signed. Raises BadMessageError if the callee has signed something else than it sent."""
        if asked is None:
            return
        given = result.signed
        if given is None or given.own.asked != asked or given.own.caller_signature != call.signature:
            raise BadMessageError("the reply has no receipt of this call")
        if (reason := await asyncio.to_thread(self._why_bad, given, result.gradient)) != "":
            raise BadMessageError(f"a receipt that binds nobody: {reason}")
        self.kept.put(self._signer.run, KeptPass(given, call.inputs, call.labels, result.gradient))
        self.calls.answered(given.own)

    def _why_bad(self, given: SignedPass, gradient: TensorBytes | None) -> str:
        if given.own.answered.gradient != tensor_hash(gradient):
            return "the gradient is not the one that was signed"
        return given.why_incomplete(self._state.num_stages) or given.why_unsigned(self._signer.run, self._signer.has_signed)

    # The callee's end

    async def is_asked(self, caller: PeerId, call: Call, chunks: Sequence[Bytes]) -> ReceivedPass:
        """Check the caller's signature of what has come, and that it shows what it made that of. Raises BadMessageError."""
        me, run, signer = self._state.record.peer, self._signer.run, self._signer
        self.note_lineage()
        inputs, labels = take(chunks, call.inputs, call.labels)

        lineage = self.lineage_at(call.step)

        def checked() -> ReceivedPass:
            ask = SignedAsk(_asked(call, run, (caller, me), inputs, labels), call.signature)
            if ask.why_unsigned(run, signer.has_signed):
                raise BadMessageError("the caller has not signed what it sent")
            if (reason := why_not_sent_on(call.above, ask, run, signer.has_signed)) != "":
                raise BadMessageError(reason)
            return ReceivedPass(ask, call.above, inputs, labels, lineage)

        return await asyncio.to_thread(checked)

    async def answers(self, given: ReceivedPass, result: CallResult, below: SignedPass | None) -> CallResult:
        """Sign the answer to a call, and keep both. `below`: what was signed of this peer's own call to the next stage."""
        run, asked = self._signer.run, given.ask.asked
        lineage = self.lineage_at(asked.step)
        next_receipt = below.own if below is not None else None

        def signed() -> SignedPass:
            named = NOTHING if next_receipt is None else next_receipt.signed(run)
            answered = AnsweredPass(tensor_hash(result.gradient), named, lineage, result.ledger)
            receipt = Receipt(asked, answered, given.ask.signature, self._signer.sign(answered.text(asked, run)))
            return SignedPass(receipt, next_receipt)

        own = await asyncio.to_thread(signed)
        self.kept.put(run, KeptPass(own, given.inputs, given.labels, result.gradient))
        self.calls.answered(own.own, given.above)
        return replace(result, signed=own)

    # What auditors ask

    def find(self, signed: bytes) -> tuple[TensorBytes, TensorBytes, TensorBytes | None] | None:
        """Inputs, labels and gradient of a call, by the hash of its receipt or of what its caller has signed; None if they are not kept."""
        kept = self.kept.find(self.calls.receipt_of(signed) or signed)
        if kept is not None:
            return kept.inputs, kept.labels, kept.gradient
        unanswered = self.calls.unanswered(signed)
        return (*unanswered, None) if unanswered is not None else None

    def sent_on(self, stage: int, step: int, known: Collection[bytes]) -> list[SentOn]:
        """What peers of a stage have sent on to this one in a step, and it has added, but for the calls of these names."""
        return self.calls.sent_on(step, self.lineage_at(step), known) if stage == self._state.record.stage - 1 else []


def hash_of_lineage(lineage: Lineage) -> bytes:
    return digest("lineage", lineage.inexact, lineage.chain, size=HASH_BYTES)


def _asked(call: Call, run: RunId, ends: tuple[PeerId, PeerId], inputs: TensorBytes, labels: TensorBytes) -> AskedPass:
    """`ends`: the caller and the callee."""
    above = NOTHING if call.above is None else call.above.asked.text(run)
    made = tensor_hash(inputs), tensor_hash(labels), above, call.lineage
    return AskedPass(call.stage, call.step, call.index, *ends, *made)

"""What a peer keeps of its calls beside receipts: what it asked and got no answer to, and what others sent on to it. Rule 20 (audit)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from peerd.policy.step.receipts import NOTHING, STEPS_KEPT, Receipt, SentOn, SignedAsk
from peerd.table.record import RunId
from peerd.wire.messages import TensorBytes


@dataclass(slots=True)
class _Step:
    receipts: dict[bytes, bytes] = field(default_factory=dict)
    """The hash of a call's receipt, by the hash of what its caller has signed."""
    unanswered: dict[bytes, tuple[TensorBytes, TensorBytes]] = field(default_factory=dict)
    """Inputs and labels of this peer's own calls, by the same hash."""
    sent_on: dict[bytes, SentOn] = field(default_factory=dict)
    """By name, what peers of the stage before have sent, and this one has added."""


class KeptCalls:
    """Calls of the last steps. Inputs of calls without an answer take bounded memory; what does not fit is not kept."""

    def __init__(self, run: RunId, most_bytes: int) -> None:
        self._run, self._most_bytes, self._num_bytes = run, most_bytes, 0
        self._steps: dict[int, _Step] = {}

    def asked(self, ask: SignedAsk, inputs: TensorBytes, labels: TensorBytes) -> None:
        """Keep what this peer sends to another one, which may never answer."""
        step, size = self._of(ask.asked.step), inputs.num_bytes + labels.num_bytes
        if self._num_bytes + size <= self._most_bytes:
            self._num_bytes += size
            step.unanswered[ask.asked.text(self._run)] = inputs, labels

    def answered(self, receipt: Receipt, above: SignedAsk | None = None) -> None:
        """Note under which receipt a call is kept from now on. `above`: at the callee, the call that its caller got itself."""
        step, text = self._of(receipt.asked.step), receipt.asked.text(self._run)
        step.receipts[text] = receipt.signed(self._run)
        self._drop(step, text)
        if above is not None and receipt.answered.ledger != NOTHING:
            step.sent_on[receipt.asked.name(self._run)] = SentOn(above, receipt)

    def receipt_of(self, text: bytes) -> bytes | None:
        """The hash of the receipt of the call whose caller has signed this text; None: it has not come, or is not kept."""
        return next((step.receipts[text] for step in self._steps.values() if text in step.receipts), None)

    def unanswered(self, text: bytes) -> tuple[TensorBytes, TensorBytes] | None:
        """Inputs and labels of this peer's own call, of which it has signed this text and has no receipt."""
        return next((step.unanswered[text] for step in self._steps.values() if text in step.unanswered), None)

    def sent_on(self, step: int, lineage: bytes, known: Collection[bytes]) -> list[SentOn]:
        """What peers of the stage before have sent in a step, but for the calls of these names.

        `lineage`: of this peer's parameters of the step. What it has added under another one is in no ledger any more.
        """
        found = self._steps[step].sent_on if step in self._steps else {}
        return [each for name, each in found.items() if name not in known and each.gave.answered.lineage == lineage]

    def _of(self, number: int) -> _Step:
        if number not in self._steps:
            newest = max([number, *self._steps])
            for old in [old for old in self._steps if old <= newest - STEPS_KEPT]:
                for text in list(self._steps[old].unanswered):
                    self._drop(self._steps[old], text)
                del self._steps[old]
        return self._steps.setdefault(number, _Step())

    def _drop(self, step: _Step, text: bytes) -> None:
        inputs, labels = step.unanswered.pop(text, (None, None))
        if inputs is not None and labels is not None:
            self._num_bytes -= inputs.num_bytes + labels.num_bytes

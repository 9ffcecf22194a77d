"""Gets what a mate got and gave of a microbatch, checks it against what both ends have signed, and computes it again: rule 20 (audit)."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from peerd.audit.host import AuditHost
from peerd.config.codec import Codec
from peerd.config.manifest import Manifest
from peerd.errors import BadMessageError, PeerdError, WrongStateError
from peerd.models.module import StageModule
from peerd.models.stages import input_of, labels_shape
from peerd.policy.step.auditing import AuditWord, DeviceKind, Precision, tolerance
from peerd.policy.step.parts import SentPart, basis_of, even_cuts, passes_of_part, slice_bounds
from peerd.policy.step.receipts import Receipt, ShownTensors, SignedPass, signed_ones, why_not_judged
from peerd.policy.step.roster import Roster
from peerd.stage.executor import Executor, Priority
from peerd.stage.jobs import check_labels, check_tokens
from peerd.stage.kept_parts import is_as_signed
from peerd.stage.replaying import ToldPass, replay_part, replay_pass
from peerd.stage.state import StageState
from peerd.stage.witnessing import PassWitness
from peerd.table.record import PeerId
from peerd.wire.audit_client import AuditClient, KeptTensors
from peerd.wire.messages import TensorBytes
from peerd.wire.receipts import tensor_hash
from peerd.wire.tensors import decode, decode_flat

USUAL_SCALE = 3.5
"""How much larger the largest value of a block of a hundred or two is than a usual one."""
_PRECISIONS = {
    "float32": Precision.FLOAT32,
    "tf32": Precision.FLOAT16,  # as many digits
    "bfloat16": Precision.BFLOAT16,
}
NO_LABELS = TensorBytes("int32", (0,), ())
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ToldPart:
    """A mate's whole part of a step: what it got and gave of each microbatch, and a chunk of what it put into the average."""

    step: int
    passes: tuple[ToldPass, ...]
    start: int
    """The chunk's first element."""
    chunk: TensorBytes


Told = ToldPass | ToldPart


@dataclass(frozen=True, slots=True)
class AuditedStep:
    """A step that this peer has finished, and can compute again as long as it has the parameters."""

    step: int
    roster: Roster
    """Of its average."""
    lineage: bytes
    """The hash of the lineage of the parameters that it was computed with."""
    generation: int
    """Of this peer's parameters."""

    @property
    def members(self) -> tuple[PeerId, ...]:
        return self.roster.peers


class Replays:
    """Replays of one seat."""

    def __init__(
        self,
        manifest: Manifest,
        state: StageState,
        executor: Executor,
        witness: PassWitness,
        client: AuditClient,
        host: AuditHost,
    ) -> None:
        self._manifest, self._state, self._executor = manifest, state, executor
        self._witness, self._client, self._host = witness, client, host
        self._held: dict[int, StageModule] = {}
        """Parameters of steps of which a case is open, so that they can be computed again for as long as that takes."""

    async def hold(self, finished: AuditedStep) -> None:
        """Keep a copy of a step's parameters, if they are still here."""
        if finished.step not in self._held:
            try:
                self._held[finished.step] = await self._executor.run(Priority.CONTROL, lambda: self._copy_of(finished))
            except WrongStateError:
                return

    def release(self, open_steps: Iterable[int]) -> None:
        """Keep the parameters of these steps alone."""
        for step in set(self._held) - set(open_steps):
            del self._held[step]

    def _copy_of(self, finished: AuditedStep) -> StageModule:
        previous = self._state.holdings.previous
        self._check_here(finished)
        if previous is None or self._state.record.step != finished.step + 1:
            raise WrongStateError("the parameters of that step are gone")
        return copy.deepcopy(previous)

    def _check_here(self, finished: AuditedStep) -> None:
        if self._state.holdings.generation != finished.generation:
            raise WrongStateError("another state was loaded since that step")

    async def told(self, signed: SignedPass, finished: AuditedStep) -> ToldPass:
        """What a mate got and gave of a microbatch: from the other ends of its calls, or from itself.

        Raises WrongStateError if nobody gives what was signed, BadMessageError if that binds the mate to nothing.
        """
        run, own, below = self._host.run, signed.own, signed.below
        if (reason := await asyncio.to_thread(signed.why_unsigned, run, self._host.has_signed)) != "":
            raise BadMessageError(reason)
        got = await self._tensors(own, (own.asked.caller, own.asked.callee))
        gave = None if below is None else await self._tensors(below, (below.asked.callee, below.asked.caller))
        output, output_gradient = (None, None) if gave is None else (gave[0], gave[2])
        self._check_form(own, got)

        def why() -> str:
            hashes = (tensor_hash(each) for each in (got[0], got[1], output, output_gradient, got[2]))
            return why_not_judged(own, below, ShownTensors(*hashes), finished.lineage, run)

        if (reason := await asyncio.to_thread(why)) != "":
            raise BadMessageError(reason)
        asked = own.asked
        labels = got[1] if below is None else None
        return ToldPass(
            step=asked.step,
            index=asked.index,
            inputs=got[0],
            labels=labels,
            output=output,
            output_gradient=output_gradient,
            gradient=got[2],
        )

    def _check_form(self, own: Receipt, got: KeptTensors) -> None:
        """Raise BadMessageError for inputs or labels that no peer of the stage would take."""
        manifest, asked = self._manifest, own.asked
        length = manifest.sequence_length_at(asked.step)
        got[0].check(*input_of(manifest, asked.stage, length))
        got[1].check("int32", labels_shape(manifest, length))

    async def _tensors(self, receipt: Receipt, holders: Iterable[PeerId]) -> KeptTensors:
        """The tensors of one call, from the first of these peers that gives those that were signed."""
        signed, last = receipt.signed(self._host.run), "nobody has kept it"
        for peer in holders:
            try:
                found = await self._from(peer, receipt.asked.step, signed)
            except PeerdError as error:
                last = error.message
                continue
            if await asyncio.to_thread(_are_signed, found, receipt):
                return found
        raise WrongStateError(last)

    async def _from(self, peer: PeerId, step: int, signed: bytes) -> KeptTensors:
        if peer == self._host.me:
            return self.kept(signed)
        return await self._client.get_pass(peer, step, signed, self._host.patience_s)

    def kept(self, signed: bytes) -> KeptTensors:
        """What this peer keeps of a call, or the chunk of a mate's part, without labels. Raises WrongStateError."""
        found = self._witness.kept.find(signed)
        if found is None:
            return self._witness.parts.find(signed), NO_LABELS, None
        return found.inputs, found.labels, found.gradient

    async def told_part(self, sent: SentPart, pairs: Iterable[SignedPass], finished: AuditedStep, keeper: PeerId) -> ToldPart:
        """A mate's whole part: its microbatches, by what is signed of them, and the chunk that `keeper` has kept.

        Raises WrongStateError if a microbatch is missing or nobody gives what was signed, BadMessageError if the chunk binds the mate to
        nothing.
        """
        reason = sent.why_not_judged(finished.roster) or await asyncio.to_thread(sent.why_unsigned, self._host.run, self._host.has_signed)
        if reason:
            raise BadMessageError(reason)
        its = [each for each in pairs if each.own.asked.callee == sent.author]
        sound = await asyncio.to_thread(signed_ones, its, self._host.run, self._host.has_signed)
        signed = passes_of_part(finished.roster, sent.author, sound)
        if signed is None:
            raise WrongStateError("not all of its microbatches are signed, or one twice")
        if basis_of(signed, self._host.run) != sent.basis:
            raise WrongStateError("this peer was shown other receipts of its microbatches")
        chunk = await self._chunk(sent, keeper)
        passes = [await self.told(each, finished) for each in signed]
        length, room = self._state.round_length(finished.roster), self._state.room_behind(finished.roster)
        slice_number, _, number = sent.place
        cuts = even_cuts(*slice_bounds(finished.roster, length, room)[slice_number], finished.roster.num_chunks)
        start, end = cuts[number : number + 2]
        if chunk.num_bytes != (end - start) * self._state.accumulator.flat.dtype.itemsize:
            raise BadMessageError("a chunk of another size than the round's")
        return ToldPart(finished.step, tuple(passes), start, chunk)

    async def _chunk(self, sent: SentPart, keeper: PeerId) -> TensorBytes:
        signed = sent.signed(self._host.run)
        if keeper == self._host.me:
            return self._witness.parts.find(signed)
        found, _, _ = await self._client.get_pass(keeper, sent.step, signed, self._host.patience_s)
        if not await asyncio.to_thread(is_as_signed, sent, found):
            raise BadMessageError("not the chunk that was signed")
        return found

    async def measure(self, told: Told, finished: AuditedStep, priority: Priority) -> AuditWord:
        """Compute a microbatch, or a whole part, again.

        Raises WrongStateError if the parameters are gone, BadMessageError for tensors that nobody could use.
        """

        def replay() -> float:
            self._check_here(finished)
            held = self._held.get(told.step)
            for each in told.passes if isinstance(told, ToldPart) else (told,):
                self._check_numbers(each)
            if isinstance(told, ToldPass):
                return replay_pass(self._state, told, held)
            values = decode_flat(told.chunk.chunks, self._state.accumulator.flat.dtype)
            return replay_part(self._state, told.passes, values, told.start, held)

        deviation = await self._executor.run(priority, replay, told.step)
        return AuditWord(deviation, self._tolerance(told))

    def _check_numbers(self, told: ToldPass) -> None:
        if told.inputs.dtype == "int32":
            check_tokens(decode(told.inputs, _CPU), self._manifest)
        if told.labels is not None:
            check_labels(decode(told.labels, _CPU), self._manifest)

    def _tolerance(self, told: Told) -> float:
        kind = DeviceKind(self._state.holdings.device.type, _PRECISIONS[self._manifest.train.precision])
        values = (told.output, told.gradient) if isinstance(told, ToldPass) else ()  # parts are kept only where they travel as they are
        steps = (quantum_of(each.codec) for each in values if each is not None)
        return tolerance(kind, kind, max(steps, default=0.0))


def quantum_of(codec: Codec) -> float:
    """The step of a codec, relative to a usual value: twice the largest error of a value; of one in a block as its scale is larger."""
    return 2.0 * codec.spec.error * (USUAL_SCALE if codec.spec.block else 1.0)


def _are_signed(found: KeptTensors, receipt: Receipt) -> bool:
    asked, answered = receipt.asked, receipt.answered
    return tuple(map(tensor_hash, found)) == (asked.inputs, asked.labels, answered.gradient)

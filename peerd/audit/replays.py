"""Gets what a mate got of a microbatch, checks it against what both ends have signed, and computes it again: rule 20 (audit).

Both ends have signed the hash of what the mate gave, too. So those bytes are got only where the result here has another hash.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peerd.audit.host import AuditHost
from peerd.config.codec import Codec
from peerd.config.manifest import Manifest
from peerd.errors import BadMessageError, PeerdError, WrongStateError
from peerd.models.module import StageModule
from peerd.models.stages import input_of, labels_shape
from peerd.policy.step.auditing import AuditWord, DeviceKind, Precision, tolerance
from peerd.policy.step.parts import SentPart, basis_of, even_cuts, passes_of_part, slice_bounds
from peerd.policy.step.receipts import NOTHING, AskedPass, Receipt, SentOn, ShownTensors, SignedPass, signed_ones, why_not_judged
from peerd.policy.step.roster import Roster
from peerd.stage.executor import Executor, Priority
from peerd.stage.jobs import RunTokens, check_labels, check_tokens
from peerd.stage.kept_parts import is_as_signed
from peerd.stage.replaying import ToldPass, deviation_of, largest, replay_part, replay_pass, sent_alike
from peerd.stage.state import StageState
from peerd.stage.witnessing import PassWitness
from peerd.table.record import PeerId
from peerd.wire.audit_client import AuditClient, KeptTensors
from peerd.wire.audit_service import NO_BYTES, WantedBytes
from peerd.wire.messages import TensorBytes
from peerd.wire.receipts import tensor_hash
from peerd.wire.tensors import decode, decode_flat, encode

USUAL_SCALE = 3.5
"""How much larger the largest value of a block of a hundred or two is than a usual one."""
_PRECISIONS = {
    "float32": Precision.FLOAT32,
    "tf32": Precision.FLOAT16,  # as many digits
    "bfloat16": Precision.BFLOAT16,
}
NO_LABELS = TensorBytes("int32", (0,), ())
_CPU = torch.device("cpu")


@dataclass(slots=True)
class Given:
    """A tensor that a mate gave, of which both ends of a call have signed the hash."""

    content: bytes
    """The hash."""
    call: Receipt
    which: WantedBytes
    """Which tensor of the call it is."""
    holders: tuple[PeerId, ...]
    """Those that have kept it, the mate itself last."""
    value: TensorBytes | None
    """How it has travelled, as a holder tells it; with the bytes, once they are here and have that hash."""

    @property
    def is_here(self) -> bool:
        return self.value is not None and len(self.value.chunks) > 0


@dataclass(frozen=True, slots=True)
class ToldWork:
    """A mate's microbatch: what it got, and what it gave, by the hashes."""

    got: ToldPass
    output: Given | None
    gradient: Given | None

    @property
    def step(self) -> int:
        return self.got.step


@dataclass(frozen=True, slots=True)
class ToldPart:
    """A mate's whole part of a step: what it got of each microbatch, and a chunk of what it put into the average."""

    step: int
    passes: tuple[ToldPass, ...]
    start: int
    """The chunk's first element."""
    chunk: TensorBytes


Told = ToldWork | ToldPart


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
        data: RunTokens | None = None,
    ) -> None:
        """`data`: the run's, as far as it is here."""
        self._manifest, self._state, self._executor = manifest, state, executor
        self._witness, self._client, self._host, self._data = witness, client, host, data
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

    async def sound(self, pairs: Sequence[SignedPass]) -> list[SignedPass]:
        """Those of some receipts that bind their peers, and name all that it takes to compute the work again."""
        return await asyncio.to_thread(signed_ones, pairs, self._host.run, self._state.num_stages, self._host.has_signed)

    async def told(self, signed: SignedPass, finished: AuditedStep) -> ToldWork:
        """What a mate got of a microbatch, and by the hashes what it gave: from the other ends of its calls, or from itself.

        Raises WrongStateError if nobody gives what was signed, BadMessageError if that binds the mate to nothing.
        """
        (output, gradient), own, below = signed.gave, signed.own, signed.below
        got, under, told = await self._told_pass(signed, finished, needs_back=gradient != NOTHING)
        above, mate, gave = own.asked.caller, own.asked.callee, None
        if below is not None and under is not None:
            gave = Given(output, below, WantedBytes.INPUTS, (below.asked.callee, mate), _bare(under[0]))
        gave_back = Given(gradient, own, WantedBytes.GRADIENT, (above, mate), _bare(got[2])) if gradient != NOTHING else None
        return ToldWork(told, gave, gave_back)

    async def told_sent_on(self, sent: SentOn, finished: AuditedStep) -> ToldWork:
        """What a mate got of a microbatch, and by its hash what it sent on, whoever has kept these: tokens are in the run's text.

        Raises WrongStateError if nobody gives what was signed, BadMessageError if that binds the mate to nothing.
        """
        asked, gave = sent.got.asked, sent.gave
        if (reason := await asyncio.to_thread(sent.why_unsigned, self._host.run, self._host.has_signed)) != "":
            raise BadMessageError(reason)
        inputs = await self._tokens(asked.step, asked.index) if asked.stage == 0 else await self._asked_inputs(sent)
        self._check_form(asked, inputs, None)
        if (reason := sent.why_not_judged(await asyncio.to_thread(tensor_hash, inputs), finished.lineage)) != "":
            raise BadMessageError(reason)
        holders = gave.asked.callee, gave.asked.caller
        under = await self._tensors(gave, holders, NO_BYTES)
        output = Given(gave.asked.inputs, gave, WantedBytes.INPUTS, holders, _bare(under[0]))
        return ToldWork(ToldPass(step=asked.step, index=asked.index, inputs=inputs), output, None)

    async def _tokens(self, step: int, index: int) -> TensorBytes:
        """A microbatch's tokens, as a trainer sends them."""
        tokens = self._data.tokens if self._data is not None else None
        if tokens is None:
            raise WrongStateError("the run's text is not here")
        return encode((await asyncio.to_thread(tokens.microbatch, step, index))[0].int())

    async def _asked_inputs(self, sent: SentOn) -> TensorBytes:
        """What a mate got, from its caller or from itself, as the caller has signed it."""
        asked, last = sent.got.asked, "nobody has kept it"
        for peer in (asked.caller, asked.callee):
            try:
                found, _, _ = await self._from(peer, asked.step, asked.text(self._host.run), WantedBytes.INPUTS)
            except PeerdError as error:
                last = error.message
                continue
            if await asyncio.to_thread(tensor_hash, found) == asked.inputs:
                return found
        raise WrongStateError(last)

    async def _told_pass(
        self, signed: SignedPass, finished: AuditedStep, needs_back: bool
    ) -> tuple[KeptTensors, KeptTensors | None, ToldPass]:
        """The kept tensors of a microbatch's two calls, with the bytes of what a mate got. `needs_back`: also from the next stage."""
        run, own, below = self._host.run, signed.own, signed.below
        if (reason := await asyncio.to_thread(signed.why_unsigned, run, self._host.has_signed)) != "":
            raise BadMessageError(reason)
        if (reason := signed.why_incomplete(self._state.num_stages)) != "":
            raise BadMessageError(reason)
        wanted = WantedBytes.INPUTS | (WantedBytes.LABELS if below is None else NO_BYTES)
        got = await self._tensors(own, (own.asked.caller, own.asked.callee), wanted)
        under, labels, back = None, got[1] if below is None else None, None
        if below is not None:
            wanted = WantedBytes.GRADIENT if needs_back else NO_BYTES
            under = await self._tensors(below, (below.asked.callee, below.asked.caller), wanted)
            back = under[2] if needs_back else None
        self._check_form(own.asked, got[0], labels)
        if back is not None:
            back.check(*input_of(self._manifest, own.asked.stage + 1, self._manifest.sequence_length_at(own.asked.step)))

        def why() -> str:
            shown = ShownTensors(tensor_hash(got[0]), tensor_hash(labels), tensor_hash(back))
            return why_not_judged(own, below, shown, finished.lineage, run)

        if (reason := await asyncio.to_thread(why)) != "":
            raise BadMessageError(reason)
        told = ToldPass(step=own.asked.step, index=own.asked.index, inputs=got[0], labels=labels, output_gradient=back)
        return got, under, told

    def _check_form(self, asked: AskedPass, inputs: TensorBytes, labels: TensorBytes | None) -> None:
        """Raise BadMessageError for inputs or labels that no peer of the stage would take."""
        manifest = self._manifest
        length = manifest.sequence_length_at(asked.step)
        inputs.check(*input_of(manifest, asked.stage, length))
        if labels is not None:
            labels.check("int32", labels_shape(manifest, length))

    async def _tensors(self, receipt: Receipt, holders: Iterable[PeerId], wanted: WantedBytes) -> KeptTensors:
        """The tensors of one call, from the first of these peers that gives the bytes that are wanted, as they were signed."""
        signed, last = receipt.signed(self._host.run), "nobody has kept it"
        for peer in holders:
            try:
                found = await self._from(peer, receipt.asked.step, signed, wanted)
            except PeerdError as error:
                last = error.message
                continue
            if await asyncio.to_thread(_are_signed, found, receipt, wanted):
                return found
        raise WrongStateError(last)

    async def _from(self, peer: PeerId, step: int, signed: bytes, wanted: WantedBytes) -> KeptTensors:
        if peer == self._host.me:
            return self.kept(signed)
        return await self._client.get_pass(peer, step, signed, wanted, self._host.patience_s)

    def kept(self, signed: bytes) -> KeptTensors:
        """What this peer keeps of a call, or the chunk of a mate's part, without labels. Raises WrongStateError."""
        return self._witness.find(signed) or (self._witness.parts.find(signed), NO_LABELS, None)

    async def told_part(self, sent: SentPart, pairs: Iterable[SignedPass], finished: AuditedStep, keeper: PeerId) -> ToldPart:
        """A mate's whole part: its microbatches, by what is signed of them, and the chunk that `keeper` has kept.

        Raises WrongStateError if a microbatch is missing or nobody gives what was signed, BadMessageError if the chunk binds the mate to
        nothing.
        """
        reason = sent.why_not_judged(finished.roster) or await asyncio.to_thread(sent.why_unsigned, self._host.run, self._host.has_signed)
        if reason:
            raise BadMessageError(reason)
        its = [each for each in pairs if each.own.asked.callee == sent.author]
        sound = await self.sound(its)
        signed = passes_of_part(finished.roster, sent.author, sound, finished.lineage)
        if signed is None:
            raise WrongStateError("not all of its microbatches are signed, or one twice")
        if basis_of(signed, self._host.run) != sent.basis:
            raise WrongStateError("this peer was shown other receipts of its microbatches")
        chunk = await self._chunk(sent, keeper)
        passes = [(await self._told_pass(each, finished, needs_back=True))[2] for each in signed]
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
        found, _, _ = await self._client.get_pass(keeper, sent.step, signed, WantedBytes.INPUTS, self._host.patience_s)
        if not await asyncio.to_thread(is_as_signed, sent, found):
            raise BadMessageError("not the chunk that was signed")
        return found

    async def measure(self, told: Told, finished: AuditedStep, priority: Priority) -> AuditWord:
        """Compute a microbatch, or a whole part, again. What a mate gave is got where the result here has another hash.

        Raises WrongStateError if the parameters are gone or nobody gives what was signed, BadMessageError for tensors that nobody could
        use.
        """
        if isinstance(told, ToldPart):
            bound = self._tolerance()
            deviation = await self._executor.run(priority, lambda: self._replay_part(told, finished, bound), told.step)
            return AuditWord(deviation, bound)
        found = await self._executor.run(priority, lambda: self._replay_pass(told, finished), told.step)
        deviations = [await self._deviation(given, own, sent, priority) for given, own, sent in found]
        return AuditWord(largest(deviations), self._tolerance(told.output, told.gradient))

    def _replay_part(self, told: ToldPart, finished: AuditedStep, bound: float) -> float:
        self._check_here(finished)
        for each in told.passes:
            self._check_numbers(each)
        values = decode_flat(told.chunk.chunks, self._state.accumulator.flat.dtype)
        return replay_part(self._state, told.passes, values, told.start, self._held.get(told.step), bound)

    def _replay_pass(self, told: ToldWork, finished: AuditedStep) -> list[tuple[Given, Tensor, TensorBytes | None]]:
        """What a mate gave, each with this peer's own result, and with that as it would travel."""
        self._check_here(finished)
        self._check_numbers(told.got)
        own = replay_pass(self._state, told.got, self._held.get(told.step))
        found = list[tuple[Given, Tensor, TensorBytes | None]]()
        for given, result in ((told.output, own.output), (told.gradient, own.gradient)):
            if given is not None and result is not None:
                sent = None if given.is_here or given.value is None else sent_alike(result, given.value.codec)
                found.append((given, result, sent))
        return found

    async def _deviation(self, given: Given, own: Tensor, sent: TensorBytes | None, priority: Priority) -> float:
        """How far a tensor that a mate gave is off. `sent`: this peer's own result as it would travel."""
        if sent is not None and await asyncio.to_thread(tensor_hash, sent) == given.content:
            return 0.0
        value = given.value
        if value is None or not given.is_here:
            kept = await self._tensors(given.call, given.holders, given.which)
            given.value = value = kept[tuple(WantedBytes).index(given.which)]
        if value is None:
            raise WrongStateError("nobody has kept it")
        return await self._executor.run(priority, lambda: deviation_of(value, own), given.call.asked.step)

    def _check_numbers(self, told: ToldPass) -> None:
        if told.inputs.dtype == "int32":
            check_tokens(decode(told.inputs, _CPU), self._manifest)
        if told.labels is not None:
            check_labels(decode(told.labels, _CPU), self._manifest)

    def _tolerance(self, *given: Given | None) -> float:
        """How far results may be off. Parts are kept only where they travel as they are."""
        kind = DeviceKind(self._state.holdings.device.type, _PRECISIONS[self._manifest.train.precision])
        steps = (quantum_of(each.value.codec) for each in given if each is not None and each.value is not None)
        return tolerance(kind, kind, max(steps, default=0.0))


def quantum_of(codec: Codec) -> float:
    """The step of a codec, relative to a usual value: twice the largest error of a value; of one in a block as its scale is larger."""
    return 2.0 * codec.spec.error * (USUAL_SCALE if codec.spec.block else 1.0)


def _bare(value: TensorBytes | None) -> TensorBytes | None:
    return None if value is None else value.with_chunks(())


def _are_signed(found: KeptTensors, receipt: Receipt, wanted: WantedBytes) -> bool:
    signed = (receipt.asked.inputs, receipt.asked.labels, receipt.answered.gradient)
    return all(tensor_hash(each) == content for which, each, content in zip(WantedBytes, found, signed, strict=True) if which in wanted)

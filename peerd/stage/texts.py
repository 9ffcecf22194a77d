"""Goes on with the texts of those who ask the model, in one stage: forward only, within the owner's share of the time or in idle moments.

A text belongs to one asker and to the parameters of one step. This peer keeps what the stage needs of the tokens so far. Where it has
lost that, it says how many tokens it knows, and the asker sends the rest again. So a peer may forget any text at any time, and another
peer of its stage may go on with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.errors import BadMessageError, BusyError, NotFiniteError, PeerdError, WrongStateError
from peerd.models.module import StageModule
from peerd.models.prefix import Prefix
from peerd.models.sampling import choose
from peerd.models.stages import layers_of
from peerd.policy.inference.paths import TextOffer
from peerd.policy.inference.sampling import Sampling
from peerd.policy.inference.sessions import SessionId, SessionLimits, Sessions
from peerd.policy.inference.turns import TokenRation, held_up_s
from peerd.stage.executor import Executor, Pace, Priority
from peerd.stage.jobs import check_tokens
from peerd.stage.precision import extend_prefix
from peerd.stage.state import StageState
from peerd.stage.text_turns import TextTurn, TextTurns
from peerd.table.record import PeerId, Phase
from peerd.transfers import is_out_of_memory
from peerd.wire.handlers import Receive
from peerd.wire.tensors import decode, encode, take
from peerd.wire.text_messages import Extended, TextCall

STRANGERS = PeerId("")
"""Stands for all askers without a record: a key costs nothing, so together they have what one asker has."""
TEXTS_A_MINUTE = 64
"""One asker may have the tokens of so many texts of full length computed in a minute."""
ROOM_SHARE = 0.05
"""The share of a stage's memory that texts may take."""
LATELY_S = 10.0
CPU = torch.device("cpu")


class _UnknownPrefix(Exception):  # noqa: N818 - it is an answer, and nothing failed
    """This peer does not hold the text up to where the pass begins."""

    def __init__(self, known: int) -> None:
        super().__init__(f"this peer knows {known} tokens of this text")
        self.known = known


@dataclass(slots=True)
class _Text:
    prefix: Prefix
    module: StageModule


@dataclass(slots=True)
class TextCounts:
    """Since the daemon began: a seat takes over the counts of the one before it."""

    tokens: int = 0
    """That passes have computed, prompts and replays included."""
    busy_s: float = 0.0
    held_up_s: float = 0.0
    """For how long training waited for passes."""
    last_s: float | None = None
    """When the last pass ended (`time.monotonic`)."""


class StageTexts:
    """`extend` is for the event loop; the texts themselves change on the executor's thread only."""

    def __init__(
        self,
        manifest: Manifest,
        state: StageState,
        executor: Executor,
        limits: SessionLimits,
        turns: TextTurns,
        is_known: Callable[[PeerId], bool],
    ) -> None:
        """`is_known` tells whether an asker has a record of this run."""
        self._manifest = manifest
        self._state = state
        self._executor = executor
        self.sessions = Sessions(limits)
        self.turns = turns
        self._is_known = is_known
        self._ration = TokenRation(TEXTS_A_MINUTE * manifest.train.sequence_length)
        self._texts: dict[SessionId, _Text] = {}
        self._token_bytes: float | None = None
        """What a token of a text takes; known once one has been computed."""
        self.counts = TextCounts()
        self.pace = Pace()
        """The owner's limit of computing. The stand-in of a microbatch's time has no part in it."""

    @property
    def steps(self) -> frozenset[int]:
        """The steps with whose parameters it goes on with texts: the present one, unless that changes within itself, and a kept one."""
        state, model = self._state, self._manifest.model
        if model.makes_samples or model.objective == "masked" or self.turns.share.share <= 0:
            return frozenset()
        present = {state.record.step} if state.updating is None and state.record.phase is not Phase.JOINING else set[int]()
        kept = {state.evaluated.step} if state.evaluated.step is not None and not state.holdings.places.offloads else set[int]()
        return frozenset(present | kept)

    def offer(self, stage: int) -> TextOffer:
        """These steps, and how soon it may compute. Raises WrongStateError if it is asked about another stage."""
        self._check_stage(stage)
        wait_s = self.turns.wait_s(is_busy=self._executor.waits_since_s is not None)
        return TextOffer(peer=self._state.record.peer, steps=self.steps, wait_s=wait_s or 0.0, is_off=wait_s is None)

    async def extend(self, asker: PeerId, asked: TextCall, receive: Receive) -> Extended:
        """Go on with a text, whose tensors `receive` fetches.

        Raises WrongStateError if the step is not here, BusyError where there is no room or no time, and BadMessageError for a pass that
        no asker should send.
        """
        self._check(asked)
        self._check_step(asked.step)
        counted = asker if self._is_known(asker) else STRANGERS
        self.turns.check()
        wait_s = self._ration.take(counted, asked.inputs.shape[1], time.monotonic())
        if wait_s:
            raise BusyError("you have had as many tokens as one asker may have in a minute", wait_s)
        chunks = await receive()
        came_s = time.monotonic()
        async with self.turns.turn(counted) as turn:
            key = self._key_of(asker, asked.text)
            found = await self._executor.run_text(lambda: self._answer(key, asked, chunks, turn), turn.wait_s)
        return replace(found, waited_s=turn.began_s - came_s, computed_s=turn.took_s)

    async def forget(self, asker: PeerId, text: bytes) -> None:
        key = self._key_of(asker, text)
        await self._executor.run(Priority.IDLE, lambda: self._forget(key))

    def _key_of(self, asker: PeerId, text: bytes) -> SessionId:
        """The name of a text. All strangers are one asker, and none of them reaches another's text."""
        return (asker, text) if self._is_known(asker) else (STRANGERS, asker.encode() + text)

    async def run(self) -> None:
        """Forget, until cancelled, what nobody goes on with, and what is of parameters that are gone."""
        while True:
            await asyncio.sleep(self.sessions.limits.unused_s / 8)
            if self._texts:
                await self.tidy()

    async def tidy(self) -> None:
        await self._executor.run(Priority.IDLE, self._make_room)

    @property
    def is_answering(self) -> bool:
        """Whether a pass has ended lately."""
        return self.counts.last_s is not None and time.monotonic() - self.counts.last_s < LATELY_S

    def _check_stage(self, stage: int) -> None:
        if stage != self._state.record.stage:
            raise WrongStateError(f"this peer serves stage {self._state.record.stage}")

    def _check_step(self, step: int) -> None:
        """Refuse before any tensor is received what cannot be computed."""
        if step not in self.steps:
            raise WrongStateError(f"this peer goes on with no text of step {step}")

    def _check(self, asked: TextCall) -> None:
        """Refuse what no honest asker sends."""
        self._check_stage(asked.stage)
        stage, model, shape = self._state.record.stage, self._manifest.model, asked.inputs.shape
        length = shape[1] if len(shape) > 1 else 0
        whole = model.boundary_shape(layers_of(self._manifest, stage).start, length) if stage else (length,)
        if (asked.inputs.dtype, shape) != ("float32" if stage else "int32", (1, *whole)) or not length:
            raise BadMessageError("the tokens of a text do not have the form that this stage takes")
        if not 0 <= asked.begin <= asked.begin + length <= self._manifest.train.sequence_length:
            raise BadMessageError(f"a text of this run has at most {self._manifest.train.sequence_length} tokens")
        if (asked.tokens is not None) != (model.tells_tokens and stage > 0):
            raise BadMessageError("the stages after the first need the tokens" if asked.tokens is None else "this stage needs no tokens")
        if asked.tokens is not None:
            asked.tokens.check("int32", (1, length))
        if any(each.codec.is_lossy for each in asked.tensors):
            raise BadMessageError("a text's tensors travel without a lossy codec")
        if (asked.sampling is not None) != self._state.holdings.module.is_last:
            raise BadMessageError("the last stage chooses the tokens that follow, and no other")
        if asked.num_drafted >= length:
            raise BadMessageError("the token before those that are guessed has to come with them")

    def _answer(self, key: SessionId, asked: TextCall, chunks: Sequence[bytes | memoryview], turn: TextTurn) -> Extended:
        """One job."""
        began_s = time.monotonic()
        try:
            inputs, *tokens = (decode(each, CPU) for each in take(chunks, *asked.tensors))
            for told in (*tokens, *(() if asked.stage else (inputs,))):
                check_tokens(told, self._manifest)
            return self._compute(key, asked, inputs, tokens[0] if tokens else None)
        except _UnknownPrefix as unknown:
            return Extended(known=unknown.known)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, PeerdError) or not is_out_of_memory(error):
                raise
            raise BusyError("this peer's device has no memory for texts now", self.sessions.limits.unused_s) from None
        finally:
            self.counts.busy_s += time.monotonic() - began_s
            self.pace.hold(began_s, 0.0)
            ended_s = time.monotonic()
            turn.began_s, turn.took_s = began_s, ended_s - began_s
            turn.held_up_s = held_up_s(began_s, ended_s, self._executor.waits_since_s)
            self.counts.held_up_s += turn.held_up_s

    def _compute(self, key: SessionId, asked: TextCall, inputs: Tensor, tokens: Tensor | None) -> Extended:
        """Find the text, compute, and keep it."""
        text = self._find(key, asked, self._module(asked.step))
        self._begin(key, asked, time.monotonic())
        try:
            output = self._extend(text.prefix, inputs, tokens)
            found = (
                Extended(outputs=encode(output.cpu()))
                if asked.sampling is None
                else Extended(chosen=_chosen(output, asked.sampling, text.prefix.length, asked.num_drafted + 1))
            )
        except BaseException:
            self._texts.pop(key, None)
            self.sessions.end_pass(key, None, time.monotonic())
            raise
        self._token_bytes = text.prefix.num_bytes / text.prefix.length
        self._texts[key] = text
        self.counts.last_s = time.monotonic()
        self.counts.tokens += asked.inputs.shape[1]
        self.sessions.end_pass(key, text.prefix.num_bytes, self.counts.last_s)
        return found

    def _module(self, step: int) -> StageModule:
        """The parameters of the step, which may have gone since the pass was admitted."""
        self._check_step(step)
        return self._state.evaluated.module_of(step, (self._state.record.step, self._state.holdings.module))

    def _find(self, key: SessionId, asked: TextCall, module: StageModule) -> _Text:
        """The text up to where the pass begins. Raises _UnknownPrefix."""
        text = self._texts.get(key)
        if text is not None and (text.module is not module or self.sessions.step_of(key) != asked.step or not asked.begin):
            self._forget(key)
            text = None
        known = 0 if text is None else text.prefix.length
        if known < asked.begin or (text is not None and not text.prefix.cut(asked.begin)):
            raise _UnknownPrefix(known)
        return text or _Text(module.prefix(), module)

    def _begin(self, key: SessionId, asked: TextCall, now_s: float) -> None:
        """Make room before memory is taken. The first text of all is taken on trust: there nothing has been measured."""
        length = asked.begin + asked.inputs.shape[1]
        reason = self.sessions.begin(key, asked.step, round((self._token_bytes or 0.0) * length), now_s)
        if reason:
            raise BusyError(reason)
        self._make_room()

    def _extend(self, prefix: Prefix, inputs: Tensor, tokens: Tensor | None) -> Tensor:
        device = self._state.holdings.device
        inputs = inputs.to(device) if self._state.record.stage else inputs.to(device).long()
        return extend_prefix(self._manifest.train, prefix, inputs, None if tokens is None else tokens.to(device).long())

    def _forget(self, key: SessionId) -> None:
        self._texts.pop(key, None)
        self.sessions.end(key)

    def _make_room(self) -> None:
        for key in self.sessions.make_room(time.monotonic(), self.steps):
            self._texts.pop(key, None)


def _chosen(logits: Tensor, sampling: Sampling, length: int, count: int) -> tuple[int, ...]:
    """What follows each of the last `count` tokens of a text of `length` tokens."""
    last = logits[0, -count:].cpu()
    if not bool(last.isfinite().all()):
        raise NotFiniteError("the logits are not finite")
    return tuple(choose(each, sampling, position) for position, each in enumerate(last, length - count + 1))

"""Goes on with the texts of those who ask the model, in one stage: forward only, after all training work, within bounds.

A text belongs to one asker and to the parameters of one step. This peer keeps what the stage needs of the tokens so far. Where it has
lost that, it says how many tokens it knows, and the asker sends the rest again. So a peer may forget any text at any time, and another
peer of its stage may go on with it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.errors import BadMessageError, BusyError, NotFiniteError, WrongStateError
from peerd.models.module import StageModule
from peerd.models.prefix import Prefix
from peerd.models.sampling import Sampling, choose
from peerd.models.stages import layers_of
from peerd.policy.inference.sessions import SessionLimits, Sessions
from peerd.stage.executor import Executor, Priority
from peerd.stage.jobs import check_tokens
from peerd.stage.precision import extend_prefix
from peerd.stage.state import StageState
from peerd.stage.text_turns import TextTurns
from peerd.table.record import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPass:
    """The next tokens of a text, for one stage."""

    text: bytes
    """The number of the text, 16 bytes, which its asker chose."""
    step: int
    begin: int
    """How many tokens come before."""
    inputs: Tensor
    """int tokens [1, S] for the first stage, else float32 [1, S, W], in the machine's memory."""
    tokens: Tensor | None = None
    """int [1, S], for stages after the first of a model that tells tokens to all stages."""
    sampling: Sampling | None = None
    """For the last stage: how to choose the token that follows."""


class UnknownPrefixError(WrongStateError):
    """This peer does not hold the text up to where the pass begins."""

    def __init__(self, known: int) -> None:
        super().__init__(f"this peer knows {known} tokens of this text")
        self.known = known


@dataclass(slots=True)
class _Text:
    prefix: Prefix
    module: StageModule


class StageTexts:
    """`extend` is for the event loop; the texts themselves change on the executor's thread only."""

    def __init__(self, manifest: Manifest, state: StageState, executor: Executor, limits: SessionLimits, turns: TextTurns) -> None:
        self._manifest = manifest
        self._state = state
        self._executor = executor
        self.sessions = Sessions(limits)
        self._turns = turns
        self._texts: dict[tuple[PeerId, bytes], _Text] = {}
        self._token_bytes: float | None = None
        """What a token of a text takes; known once one has been computed."""

    async def extend(self, asker: PeerId, asked: TextPass) -> Tensor | int:
        """The activations for the next stage, float32 [1, S, W]; from the last stage the token that follows.

        Raises UnknownPrefixError, WrongStateError if the step is not here, BusyError where there is no room or no time, and
        BadMessageError for a pass that no asker should send.
        """
        self._check(asked)
        async with self._turns.turn(asker) as took_s:
            return await self._executor.run(Priority.IDLE, lambda: self._compute((asker, asked.text), asked, took_s))

    async def end(self, asker: PeerId, text: bytes) -> None:
        """Forget a text."""
        await self._executor.run(Priority.IDLE, lambda: self._forget((asker, text)))

    async def tidy(self) -> None:
        """Forget what nobody goes on with, and what is of parameters that are gone. To be called now and then."""
        await self._executor.run(Priority.IDLE, self._make_room)

    def _check(self, asked: TextPass) -> None:
        """Refuse what no honest asker sends."""
        stage, model, length = self._state.record.stage, self._manifest.model, asked.inputs.shape[1] if asked.inputs.dim() > 1 else 0
        whole = model.boundary_shape(layers_of(self._manifest, stage).start, length) if stage else (length,)
        if asked.inputs.is_floating_point() != bool(stage) or tuple(asked.inputs.shape) != (1, *whole) or not length:
            raise BadMessageError("the tokens of a text do not have the form that this stage takes")
        if not 0 <= asked.begin <= asked.begin + length <= self._manifest.train.sequence_length:
            raise BadMessageError(f"a text of this run has at most {self._manifest.train.sequence_length} tokens")
        if (asked.tokens is not None) != (model.tells_tokens and stage > 0):
            raise BadMessageError("the stages after the first need the tokens" if asked.tokens is None else "this stage needs no tokens")
        if asked.tokens is not None and tuple(asked.tokens.shape) != (1, length):
            raise BadMessageError("there are not as many tokens as inputs")
        for tokens in (asked.tokens, None if stage else asked.inputs):
            if tokens is not None:
                check_tokens(tokens, self._manifest)
        if (asked.sampling is not None) != self._state.holdings.module.is_last:
            raise BadMessageError("the last stage chooses the token that follows, and no other")

    def _compute(self, key: tuple[PeerId, bytes], asked: TextPass, took_s: list[float]) -> Tensor | int:
        """One job: find the text, compute, and keep it."""
        module = self._module(asked.step)
        text = self._find(key, asked, module)
        began_s = time.monotonic()
        self._begin(key, asked, began_s)
        try:
            output = self._extend(text.prefix, asked)
            found: Tensor | int = output.cpu() if asked.sampling is None else self._chosen(output, asked.sampling, text.prefix.length)
        except BaseException:
            self._texts.pop(key, None)
            self.sessions.end_pass(key, None, time.monotonic())
            raise
        finally:
            took_s.append(time.monotonic() - began_s)
        self._token_bytes = text.prefix.num_bytes / text.prefix.length
        self._texts[key] = text
        self.sessions.end_pass(key, text.prefix.num_bytes, time.monotonic())
        return found

    def _module(self, step: int) -> StageModule:
        holdings = self._state.holdings
        module = self._state.evaluated.module_of(step, (self._state.record.step, holdings.module))
        if holdings.places.offloads and module is not holdings.module:
            raise WrongStateError("this peer holds the parameters of that step, but not on its device")
        return module

    def _find(self, key: tuple[PeerId, bytes], asked: TextPass, module: StageModule) -> _Text:
        """The text up to where the pass begins. Raises UnknownPrefixError."""
        text = self._texts.get(key)
        if text is not None and (text.module is not module or self.sessions.step_of(key) != asked.step or not asked.begin):
            self._forget(key)
            text = None
        known = 0 if text is None else text.prefix.length
        if known != asked.begin:
            raise UnknownPrefixError(known)
        return text or _Text(module.prefix(), module)

    def _begin(self, key: tuple[PeerId, bytes], asked: TextPass, now_s: float) -> None:
        """Make room before memory is taken. The first text of all is taken on trust: there nothing has been measured."""
        length = asked.begin + asked.inputs.shape[1]
        reason = self.sessions.begin(key, asked.step, round((self._token_bytes or 0.0) * length), now_s)
        if reason:
            raise BusyError(reason)
        self._make_room()

    def _extend(self, prefix: Prefix, asked: TextPass) -> Tensor:
        device = self._state.holdings.device
        inputs = asked.inputs.to(device) if self._state.record.stage else asked.inputs.to(device).long()
        tokens = None if asked.tokens is None else asked.tokens.to(device).long()
        return extend_prefix(self._manifest.train, prefix, inputs, tokens)

    def _chosen(self, logits: Tensor, sampling: Sampling, position: int) -> int:
        last = logits[0, -1].cpu()
        if not bool(last.isfinite().all()):
            raise NotFiniteError("the logits are not finite")
        return choose(last, sampling, position)

    def _forget(self, key: tuple[PeerId, bytes]) -> None:
        self._texts.pop(key, None)
        self.sessions.end(key)

    def _make_room(self) -> None:
        held = frozenset(step for step in (self._state.record.step, self._state.evaluated.step) if step is not None)
        for key in self.sessions.make_room(time.monotonic(), held):
            self._texts.pop(key, None)

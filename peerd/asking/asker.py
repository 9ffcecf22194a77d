"""Goes on with one text over peers of all stages, and over others when one of them leaves or the step's parameters are gone.

The asker keeps what went into each stage. A peer that does not know the text gets what came before from it, so a failure in one stage
makes no other stage compute anything again. Where the step changes, everything is computed again, with the parameters of another step.

A way through all stages takes a round trip to each. So the asker guesses tokens and sends them along (`policy/inference/drafts.py`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import structlog
import torch
from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.errors import BadMessageError, BusyError, PeerGoneError, RemoteError, WrongStateError
from peerd.models.stages import layers_of
from peerd.policy.inference.drafts import Drafts
from peerd.policy.inference.left_out import LeftOut
from peerd.policy.inference.paths import TextOffer, TextPath, choose_path
from peerd.policy.inference.sampling import Sampling
from peerd.table.record import PeerId
from peerd.wire.convert import ID_BYTES
from peerd.wire.tensors import decode, encode
from peerd.wire.text_messages import Extended, TextCall

MOST_ASKED = 4
"""Peers of one stage that are asked for an offer at once."""
CPU = torch.device("cpu")
LOG = structlog.get_logger()
Result = TypeVar("Result")


class _NoPathError(PeerGoneError):
    """No peers hold the parameters of one step in all stages and go on with texts."""


class _AllOffError(PeerGoneError):
    """The owners of all peers of a stage let nobody ask."""


@dataclass(slots=True)
class HopTimes:
    """What the calls to one stage took, in seconds."""

    calls: int = 0
    took_s: float = 0.0
    waited_s: float = 0.0
    """Of this, until the pass had its turn, as the peers say; most of it behind passes of training."""
    computed_s: float = 0.0
    """Of this, the passes. The rest is the way there and back."""

    def note(self, took_s: float, found: Extended) -> None:
        """Add a call. What a peer says is believed no further than what the call took."""
        waited_s = min(found.waited_s, took_s)
        self.calls += 1
        self.took_s += took_s
        self.waited_s += waited_s
        self.computed_s += min(found.computed_s, took_s - waited_s)


class TextPeers(Protocol):
    """The peers of the run, as an asker sees them. All calls raise RemoteError."""

    def candidates(self, stage: int) -> Sequence[PeerId]:
        """The peers that serve a stage, the nearest first."""
        ...

    async def offer(self, peer: PeerId, stage: int) -> TextOffer: ...

    async def extend(self, peer: PeerId, call: TextCall) -> Extended: ...

    async def forget(self, peer: PeerId, text: bytes) -> None: ...

    async def changed(self, timeout_s: float) -> object:
        """Wait until the table has changed, or for the time given."""
        ...


class Asker:
    """One text. `next_tokens` is called again and again; `close` at the end."""

    def __init__(self, manifest: Manifest, peers: TextPeers, prompt: Sequence[int], sampling: Sampling, patience_s: float) -> None:
        """`prompt`: at least one token. `patience_s`: how long to look for peers that answer, while none says that it will."""
        self._manifest = manifest
        self._peers = peers
        self._sampling = sampling
        self._patience_s = patience_s
        self._text = os.urandom(ID_BYTES)
        self._path: TextPath | None = None
        self._given: dict[int, Tensor] = {}
        """By stage, all inputs so far."""
        self._done = [0] * manifest.train.num_stages
        """By stage, of how many tokens the results are known."""
        self._left_out = LeftOut()
        self._off = set[PeerId]()
        """Peers whose owners let nobody ask. What they say once counts for this text."""
        self._drafts, self._drafted = Drafts(), list[int]()
        self._may_guess = True
        self.tokens = [*prompt]
        self.steps: list[int] = []
        """With the parameters of which steps its tokens were computed, in this order."""
        self.served: dict[PeerId, int] = {}
        """The peers that have computed, and their stages."""
        self.num_rerouted = self.num_again = self.num_guessed = self.num_right = 0
        """How often another path was taken, how often a peer was sent what came before, and how many tokens were guessed and right."""
        self.hops = [HopTimes() for _ in range(manifest.train.num_stages)]
        """By stage."""

    async def next_tokens(self, most: int) -> list[int]:
        """Return the tokens that follow: those of one way through the stages, from 1 to `most`.

        Raises the last RemoteError if no path has been found for `patience_s`, and at once where all owners of a stage let nobody ask.
        """
        until_s = time.monotonic() + self._patience_s
        room = self._manifest.train.sequence_length - len(self.tokens)
        self._drafted = self._drafts.guess(self.tokens, min(most - 1, room)) if self._may_guess else []
        self._keep(len(self.tokens))
        self._given[0] = torch.tensor([self.tokens + self._drafted], dtype=torch.int32)
        while True:
            try:
                path = await self._find()
                return await self._through(path)
            except _AllOffError:
                raise
            except RemoteError as error:
                now_s = time.monotonic()
                self._path = None
                if isinstance(error, BusyError) and error.retry_after_s:
                    until_s = max(until_s, now_s + error.retry_after_s + self._patience_s)
                if now_s >= until_s:
                    raise
                if isinstance(error, _NoPathError):
                    await self._peers.changed(self._left_out.pause_s(now_s))

    async def close(self) -> None:
        """Let peers forget the text."""
        await asyncio.gather(*(self._peers.forget(peer, self._text) for peer in self.served), return_exceptions=True)

    async def _find(self) -> TextPath:
        """The present path, or another one. Raises _NoPathError."""
        if self._path is not None:
            return self._path
        stages = range(self._manifest.train.num_stages)
        offers = await asyncio.gather(*map(self._offers, stages))
        off = next((stage for stage in stages if not offers[stage] and self._is_off(stage)), None)
        if off is not None:
            raise _AllOffError(f"the owners of all peers of stage {off} let nobody ask the model (`peerd limits --inference 0%`)")
        present = self.steps[-1] if self.steps else None
        path = choose_path(offers, self._manifest.train.evaluates_at, present)
        if path is None:
            lacking = [stage for stage in stages if not any(offer.steps for offer in offers[stage])]
            told = f"no peer of stage {lacking[0]} goes on with texts now" if lacking else "no step is held in all stages now"
            raise _NoPathError(told)
        if path.step != present:
            self._given, self._done = {0: self._given[0]}, [0] * len(stages)
            self.steps.append(path.step)
        elif self.served:
            self.num_rerouted += 1
        self._path = path
        return path

    async def _offers(self, stage: int) -> list[TextOffer]:
        now_s, answers = time.monotonic(), list[TextOffer]()
        while not answers:  # those that are off are not asked again, and others are
            free = [peer for peer in self._peers.candidates(stage) if peer not in self._off and not self._left_out.includes(peer, now_s)]
            if not free:
                break
            found = [each for each in await asyncio.gather(*(self._offer(peer, stage) for peer in free[:MOST_ASKED])) if each is not None]
            self._off |= {offer.peer for offer in found if offer.is_off}
            answers = [offer for offer in found if not offer.is_off]
        return answers

    def _is_off(self, stage: int) -> bool:
        """Whether the stage has peers, and all of them have said that their owners let nobody ask."""
        serving = self._peers.candidates(stage)
        return bool(serving) and self._off.issuperset(serving)

    async def _offer(self, peer: PeerId, stage: int) -> TextOffer | None:
        try:
            offer = await self._peers.offer(peer, stage)
            if not offer.steps and not offer.is_off:
                raise WrongStateError("it holds no step now")
        except RemoteError as error:
            self._leave_out(peer, error)
            return None
        return offer

    def _leave_out(self, peer: PeerId, error: RemoteError) -> None:
        LOG.debug("a peer does not go on with a text", peer=peer, error=error.message)
        retry_after_s = error.retry_after_s if isinstance(error, BusyError) else 0.0
        refused = isinstance(error, WrongStateError | BusyError)
        self._left_out.note(peer, time.monotonic(), refused=refused, retry_after_s=retry_after_s)

    async def _through(self, path: TextPath) -> list[int]:
        """Compute, stage by stage, what is missing."""
        whole, last = len(self.tokens) + len(self._drafted), self._last
        for stage in range(last):
            if self._done[stage] < whole:
                outputs = await self._ask(path, stage, self._outputs_of)
                before = self._given.get(stage + 1)
                self._given[stage + 1] = outputs if before is None else torch.cat([before, outputs], dim=1)
                self._done[stage] = whole
        chosen = await self._ask(path, last, self._chosen_of)
        self._done[last] = whole
        right = self._drafts.judge(self._drafted, chosen)
        self.num_guessed, self.num_right = self.num_guessed + len(self._drafted), self.num_right + right
        self._keep(len(self.tokens) + right)
        self.tokens += chosen[: right + 1]
        return [*chosen[: right + 1]]

    def _keep(self, length: int) -> None:
        """Give up what the stages have computed from the token at position `length` on: it was guessed wrong."""
        for stage, done in enumerate(self._done):
            if done > length:
                self._done[stage] = length
                if stage < self._last:
                    self._given[stage + 1] = self._given[stage + 1][:, :length]

    @property
    def _last(self) -> int:
        return self._manifest.train.num_stages - 1

    async def _ask(self, path: TextPath, stage: int, read: Callable[[Extended, int, int], Result]) -> Result:
        """What one stage computes for the tokens that lack results. `read` checks it, by the stage and the first token asked for."""
        peer, begin = path.peers[stage], self._done[stage]
        try:
            found = await self._timed(peer, self._call(path.step, stage, begin))
            if found.known is not None:  # another peer's text, or one that was forgotten, or that cannot take tokens back
                self.num_again += 1
                self._may_guess &= found.known < begin
                begin = found.known if found.known < begin else 0
                found = await self._timed(peer, self._call(path.step, stage, begin))
            if found.known is not None:
                raise BusyError("the peer has forgotten the text while it was sent")
            result = read(found, stage, begin)
        except RemoteError as error:
            self._leave_out(peer, error)
            raise
        self.served[peer] = stage
        return result

    async def _timed(self, peer: PeerId, call: TextCall) -> Extended:
        began_s = time.monotonic()
        found = await self._peers.extend(peer, call)
        self.hops[call.stage].note(time.monotonic() - began_s, found)
        return found

    def _call(self, step: int, stage: int, begin: int) -> TextCall:
        is_told = self._manifest.model.tells_tokens and stage > 0
        return TextCall(
            text=self._text,
            stage=stage,
            step=step,
            begin=begin,
            inputs=encode(self._given[stage][:, begin:]),
            tokens=encode(self._given[0][:, begin:]) if is_told else None,
            sampling=self._sampling if stage == self._last else None,
            num_drafted=len(self._drafted) if stage == self._last else 0,
        )

    def _chosen_of(self, found: Extended, _stage: int, _begin: int) -> tuple[int, ...]:
        """The tokens that follow. Raises BadMessageError if they cannot be."""
        if len(found.chosen) != len(self._drafted) + 1 or not all(0 <= each < self._manifest.model.vocab_size for each in found.chosen):
            raise BadMessageError("not as many tokens as were asked for, or one outside the vocabulary")
        return found.chosen

    def _outputs_of(self, found: Extended, stage: int, begin: int) -> Tensor:
        """The outputs that were not known, float32 [1, S, W]. Raises BadMessageError for anything but what was asked for."""
        if found.outputs is None or found.outputs.codec.is_lossy:
            raise BadMessageError("no outputs, or ones in a lossy codec")
        whole = len(self.tokens) + len(self._drafted)
        shape = self._manifest.model.boundary_shape(layers_of(self._manifest, stage + 1).start, whole - begin)
        found.outputs.check("float32", (1, *shape))
        outputs = decode(found.outputs, CPU)[:, self._done[stage] - begin :]
        if not bool(outputs.isfinite().all()):
            raise BadMessageError("outputs that are not finite: the next stage would get the blame")
        return outputs

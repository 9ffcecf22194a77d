"""Goes on with one text over peers of all stages, and over others when one of them leaves or the step's parameters are gone.

The asker keeps what went into each stage. A peer that does not know the text gets what came before from it, so a failure in one stage
makes no other stage compute anything again. Where the step changes, everything is computed again, with the parameters of another step.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import structlog
import torch
from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.errors import BadMessageError, BusyError, PeerGoneError, RemoteError, WrongStateError
from peerd.models.stages import layers_of
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
    """One text. `next_token` is called again and again; `close` at the end."""

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
        self.tokens = [*prompt]
        self.steps: list[int] = []
        """With the parameters of which steps its tokens were computed, in this order."""
        self.served: dict[PeerId, int] = {}
        """The peers that have computed, and their stages."""
        self.num_rerouted = self.num_again = 0
        """How often another path was taken, and how often a peer was sent what came before."""

    async def next_token(self) -> int:
        """Return the token that follows. Raises the last RemoteError if no path has been found for `patience_s`."""
        until_s = time.monotonic() + self._patience_s
        self._given[0] = torch.tensor([self.tokens], dtype=torch.int32)
        while True:
            try:
                path = await self._find()
                return await self._through(path)
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
        now_s = time.monotonic()
        asked = [peer for peer in self._peers.candidates(stage) if not self._left_out.includes(peer, now_s)][:MOST_ASKED]
        answers = await asyncio.gather(*(self._offer(peer, stage) for peer in asked))
        return [offer for offer in answers if offer is not None]

    async def _offer(self, peer: PeerId, stage: int) -> TextOffer | None:
        try:
            return await self._peers.offer(peer, stage)
        except RemoteError as error:
            self._leave_out(peer, error)
            return None

    def _leave_out(self, peer: PeerId, error: RemoteError) -> None:
        LOG.debug("a peer does not go on with a text", peer=peer, error=error.message)
        retry_after_s = error.retry_after_s if isinstance(error, BusyError) else 0.0
        refused = isinstance(error, WrongStateError | BusyError)
        self._left_out.note(peer, time.monotonic(), refused=refused, retry_after_s=retry_after_s)

    async def _through(self, path: TextPath) -> int:
        """Compute, stage by stage, what is missing."""
        whole, last = len(self.tokens), self._last
        for stage in range(last):
            if self._done[stage] < whole:
                outputs = await self._ask(path, stage, self._outputs_of)
                before = self._given.get(stage + 1)
                self._given[stage + 1] = outputs if before is None else torch.cat([before, outputs], dim=1)
                self._done[stage] = whole
        token = await self._ask(path, last, self._token_of)
        self._done[last] = whole
        self.tokens.append(token)
        return token

    @property
    def _last(self) -> int:
        return self._manifest.train.num_stages - 1

    async def _ask(self, path: TextPath, stage: int, read: Callable[[Extended, int, int], Result]) -> Result:
        """What one stage computes for the tokens that lack results. `read` checks it, by the stage and the first token asked for."""
        peer, begin = path.peers[stage], self._done[stage]
        try:
            found = await self._peers.extend(peer, self._call(path.step, stage, begin))
            if found.known is not None:  # another peer's text, or one that was forgotten, or of which the answer was lost
                self.num_again += 1
                begin = found.known if found.known < begin else 0
                found = await self._peers.extend(peer, self._call(path.step, stage, begin))
            if found.known is not None:
                raise BusyError("the peer has forgotten the text while it was sent")
            result = read(found, stage, begin)
        except RemoteError as error:
            self._leave_out(peer, error)
            raise
        self.served[peer] = stage
        return result

    def _call(self, step: int, stage: int, begin: int) -> TextCall:
        is_told = self._manifest.model.tells_tokens and stage > 0
        return TextCall(
            text=self._text,
            stage=stage,
            step=step,
            begin=begin,
            inputs=encode(self._given[stage][:, begin:]),
            tokens=encode(torch.tensor([self.tokens[begin:]], dtype=torch.int32)) if is_told else None,
            sampling=self._sampling if stage == self._last else None,
        )

    def _token_of(self, found: Extended, _stage: int, _begin: int) -> int:
        """The token that follows. Raises BadMessageError if there is none that can be."""
        if found.token is None or not 0 <= found.token < self._manifest.model.vocab_size:
            raise BadMessageError("no token, or one outside the vocabulary")
        return found.token

    def _outputs_of(self, found: Extended, stage: int, begin: int) -> Tensor:
        """The outputs that were not known, float32 [1, S, W]. Raises BadMessageError for anything but what was asked for."""
        if found.outputs is None or found.outputs.codec.is_lossy:
            raise BadMessageError("no outputs, or ones in a lossy codec")
        shape = self._manifest.model.boundary_shape(layers_of(self._manifest, stage + 1).start, len(self.tokens) - begin)
        found.outputs.check("float32", (1, *shape))
        return decode(found.outputs, CPU)[:, self._done[stage] - begin :]

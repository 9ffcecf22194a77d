"""The control verb `ask`: the swarm goes on with a text of this daemon's user, token by token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from peerd.api.requests import MAX_STOP_CHARS, MAX_STOPS, Message, stops_of_chat, transcript
from peerd.api.text import TextStream
from peerd.asking.asker import Asker
from peerd.config.manifest import Manifest
from peerd.config.paths import cache_folder
from peerd.control.protocol import SCHEMA
from peerd.control.server import Say, Verb
from peerd.control.teller import Teller
from peerd.control.texts import TextReply
from peerd.daemon.asking import RunPeers
from peerd.daemon.peer import Peer
from peerd.data.tokenizer import coding_of
from peerd.errors import PeerdError, RemoteError, UnreachableError, UsageError
from peerd.policy.inference.sampling import MAX_TEMPERATURE, Sampling

MOST_AT_ONCE = 8
"""Texts of this daemon's user."""
PATIENCES = 4
"""An asker gives up after so many times the patience with a silent peer."""


class AskRequest(BaseModel):
    """What a client asks for: a text to go on from, its tokens, or a conversation."""

    model_config = ConfigDict(strict=True, extra="ignore")
    prompt: str = ""
    tokens: list[int] = []
    messages: list[Message] = []
    max_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    stops: Annotated[list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]], Field(max_length=MAX_STOPS)] = []
    ends: bool = False
    """Whether a token that ends a text ends the answer, too."""


class Coding(NamedTuple):
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    ends: Sequence[int]


class AskVerb:
    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._coding: Coding | None = None

    def verbs(self) -> dict[str, Verb]:
        return {"ask": self.ask}

    async def ask(self, request: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
        """Say each token as it comes, and return the whole. Raises UsageError, UnreachableError where the swarm does not answer."""
        peer, manifest = self._peer, self._peer.place.manifest
        _check_goes_on(manifest)
        if peer.is_resting:
            raise PeerdError("this peer is paused, and a paused peer asks nobody", "`peerd resume` ends its owner's pause")
        if peer.num_asking >= MOST_AT_ONCE:
            raise PeerdError(f"this daemon asks for {MOST_AT_ONCE} texts already", "wait until one of them is done")
        asked = _parsed(request)
        if self._coding is None:
            self._coding = Coding(*await asyncio.to_thread(coding_of, manifest.data, cache_folder()))
        given, stops = _given(asked, self._coding, manifest.train.sequence_length)
        sampling = Sampling(temperature=asked.temperature, top_p=asked.top_p, seed=asked.seed)
        asker = Asker(manifest, RunPeers(peer), given, sampling, PATIENCES * peer.patience_s)
        answer = _Answer(asker, asked, self._coding, stops, manifest.train.sequence_length - len(given))
        teller = Teller(say, look=lambda: answer.last)
        peer.num_asking += 1
        try:
            await teller.through(answer.through(teller))
        except RemoteError as error:
            raise UnreachableError(f"the swarm does not go on: {error.message}", "try again, or look at `peerd peers`") from None
        finally:
            peer.num_asking -= 1
            with contextlib.suppress(RemoteError):
                await asker.close()
        return {**answer.reply(manifest.train.num_stages), "context": manifest.train.sequence_length}


class _Answer:
    """One answer while it is made."""

    def __init__(self, asker: Asker, asked: AskRequest, coding: Coding, stops: Sequence[str], room: int) -> None:
        self._asker = asker
        self._most = min(asked.max_tokens, room)
        self._ends = frozenset(coding.ends) if asked.ends else frozenset[int]()
        self._text, self._pieces = TextStream(coding.decode, stops), list[str]()
        self._began_s = time.monotonic()
        self._times_s = list[float]()
        self._reason = ""
        self._ways = 0
        self.last = ""
        """The line of progress that was said last."""

    async def through(self, tell: Callable[[str], None]) -> None:
        while self._reason == "" and len(self._times_s) < self._most:
            self._ways += 1
            for token in await self._asker.next_tokens(self._most - len(self._times_s)):
                self._times_s.append(time.monotonic() - self._began_s)
                if token in self._ends:
                    self._reason = "stop"
                    break
                self._pieces.append(self._text.add(token))
                self.last = json.dumps({"number": len(self._times_s) - 1, "token": token, "text": self._pieces[-1]})
                tell(self.last)
                if self._text.has_stopped:
                    self._reason = "stop"
                    break
        self._reason = self._reason or "length"
        self._pieces.append(self._text.rest())

    def reply(self, num_stages: int) -> TextReply:
        asker = self._asker
        return {
            "schema": SCHEMA,
            "text": "".join(self._pieces),
            "tokens": len(self._times_s),
            "reason": self._reason,
            "steps": asker.steps,
            "peers": [[peer for peer, each in asker.served.items() if each == stage] for stage in range(num_stages)],
            "rerouted": asker.num_rerouted,
            "ways": self._ways,
            "guessed": asker.num_guessed,
            "right": asker.num_right,
            "hops": [
                {"calls": hop.calls, "took_s": hop.took_s, "waited_s": hop.waited_s, "computed_s": hop.computed_s} for hop in asker.hops
            ],
            "first_s": self._times_s[0] if self._times_s else 0.0,
            "took_s": time.monotonic() - self._began_s,
        }


def _check_goes_on(manifest: Manifest) -> None:
    if manifest.model.makes_samples or manifest.model.objective == "masked":
        raise UsageError(f"a {manifest.model.title} does not go on from a text", "look at its losses with `peerd history`")


def _parsed(request: Mapping[str, Any]) -> AskRequest:
    try:
        asked = AskRequest.model_validate(dict(request))
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if sum(map(bool, (asked.prompt, asked.tokens, asked.messages))) != 1:
        raise UsageError("the prompt is empty", "give at least one character")
    return asked


def _given(asked: AskRequest, coding: Coding, context: int) -> tuple[list[int], Sequence[str]]:
    """The tokens to go on from, and the texts at which the answer ends. A conversation loses its oldest messages where it is too long."""
    given, stops, messages = asked.tokens or coding.encode(asked.prompt), tuple(asked.stops), asked.messages
    if messages:
        stops += stops_of_chat()
        while len(given := coding.encode(transcript(messages))) >= context and len(messages) > 1:
            messages = messages[1:]
    if len(given) >= context:
        raise UsageError(f"the prompt has {len(given)} tokens, and the model's context {context}", "give a shorter one")
    return given, stops

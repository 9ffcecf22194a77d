"""HTTP of the interface: routes, the guard before them, and the answers, which come token by token."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from peerd.api.answers import DONE, ApiAnswer, TokenCounts, event, models
from peerd.api.guard import MAX_BODY_BYTES, ApiAccess, too_large, why_refuse
from peerd.api.requests import ApiError, TextRequest, parse_chat, parse_completion
from peerd.api.text import TextStream
from peerd.http_server import config_of

MOST_AT_ONCE = 8
"""Answers that are being made. Each keeps its text in memory; they take turns, token by token."""
MAX_CONNECTIONS = 64
MOST_DISCARDED_BYTES = 32 << 20
"""Of a request that is refused."""


class Tokens(Protocol):
    """The tokens of one answer, each computed when it is asked for."""

    def __next__(self) -> int:
        """The next token. Raises ApiError where there is none."""
        ...

    def close(self) -> None:
        """No more are wanted. It may be called while another thread waits for a token."""
        ...


class Model(Protocol):
    """A model that goes on from a text. One thread at a time uses one answer."""

    name: str
    num_threads: int
    """Answers of which a token is computed at once."""
    max_context: int
    """Tokens of prompt and answer together."""
    ends: frozenset[int]
    """Tokens that end a text."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...

    def begin(self, prompt: list[int], asked: TextRequest, most: int) -> Tokens:
        """The tokens that follow the prompt; no more than `most` are wanted."""
        ...


class Endpoints:
    def __init__(self, model: Model, access: ApiAccess) -> None:
        self._model = model
        self._access = access
        self._since_s = int(time.time())
        self._thread = ThreadPoolExecutor(model.num_threads, thread_name_prefix="model")
        self._num_open = 0

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def models(self, request: Request) -> Response:
        self._check(request)
        return JSONResponse(models(self._model.name, self._since_s))

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, parse_completion)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, parse_chat)

    def _check(self, request: Request) -> None:
        refused = why_refuse(request.headers, self._access)
        if refused is not None:
            raise refused

    async def _answer(self, request: Request, parse: Callable[[bytes], TextRequest]) -> Response:
        refused = why_refuse(request.headers, self._access)
        if refused is not None:
            await _discard(request)
            raise refused
        asked = parse(await _body(request))
        if asked.model != self._model.name:
            said = f"there is no model {asked.model!r} here; its name is {self._model.name!r}"
            raise ApiError(HTTPStatus.NOT_FOUND, said, code="model_not_found", param="model")
        prompt = self._model.encode(asked.prompt)
        most = self._room(len(prompt), asked)
        if self._num_open >= MOST_AT_ONCE:
            raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, f"{MOST_AT_ONCE} answers are being made already", code="rate_limit_exceeded")
        answer = ApiAnswer(number=secrets.token_hex(12), created_s=int(time.time()), model=self._model.name, is_chat=asked.is_chat)
        talk = _Talk(self._model, asked, prompt, most)
        if asked.streams:
            return StreamingResponse(self._events(talk, answer), media_type="text/event-stream")
        pieces = [piece async for piece in self._pieces(talk, request.is_disconnected)]
        return JSONResponse(answer.whole("".join(pieces), talk.reason, talk.usage))

    def _room(self, num_given: int, asked: TextRequest) -> int:
        """How many tokens may come."""
        most, wanted = self._model.max_context, asked.max_tokens
        if not num_given:
            raise ApiError(HTTPStatus.BAD_REQUEST, "the prompt is empty", param="prompt")
        if num_given + (wanted or 1) > most:
            said = f"the model's context has {most} tokens; the prompt has {num_given}, and the answer {wanted or 'at least 1'}"
            param = "messages" if asked.is_chat else "prompt"
            raise ApiError(HTTPStatus.BAD_REQUEST, said, code="context_length_exceeded", param=param)
        return wanted or most - num_given

    async def _events(self, talk: _Talk, answer: ApiAnswer) -> AsyncIterator[str]:
        is_first = True
        try:
            async for piece in self._pieces(talk):
                if piece:
                    yield event(answer.piece(piece, is_first=is_first))
                    is_first = False
        except ApiError as error:
            yield event(error.document())
            yield DONE
            return
        yield event(answer.piece(None, talk.reason, is_first=is_first))
        if talk.asked.tells_usage:
            yield event(answer.usage(talk.usage))
        yield DONE

    async def _pieces(self, talk: _Talk, is_gone: Callable[[], Awaitable[bool]] | None = None) -> AsyncIterator[str]:
        """The answer's text as it comes. Requests take turns on the model's threads, because each asks for one token at a time."""
        self._num_open += 1
        try:
            while not talk.reason:
                yield await asyncio.get_running_loop().run_in_executor(self._thread, talk.advance)
                if is_gone is not None and await is_gone():
                    return
            yield talk.text.rest()
        finally:
            self._num_open -= 1
            talk.tokens.close()


class _Talk:
    """One answer while it is made."""

    def __init__(self, model: Model, asked: TextRequest, prompt: list[int], most: int) -> None:
        self.asked = asked
        self.text = TextStream(model.decode, asked.stops)
        self.reason = ""
        """Why the answer ends, once it does."""
        self.tokens = model.begin(prompt, asked, most)
        self._ends, self._num_given, self._most, self._num_ends = model.ends, len(prompt), most, 0

    def advance(self) -> str:
        """Compute one token; the text that may be sent."""
        token = next(self.tokens)
        if token in self._ends:
            self.reason, self._num_ends = "stop", 1
            return ""
        piece = self.text.add(token)
        self.reason = "stop" if self.text.has_stopped else "length" if self.text.num_tokens >= self._most else ""
        return piece

    @property
    def usage(self) -> TokenCounts:
        return TokenCounts(prompt=self._num_given, answer=self.text.num_tokens + self._num_ends)


async def _body(request: Request) -> bytes:
    found, num_bytes = bytearray(), 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        found += chunk if num_bytes <= MAX_BODY_BYTES else b""
        if num_bytes > MOST_DISCARDED_BYTES:
            break
    if num_bytes > MAX_BODY_BYTES:
        raise too_large()
    return bytes(found)


async def _discard(request: Request) -> None:
    """Read what is still sent: a client that is cut off while it sends hears of no error but a broken connection."""
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > MOST_DISCARDED_BYTES:
            return


async def _told(_request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return JSONResponse(error.document(), error.status)
    status = HTTPStatus(error.status_code) if isinstance(error, HTTPException) else HTTPStatus.INTERNAL_SERVER_ERROR
    return JSONResponse(ApiError(status, f"{status.phrase.lower()}: see `peerd help chat` for what there is").document(), status)


def build(endpoints: Endpoints) -> ASGIApp:
    routes = [
        Route("/v1/models", endpoints.models),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={ApiError: _told, HTTPException: _told, Exception: _told})


@contextlib.contextmanager
def server_of(model: Model, access: ApiAccess) -> Iterator[uvicorn.Server]:
    """A server, whose `run` serves until a signal comes or its `should_exit` is set."""
    endpoints = Endpoints(model, access)
    with contextlib.closing(endpoints):
        yield uvicorn.Server(config_of(build(endpoints), MAX_CONNECTIONS))

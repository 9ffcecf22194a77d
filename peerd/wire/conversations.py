"""Conversations: one stream to a peer for questions that come often, in place of a call for each, which costs four times as much.

Answers come in the order of the questions. A stream takes the quickest way that is open, and the next question begins another one where
that is another by then or the stream has ended; who does not answer in time is not asked over the same stream again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from peerd.errors import BadMessageError, PeerGoneError, RemoteError
from peerd.table.record import PeerId
from peerd.wire.links import Links, as_remote_error, raise_if_ours

_OVER = "the conversation is over"


class EndedError(PeerGoneError):
    """The callee has ended the stream in good order, as it does after a long silence."""


class Conversations:
    """With all peers, about one method."""

    def __init__(self, links: Links, method: str, serialize: Callable[[Any], bytes], deserialize: Callable[[bytes], Any]) -> None:
        self._links = links
        self._method = method
        self._coders = {"request_serializer": serialize, "response_deserializer": deserialize}
        self._with: dict[PeerId, _Conversation] = {}

    async def ask(self, peer: PeerId, question: Any, timeout_s: float) -> Any:
        """The answer. RemoteError as the peer says, or when none comes in time."""
        channel = await self._links.quickest_channel(peer)
        for _ in range(2):  # a stream may end between two questions
            with contextlib.suppress(EndedError):
                return await self._by(channel, peer).ask(question, timeout_s)
        raise PeerGoneError(_OVER)

    def _by(self, channel: Any, peer: PeerId) -> _Conversation:
        """The one under way, or a new one where that takes another way by now."""
        known = self._with.get(peer)
        if known is not None and known.channel is channel:
            return known
        if known is not None:
            known.end()
        begun = self._with[peer] = _Conversation(channel, channel.stream_stream(self._method, **self._coders)())
        begun.on_over = lambda: self._forget(peer, begun)
        return begun

    def _forget(self, peer: PeerId, conversation: _Conversation) -> None:
        if self._with.get(peer) is conversation:
            del self._with[peer]


class _Conversation:
    """One stream. It is over with the first thing that goes wrong."""

    def __init__(self, channel: Any, call: Any) -> None:
        self.channel = channel
        self.is_over = False
        self.on_over: Callable[[], None] = lambda: None
        self._call = call
        self._turn = asyncio.Lock()
        self._asked: deque[asyncio.Future[Any]] = deque()
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def ask(self, question: Any, timeout_s: float) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                async with self._turn:
                    if self.is_over:
                        raise EndedError(_OVER)
                    self._asked.append(answer)
                    await self._write(question)
                return await answer
        except TimeoutError:
            self._close(PeerGoneError(f"no word for {timeout_s:.1f} s"))
            raise PeerGoneError(f"no word for {timeout_s:.1f} s") from None

    def end(self) -> None:
        """Nothing more is asked; what is under way is answered first."""
        if self._asked:
            self._asked[-1].add_done_callback(lambda _answer: self._close(EndedError(_OVER)))
        else:
            self._close(EndedError(_OVER))

    async def _write(self, question: Any) -> None:
        """What goes wrong is the reader's to tell."""
        try:
            await self._call.write(question)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return
        except asyncio.CancelledError:
            raise_if_ours()

    async def _read(self) -> None:
        reason: RemoteError = EndedError(_OVER)
        try:
            while (answer := await self._call.read()) is not grpc.aio.EOF:
                if answer is None or not self._asked:
                    reason = BadMessageError("an answer that cannot be read, or that nobody asked for")
                    break
                asked = self._asked.popleft()
                if not asked.done():
                    asked.set_result(answer)
        except grpc.aio.AioRpcError as error:
            reason = as_remote_error(error)
        except asyncio.CancelledError:
            reason = PeerGoneError("the connection was closed")
            raise_if_ours()
        finally:
            self._close(reason)

    def _close(self, reason: RemoteError) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._call.cancel()
        while self._asked:
            asked = self._asked.popleft()
            if not asked.done():
                asked.set_exception(reason)
                asked.exception()  # seen, should nobody wait for it any more
        self.on_over()

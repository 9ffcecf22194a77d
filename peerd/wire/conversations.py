"""Conversations: one stream to a peer for frequent questions, because a call for each question costs four times as much.

Answers come in the order of the questions. A stream uses the fastest open channel. The next question begins a new stream if another
channel is the fastest by then, or if the stream has ended. A stream on which an answer does not come in time is closed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from peerd.background import start
from peerd.errors import BadMessageError, PeerGoneError, RemoteError
from peerd.link.links import Links, as_remote_error, raise_if_ours, was_cut_short
from peerd.served_time import served_timeout
from peerd.table.record import PeerId

SHUNNED_S = 30.0
"""About the time that gRPC needs to find that the other end is gone."""
_OVER = "the conversation is over"


class EndedError(PeerGoneError):
    """The stream has ended in good order, as the callee ends it after a long silence."""


class Conversations:
    """The conversations with all peers that use one gRPC method."""

    def __init__(self, links: Links, method: str, serialize: Callable[[Any], bytes], deserialize: Callable[[bytes], Any]) -> None:
        self._links = links
        self._method = method
        self._coders = {"request_serializer": serialize, "response_deserializer": deserialize}
        self._with: dict[PeerId, _Conversation] = {}
        self._shunned_until_s: dict[PeerId, float] = {}
        """Peers that were silent over a direct path, which may be dead. Until the given time they are asked through the tunnel."""

    async def ask(self, peer: PeerId, question: Any, timeout_s: float) -> Any:
        """Return the answer. Raises the peer's RemoteError, or PeerGoneError if none comes in time."""
        for _ in range(2):  # a stream may end between two questions
            shuns = time.monotonic() < self._shunned_until_s.get(peer, 0.0)
            tunnel = await self._links.channel(peer)
            channel = tunnel if shuns else await self._links.quickest_channel(peer)
            try:
                return await self._by(channel, peer).ask(question, timeout_s)
            except EndedError:
                continue
            except PeerGoneError:
                if channel is not tunnel:
                    self._shun(peer, time.monotonic())
                raise
        raise PeerGoneError(_OVER)

    def _shun(self, peer: PeerId, now_s: float) -> None:
        self._shunned_until_s = {each: until_s for each, until_s in self._shunned_until_s.items() if until_s > now_s}
        self._shunned_until_s[peer] = now_s + SHUNNED_S

    def _by(self, channel: Any, peer: PeerId) -> _Conversation:
        """Return the present conversation if it uses this channel, otherwise a new one."""
        known = self._with.get(peer)
        if known is not None and known.channel is channel:
            return known
        if known is not None:
            known.end()
        try:
            call = channel.stream_stream(self._method, **self._coders)()
        except grpc.aio.UsageError:
            raise PeerGoneError("the connection was closed") from None
        begun = self._with[peer] = _Conversation(channel, call, partial(self._forget, peer))
        return begun

    def _forget(self, peer: PeerId, conversation: _Conversation) -> None:
        if self._with.get(peer) is conversation:
            del self._with[peer]


class _Conversation:
    """One stream. Any error ends it."""

    def __init__(self, channel: Any, call: Any, on_over: Callable[[_Conversation], None]) -> None:
        self.channel = channel
        self.is_over = False
        self._is_heard = False
        """True once the callee has answered a question."""
        self._on_over = on_over
        self._call = call
        self._turn = asyncio.Lock()
        self._asked: deque[asyncio.Future[Any]] = deque()
        self._reader = start(self._read())

    async def ask(self, question: Any, timeout_s: float) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            async with served_timeout(timeout_s):
                async with self._turn:
                    if self.is_over:
                        raise EndedError(_OVER)
                    self._asked.append(answer)
                    await self._write(question, answer)
                return await answer
        except TimeoutError:
            self._close(PeerGoneError(f"no message for {timeout_s:.1f} s"))
            raise PeerGoneError(f"no message for {timeout_s:.1f} s") from None
        except asyncio.CancelledError:  # the question may or may not have been sent, so later answers could not be told apart
            self._close(EndedError(_OVER))
            raise

    def end(self) -> None:
        """Close the stream once the pending questions have been answered."""
        if self._asked:
            self._asked[-1].add_done_callback(lambda _answer: self._close(EndedError(_OVER)))
        else:
            self._close(EndedError(_OVER))

    async def _write(self, question: Any, answer: asyncio.Future[Any]) -> None:
        """Send a question; `_read` reports any error. gRPC never ends the first write of a call that is cancelled while connecting."""
        try:
            if self._is_heard:
                await self._call.write(question)
                return
            write = asyncio.ensure_future(self._call.write(question))
            try:
                await asyncio.wait({write, answer}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                write.cancel()
            await write
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return
        except asyncio.CancelledError:
            raise_if_ours()

    async def _read(self) -> None:
        reason: RemoteError = EndedError(_OVER)
        try:
            while (answer := await self._call.read()) is not grpc.aio.EOF:
                if answer is None or not self._asked:
                    reason = BadMessageError("the answer cannot be read, or belongs to no question")
                    break
                self._is_heard = True
                asked = self._asked.popleft()
                if not asked.done():
                    asked.set_result(answer)
        except grpc.aio.AioRpcError as error:
            reason = EndedError(_OVER) if was_cut_short(error) else as_remote_error(error)
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
                asked.exception()  # marks it as retrieved, in case nobody waits for it
        self._on_over(self)

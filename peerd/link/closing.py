"""Closes gRPC channels once the calls on them have ended."""

from __future__ import annotations

import asyncio

import grpc

from peerd.background import start


class ClosingChannels:
    """Channels that take no new calls."""

    def __init__(self) -> None:
        self.tasks: dict[grpc.aio.Channel, asyncio.Task[None]] = {}

    def soon(self, channel: grpc.aio.Channel, grace_s: float | None) -> None:
        """Close the channel once its remaining calls have finished, or `grace_s` have passed."""
        self.tasks[channel] = task = start(channel.close(grace_s))
        task.add_done_callback(lambda _task: self.tasks.pop(channel, None))

    async def now(self) -> None:
        """Close all of them, with the calls on them."""
        closing = dict(self.tasks)
        for task in closing.values():
            task.cancel()
        await asyncio.gather(*closing.values(), return_exceptions=True)
        for channel in closing:
            await channel.close(None)

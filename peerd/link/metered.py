"""Counts the bytes of direct connections by message. gRPC alone handles these bytes, so peerd can count them only in its messages.

The overhead of HTTP/2 and TLS is not counted; it is less than 1 % of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from peerd.link.throttle import Throttle, Throttles

FRAME_BYTES = 5
"""Size of gRPC's prefix of a message."""
Serializer = Callable[[Any], bytes]
Deserializer = Callable[[bytes], Any]


class CountedChannel:
    """A channel for the generated stubs that counts the bytes of its messages."""

    def __init__(self, channel: grpc.aio.Channel, throttles: Throttles) -> None:
        self._channel = channel
        self._throttles = throttles

    def __getattr__(self, kind: str) -> Any:
        """Wrap the channel's method of this name: `unary_unary`, `unary_stream`, `stream_unary` or `stream_stream`."""
        return partial(self._counted, getattr(self._channel, kind))

    def _counted(self, call: Any, method: str, request_serializer: Serializer, response_deserializer: Deserializer, **more: Any) -> Any:
        coders = sending(request_serializer, self._throttles.upload), receiving(response_deserializer, self._throttles.download)
        return call(method, *coders, **more)


def counted(handler: Any, throttles: Throttles) -> Any:
    """Wrap the handler of a server's method so that its messages are counted."""
    return handler._replace(
        request_deserializer=receiving(handler.request_deserializer, throttles.download),
        response_serializer=sending(handler.response_serializer, throttles.upload),
    )


def sending(serializer: Serializer, throttle: Throttle) -> Serializer:
    def serialize(message: Any) -> bytes:
        data = serializer(message)
        throttle.total += len(data) + FRAME_BYTES
        return data

    return serialize


def receiving(deserializer: Deserializer, throttle: Throttle) -> Deserializer:
    def deserialize(data: bytes) -> Any:
        throttle.total += len(data) + FRAME_BYTES
        return deserializer(data)

    return deserialize

"""Counts what direct connections carry, by message: nobody copies their bytes, so this is where they can be seen.

What HTTP/2 and TLS add is not counted; it is less than 1 % of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from peerd.link.throttle import Throttle, Throttles

FRAME_BYTES = 5
"""What gRPC puts before a message."""
Serializer = Callable[[Any], bytes]
Deserializer = Callable[[bytes], Any]


class CountedChannel:
    """A channel, as the generated stubs take one."""

    def __init__(self, channel: grpc.aio.Channel, throttles: Throttles) -> None:
        self._channel = channel
        self._throttles = throttles

    def unary_unary(self, method: str, **coders: Any) -> Any:
        return self._channel.unary_unary(method, **self._counting(**coders))

    def unary_stream(self, method: str, **coders: Any) -> Any:
        return self._channel.unary_stream(method, **self._counting(**coders))

    def stream_unary(self, method: str, **coders: Any) -> Any:
        return self._channel.stream_unary(method, **self._counting(**coders))

    def stream_stream(self, method: str, **coders: Any) -> Any:
        return self._channel.stream_stream(method, **self._counting(**coders))

    def _counting(self, request_serializer: Serializer, response_deserializer: Deserializer, **more: Any) -> dict[str, Any]:
        return {
            "request_serializer": sending(request_serializer, self._throttles.upload),
            "response_deserializer": receiving(response_deserializer, self._throttles.download),
            **more,
        }


def counted(handler: Any, throttles: Throttles) -> Any:
    """A server's method, whose messages are counted."""
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

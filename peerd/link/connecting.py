"""Opens gRPC channels past the tunnel, and notices when one breaks."""

from __future__ import annotations

import contextlib
import random

import grpc

from peerd.errors import PeerGoneError
from peerd.link.certificate import SERVER_NAME
from peerd.link.links import ATTEMPT_MS, CHANNEL_OPTIONS
from peerd.served_time import served_timeout

DIAL_TIMEOUT_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 600.0
KEEPALIVE_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
)
"""Keepalive pings detect a cut line. The tunnel needs none, because libp2p detects it there."""
_DIAL_OPTIONS = (
    *(option for option in CHANNEL_OPTIONS if not option[0].endswith("_backoff_ms")),
    *KEEPALIVE_OPTIONS,
    ("grpc.ssl_target_name_override", SERVER_NAME),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", ATTEMPT_MS),
)


async def connected(target: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """Return a connected channel. Raises PeerGoneError if no server answers at `target`, with these credentials if given."""
    if credentials is None:
        channel = grpc.aio.insecure_channel(target, options=_DIAL_OPTIONS)
    else:
        channel = grpc.aio.secure_channel(target, credentials, options=_DIAL_OPTIONS)
    try:
        async with served_timeout(DIAL_TIMEOUT_S):
            await _ready(channel)
    except BaseException as error:
        await channel.close(None)
        if isinstance(error, TimeoutError):
            raise PeerGoneError(f"nothing answers at {target}" + (" under the certificate that was shown" if credentials else "")) from None
        raise
    return channel


async def _ready(channel: grpc.aio.Channel) -> None:
    """Wait until the channel is connected. Raises TimeoutError once all addresses have failed."""
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        await channel.wait_for_state_change(state)
        state = channel.get_state()
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            raise TimeoutError


async def broken(channel: grpc.aio.Channel) -> None:
    with contextlib.suppress(grpc.aio.UsageError):  # raised when this process closed the channel
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)


def pause_s(failures: int) -> float:
    """Pause before what has failed so often in a row is tried again. It doubles each time; up to a quarter is taken off at random."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures, 16)) * random.uniform(0.75, 1.0)

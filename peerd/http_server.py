"""Every server of HTTP in this package: the same parser, no files, no websockets, no log of its own, and a bound on connections."""

from __future__ import annotations

from typing import Literal

import uvicorn
from starlette.types import ASGIApp

CLOSE_WITHIN_S = 1
"""How long a server that ends waits for its answers, s."""


def config_of(app: ASGIApp, most_connections: int, loop: Literal["auto", "none"] = "auto") -> uvicorn.Config:
    """The configuration of a server of `app`. `loop`: "none" where it runs in an event loop that is there already."""
    return uvicorn.Config(
        app,
        loop=loop,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=most_connections,
        timeout_graceful_shutdown=CLOSE_WITHIN_S,
    )

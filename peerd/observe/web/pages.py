"""HTTP of the dashboard: routes, the guard in front of them, and the server, which runs in the daemon's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator
from http import HTTPStatus
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peerd.background import start
from peerd.http_server import CLOSE_WITHIN_S, config_of
from peerd.observe.metrics import CONTENT_TYPE
from peerd.observe.web.guard import OPENS, SECURITY_HEADERS, Access, Asked, RateLimit, has_token, who_asks, why_refuse
from peerd.observe.web.stream import DashboardSource, Stream

ASSETS = Path(__file__).with_name("assets")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
RANGES_S = {"1h": 3600.0, "24h": 24 * 3600.0, "7d": 7 * 24 * 3600.0, "all": float("inf")}
USUAL_RANGE_S = RANGES_S["24h"]
COOKIE_AGE_S = 30 * 24 * 3600
MAX_CONNECTIONS = 256


class Guard:
    """Refuses requests before anything else is done, and adds the security headers to every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        self._limit = RateLimit()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        request = Request(scope)
        refused = why_refuse(_asked(request, self._access), self._access)
        if refused is None and self._access.public and not self._limit.allows(_address(request, self._access), time.monotonic()):
            refused = HTTPStatus.TOO_MANY_REQUESTS, "too many requests; wait a moment"
        if refused is None:
            await self._app(scope, receive, send_guarded)
        else:
            status, reason = refused
            await PlainTextResponse(reason + "\n", status)(scope, receive, send_guarded)


def _asked(request: Request, access: Access) -> Asked:
    headers: Headers = request.headers
    tokens = (request.cookies.get(access.cookie), request.query_params.get("token"), headers.get("x-peerd-token"))
    return Asked(
        method=request.method,
        path=request.url.path,
        host=headers.get("host", ""),
        origin=headers.get("origin", ""),
        tokens=tuple(token for token in tokens if token),
    )


def _address(request: Request, access: Access) -> str:
    forwarded = request.headers.getlist("x-forwarded-for") or [""]
    return who_asks(request.client.host if request.client else "", forwarded[-1], access)


class Pages:
    """The endpoints. Assets are read once, at the start."""

    def __init__(self, source: DashboardSource, stream: Stream, access: Access) -> None:
        self._source = source
        self._stream = stream
        self._access = access
        self._assets = {path.name: path.read_bytes() for path in ASSETS.iterdir() if path.suffix in TYPES}

    async def page(self, request: Request) -> Response:
        """The page. A token in the address is moved to a cookie that scripts cannot read, by a redirect."""
        if "token" in request.query_params:
            return self._welcome(has_token(_asked(request, self._access), self._access))
        return self._asset("index.html")

    async def open(self, request: Request) -> Response:
        """Exchange the code in the address, which is valid once, for the cookie."""
        return self._welcome(request.method == "GET" and self._source.take_code(request.path_params["code"]))

    def _welcome(self, knows_token: bool) -> Response:
        answer = RedirectResponse("/", HTTPStatus.SEE_OTHER)
        if knows_token:
            answer.set_cookie(self._access.cookie, self._access.token, max_age=COOKIE_AGE_S, httponly=True, samesite="strict")
        return answer

    async def asset(self, request: Request) -> Response:
        return self._asset(request.path_params["name"])

    def _asset(self, name: str) -> Response:
        content = self._assets.get(name)
        if content is None:
            return PlainTextResponse("no such page\n", HTTPStatus.NOT_FOUND)
        return Response(content, media_type=TYPES[Path(name).suffix])

    async def session(self, request: Request) -> Response:
        """The rights of the client."""
        may_act = not self._access.public and has_token(_asked(request, self._access), self._access)
        return JSONResponse({"may_act": may_act, "public": self._access.public})

    async def live(self, request: Request) -> Response:
        address = _address(request, self._access)
        reach_s = RANGES_S.get(request.query_params.get("range", ""), USUAL_RANGE_S)
        if self._stream.is_full(address):
            return PlainTextResponse("too many look at once\n", HTTPStatus.SERVICE_UNAVAILABLE)
        at_once = {"x-accel-buffering": "no"}  # keeps a proxy from buffering the events
        return StreamingResponse(self._stream.watch(address, reach_s), headers=at_once, media_type="text/event-stream")

    async def join(self, _request: Request) -> Response:
        """The address with which others join, as a line of text: what `peerd join https://HOST` reads."""
        return PlainTextResponse(self._source.join_address() + "\n")

    async def contributions(self, _request: Request) -> Response:
        return JSONResponse(await self._source.contributions())

    async def leave(self, _request: Request) -> Response:
        await self._source.leave()
        return JSONResponse({"leaving": True})

    async def pause(self, _request: Request) -> Response:
        await self._source.pause(True)
        return JSONResponse({"paused": True})

    async def resume(self, _request: Request) -> Response:
        await self._source.pause(False)
        return JSONResponse({"paused": False})

    async def metrics(self, _request: Request) -> Response:
        return Response(self._source.metrics(), headers={"content-type": CONTENT_TYPE})

    async def healthz(self, _request: Request) -> Response:
        return PlainTextResponse("ok\n")


def build(source: DashboardSource, stream: Stream, access: Access) -> ASGIApp:
    pages = Pages(source, stream, access)
    routes = [
        Route("/", pages.page),
        Route(OPENS + "{code}", pages.open),
        Route("/assets/{name}", pages.asset),
        Route("/api/session", pages.session),
        Route("/api/live", pages.live),
        Route("/join", pages.join),
        Route("/api/contributions", pages.contributions),
        Route("/api/leave", pages.leave, methods=["POST"]),
        Route("/api/pause", pages.pause, methods=["POST"]),
        Route("/api/resume", pages.resume, methods=["POST"]),
        Route("/metrics", pages.metrics),
        Route("/healthz", pages.healthz),
    ]
    return Guard(Starlette(routes=routes), access)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the daemon handles signals."""
        yield


@contextlib.asynccontextmanager
async def dashboard(listener: socket.socket, source: DashboardSource, access: Access) -> AsyncIterator[None]:
    """Serve the dashboard on a bound socket until the block ends."""
    stream = Stream(source)
    server = _Server(config_of(build(source, stream, access), MAX_CONNECTIONS, loop="none"))
    serving = start(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        stream.close()
        server.should_exit = True
        await asyncio.wait({serving}, timeout=2 * CLOSE_WITHIN_S)
        serving.cancel()

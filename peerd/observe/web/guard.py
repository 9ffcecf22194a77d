"""Who may ask the dashboard for what: pure decisions about one request.

The page is for this machine's user. Three things are kept out: other web sites that a browser has open (their Host or Origin
is not ours: DNS rebinding, cross-site requests), strangers on the network (the token, unless the dashboard is public), and too
many requests (public only). A public page is for everybody, so it is served by whatever name it is known.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from dataclasses import dataclass, field
from http import HTTPStatus

TOKEN_COOKIE = "peerd-token"  # noqa: S105 - a name
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
REQUESTS_PER_S = 10.0
BURST = 60.0
MAX_ADDRESSES = 4096
CODE_LIFE_S = 60.0
MAX_CODES = 16
OPENS = "/open/"
"""Where a code is shown; all that can be had there is the token's cookie."""
LOOPBACK_NAMES = frozenset({"localhost"})
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How the dashboard is served."""

    host: str
    port: int
    token: str
    public: bool = False

    @property
    def cookie(self) -> str:
        """Cookies know no port: each daemon's has a name of its own."""
        return f"{TOKEN_COOKIE}-{self.port}"

    @property
    def on_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What of a request matters here."""

    method: str
    path: str
    host: str
    origin: str = ""
    tokens: tuple[str, ...] = ()
    """Those it brings: in the cookie, the address or a header."""


def why_refuse(asked: Asked, access: Access) -> tuple[HTTPStatus, str] | None:
    """None when the request may go on, else the status and the reason."""
    scraped = asked.path == "/metrics" and not access.on_loopback  # scrapers know this machine by names we do not
    if not scraped and not access.public and not _is_ours(asked.host, access):
        return HTTPStatus.MISDIRECTED_REQUEST, "not by this name: use the IP address, or localhost"
    if asked.origin and asked.origin not in (f"http://{asked.host}", f"https://{asked.host}"):
        return HTTPStatus.FORBIDDEN, "another site may not ask this"
    if asked.method not in ("GET", "HEAD"):
        if access.public:
            return HTTPStatus.FORBIDDEN, "this dashboard is read-only"
        if not asked.origin or not has_token(asked, access):
            return HTTPStatus.FORBIDDEN, "this needs the token: open the address that `peerd dashboard` prints"
        return None
    open_to_all = access.public or access.on_loopback or asked.path in ("/metrics", "/healthz") or asked.path.startswith(OPENS)
    if not open_to_all and not has_token(asked, access):
        return HTTPStatus.UNAUTHORIZED, "this needs the token: open the address that `peerd dashboard` prints"
    return None


def has_token(asked: Asked, access: Access) -> bool:
    return any(hmac.compare_digest(token.encode(), access.token.encode()) for token in asked.tokens)


def who_asks(client: str, forwarded: str, access: Access) -> str:
    """The address that a request counts for.

    Behind a proxy on this machine that is whom the proxy heard, else all its visitors would share one limit. A proxy appends the
    address it sees to `forwarded` (X-Forwarded-For), so what a visitor wrote there before counts for nothing.
    """
    proxy, last = _as_address(client), forwarded.rpartition(",")[2].strip()
    passed_on = access.public and proxy is not None and proxy.is_loopback and _as_address(last) is not None
    return last if passed_on else client


def _is_ours(host: str, access: Access) -> bool:
    """An address as numbers cannot be rebound; of names only localhost is ours, and whatever the dashboard was told to listen on."""
    parts = _HOST.fullmatch(host)
    if parts is None:
        return False
    name = parts[1].strip("[]")
    if name in LOOPBACK_NAMES:
        return True
    address = _as_address(name)
    return address is not None and (address.is_loopback or not access.on_loopback)


def _as_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


@dataclass(slots=True)
class Codes:
    """Codes that stand for the token, each once and for a minute: a browser's command line, where one goes, is for all users to see."""

    _until_s: dict[str, float] = field(default_factory=dict)

    def add(self, code: str, now_s: float) -> None:
        """The oldest goes where there are many."""
        self._until_s[code] = now_s + CODE_LIFE_S
        if len(self._until_s) > MAX_CODES:
            del self._until_s[next(iter(self._until_s))]

    def take(self, code: str, now_s: float) -> bool:
        """Whether it holds; from now on it does not."""
        return now_s < self._until_s.pop(code, now_s)


@dataclass(slots=True)
class RateLimit:
    """A bucket of requests per address, that fills up again."""

    per_s: float = REQUESTS_PER_S
    burst: float = BURST
    _left: dict[str, tuple[float, float]] = field(default_factory=dict)

    def allows(self, address: str, now_s: float) -> bool:
        left, then_s = self._left.pop(address, (self.burst, now_s))
        left = min(self.burst, left + (now_s - then_s) * self.per_s)
        self._left[address] = (max(0.0, left - 1), now_s)
        if len(self._left) > MAX_ADDRESSES:
            del self._left[next(iter(self._left))]
        return left >= 1

"""Access control of the dashboard: pure decisions about one request.

The page is for this machine's user. The guard refuses other web sites that a browser has open (DNS rebinding and cross-site requests,
recognised by Host and Origin), requests from the network without the token (unless the dashboard is public), and too many requests
(public only). A public page is served under any host name.
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
"""Path under which a code is exchanged for the token's cookie, and nothing else is served."""
LOOPBACK_NAMES = frozenset({"localhost"})
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Address, token and mode of the dashboard."""

    host: str
    port: int
    token: str
    public: bool = False

    @property
    def cookie(self) -> str:
        """Name of this daemon's cookie. It contains the port, because browsers share cookies between the ports of a host."""
        return f"{TOKEN_COOKIE}-{self.port}"

    @property
    def on_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The parts of a request that decide about access."""

    method: str
    path: str
    host: str
    origin: str = ""
    tokens: tuple[str, ...] = ()
    """The tokens it carries, in the cookie, the address or a header."""


def why_refuse(asked: Asked, access: Access) -> tuple[HTTPStatus, str] | None:
    """The status and the reason of a refusal, or None if the request is allowed."""
    scraped = asked.path == "/metrics" and not access.on_loopback  # scrapers may use host names unknown to this daemon
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
    """The address whose rate limit a request counts towards.

    Behind a proxy on this machine it is the proxy's client; otherwise all its visitors would share one limit. A proxy appends its
    client's address to `forwarded` (X-Forwarded-For), so only the last entry is trusted.
    """
    proxy, last = _as_address(client), forwarded.rpartition(",")[2].strip()
    passed_on = access.public and proxy is not None and proxy.is_loopback and _as_address(last) is not None
    return last if passed_on else client


def _is_ours(host: str, access: Access) -> bool:
    """True if the Host header cannot come from DNS rebinding: a numeric address that the dashboard listens on, or localhost."""
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
    """Codes that replace the token once, for a minute. All users of a machine can read a browser's command line, so it gets a code."""

    _until_s: dict[str, float] = field(default_factory=dict)

    def add(self, code: str, now_s: float) -> None:
        """Add a code. If there are too many, the oldest is dropped."""
        self._until_s[code] = now_s + CODE_LIFE_S
        if len(self._until_s) > MAX_CODES:
            del self._until_s[next(iter(self._until_s))]

    def take(self, code: str, now_s: float) -> bool:
        """True if the code is valid. It is invalid from now on."""
        return now_s < self._until_s.pop(code, now_s)


@dataclass(slots=True)
class RateLimit:
    """A token bucket for each address."""

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

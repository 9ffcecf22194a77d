"""Reading a small page that somebody publishes: over https, or from this machine."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import urllib.error
import urllib.parse
import urllib.request
from typing import IO, TYPE_CHECKING

from peerd.errors import AddressError, UnreachableError

if TYPE_CHECKING:
    from email.message import Message

TIMEOUT_S = 15.0
REMEDY = "ask whoever gave you the link for another one"


def is_link(text: str) -> bool:
    return text.startswith(("https://", "http://", "peerd://"))


def secure_parts(link: str, remedy: str = REMEDY) -> urllib.parse.SplitResult:
    """The parts of a link; `peerd://` stands for https. Raises AddressError.

    Plain http is taken only on this machine: anybody on the way could change the page.
    """
    try:
        parts = urllib.parse.urlsplit(link)
    except ValueError:
        raise AddressError(f"{link}: not a link to a page", remedy) from None
    if parts.scheme == "peerd":
        parts = parts._replace(scheme="https")
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_here(parts.hostname or "")):
        raise AddressError(f"{link}: a link must begin with https:// or peerd://", remedy)
    if not parts.hostname or parts.username:
        raise AddressError(f"{link}: not a link to a page", remedy)
    return parts


def _is_here(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class _SecureRedirects(urllib.request.HTTPRedirectHandler):
    """Follow a redirect only to another secure page, or on this machine."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        secure_parts(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]  # typeshed asks for HTTPMessage


def read_page(url: str, most_bytes: int, remedy: str = REMEDY) -> bytes:
    """What the page holds, and one byte more than `most_bytes` of a longer one. Raises UnreachableError, or AddressError for a redirect."""
    opener = urllib.request.build_opener(_SecureRedirects)
    request = urllib.request.Request(url, headers={"accept": "text/plain"})  # noqa: S310 - secure_parts lets only https and loopback pass
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            page: bytes = answer.read(most_bytes + 1)
    except urllib.error.HTTPError as error:
        with error:
            raise UnreachableError(f"{url} answers {error.code}", remedy) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UnreachableError(f"{url} cannot be read: {reason}", "are you online? " + remedy) from None
    return page

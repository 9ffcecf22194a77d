"""A short link in place of an address: a page that names the addresses at which a run is joined."""

from __future__ import annotations

import contextlib
import ipaddress
import urllib.error
import urllib.parse
import urllib.request
from typing import IO, TYPE_CHECKING

from peerd.errors import AddressError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from email.message import Message

TIMEOUT_S = 15.0
MAX_BYTES = 16 * 1024
MAX_ADDRESSES = 8
USUAL_PATH = "/join"
REMEDY = "ask the organiser for the link again, or for the address itself"


def addresses_behind(given: Sequence[str]) -> tuple[str, ...]:
    """The addresses, with each link replaced by those that its page names. AddressError and UnreachableError as for an address."""
    return tuple(address for each in given for address in (_at(each) if is_link(each) else (each,)))


def is_link(text: str) -> bool:
    return text.startswith(("https://", "http://", "peerd://"))


def _at(link: str) -> tuple[str, ...]:
    url, run = url_of(link)
    return addresses_in(_read(url), run, url)


def url_of(link: str) -> tuple[str, str]:
    """The URL to read and the run id after the '#', if there is one. `peerd://` stands for https, and no path for `/join`.

    Plain http is taken only on this machine: anybody on the way could name another run. Raises AddressError.
    """
    parts = urllib.parse.urlsplit(link)
    scheme = "https" if parts.scheme == "peerd" else parts.scheme
    if scheme == "http" and not _is_here(parts.hostname or ""):
        raise AddressError(f"{link}: a link must begin with https:// or peerd://", REMEDY)
    if not parts.hostname or parts.username:
        raise AddressError(f"{link}: not a link to a page", REMEDY)
    path = parts.path if parts.path.strip("/") else USUAL_PATH
    return urllib.parse.urlunsplit((scheme, parts.netloc, path, parts.query, "")), parts.fragment


def _is_here(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def addresses_in(page: str, run: str, url: str) -> tuple[str, ...]:
    """The addresses in a page, one a line; `peerd join` may stand before one. All must name the run, if the link does."""
    lines = [line.strip().removeprefix("peerd join ").strip() for line in page.splitlines()]
    found = tuple(dict.fromkeys(line for line in lines if line.startswith("/")))[:MAX_ADDRESSES]
    if not found:
        raise AddressError(f"{url} names no address", REMEDY)
    runs = {address.partition("#")[2] for address in found}
    if len(runs) > 1 or (run and runs != {run}):
        raise AddressError(f"{url} names another run than the link", REMEDY)
    return found


class _SecureRedirects(urllib.request.HTTPRedirectHandler):
    """Follow a redirect only to another secure page, or on this machine."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        url_of(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]  # typeshed asks for HTTPMessage


def _read(url: str) -> str:
    opener = urllib.request.build_opener(_SecureRedirects)
    request = urllib.request.Request(url, headers={"accept": "text/plain"})  # noqa: S310 - url_of lets only https and loopback pass
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            page: bytes = answer.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            raise UnreachableError(f"{url} answers {error.code}", REMEDY) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UnreachableError(f"{url} cannot be read: {reason}", "are you online? " + REMEDY) from None
    if len(page) > MAX_BYTES:
        raise AddressError(f"{url} has more than {MAX_BYTES} bytes: it is not a page that names addresses", REMEDY)
    return page.decode(errors="replace")

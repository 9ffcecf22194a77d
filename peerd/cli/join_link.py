"""A short link in place of an address: a page that names the addresses at which a run is joined."""

from __future__ import annotations

import urllib.parse
from typing import TYPE_CHECKING

from peerd.cli.pages import is_link, read_page, secure_parts
from peerd.errors import AddressError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_BYTES = 16 * 1024
MAX_ADDRESSES = 8
USUAL_PATH = "/join"
REMEDY = "ask the organiser for the link again, or for the address itself"


def addresses_behind(given: Sequence[str]) -> tuple[str, ...]:
    """The addresses, with each link replaced by those that its page names. AddressError and UnreachableError as for an address."""
    return tuple(address for each in given for address in (_at(each) if is_link(each) else (each,)))


def _at(link: str) -> tuple[str, ...]:
    url, run = url_of(link)
    return addresses_in(_read(url), run, url)


def url_of(link: str) -> tuple[str, str]:
    """The URL to read and the run id after the '#', if there is one. No path stands for `/join`. Raises AddressError."""
    parts = secure_parts(link, REMEDY)
    path = parts.path if parts.path.strip("/") else USUAL_PATH
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, parts.query, "")), parts.fragment


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


def _read(url: str) -> str:
    page = read_page(url, MAX_BYTES, REMEDY)
    if len(page) > MAX_BYTES:
        raise AddressError(f"{url} has more than {MAX_BYTES} bytes: it is not a page that names addresses", REMEDY)
    return page.decode(errors="replace")

"""A list of runs that look for volunteers: a text file with one run a line, each line signed by that run's organiser.

A run's id follows from its organiser's key and its name, and every address in a line ends in that id. So nobody else can describe a run, or
name other addresses for it. Which runs are in a list is the word of whoever publishes it: lines may be added, left out and put into another
order. The lines of several lists can be joined into one; of two lines about one run the one that was signed later counts.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from peerd.config.about import AboutConfig, check_name
from peerd.config.access import PEER_ID
from peerd.config.manifest import run_id
from peerd.config.organiser import is_signed_by, public_bytes
from peerd.errors import BadMessageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

HEAD = "peerd runs 1"
"""The first line of a list. Empty lines and lines that begin with '#' say nothing."""
MAX_LIST_BYTES = 1 << 18
MAX_LINE_BYTES = 1 << 12
MAX_ADDRESSES = 8
MAX_SIGNED_S = 1 << 53
_DOMAIN = b"peerd run listed\0"
_AT = re.compile(
    rf"/(?:ip4|dns4)/[A-Za-z0-9.-]{{1,253}}/tcp/[0-9]{{1,5}}/p2p/{PEER_ID}(?:/p2p-circuit/p2p/{PEER_ID})?"
    r"|https://[A-Za-z0-9.-]{1,253}(?::[0-9]{1,5})?(?:/[A-Za-z0-9._/-]{0,200})?",
    re.ASCII,
)
"""An address or a short link, without the run's id: only characters that a shell leaves alone."""


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run as its organiser describes it."""

    name: str
    run: str
    """The run's id."""
    addresses: tuple[str, ...]
    """Where it is joined: addresses or short links, each with `#` and the run's id at its end."""
    about: AboutConfig
    signed_s: int
    """When the line was signed, by its organiser's clock, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class RunList:
    runs: tuple[ListedRun, ...]
    wrong: tuple[str, ...]
    """What is wrong with the other lines, in words."""


def sign_run(key: Ed25519PrivateKey, name: str, addresses: Sequence[str], about: AboutConfig, signed_s: int) -> str:
    """The line about a run, without its end. Raises ValueError for one that `read_runs` would not take."""
    body = {"name": name, "addresses": list(addresses), "about": about.told, "signed": signed_s}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    line = " ".join((_word(public_bytes(key)), _word(key.sign(_DOMAIN + text.encode())), text))
    _read_line(line)
    return line


def read_runs(raw: bytes) -> RunList:
    """Decode a list. Lines that break a rule are left out and told. Raises BadMessageError for what is no list, or too long a one."""
    if len(raw) > MAX_LIST_BYTES:
        raise BadMessageError(f"it has more than {MAX_LIST_BYTES:,} bytes")
    head, *lines = raw.decode(errors="replace").splitlines() or [""]
    if head.strip() != HEAD:
        raise BadMessageError(f"its first line is not `{HEAD}`")
    runs, wrong = dict[str, ListedRun](), list[str]()
    for number, line in enumerate(lines, 2):
        if not says_something(line):
            continue
        try:
            found = _read_line(line)
        except ValueError as error:
            wrong.append(f"line {number}: {error}")
            continue
        known = runs.get(found.run)
        if known is None or known.signed_s < found.signed_s:
            runs[found.run] = found
    return RunList(tuple(runs.values()), tuple(wrong))


def with_run(raw: bytes, line: str) -> bytes:
    """The list with this line in place of those about the same run, at its end. Raises BadMessageError as `read_runs` does."""
    read_runs(raw)
    run = _read_line(line).run
    kept = [each for each in raw.decode(errors="replace").splitlines() if not (says_something(each) and _run_of(each) == run)]
    changed = "".join(f"{each}\n" for each in (*kept, line)).encode()
    if len(changed) > MAX_LIST_BYTES:
        raise BadMessageError(f"it would have more than {MAX_LIST_BYTES:,} bytes")
    return changed


def says_something(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("#")


def _run_of(line: str) -> str:
    """The id of the run that a line is about; empty if the line breaks a rule."""
    try:
        return _read_line(line).run
    except ValueError:
        return ""


def _read_line(line: str) -> ListedRun:
    """Verify and decode a line. Raises ValueError."""
    if len(line.encode()) > MAX_LINE_BYTES:
        raise ValueError(f"it has more than {MAX_LINE_BYTES:,} bytes")
    words = line.split(" ", 2)
    if len(words) < 3:
        raise ValueError("it has no key, signature and run")
    key, signature, body = _bytes(words[0]), _bytes(words[1]), words[2].encode()
    if not is_signed_by(key, _DOMAIN + body, signature):
        raise ValueError("it is not signed by the key that it names")
    try:
        return _decode(json.loads(body), key)
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"it is not the description of a run: {error}") from None


def _decode(document: Any, key: bytes) -> ListedRun:
    if not isinstance(document, dict) or document.keys() != {"name", "addresses", "about", "signed"}:
        raise ValueError("it has not the fields of a run")
    name, addresses, about, signed_s = (document[field] for field in ("name", "addresses", "about", "signed"))
    if not isinstance(name, str) or not isinstance(addresses, list) or not isinstance(about, dict) or type(signed_s) is not int:
        raise ValueError("a field has another type")
    if not all(isinstance(text, str) for text in (*addresses, *about.values())) or not 0 <= signed_s <= MAX_SIGNED_S:
        raise ValueError("a field has another type")
    check_name(name)
    run = run_id(key, name)
    if not 1 <= len(addresses) <= MAX_ADDRESSES:
        raise ValueError(f"it names {len(addresses)} addresses; 1 to {MAX_ADDRESSES} are allowed")
    for address in addresses:
        place, _, named = address.partition("#")
        if not _AT.fullmatch(place):
            raise ValueError(f"{address[:100]!r} is not an address")
        if named != run:
            raise ValueError("an address names another run")
    return ListedRun(name, run, tuple(addresses), AboutConfig(**about), signed_s)


def _word(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode()


def _bytes(word: str) -> bytes:
    try:
        return base64.b64decode(word, altchars=b"-_", validate=True)
    except binascii.Error:
        raise ValueError("a word is not base64") from None

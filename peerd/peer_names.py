"""How peers are called where people read: the same abbreviation of an id in every text, log, table and page."""

from __future__ import annotations

import unicodedata

SHOWN_CHARACTERS = 6
MAX_NAME_CHARACTERS = 24
_BESIDE_LETTERS = frozenset(" ._-")


def short_id(peer: str) -> str:
    """The end of a peer id. All ids have the same start."""
    return ".." + peer[-SHOWN_CHARACTERS:] if len(peer) > SHOWN_CHARACTERS + len("..") else peer


def check_name(name: str) -> None:
    """Raise a ValueError unless a peer may call itself, or its team, so. An empty name is none, and allowed.

    Letters and digits of any language, and ` ._-` after the first: a name moves no cursor, and looks like no abbreviation of an id.
    """
    if not name:
        return
    if len(name) > MAX_NAME_CHARACTERS:
        raise ValueError(f"it has {len(name)} characters; {MAX_NAME_CHARACTERS} at most")
    odd = next((character for character in name if not (character.isalnum() or character in _BESIDE_LETTERS)), None)
    if odd is not None:
        raise ValueError(f"it has the character {odd!a}; use letters, digits, spaces, and . _ - between them")
    if not (name[0].isalnum() and name[-1].isalnum()) or "  " in name or unicodedata.normalize("NFKC", name) != name:
        raise ValueError("use plain letters and digits, single spaces, and . _ - between them")


def known_as(nickname: str, team: str) -> str:
    """A peer's own name and its team, like `anna (rust)`; empty if it has told none."""
    return f"{nickname} ({team})".strip() if team else nickname

"""How peers are called where people read: the same abbreviation of an id in every text, log, table and page."""

from __future__ import annotations

SHOWN_CHARACTERS = 6


def short_id(peer: str) -> str:
    """The end of a peer id. All ids have the same start."""
    return ".." + peer[-SHOWN_CHARACTERS:] if len(peer) > SHOWN_CHARACTERS + len("..") else peer

"""Redaction of logs: hides tokens, passwords and private keys, recognised by the name before them."""

from __future__ import annotations

import re

HIDDEN = "[hidden]"
NAMES = frozenset({"token", "password", "passwd", "secret", "private_key", "organiser_private_key", "authorization", "cookie", "api_key"})
_NAMED = re.compile(rf"""(?i)\b({"|".join(sorted(NAMES))})\b(["']?\s*[=:]\s*["']?)([^\s"'&;,}}]+)""")
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL)


def redacted(text: str) -> str:
    """The text with every named secret hidden."""
    return _NAMED.sub(rf"\1\2{HIDDEN}", _PEM.sub(HIDDEN, text))


def redacted_field(name: str, value: object) -> object:
    """The value of a log field, hidden if its name is that of a secret, and redacted if its text contains one."""
    if name.lower() in NAMES:
        return HIDDEN
    return redacted(value) if isinstance(value, str) else value

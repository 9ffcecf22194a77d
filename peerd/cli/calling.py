"""Commands in peerd's output, written as this user has to type them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

NAMED_BY = "PEERD_CALLED_AS"
"""The variable by which scripts/peerd says how it was called."""


def called_as() -> str:
    """`peerd` if the shell finds this program under that name, otherwise the path that was typed, quoted."""
    import shlex
    import shutil

    typed, found = Path(os.environ.get(NAMED_BY) or sys.argv[0]), shutil.which("peerd")
    if typed.name != "peerd" or not typed.exists() or (found is not None and typed.samefile(found)):
        return "peerd"
    return shlex.quote(str(typed))


def pasteable(text: str) -> str:
    """The text with its commands (`peerd VERB`, `peerd --home ...`) under the name that works here."""
    name = called_as()
    if name == "peerd":
        return text
    import re

    from peerd.cli.verbs import SECTIONS

    verbs = "|".join(str(command.name) for section in SECTIONS.values() for command in section)
    return re.sub(rf"(?<![\w/.-])peerd(?= (?:--home|--help|{verbs})\b)", lambda _: name, text)

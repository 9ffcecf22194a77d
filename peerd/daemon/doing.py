"""Says what a daemon does until it can be reached: in its log, and to the command that has started it in the background."""

from __future__ import annotations

import contextlib
import json
import os

import structlog

STDOUT = 1
LOG = structlog.get_logger()


def tell_doing(text: str) -> None:
    """Log what is begun, and print it as a line of JSON where the command that started this daemon reads such lines.

    That command may have ended by now; nobody hears the line then.
    """
    LOG.info(text)
    if os.environ.get("PEERD_READY") == "steps":
        with contextlib.suppress(OSError):
            os.write(STDOUT, json.dumps({"doing": text}).encode() + b"\n")

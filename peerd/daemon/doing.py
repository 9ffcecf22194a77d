"""Says what a daemon does until it can be reached: in its log, and to the command that has started it in the background."""

from __future__ import annotations

import json
import os

import structlog

LOG = structlog.get_logger()


def tell_doing(text: str) -> None:
    """Log what is begun, and print it as a line of JSON where the command that started this daemon reads such lines."""
    LOG.info(text)
    if os.environ.get("PEERD_READY") == "steps":
        print(json.dumps({"doing": text}), flush=True)

"""What becomes of an error that no code reads: asyncio tells the event loop's exception handler of it."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path
from typing import Any

import structlog

from peerd.background import INTERNAL_ERRORS
from peerd.link.libp2p import HIVEMIND

LOG = structlog.get_logger()


def on_lost_error(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A lost error is a bug, except in hivemind's own tasks: these end with errors that nobody reads when a connection closes."""
    message, error = context["message"], context.get("exception")
    if error is None or HIVEMIND in Path(_file_of(context, error)).parents:
        LOG.debug("background task", message=message, error=repr(error))
    else:
        INTERNAL_ERRORS.report(message, error)


def _file_of(context: dict[str, Any], error: BaseException) -> str:
    """The file of the task's coroutine; without a task that of the line which raised the error."""
    task = context.get("task") or context.get("future")
    if isinstance(task, asyncio.Task):
        code = getattr(task.get_coro(), "cr_code", None)
        return code.co_filename if code is not None else ""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename if frames else ""

"""Handles errors that no code reads. asyncio passes them to the event loop's exception handler."""

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
    """Report a lost error as a bug, except in hivemind's own tasks, which end with unread errors when a connection closes."""
    message, error = context["message"], context.get("exception")
    if error is None or HIVEMIND in Path(_file_of(context, error)).parents:
        LOG.debug("background task", message=message, error=repr(error))
    else:
        INTERNAL_ERRORS.report(message, error)


def _file_of(context: dict[str, Any], error: BaseException) -> str:
    """Return the file of the task's coroutine; without a task, the file that raised the error."""
    task = context.get("task") or context.get("future")
    if isinstance(task, asyncio.Task):
        code = getattr(task.get_coro(), "cr_code", None)
        return code.co_filename if code is not None else ""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename if frames else ""

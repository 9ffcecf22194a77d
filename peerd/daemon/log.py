"""Logging: events with fields on standard error, readable on a terminal and JSON otherwise. The writer hides secrets."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from functools import cache
from typing import Any

import structlog

from peerd.config.paths import Home
from peerd.config.secret import redacted_field
from peerd.daemon.rotation import RotatingStream


def configure(home: Home, **bound: Any) -> None:
    """Bind the fields of every line (peer, stage) and choose the form. PEERD_LOG sets the level.

    If standard error is the home's log, its size is bounded.
    """
    level = getattr(logging, os.environ.get("PEERD_LOG", "info").upper(), logging.INFO)
    human = sys.stderr.isatty()
    renderer: Any = structlog.dev.ConsoleRenderer() if human else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if human else "iso", utc=not human),
            _hide_secrets,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(_stream_of(home)),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**bound)


@cache
def _stream_of(home: Home) -> Any:
    """Return the process's only stream for a home: it holds the lock."""
    return RotatingStream(sys.stderr, home)


def _hide_secrets(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {name: redacted_field(name, value) for name, value in event.items()}

"""An error that no code reads is reported, except where hivemind's own task ended with it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from types import FunctionType
from typing import Any

import pytest
from structlog.testing import capture_logs

from peerd.background import INTERNAL_ERRORS
from peerd.daemon.lost_errors import on_lost_error
from peerd.link.libp2p import HIVEMIND


async def _fail() -> None:
    raise TypeError("nobody awaits this")


def _in_file(path: str) -> Callable[[], Coroutine[Any, Any, None]]:
    """The same function, as if it stood in this file."""
    return FunctionType(_fail.__code__.replace(co_filename=path), globals())


@pytest.mark.parametrize(("fail", "level", "counted"), [(_fail, "error", 1), (_in_file(str(HIVEMIND / "p2p" / "any.py")), "debug", 0)])
async def test_the_error_of_a_task_that_nobody_awaits(fail: Callable[[], Coroutine[Any, Any, None]], level: str, counted: int) -> None:
    before, loop = INTERNAL_ERRORS.count, asyncio.get_running_loop()
    loop.set_exception_handler(on_lost_error)
    with capture_logs() as logs:
        task = loop.create_task(fail())
        await asyncio.wait({task})
        del task
        gc.collect()
    assert [line["log_level"] for line in logs] == [level]
    assert INTERNAL_ERRORS.count == before + counted


async def test_the_error_of_a_callback() -> None:
    before, loop = INTERNAL_ERRORS.count, asyncio.get_running_loop()
    loop.set_exception_handler(on_lost_error)
    with capture_logs() as logs:
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(0)
    assert "ZeroDivisionError" in logs[0]["exception"]
    assert INTERNAL_ERRORS.count == before + 1

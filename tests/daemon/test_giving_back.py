"""A daemon gives free memory back first on the thread that has used it, and goes on where that thread ends meanwhile."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from peerd.daemon import peer as module
from peerd.daemon.peer import Peer
from peerd.stage.executor import Executor, Priority


async def test_memory_goes_back_on_the_passes_thread_first_and_without_it_where_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[str]()
    monkeypatch.setattr(module, "give_back_free_memory", lambda: threads.append(threading.current_thread().name.partition("_")[0]))
    executor = Executor("passes")
    daemon: Any = SimpleNamespace(_seat=SimpleNamespace(executor=executor))
    await Peer._give_back_memory(daemon)
    assert [name == "passes" for name in threads] == [True, False]
    may_end, began = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        may_end.wait()

    passing = asyncio.ensure_future(executor.run(Priority.FORWARD, work))
    await asyncio.to_thread(began.wait)
    giving = asyncio.ensure_future(Peer._give_back_memory(daemon))
    await asyncio.sleep(0)
    executor.close()
    async with asyncio.timeout(20):
        await giving  # the job that waited behind the pass is cancelled
        await Peer._give_back_memory(daemon)
        daemon._seat = None
        await Peer._give_back_memory(daemon)
    assert "passes" not in threads[2:]
    assert len(threads) == 5
    may_end.set()
    await passing

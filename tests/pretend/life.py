"""Lives of stages on the pretend device, and how often they wait for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from peerd.stage.executor import Priority
from tests.life import Life
from tests.pretend import METERS

PRETEND = torch.device("pretend", 0)


@contextmanager
def waits_of_passes(life: Life) -> Iterator[Counter[int]]:
    """Count how often each stage's jobs wait for the device, by stage. Microbatches go through one after another."""
    found, meter = Counter[int](), METERS[0]
    with ExitStack() as stack:
        for stage, executor in enumerate(life.executors):
            run = executor.run

            async def counting(
                priority: Priority, work: Callable[[], Any], step: int = 0, stage: int = stage, run: Callable[..., Any] = run
            ) -> Any:
                def counted() -> Any:
                    before = meter.num_waits
                    try:
                        return work()
                    finally:
                        found[stage] += meter.num_waits - before

                return await run(priority, counted, step)

            executor.run = counting  # type: ignore[method-assign]
            stack.callback(setattr, executor, "run", run)
        yield found

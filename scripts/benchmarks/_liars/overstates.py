"""Computes slowly, and its record claims that it is a hundred times as fast."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from peerd.daemon.peer import Peer
from peerd.stage.calls import StageService

TIMES = 100.0


async def lie(_peer: Peer, arguments: Mapping[str, Any]) -> None:
    honest, measured = StageService.backpropagate, StageService.throughput

    async def backpropagate(self: StageService, *given: Any) -> Any:
        await asyncio.sleep(float(arguments["slower_s"]))
        return await honest(self, *given)

    setattr(StageService, "backpropagate", backpropagate)  # noqa: B010 - the class is another room's
    setattr(StageService, "throughput", property(lambda self: TIMES * measured.__get__(self)))  # noqa: B010

"""Computes slowly, and says that every microbatch only waited its turn: its response time seems to be 0."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peerd.daemon.peer import Peer
from peerd.stage.calls import StageService


async def lie(_peer: Peer, arguments: Mapping[str, Any]) -> None:
    honest = StageService.backpropagate

    async def backpropagate(self: StageService, *given: Any) -> Any:
        await asyncio.sleep(float(arguments["slower_s"]))
        return replace(await honest(self, *given), queued_s=1e9)

    setattr(StageService, "backpropagate", backpropagate)  # noqa: B010 - the class is another room's

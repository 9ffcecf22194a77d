"""Does its share of a step, and never joins a round: proposals to it are never answered, and it proposes none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from peerd.averaging.rounds import Rounds
from peerd.daemon.peer import Peer

PAUSE_S = 1.0


async def _never(*_arguments: Any) -> Any:
    await asyncio.Event().wait()


async def _nothing(*_arguments: Any) -> str:
    await asyncio.sleep(PAUSE_S)
    return "this peer leads no round"


async def lie(_peer: Peer, _arguments: Mapping[str, Any]) -> None:
    setattr(Rounds, "propose", _never)  # noqa: B010 - the class is another room's
    setattr(Rounds, "lead", _nothing)  # noqa: B010

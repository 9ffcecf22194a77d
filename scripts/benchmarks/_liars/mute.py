"""Joins each round and leads when it is its turn, and says nothing in it: it sends no chunk, tells no judge, and judges nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from peerd.averaging.open_round import OpenRound
from peerd.averaging.rounds import Rounds
from peerd.daemon.peer import Peer
from peerd.errors import WrongStateError


async def _never(*_arguments: Any) -> None:
    await asyncio.Event().wait()


async def _no_chunk(*_arguments: Any) -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield


def _refuse(*_arguments: Any) -> Any:
    raise WrongStateError("this peer says nothing")


async def lie(_peer: Peer, _arguments: Mapping[str, Any]) -> None:
    for name in ("_give", "_take", "_beat"):
        setattr(OpenRound, name, _never)
    setattr(OpenRound, "taken", _no_chunk)  # noqa: B010 - the class is another room's
    setattr(Rounds, "beat", _refuse)  # noqa: B010

"""What a daemon is asked for while it is on its way out of a stage."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from peerd.daemon.departure import Departure, Left, Moved, Paused
from peerd.daemon.peer import Peer


class Leaving(Departure):
    """A departure from a stage without anything in it; `farewell` is what happens while others are told."""

    def __init__(self) -> None:
        super().__init__(cast(Peer, SimpleNamespace()))
        self.while_others_are_told: list[str] = []

    async def _leave_stage(self) -> bool:
        return True

    async def _keep_state(self) -> None: ...

    async def _say_farewell(self) -> None:
        for asked in self.while_others_are_told:
            getattr(self, asked)()

    def _has_successors(self) -> bool:
        return True


async def test_what_was_asked_is_done_once() -> None:
    leaving = Leaving()
    leaving.move(1)
    with pytest.raises(Moved):
        await leaving.of_stage()
    leaving.pause()
    with pytest.raises(Paused):
        await leaving.of_stage()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(leaving.of_stage(), 0.01)


@pytest.mark.parametrize("first", ["pause", "move"])
async def test_a_daemon_told_to_leave_while_it_pauses_or_moves_leaves_next(first: str) -> None:
    leaving = Leaving()
    leaving.while_others_are_told = ["ask_to_leave"]
    if first == "pause":
        leaving.pause()
    else:
        leaving.move(1)
    with pytest.raises((Paused, Moved)):
        await leaving.of_stage()
    leaving.while_others_are_told = []
    await asyncio.wait_for(leaving.of_resting(), 1)
    with pytest.raises(Left):
        await leaving.of_stage()

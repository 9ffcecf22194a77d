"""Groups of members of one stage, closed after the test. Time passes for them only while all of them wait."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from peerd.config.manifest import Manifest
from peerd.table.record import PeerId
from tests.averaging.rounds_group import AVERAGING_S, MANIFEST, MICROBATCHES, Group, fill, make_member
from tests.steady_loop import SteadyLoop, steady, steady_clock

__all__ = ["make_group", "pytest_asyncio_loop_factories", "steady_clock"]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], SteadyLoop]]:
    return {"steady": steady}


@pytest.fixture
async def make_group(tmp_path: Path) -> AsyncIterator[Callable[..., Group]]:
    groups: list[Group] = []

    def make(num_members: int, manifest: Manifest = MANIFEST, averaging_s: float = AVERAGING_S) -> Group:
        group = Group()
        groups.append(group)
        for number in range(num_members):
            peer = PeerId(f"member{number}")
            group.members[peer] = make_member(group, peer, tmp_path / peer, manifest, averaging_s)
            fill(group.members[peer].state, range(number, MICROBATCHES, num_members))
        return group

    yield make
    for group in groups:
        for member in group.members.values():
            member.rounds.shut()
            member.executor.close()

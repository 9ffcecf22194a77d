"""A copy of the state that one caller reads slowly, or not at all, is soon given to others: hole 83."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
import torch

from peerd.errors import BusyError, PeerGoneError
from peerd.policy.route.yielding import IN_FLIGHT_BYTES
from peerd.policy.step.following import Followers
from peerd.stage.executor import Executor, Priority
from peerd.stage.snapshots import SHARED_STEPS, SnapshotServer
from peerd.stage.state import StageState
from peerd.table.record import PeerId, PeerRecord
from peerd.wire.deliveries import SLOWEST_BYTES_PER_S
from peerd.wire.messages import StateRequest
from tests.strategies import view_of
from tests.tiny_run import tiny_manifest
from tests.wire.lent import sent

PATIENCE_S = 15.0
JOINER = PeerId("joiner")


@pytest.fixture
async def server() -> AsyncIterator[tuple[SnapshotServer, StageState, Executor]]:
    executor, record = Executor(), PeerRecord(peer=PeerId("me"))
    state = StageState(tiny_manifest(), record, torch.device("cpu"), lambda: view_of(record))
    yield SnapshotServer(state, executor, Followers(), PATIENCE_S), state, executor
    executor.close()


async def later(snapshots: SnapshotServer, state: StageState, executor: Executor) -> None:
    for _ in range(SHARED_STEPS + 1):
        await executor.run(Priority.CONTROL, state.skip_step)
    snapshots.forget()


@pytest.mark.parametrize("breaks", [False, True])
async def test_hole_83_one_caller_that_reads_slowly_or_breaks_off_holds_one_copy_of_the_state_and_not_both(
    server: tuple[SnapshotServer, StageState, Executor], breaks: bool
) -> None:
    snapshots, state, executor = server
    state.serve()
    held = []
    for _ in range(2):
        _, lending = await snapshots.snapshot(PeerId("liar"), StateRequest(stage=0))
        if breaks:
            with lending:
                lending.chunk(0)
        held.append(lending)
        await later(snapshots, state, executor)
    header, lending = await snapshots.snapshot(JOINER, StateRequest(stage=0))
    assert header.step == 2 * (SHARED_STEPS + 1)
    await later(snapshots, state, executor)
    with pytest.raises(BusyError):
        await snapshots.snapshot(PeerId("liar"), StateRequest(stage=0))
    assert sent(header, lending), "the joiner's copy is not taken back for it"
    if not breaks:
        assert held[1].chunk(0)
        with pytest.raises(PeerGoneError):
            held[0].chunk(0)


async def test_hole_83_a_copy_whose_reader_lets_its_giver_wait_goes_to_others_once_it_has_had_its_time(
    server: tuple[SnapshotServer, StageState, Executor],
) -> None:
    snapshots, state, executor = server
    state.serve()
    held = []
    for name in ("liar", "accomplice"):
        held.append((await snapshots.snapshot(PeerId(name), StateRequest(stage=0)))[1])
        await later(snapshots, state, executor)
    with pytest.raises(BusyError):
        await snapshots.snapshot(JOINER, StateRequest(stage=0))
    for lending in held:
        lending._began_s -= 2 * (PATIENCE_S + (IN_FLIGHT_BYTES + lending._num_bytes) / SLOWEST_BYTES_PER_S)
    with pytest.raises(BusyError):
        await snapshots.snapshot(JOINER, StateRequest(stage=0))  # this peer's own line is slow: none of them let it wait
    held[1]._waited_s = 0.9 * (time.monotonic() - held[1]._began_s)
    header, lending = await snapshots.snapshot(JOINER, StateRequest(stage=0))
    assert sent(header, lending)
    assert held[0].chunk(0)
    with pytest.raises(PeerGoneError):
        held[1].chunk(0)

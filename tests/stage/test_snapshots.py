"""Giving a state: immutable, hashed, in few copies that all joiners share."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from safetensors.torch import load

from peerd.config.manifest import Manifest, ModelConfig
from peerd.errors import BadMessageError, BusyError, NotFiniteError, WrongStateError
from peerd.policy.step.following import Followers
from peerd.policy.step.sketching import MAKING_S, PAUSE
from peerd.stage.executor import Executor, Priority
from peerd.stage.snapshots import SHARED_STEPS, SnapshotServer, identity_of
from peerd.stage.spool import Spools
from peerd.stage.state import StageState
from peerd.swarm.clock import clock_s
from peerd.table.record import Lineage, PeerId, PeerRecord
from peerd.wire.deliveries import Lending
from peerd.wire.messages import Snapshot, StateRequest
from tests.strategies import view_of
from tests.tiny_run import tiny_manifest
from tests.wire.lent import files_of, sent

PATIENCE_S = 15.0
JOINER, OTHER_SEED = PeerId("joiner"), bytes([1] * 16)


@pytest.fixture
def manifest() -> Manifest:
    """More than a chunk of state."""
    return replace(tiny_manifest(), model=ModelConfig(num_layers=1, d_model=256, num_heads=2, d_ff=512))


@pytest.fixture
async def server(manifest: Manifest) -> AsyncIterator[tuple[SnapshotServer, StageState, Executor]]:
    executor, record = Executor(), PeerRecord(peer=PeerId("me"))
    state = StageState(manifest, record, torch.device("cpu"), lambda: view_of(record))
    yield SnapshotServer(state, executor, Followers(), PATIENCE_S), state, executor
    executor.close()


async def test_a_joiner_has_no_state_to_give(server: tuple[SnapshotServer, StageState, Executor]) -> None:
    snapshots, state, _ = server
    with pytest.raises(WrongStateError):
        await snapshots.snapshot(JOINER, StateRequest(stage=0))
    state.serve()
    with pytest.raises(WrongStateError):
        await snapshots.snapshot(JOINER, StateRequest(stage=1))


async def test_joiners_of_one_step_share_one_snapshot_which_no_update_changes(
    server: tuple[SnapshotServer, StageState, Executor],
) -> None:
    snapshots, state, executor = server
    state.serve()
    (first, lending), (second, late) = await asyncio.gather(*(snapshots.snapshot(JOINER, StateRequest(stage=0)) for _ in range(2)))
    assert first is second
    chunks = sent(first, lending)
    assert len(chunks) > 1
    assert tuple(blake3(chunk).digest() for chunk in chunks) == first.chunk_hashes
    await executor.run(Priority.CONTROL, state.skip_step)
    with torch.no_grad():
        for parameter in state.holdings.module.parameters():
            parameter.add_(1.0)  # in place, as an optimizer does
    again, rest = await snapshots.snapshot(JOINER, StateRequest(stage=0, snapshot=identity_of(first.chunk_hashes), step=first.step))
    assert again is first
    assert sent(again, rest) == chunks
    assert sent(second, late) == chunks
    newest, _ = await snapshots.snapshot(JOINER, StateRequest(stage=0))
    assert newest.step == 1


async def test_a_joiner_hears_while_a_pass_of_minutes_is_under_way_and_finds_the_copy_when_it_asks_again(
    server: tuple[SnapshotServer, StageState, Executor],
) -> None:
    """A copy is made between two passes. The joiner's patience must not end before, and the donor must not look dead to it."""
    _, state, executor = server
    snapshots = SnapshotServer(state, executor, Followers(), patience_s=0.4)
    state.serve()
    begun, ends = threading.Event(), threading.Event()

    def compute() -> None:
        begun.set()
        ends.wait(10)

    passing = asyncio.ensure_future(executor.run(Priority.FORWARD, compute))
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(3):
        with pytest.raises(BusyError, match="as soon as the pass under way is over") as busy:
            await asyncio.wait_for(snapshots.snapshot(JOINER, StateRequest(stage=0)), 0.35)
        assert busy.value.retry_after_s > 0
    ends.set()
    await passing
    await executor.run(Priority.CONTROL, lambda: None)
    await executor.run(Priority.CONTROL, state.skip_step)  # the step ends with that pass
    snapshots.forget()
    executor.close()  # no other copy can be made
    header, lending = await asyncio.wait_for(snapshots.snapshot(JOINER, StateRequest(stage=0)), 0.35)
    assert header.step == 0
    assert sent(header, lending)


async def test_copies_for_joiners_are_bounded_and_shared(server: tuple[SnapshotServer, StageState, Executor]) -> None:
    """A download takes many steps, so a copy for each joiner's step would be a copy of the state for each joiner."""
    snapshots, state, executor = server
    state.serve()

    async def ask_at(step: int) -> tuple[Snapshot, Lending]:
        while state.record.step < step:
            await executor.run(Priority.CONTROL, state.skip_step)
            snapshots.forget()
        return await snapshots.snapshot(PeerId(f"joiner at {step}"), StateRequest(stage=0))

    first, second = await ask_at(0), await ask_at(1)
    third, fourth = await ask_at(2), await ask_at(3)
    assert [made[0].step for made in (first, second, third, fourth)] == [0, 1, 1, 1]
    assert second[0] is third[0] is fourth[0]
    with pytest.raises(BusyError, match="at most 2 copies"):
        await ask_at(4)
    again = await snapshots.snapshot(JOINER, StateRequest(stage=0, snapshot=identity_of(first[0].chunk_hashes), step=first[0].step))
    assert again[0] is first[0], "a joiner goes on with its own"
    for lent in (first, again):
        sent(*lent)
    newest = await ask_at(4)
    assert newest[0].step == 4
    with pytest.raises(BusyError):
        await ask_at(7)


async def test_a_joiner_that_gets_no_copy_hears_when_the_present_downloads_will_be_over(
    server: tuple[SnapshotServer, StageState, Executor],
) -> None:
    snapshots, state, executor = server
    state.serve()
    under_way = []
    for name in ("first", "second"):
        under_way.append(await snapshots.snapshot(PeerId(name), StateRequest(stage=0)))
        for _ in range(SHARED_STEPS + 1):
            await executor.run(Priority.CONTROL, state.skip_step)
        snapshots.forget()
    with pytest.raises(BusyError) as unknown:
        await snapshots.snapshot(JOINER, StateRequest(stage=0))
    assert unknown.value.retry_after_s == PATIENCE_S, "nothing has been sent yet"
    for (header, lending), elapsed_s in zip(under_way, (20.0, 60.0), strict=True):
        chunk_bytes = len(lending.chunk(0))
        lending._began_s = time.monotonic() - elapsed_s
        assert header.num_bytes > 2 * chunk_bytes
    with pytest.raises(BusyError) as busy:
        await snapshots.snapshot(JOINER, StateRequest(stage=0))
    assert busy.value.retry_after_s == pytest.approx(20.0 * (under_way[0][0].num_bytes / chunk_bytes - 1), rel=0.05)
    for lent in under_way:
        for number in range(1, len(lent[0].chunk_hashes)):
            lent[1].chunk(number)
        lent[1].__exit__()


async def test_a_copy_outlives_a_broken_download_for_a_while_and_a_whole_one_not_at_all(
    server: tuple[SnapshotServer, StageState, Executor],
) -> None:
    """The joiner goes on where it stopped, though the stage has finished steps meanwhile."""
    snapshots, state, executor = server
    state.serve()
    snapshots._patience_s = 4.0
    header, lending = await snapshots.snapshot(JOINER, StateRequest(stage=0))
    with lending:
        first = lending.chunk(0)
    for _ in range(SHARED_STEPS + 1):
        await executor.run(Priority.CONTROL, state.skip_step)
    snapshots.forget()
    again, rest = await snapshots.snapshot(JOINER, StateRequest(stage=0, snapshot=identity_of(header.chunk_hashes), step=header.step))
    assert again is header
    chunks = sent(again, rest)
    assert chunks[0] == first
    assert tuple(blake3(chunk).digest() for chunk in chunks) == header.chunk_hashes
    assert len(snapshots._alive()) == 1
    async with asyncio.timeout(30):
        while snapshots._alive():  # noqa: ASYNC110 - memory that is freed sets no event
            await asyncio.sleep(0.05)


async def test_averages_are_kept_for_a_joiner_from_the_moment_that_it_asks(
    manifest: Manifest, server: tuple[SnapshotServer, StageState, Executor]
) -> None:
    snapshots, state, executor = server
    state.serve()

    def needed_from() -> int | None:
        return snapshots._followers.needed_from(view_of(state.record), state.record, clock_s())

    header, lending = await snapshots.snapshot(JOINER, StateRequest(stage=0))
    for _ in range(9):
        await executor.run(Priority.CONTROL, state.skip_step)
    assert needed_from() == 0
    sent(header, lending)
    assert needed_from() == 0, "it has yet to load the state, and to catch up"
    _, lending = await snapshots.snapshot(PeerId("other"), StateRequest(stage=0, tied_only=True))
    assert needed_from() == 0


async def test_a_snapshot_and_a_checkpoint_of_one_step_are_one_copy_of_the_state_and_the_next_step_another(
    server: tuple[SnapshotServer, StageState, Executor],
) -> None:
    snapshots, state, executor = server
    state.serve()
    await snapshots.snapshot(JOINER, StateRequest(stage=0))
    ((_, file),) = snapshots._alive()
    checkpoint = await snapshots.own()
    addresses = {tensor.data_ptr() for tensor in checkpoint.tensors.values()}
    assert {np.frombuffer(piece, np.uint8).ctypes.data for piece in file.pieces[1:]} == addresses
    assert addresses.isdisjoint({parameter.data_ptr() for parameter in state.holdings.module.parameters()})
    assert await snapshots.own() is checkpoint
    await executor.run(Priority.CONTROL, state.skip_step)
    assert (await snapshots.own()).step == checkpoint.step + 1


@pytest.mark.parametrize("is_stored", [False, True])
async def test_what_is_served_can_be_loaded_and_is_equal_to_the_bit(
    manifest: Manifest, server: tuple[SnapshotServer, StageState, Executor], tmp_path: Path, is_stored: bool
) -> None:
    snapshots, state, _ = server
    if is_stored:
        snapshots._spools = Spools(tmp_path, least_bytes=0)
    state.serve()
    state.skip_step()  # so that there are previous parameters, too
    snapshot, lending = await snapshots.snapshot(JOINER, StateRequest(stage=0))
    assert snapshots._alive()[0][1].is_stored == is_stored
    other = StageState(replace(manifest, seed=9), PeerRecord(peer=PeerId("other")), torch.device("cpu"), lambda: view_of(state.record))
    main, previous = files_of(snapshot, b"".join(sent(snapshot, lending)))
    other.load(load(main), snapshot.step, snapshot.lineage, ())
    assert other.holdings.previous is None
    other.holdings.take_previous(load(previous))
    theirs, mine = other.holdings.tensors(other.record), state.holdings.tensors(state.record)
    assert {name.partition("/")[0] for name in theirs} >= {"parameters", "previous", "optimizer"}
    assert theirs.keys() == mine.keys()
    assert all(torch.equal(theirs[name], mine[name]) for name in mine)


async def test_a_state_that_is_not_finite_is_not_given(server: tuple[SnapshotServer, StageState, Executor]) -> None:
    """A joiner would refuse it after the whole download, blame its donor, and ask again."""
    snapshots, state, _ = server
    state.serve()
    with torch.no_grad():
        next(state.holdings.module.parameters()).fill_(torch.inf)
    with pytest.raises(NotFiniteError, match="diverged"):
        await snapshots.snapshot(JOINER, StateRequest(stage=0))


def test_state_of_another_stage_is_refused_and_changes_nothing(manifest: Manifest) -> None:
    state = StageState(manifest, PeerRecord(peer=PeerId("me")), torch.device("cpu"), lambda: view_of(state.record))
    before = state.holdings.tensors(state.record)
    for change in ({"odd/x": torch.zeros(1)}, {"parameters/x": torch.zeros(1)}, {"optimizer/x": torch.zeros(1)}):
        with pytest.raises(BadMessageError):
            state.load({**before, **change}, 5, Lineage(), ())
    broken = {name: torch.full_like(value, torch.nan) for name, value in before.items()}
    with pytest.raises(BadMessageError, match="not finite"):
        state.load(broken, 5, Lineage(), ())
    after = state.holdings.tensors(state.record)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert state.record.step == 0


async def serves_in_a_pass(
    server: tuple[SnapshotServer, StageState, Executor],
) -> tuple[SnapshotServer, threading.Event, asyncio.Future[bool]]:
    """One that serves, while a pass that has begun goes on until the event is set."""
    snapshots, state, executor = server
    state.serve()
    begun, ends = threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return ends.wait(PATIENCE_S)

    passing = asyncio.ensure_future(executor.run(Priority.CONTROL, work))
    await asyncio.sleep(0)
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    return snapshots, ends, passing


async def test_hole_74_who_asks_for_a_sketch_and_hangs_up_gets_no_other_one_made(
    server: tuple[SnapshotServer, StageState, Executor],
) -> None:
    """Not even some time later, while the first one waits for a pass."""
    snapshots, ends, passing = await serves_in_a_pass(server)
    asked = asyncio.ensure_future(snapshots.sketch(PeerId("liar"), 0, bytes(16)))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await asyncio.sleep(0.3)
    with pytest.raises(BusyError, match="others"):
        await asyncio.wait_for(snapshots.sketch(PeerId("liar"), 0, OTHER_SEED), 1.0)
    ends.set()
    assert await passing
    while True:
        try:
            assert (await snapshots.sketch(PeerId("liar"), 0, OTHER_SEED)).sums
            return
        except BusyError as error:
            await asyncio.sleep(error.retry_after_s)


async def test_a_sketch_that_waits_for_a_longer_pass_than_a_call_may_take_is_told_to_who_asks_for_it_again(
    server: tuple[SnapshotServer, StageState, Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a joiner would never hear it, where passes take long: each time it asks another one would be made, for nobody."""
    monkeypatch.setattr(server[0], "_patience_s", 2.0)
    snapshots, ends, passing = await serves_in_a_pass(server)
    began_s = clock_s()
    with pytest.raises(BusyError, match="makes the sketch") as busy:
        await snapshots.sketch(JOINER, 0, bytes(16))
    assert clock_s() - began_s < PATIENCE_S / 3
    assert busy.value.retry_after_s == MAKING_S
    ends.set()
    assert await passing
    told = None
    while told is None:
        try:
            told = await snapshots.sketch(JOINER, 0, bytes(16))
        except BusyError as error:
            assert error.retry_after_s == MAKING_S
    with pytest.raises(BusyError, match="others"):  # the next one would be of a later state, so it is made anew
        await snapshots.sketch(JOINER, 0, bytes(16))


async def test_a_sketch_that_nobody_comes_for_is_not_kept(
    server: tuple[SnapshotServer, StageState, Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server[0], "_patience_s", 0.1)
    snapshots, ends, passing = await serves_in_a_pass(server)
    with pytest.raises(BusyError, match="makes the sketch"):
        await snapshots.sketch(JOINER, 0, bytes(16))
    ends.set()
    assert await passing
    async with asyncio.timeout(PATIENCE_S):
        while snapshots._sketches:  # noqa: ASYNC110 - a timer that has run sets no event
            await asyncio.sleep(0.01)


async def test_hole_74_a_sketch_that_waits_for_a_pass_makes_others_wait_for_its_own_time_alone(
    server: tuple[SnapshotServer, StageState, Executor],
) -> None:
    snapshots, ends, passing = await serves_in_a_pass(server)
    told = asyncio.ensure_future(snapshots.sketch(JOINER, 0, bytes(16)))
    await asyncio.sleep(0.5)
    ended_s = clock_s()
    ends.set()
    assert await passing
    await told
    own_s = clock_s() - ended_s
    with pytest.raises(BusyError) as busy:
        await snapshots.sketch(PeerId("another"), 0, bytes(16))
    assert busy.value.retry_after_s <= max(0.1, PAUSE * own_s), "however short, it is not asked again at once"

"""Handing state over: immutable, hashed, from another donor when one fails; and what a lying donor cannot do."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load, save

from peerd.config.manifest import Manifest, ModelConfig
from peerd.errors import BadMessageError, BusyError, NotFiniteError, PeerGoneError, StageError, WrongStateError
from peerd.link.links import CHUNK_BYTES
from peerd.policy.step.following import Followers
from peerd.stage.download import Downloader
from peerd.stage.executor import Executor, Priority
from peerd.stage.history import HistoryEntry
from peerd.stage.snapshots import SHARED_STEPS, Downloaded, SnapshotServer, identity_of
from peerd.stage.state import StageState
from peerd.swarm.clock import clock_s
from peerd.swarm.identity import Identity
from peerd.swarm.membership import Membership
from peerd.table.record import Lineage, PeerId, PeerRecord, Phase, RunId
from peerd.wire.chunks import chunks_of
from peerd.wire.clients import StateClient, StateRequest
from peerd.wire.deliveries import Delivery
from peerd.wire.messages import Snapshot
from tests.strategies import view_of
from tests.tiny_run import tiny_manifest

MOST_BYTES = 1 << 30
PATIENCE_S = 15.0
JOINER = PeerId("joiner")
NEAR, FAR = PeerId("a-near"), PeerId("b-far")


@dataclass
class Donor:
    """A peer that gives the state of a step, and breaks off before chunk `breaks_at`."""

    step: int
    data: bytes
    breaks_at: int | None = None
    header_changes: dict[str, Any] = field(default_factory=dict)
    asked: list[StateRequest] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    """For how long it says that it is busy, at the first requests."""

    @property
    def header(self) -> Snapshot:
        hashes = tuple(blake3(chunk).digest() for chunk in chunks_of([self.data]))
        sound = Snapshot(
            step=self.step, lineage=Lineage(0, b"x"), num_bytes=len(self.data), chunk_hashes=hashes, metadata=json.dumps([[0, 5.5, 100]])
        )
        return replace(sound, **self.header_changes)

    async def chunks(self, first: int) -> AsyncIterator[bytes]:
        for number, chunk in enumerate(chunks_of([self.data])):
            if number == self.breaks_at:
                raise PeerGoneError("gone in the middle")
            if number >= first:
                yield chunk


class Donors:
    """The client's side of GET_STATE, answered by paper donors."""

    def __init__(self, **donors: Donor) -> None:
        self.by_peer = {NEAR: donors["near"], **({FAR: donors["far"]} if "far" in donors else {})}

    async def get_state(self, peer: PeerId, request: StateRequest, _patience_s: float) -> tuple[Snapshot, AsyncIterator[bytes]]:
        donor = self.by_peer[peer]
        donor.asked.append(request)
        if donor.busy_s and (wait_s := donor.busy_s.pop(0)):
            raise BusyError("it gives its state to others", wait_s)
        return donor.header, donor.chunks(request.first_chunk)


def state_of(step: int, num_chunks: int = 3) -> bytes:
    """A safetensors file of a little less than `num_chunks` chunks whose values tell its step."""
    return save({"parameters/w": torch.full((num_chunks * CHUNK_BYTES // 4 - 1000,), float(step))})


def downloader(donors: Donors) -> Downloader:
    membership = Membership(Identity(Ed25519PrivateKey.generate()), RunId("r"), ttl_s=100)
    for number, (peer, donor) in enumerate(donors.by_peer.items()):
        record = PeerRecord(peer=peer, version=number, step=donor.step, phase=Phase.ACCUMULATING)
        membership.view = membership.view.merge(record, clock_s())
    return Downloader(cast(StateClient, donors), membership, 1.0)


async def download(donors: Donors, most_bytes: int = MOST_BYTES) -> Downloaded:
    return await downloader(donors).download(0, most_bytes, prefer=NEAR)


def steps_in(found: Downloaded) -> set[float]:
    return set(found.tensors["parameters/w"][:: CHUNK_BYTES // 16].tolist())


# Downloading


async def test_a_download_is_what_the_donor_holds() -> None:
    found = await download(Donors(near=Donor(3, state_of(3))))
    assert (found.step, found.lineage, steps_in(found)) == (3, Lineage(0, b"x"), {3.0})
    assert found.history == (HistoryEntry(step=0, loss=5.5, tokens=100),)


async def test_another_donor_of_the_same_snapshot_goes_on_where_the_first_stopped() -> None:
    donors = Donors(near=Donor(3, state_of(3), breaks_at=2), far=Donor(3, state_of(3)))
    assert steps_in(await download(donors)) == {3.0}
    (request,) = donors.by_peer[FAR].asked
    assert request.first_chunk == 2
    assert request.snapshot == identity_of(donors.by_peer[NEAR].header.chunk_hashes)


async def test_chunks_of_two_steps_are_never_put_together() -> None:
    """Hole 10: the second donor has committed meanwhile, and what came from the first is worth nothing any more."""
    found = await download(Donors(near=Donor(3, state_of(3), breaks_at=2), far=Donor(4, state_of(4))))
    assert (found.step, steps_in(found)) == (4, {4.0})


class CountedChunk(bytes):
    """A chunk that knows how often somebody asked for its length."""

    asked = 0

    def __len__(self) -> int:
        self.asked += 1
        return super().__len__()


async def test_the_progress_of_a_download_costs_each_chunk_no_more_than_the_first() -> None:
    chunks: list[CountedChunk] = []

    class CountingDonor(Donor):
        async def chunks(self, first: int) -> AsyncIterator[bytes]:
            async for chunk in super().chunks(first):
                chunks.append(CountedChunk(chunk))
                yield chunks[-1]

    whole = state_of(3, num_chunks=8)
    fetch = downloader(Donors(near=CountingDonor(2, whole, breaks_at=3), far=CountingDonor(3, whole)))
    await fetch.download(0, MOST_BYTES, prefer=NEAR)
    assert fetch.bytes_done == fetch.bytes_total == len(whole)
    assert max(chunk.asked for chunk in chunks) <= 1


async def test_a_donor_that_fails_before_its_first_chunk_costs_nothing() -> None:
    donors = Donors(near=Donor(3, state_of(3), breaks_at=0), far=Donor(4, state_of(4)))
    assert steps_in(await download(donors)) == {4.0}
    assert len(donors.by_peer[FAR].asked) == 1


async def test_when_no_donor_can_give_it_the_last_reason_is_told() -> None:
    with pytest.raises(StageError, match=r"b-far: gone in the middle; wait for another"):
        await download(Donors(near=Donor(3, state_of(3), breaks_at=1), far=Donor(3, state_of(3), breaks_at=2)))


async def test_a_joiner_waits_for_a_busy_donor_as_long_as_that_says_and_no_longer() -> None:
    busy, far = Donor(3, state_of(3), busy_s=[1.1, 0.0]), Donor(3, state_of(3), breaks_at=1)
    began_s = time.monotonic()
    assert steps_in(await download(Donors(near=busy, far=far))) == {3.0}
    assert 1.1 <= time.monotonic() - began_s < 10
    assert (len(busy.asked), len(far.asked)) == (2, 1)


async def test_a_joiner_does_not_wait_for_a_busy_donor_while_another_gives_the_state() -> None:
    assert steps_in(await download(Donors(near=Donor(3, state_of(3), busy_s=[600.0]), far=Donor(3, state_of(3))))) == {3.0}


LIES: dict[str, dict[str, Any]] = {
    "another hash": {"chunk_hashes": (bytes(32),) * 3},
    "a hash too few": {"chunk_hashes": (bytes(32),) * 2},
    "more chunks than bytes": {"num_bytes": 10},
    "more bytes than chunks": {"num_bytes": 9 * CHUNK_BYTES},
    "no history": {"metadata": "{"},
    "an endless history": {"metadata": "[" * 100_000},
    "a loss that is not finite": {"metadata": "[[0, NaN, 1]]"},
    "a step that is not finite": {"metadata": "[[Infinity, 1.0, 1]]"},
    "a history of junk": {"metadata": '[["a"]]'},
}


@pytest.mark.parametrize("lie", sorted(LIES))
async def test_a_lying_donor_is_passed_over_for_an_honest_one(lie: str) -> None:
    found = await download(Donors(near=Donor(3, state_of(3), header_changes=LIES[lie]), far=Donor(3, state_of(3))))
    assert steps_in(found) == {3.0}


JUNK = {
    "no safetensors": b"junk" * 1000,
    "numbers of another kind": save({"parameters/w": torch.zeros(3).to(torch.float8_e4m3fn)}),
    "whole numbers": save({"parameters/w": torch.zeros(3, dtype=torch.int64)}),
}


@pytest.mark.parametrize("junk", sorted(JUNK))
async def test_junk_under_honest_hashes_is_passed_over_too(junk: str) -> None:
    donors = Donors(near=Donor(3, JUNK[junk]), far=Donor(3, state_of(3)))
    assert steps_in(await download(donors)) == {3.0}
    with pytest.raises(StageError):
        await download(Donors(near=Donor(3, JUNK[junk])))


async def test_a_state_larger_than_the_stage_can_have_is_not_even_begun() -> None:
    with pytest.raises(StageError, match="at most"):
        await download(Donors(near=Donor(3, state_of(3))), most_bytes=CHUNK_BYTES // 2)


# Serving


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
        await snapshots.snapshot(JOINER, 0)
    state.serve()
    with pytest.raises(WrongStateError):
        await snapshots.snapshot(JOINER, 1)


def sent(delivery: Delivery) -> list[bytes]:
    with delivery:
        return list(delivery)


async def test_joiners_of_one_step_share_one_snapshot_which_no_update_changes(
    server: tuple[SnapshotServer, StageState, Executor],
) -> None:
    snapshots, state, executor = server
    state.serve()
    (first, delivery), (second, late) = await asyncio.gather(*(snapshots.snapshot(JOINER, 0) for _ in range(2)))
    assert first is second
    chunks = sent(delivery)
    assert len(chunks) > 1
    assert tuple(blake3(chunk).digest() for chunk in chunks) == first.chunk_hashes
    await executor.run(Priority.CONTROL, state.skip_step)
    with torch.no_grad():
        for parameter in state.holdings.module.parameters():
            parameter.add_(1.0)  # in place, as an optimizer does
    again, rest = await snapshots.snapshot(JOINER, 0, identity_of(first.chunk_hashes), 1)
    assert again is first
    assert sent(rest) == chunks[1:]
    assert sent(late) == chunks
    newest, _ = await snapshots.snapshot(JOINER, 0)
    assert newest.step == 1


async def test_copies_for_joiners_are_bounded_and_shared(server: tuple[SnapshotServer, StageState, Executor]) -> None:
    """A download takes many steps, so a copy for each joiner's step would be a copy of the state for each joiner."""
    snapshots, state, executor = server
    state.serve()

    async def ask_at(step: int) -> tuple[Snapshot, Delivery]:
        while state.record.step < step:
            await executor.run(Priority.CONTROL, state.skip_step)
            snapshots.forget()
        return await snapshots.snapshot(JOINER, 0)

    first, second = await ask_at(0), await ask_at(1)
    third, fourth = await ask_at(2), await ask_at(3)
    assert [made[0].step for made in (first, second, third, fourth)] == [0, 1, 1, 1]
    assert second[0] is third[0] is fourth[0]
    with pytest.raises(BusyError, match="at most 2 copies"):
        await ask_at(4)
    again = await snapshots.snapshot(JOINER, 0, identity_of(first[0].chunk_hashes))
    assert again[0] is first[0], "a joiner goes on with its own"
    for delivery in (first[1], again[1]):
        sent(delivery)
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
    for _ in range(2):
        under_way.append(await snapshots.snapshot(JOINER, 0))
        for _ in range(SHARED_STEPS + 1):
            await executor.run(Priority.CONTROL, state.skip_step)
        snapshots.forget()
    with pytest.raises(BusyError) as unknown:
        await snapshots.snapshot(JOINER, 0)
    assert unknown.value.retry_after_s == PATIENCE_S, "nothing has been sent yet"
    for (header, delivery), elapsed_s in zip(under_way, (20.0, 60.0), strict=True):
        next(iter(delivery))
        delivery._began_s = time.monotonic() - elapsed_s
        assert header.num_bytes > 2 * CHUNK_BYTES
    with pytest.raises(BusyError) as busy:
        await snapshots.snapshot(JOINER, 0)
    assert busy.value.retry_after_s == pytest.approx(20.0 * (under_way[0][0].num_bytes / CHUNK_BYTES - 1), rel=0.05)
    for _, delivery in under_way:
        sent(delivery)


async def test_averages_are_kept_for_a_joiner_from_the_moment_that_it_asks(
    manifest: Manifest, server: tuple[SnapshotServer, StageState, Executor]
) -> None:
    snapshots, state, executor = server
    state.serve()

    def needed_from() -> int | None:
        return snapshots._followers.needed_from(view_of(state.record), state.record, clock_s())

    _, delivery = await snapshots.snapshot(JOINER, 0)
    for _ in range(9):
        await executor.run(Priority.CONTROL, state.skip_step)
    assert needed_from() == 0
    sent(delivery)
    assert needed_from() == 0, "it has yet to load the state, and to catch up"
    _, delivery = await snapshots.snapshot(PeerId("other"), 0, tied_only=True)
    assert needed_from() == 0


async def test_a_snapshot_and_a_checkpoint_of_one_step_are_one_copy_of_the_state_and_the_next_step_another(
    server: tuple[SnapshotServer, StageState, Executor],
) -> None:
    snapshots, state, executor = server
    state.serve()
    await snapshots.snapshot(JOINER, 0)
    ((_, pieces),) = snapshots._alive()
    checkpoint = await snapshots.own()
    addresses = {tensor.data_ptr() for tensor in checkpoint.tensors.values()}
    assert {np.frombuffer(piece, np.uint8).ctypes.data for piece in pieces[1:]} == addresses
    assert addresses.isdisjoint({parameter.data_ptr() for parameter in state.holdings.module.parameters()})
    assert await snapshots.own() is checkpoint
    await executor.run(Priority.CONTROL, state.skip_step)
    assert (await snapshots.own()).step == checkpoint.step + 1


async def test_what_is_served_can_be_loaded_and_is_equal_to_the_bit(
    manifest: Manifest, server: tuple[SnapshotServer, StageState, Executor]
) -> None:
    snapshots, state, _ = server
    state.serve()
    state.skip_step()  # so that there are previous parameters, too
    snapshot, delivery = await snapshots.snapshot(JOINER, 0)
    other = StageState(replace(manifest, seed=9), PeerRecord(peer=PeerId("other")), torch.device("cpu"), lambda: view_of(state.record))
    other.load(load(b"".join(sent(delivery))), snapshot.step, snapshot.lineage, ())
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
        await snapshots.snapshot(JOINER, 0)


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

"""Downloading a state: from several donors, from others when one fails, after a line broke; and what liars cannot do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import structlog
import torch
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import save

from peerd.errors import BadMessageError, BusyError, PeerGoneError, StageError, WrongStateError
from peerd.policy.route.admission import MOST_DONORS
from peerd.policy.route.chunk_shares import LEAST_ASKED, MOST_ASKED
from peerd.stage.download import Downloader
from peerd.stage.history import HistoryEntry
from peerd.stage.snapshots import Downloaded, identity_of
from peerd.swarm.clock import clock_s
from peerd.swarm.identity import Identity
from peerd.swarm.membership import Membership
from peerd.table.record import Lineage, PeerId, PeerRecord, Phase, RunId
from peerd.wire.chunks import state_chunk_bytes
from peerd.wire.messages import Snapshot, StateRequest
from peerd.wire.state_client import StateClient

MOST_BYTES = 1 << 30
CHUNK_BYTES = state_chunk_bytes(0)
NEAR, FAR = PeerId("a-near"), PeerId("b-far")


@dataclass
class Donor:
    """A peer that gives the state of a step, and breaks off before chunk `breaks_at`."""

    step: int
    data: bytes
    breaks_at: int | None = None
    header_changes: dict[str, Any] = field(default_factory=dict)
    asked: list[StateRequest] = field(default_factory=list)
    gave: list[int] = field(default_factory=list)
    """Numbers of the chunks that it has sent."""
    breaks_often: bool = False
    """It breaks off one chunk later each time."""
    busy_s: list[float] = field(default_factory=list)
    """For how long it says that it is busy, at the first requests."""
    chunk_bytes: int = CHUNK_BYTES
    wrong: frozenset[int] = frozenset()
    """Chunks of which it sends other bytes than the header says."""
    sends: asyncio.Event | None = None
    """It sends chunks while this is set; None: always."""
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is asked for a chunk."""
    up: int = 0
    num_open: int = 0
    """Streams that are open now."""

    @property
    def header(self) -> Snapshot:
        chunks = (self.data[start : start + self.chunk_bytes] for start in range(0, len(self.data), self.chunk_bytes))
        hashes = tuple(blake3(chunk).digest() for chunk in chunks)
        sound = Snapshot(
            step=self.step, lineage=Lineage(0, b"x"), num_bytes=len(self.data), chunk_hashes=hashes, metadata=json.dumps([[0, 5.5, 100]])
        )
        return replace(sound, **self.header_changes)

    def chunk(self, number: int) -> bytes:
        chunk = self.data[number * self.chunk_bytes : (number + 1) * self.chunk_bytes]
        return bytes(len(chunk)) if number in self.wrong else chunk


class Open:
    """A stream to a paper donor."""

    def __init__(self, donor: Donor) -> None:
        self._donor = donor
        self._asked: list[int] = []
        self.header = donor.header

    def ask(self, number: int) -> None:
        self._asked.append(number)
        self._donor.was_asked.set()

    async def take(self, num_bytes: int) -> bytes:
        donor, number = self._donor, self._asked.pop(0)
        await asyncio.sleep(0)
        if donor.sends is not None:
            await donor.sends.wait()
        if donor.breaks_at is not None and number >= donor.breaks_at:
            donor.breaks_at += donor.breaks_often
            raise PeerGoneError("gone in the middle")
        chunk = donor.chunk(number)
        if len(chunk) != num_bytes:
            raise BadMessageError(f"a chunk of {len(chunk)} bytes")
        donor.gave.append(number)
        return chunk

    async def end(self) -> None:
        assert not self._asked


class Donors:
    """The client's side of GET_STATE, answered by paper donors."""

    def __init__(self, near: Donor, **others: Donor) -> None:
        self.by_peer = {NEAR: near} | {PeerId(f"b-{name}"): donor for name, donor in others.items()}

    @contextlib.asynccontextmanager
    async def open(self, peer: PeerId, request: StateRequest, _patience_s: float) -> AsyncIterator[Open]:
        donor = self.by_peer[peer]
        donor.asked.append(request)
        if donor.busy_s and (wait_s := donor.busy_s.pop(0)):
            raise BusyError("it gives its state to others", wait_s)
        if request.snapshot and request.snapshot != identity_of(donor.header.chunk_hashes):
            raise WrongStateError(f"it is at step {donor.step}")
        donor.num_open += 1
        try:
            yield Open(donor)
        finally:
            donor.num_open -= 1


def state_of(step: int, num_chunks: int = 3) -> bytes:
    """A safetensors file of a little less than `num_chunks` chunks whose values tell its step."""
    return save({"parameters/w": torch.full((num_chunks * CHUNK_BYTES // 4 - 1000,), float(step))})


def downloader(donors: Donors, most_bytes: int = MOST_BYTES) -> Downloader:
    membership = Membership(Identity(Ed25519PrivateKey.generate()), RunId("r"), ttl_s=100)
    for number, (peer, donor) in enumerate(donors.by_peer.items()):
        record = PeerRecord(peer=peer, version=number, step=donor.step, phase=Phase.ACCUMULATING, up=donor.up)
        membership.view.merge(record, clock_s())
    return Downloader(cast(StateClient, donors), membership, lambda _stage, _tied_only: most_bytes, 1.0)


async def download(donors: Donors, most_bytes: int = MOST_BYTES) -> Downloaded:
    return await downloader(donors, most_bytes).download(0, prefer=NEAR)


def steps_in(found: Downloaded) -> set[float]:
    return set(found.tensors["parameters/w"][:: CHUNK_BYTES // 16].tolist())


async def test_a_download_is_what_the_donor_holds() -> None:
    found = await download(Donors(near=Donor(3, state_of(3))))
    assert (found.step, found.lineage, steps_in(found)) == (3, Lineage(0, b"x"), {3.0})
    assert found.history == (HistoryEntry(step=0, loss=5.5, tokens=100),)


async def test_another_donor_of_the_same_snapshot_sends_what_the_first_had_left() -> None:
    donors = Donors(near=Donor(3, state_of(3, num_chunks=9), breaks_at=2), far=Donor(3, state_of(3, num_chunks=9)))
    assert steps_in(await download(donors)) == {3.0}
    assert sorted(set(donors.by_peer[NEAR].gave) | set(donors.by_peer[FAR].gave)) == [*range(9)]


async def test_each_of_several_donors_sends_a_part_and_no_chunk_is_sent_twice_before_the_end() -> None:
    sends = asyncio.Event()
    donors = Donors(**{name: Donor(3, state_of(3, num_chunks=60), sends=sends) for name in ("near", "far", "third")})
    downloading = asyncio.create_task(download(donors))
    for donor in donors.by_peer.values():
        await donor.was_asked.wait()
    sends.set()
    assert steps_in(await downloading) == {3.0}
    gave = [donor.gave for donor in donors.by_peer.values()]
    assert all(len(numbers) >= LEAST_ASKED for numbers in gave)
    assert sum(map(len, gave)) <= 60 + 3 * MOST_ASKED
    assert all(not donor.num_open for donor in donors.by_peer.values())


async def test_a_chunk_that_is_wrong_is_its_donors_fault_and_comes_from_others() -> None:
    is_found_out = asyncio.Event()
    liar = Donor(3, state_of(3, num_chunks=20), wrong=frozenset(range(20)))
    honest = Donor(3, state_of(3, num_chunks=20), sends=is_found_out)
    with structlog.testing.capture_logs() as logs:
        downloading = asyncio.create_task(download(Donors(near=liar, far=honest)))
        await asyncio.wait_for(liar.was_asked.wait(), 10)
        while liar.num_open:  # noqa: ASYNC110 - a paper donor sets no event
            await asyncio.sleep(0.01)
        is_found_out.set()
        assert steps_in(await downloading) == {3.0}
    assert {line["donor"] for line in logs if "wrong" in line["event"]} == {NEAR}
    assert len(liar.asked) == 1, "it is asked for nothing more"


async def test_a_donor_that_stands_still_is_not_waited_for() -> None:
    still = Donor(3, state_of(3, num_chunks=20), sends=asyncio.Event())
    assert steps_in(await asyncio.wait_for(download(Donors(near=still, far=Donor(3, state_of(3, num_chunks=20)))), 10)) == {3.0}
    assert (still.gave, still.num_open) == ([], 0)


async def test_a_joiner_asks_several_donors_however_slow_its_downlink_seemed_and_no_more_than_a_few() -> None:
    """A downlink that was measured while one home sent looks like that home's uplink."""
    gate = asyncio.Event()
    donors = Donors(**{name: Donor(3, state_of(3, num_chunks=60), sends=gate) for name in ("near", *map(str, range(MOST_DONORS)))})
    fetch = downloader(donors)
    me = fetch._membership.me
    fetch._membership.view.merge(PeerRecord(peer=me, version=1, up=10**6, down=10**6), clock_s())
    under_way = asyncio.ensure_future(fetch.download(0))
    while sum(donor.num_open for donor in donors.by_peer.values()) < MOST_DONORS:  # noqa: ASYNC110 - a paper donor sets no event
        await asyncio.sleep(0)
    gate.set()
    assert steps_in(await asyncio.wait_for(under_way, 10)) == {3.0}
    assert sum(bool(donor.asked) for donor in donors.by_peer.values()) == MOST_DONORS


async def test_a_donor_that_comes_later_helps() -> None:
    slow = Donor(3, state_of(3, num_chunks=20), sends=asyncio.Event())
    donors = Donors(near=slow)
    fetch = downloader(donors)
    under_way = asyncio.ensure_future(fetch.download(0))
    while not slow.num_open:  # noqa: ASYNC110 - a paper donor sets no event
        await asyncio.sleep(0)
    donors.by_peer[FAR] = Donor(3, slow.data)
    fetch._membership.view.merge(PeerRecord(peer=FAR, version=9, step=3, phase=Phase.ACCUMULATING), clock_s())
    assert steps_in(await asyncio.wait_for(under_way, 10)) == {3.0}


async def test_of_two_snapshots_that_are_offered_the_one_of_more_donors_is_taken() -> None:
    donors = Donors(near=Donor(4, state_of(4)), far=Donor(3, state_of(3)), third=Donor(3, state_of(3)))
    assert steps_in(await download(donors)) == {3.0}
    assert donors.by_peer[NEAR].gave == []


async def test_a_download_whose_connection_breaks_again_and_again_goes_on_with_the_same_donor() -> None:
    donor = Donor(3, state_of(3, num_chunks=5), breaks_at=1, breaks_often=True)
    assert steps_in(await download(Donors(near=donor))) == {3.0}
    assert (donor.gave, len(donor.asked)) == ([0, 1, 2, 3, 4], 5)


async def test_a_download_goes_on_after_a_while_in_which_no_donor_could_be_reached() -> None:
    donor = Donor(3, state_of(3), breaks_at=2)
    fetch = downloader(Donors(near=donor))
    with pytest.raises(StageError, match="gone in the middle"):
        await fetch.download(0)
    donor.breaks_at = None
    assert steps_in(await fetch.download(0)) == {3.0}
    assert donor.gave == [0, 1, 2]


async def test_chunks_of_two_steps_are_never_put_together() -> None:
    """Hole 10: the second donor has committed meanwhile, and what came from the first is worth nothing any more."""
    found = await download(Donors(near=Donor(3, state_of(3), breaks_at=2), far=Donor(4, state_of(4), busy_s=[0.1])))
    assert (found.step, steps_in(found)) == (4, {4.0})


PREVIOUS = save({"previous/w": torch.full((3 * CHUNK_BYTES // 4,), 2.0)})


@pytest.mark.parametrize("num_chunks", [1, 4])
async def test_the_previous_parameters_are_not_downloaded_until_they_are_asked_for(num_chunks: int) -> None:
    whole = state_of(3, num_chunks)
    donor = Donor(3, whole + PREVIOUS, header_changes={"previous_bytes": len(PREVIOUS)})
    fetch = downloader(Donors(near=donor))
    found = await fetch.download(0)
    assert ({*found.tensors}, steps_in(found)) == ({"parameters/w"}, {3.0})
    assert fetch.bytes_done == fetch.bytes_total == len(whole)
    assert donor.gave == [*range(-(-len(whole) // CHUNK_BYTES))]
    assert fetch.previous_s > 0
    later = await fetch.download_previous(0, NEAR)
    assert (later.step, {*later.tensors}, set(later.tensors["previous/w"].tolist())) == (3, {"previous/w"}, {2.0})


async def test_donors_that_have_just_begun_have_no_previous_parameters() -> None:
    found = await downloader(Donors(near=Donor(3, state_of(3)))).download_previous(0, NEAR)
    assert (found.step, found.tensors) == (3, {})


async def test_bytes_are_counted_as_they_come() -> None:
    donor = Donor(3, state_of(3, num_chunks=8), breaks_at=5)
    fetch = downloader(Donors(near=donor))
    with pytest.raises(StageError):
        await fetch.download(0)
    assert (fetch.bytes_done, fetch.bytes_total) == (5 * CHUNK_BYTES, len(donor.data))
    donor.breaks_at = None
    await fetch.download(0)
    assert fetch.bytes_done == fetch.bytes_total == len(donor.data)


async def test_a_donor_that_fails_before_its_first_chunk_costs_nothing() -> None:
    donors = Donors(near=Donor(3, state_of(3), breaks_at=0), far=Donor(4, state_of(4)))
    assert steps_in(await download(donors)) == {4.0}
    assert donors.by_peer[NEAR].gave == []


async def test_when_no_donor_can_give_it_the_last_reason_is_told() -> None:
    with pytest.raises(StageError, match=r": gone in the middle; wait for another"):
        await download(Donors(near=Donor(3, state_of(3), breaks_at=1), far=Donor(3, state_of(3), breaks_at=2)))


async def test_a_joiner_waits_for_a_busy_donor_as_long_as_that_says_and_no_longer() -> None:
    busy, far = Donor(3, state_of(3), busy_s=[1.1, 0.0]), Donor(3, state_of(3), breaks_at=1)
    began_s = time.monotonic()
    assert steps_in(await download(Donors(near=busy, far=far))) == {3.0}
    assert 1.1 <= time.monotonic() - began_s < 10
    assert (len(busy.asked), far.gave) == (2, [0]), "the second broke off, and sent no more when it was asked again"


async def test_a_joiner_does_not_wait_for_a_busy_donor_while_another_gives_the_state() -> None:
    assert steps_in(await download(Donors(near=Donor(3, state_of(3), busy_s=[600.0]), far=Donor(3, state_of(3))))) == {3.0}


LIES: dict[str, dict[str, Any]] = {
    "another hash": {"chunk_hashes": (bytes(32),) * 3},
    "a hash too few": {"chunk_hashes": (bytes(32),) * 2},
    "more chunks than bytes": {"num_bytes": 10},
    "more previous parameters than bytes": {"previous_bytes": 4 * CHUNK_BYTES},
    "half of it previous parameters": {"previous_bytes": CHUNK_BYTES},
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


async def test_chunks_of_another_size_than_the_header_says_are_not_kept() -> None:
    """Three chunks, by their hashes, that would take up three times what the header says."""
    large = Donor(3, state_of(3, num_chunks=9), chunk_bytes=3 * CHUNK_BYTES, header_changes={"num_bytes": 3 * CHUNK_BYTES})
    fetch = downloader(Donors(near=large))
    with pytest.raises(StageError, match="bytes"):
        await fetch.download(0)
    assert fetch.bytes_done == 0


async def test_a_state_larger_than_the_stage_can_have_is_not_even_begun() -> None:
    with pytest.raises(StageError, match="at most"):
        await download(Donors(near=Donor(3, state_of(3))), most_bytes=CHUNK_BYTES // 2)


def nobody(_record: PeerRecord) -> bool:
    """No record claims anything."""
    return False


async def test_hole_32_a_peer_that_claims_a_state_which_nobody_shows_does_not_count_for_a_while() -> None:
    found = downloader(Donors(near=Donor(3, state_of(3)), far=Donor(5, state_of(5))))
    with pytest.raises(StageError, match="newer state"):
        await found.find_donor(0, FAR, lambda _header: False, lambda record: record.peer == FAR)
    live = found._membership.live()
    assert [record.peer for record in live.records] == [NEAR]
    assert [record.peer for record in live.suspected] == [FAR]


async def test_a_donor_is_one_whose_header_shows_a_state_of_use_and_the_download_goes_on_with_that_snapshot() -> None:
    donors = Donors(near=Donor(3, state_of(3)), far=Donor(5, state_of(5)))
    found = downloader(donors)
    assert await found.find_donor(0, NEAR, lambda header: header.step > 4, nobody) == FAR
    assert steps_in(await found.download(0, prefer=FAR)) == {5.0}
    assert donors.by_peer[FAR].asked[-1].snapshot == identity_of(donors.by_peer[FAR].header.chunk_hashes)


async def test_a_donor_that_is_busy_with_other_downloads_counts_as_one_and_nobody_else_does() -> None:
    assert await downloader(Donors(near=Donor(3, b"", busy_s=[9.0]))).find_donor(0, NEAR, lambda _header: False, nobody) == NEAR
    with pytest.raises(StageError, match="newer state"):
        await downloader(Donors(near=Donor(3, state_of(3)))).find_donor(0, NEAR, lambda _header: False, nobody)

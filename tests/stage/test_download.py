"""Downloading a state: from another donor when one fails, where it stopped when a line breaks; and what a lying donor cannot do."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import save

from peerd.errors import BusyError, PeerGoneError, StageError
from peerd.link.links import CHUNK_BYTES
from peerd.stage.download import Downloader
from peerd.stage.history import HistoryEntry
from peerd.stage.snapshots import Downloaded, identity_of
from peerd.swarm.clock import clock_s
from peerd.swarm.identity import Identity
from peerd.swarm.membership import Membership
from peerd.table.record import Lineage, PeerId, PeerRecord, Phase, RunId
from peerd.wire.clients import StateClient, StateRequest
from peerd.wire.messages import Snapshot

MOST_BYTES = 1 << 30
NEAR, FAR = PeerId("a-near"), PeerId("b-far")


@dataclass
class Donor:
    """A peer that gives the state of a step, and breaks off before chunk `breaks_at`."""

    step: int
    data: bytes
    breaks_at: int | None = None
    header_changes: dict[str, Any] = field(default_factory=dict)
    asked: list[StateRequest] = field(default_factory=list)
    breaks_often: bool = False
    """It breaks off one chunk later each time."""
    busy_s: list[float] = field(default_factory=list)
    """For how long it says that it is busy, at the first requests."""
    chunk_bytes: int = CHUNK_BYTES

    @property
    def header(self) -> Snapshot:
        hashes = tuple(blake3(chunk).digest() for chunk in self._cut())
        sound = Snapshot(
            step=self.step, lineage=Lineage(0, b"x"), num_bytes=len(self.data), chunk_hashes=hashes, metadata=json.dumps([[0, 5.5, 100]])
        )
        return replace(sound, **self.header_changes)

    async def chunks(self, first: int) -> AsyncIterator[bytes]:
        for number, chunk in enumerate(self._cut()):
            if number == self.breaks_at:
                self.breaks_at += self.breaks_often
                raise PeerGoneError("gone in the middle")
            if number >= first:
                yield chunk

    def _cut(self) -> Iterator[bytes]:
        return (self.data[start : start + self.chunk_bytes] for start in range(0, len(self.data), self.chunk_bytes))


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

    async def get_header(self, peer: PeerId, request: StateRequest, patience_s: float) -> Snapshot:
        header, _chunks = await self.get_state(peer, request, patience_s)
        return header


def state_of(step: int, num_chunks: int = 3) -> bytes:
    """A safetensors file of a little less than `num_chunks` chunks whose values tell its step."""
    return save({"parameters/w": torch.full((num_chunks * CHUNK_BYTES // 4 - 1000,), float(step))})


def downloader(donors: Donors, most_bytes: int = MOST_BYTES) -> Downloader:
    membership = Membership(Identity(Ed25519PrivateKey.generate()), RunId("r"), ttl_s=100)
    for number, (peer, donor) in enumerate(donors.by_peer.items()):
        record = PeerRecord(peer=peer, version=number, step=donor.step, phase=Phase.ACCUMULATING)
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


async def test_another_donor_of_the_same_snapshot_goes_on_where_the_first_stopped() -> None:
    donors = Donors(near=Donor(3, state_of(3), breaks_at=2), far=Donor(3, state_of(3)))
    assert steps_in(await download(donors)) == {3.0}
    (request,) = donors.by_peer[FAR].asked
    assert request.first_chunk == 2
    assert request.snapshot == identity_of(donors.by_peer[NEAR].header.chunk_hashes)


async def test_a_download_whose_connection_breaks_again_and_again_goes_on_with_the_same_donor() -> None:
    donor = Donor(3, state_of(3, num_chunks=5), breaks_at=1, breaks_often=True)
    assert steps_in(await download(Donors(near=donor))) == {3.0}
    assert [request.first_chunk for request in donor.asked] == [0, 1, 2, 3, 4]


async def test_a_download_goes_on_after_a_while_in_which_no_donor_could_be_reached() -> None:
    donor = Donor(3, state_of(3), breaks_at=2)
    fetch = downloader(Donors(near=donor))
    with pytest.raises(StageError, match="gone in the middle"):
        await fetch.download(0)
    donor.breaks_at = None
    assert steps_in(await fetch.download(0)) == {3.0}
    assert [request.first_chunk for request in donor.asked] == [0, 2, 2]


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
    await fetch.download(0, prefer=NEAR)
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
    assert (len(busy.asked), len(far.asked)) == (2, 2), "the second broke off, and sent no more when it was asked again"


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


async def test_chunks_of_another_size_than_the_header_says_are_not_kept() -> None:
    """Three chunks, by their hashes, that would take up three times what the header says."""
    large = Donor(3, state_of(3, num_chunks=9), chunk_bytes=3 * CHUNK_BYTES, header_changes={"num_bytes": 3 * CHUNK_BYTES})
    fetch = downloader(Donors(near=large))
    with pytest.raises(StageError, match="does not match its hash"):
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

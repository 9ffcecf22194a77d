"""An average is fetched of several mates at once; who gives something else is found by chunk, and alone to blame."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from peerd.averaging import fetcher
from peerd.config.manifest import ModelConfig
from peerd.errors import BadMessageError, PeerGoneError, RemoteError, UnbelievedError, WrongStateError
from peerd.link.links import CHUNK_BYTES
from peerd.policy.step.roster import Roster
from peerd.stage.results import HeldAverage
from peerd.table.record import AverageId, PeerId
from peerd.wire.chunks import CutFile
from peerd.wire.messages import Average
from tests.averaging.rounds_group import MANIFEST, Group, Member, whole_sum

MakeGroup = Callable[..., Group]
LARGE = replace(MANIFEST, model=ModelConfig(num_layers=2, d_model=128, num_heads=4, d_ff=512))
LIAR = PeerId("member2")


class Counted(CutFile):
    """Says which chunks were asked for; of `wrong` ones other bytes come."""

    def __init__(self, file: CutFile, asked: list[int], wrong: bool) -> None:
        super().__init__(file.pieces, None if file.pieces else file.num_bytes, file.chunk_bytes)
        self._file, self._asked, self._wrong = file, asked, wrong

    def chunk(self, number: int) -> bytes:
        self._asked.append(number)
        chunk = self._file.chunk(number)
        return bytes(len(chunk)) if self._wrong else chunk


class Stage:
    """Members that have averaged, one of which has lost its average and fetches it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.late: Member = group.members[PeerId("member0")]
        self.mates = [peer for peer in group.members if peer != self.late.peer]
        self.asked: dict[PeerId, list[int]] = {peer: [] for peer in self.mates}
        self.liars: set[PeerId] = set()
        self.blamed: dict[PeerId, RemoteError] = {}
        group.lend = lambda peer, file: Counted(file, self.asked[peer], peer in self.liars)

    async def fetch(self, *mates: PeerId) -> HeldAverage:
        first, *others = mates or self.mates
        return await self.late.rounds.fetcher.fetch(first, 0, others, lambda peer, error: self.blamed.update({peer: error}))

    @property
    def num_chunks(self) -> int:
        size = self.late.average.nbytes
        return -(-size // CHUNK_BYTES)


def averaged(group: Group) -> Stage:
    """All members have the average, without a round for it."""
    roster, total = group.roster(), whole_sum(group.members[PeerId("member0")])
    for member in group.members.values():
        assert member.state.open_round(roster)[1] is not None
        member.state.take_average(roster, total.clone())
    return Stage(group)


@pytest.fixture
async def stage(make_group: MakeGroup) -> Stage:
    return averaged(make_group(4, LARGE))


async def test_each_of_several_mates_sends_a_part_of_an_average(stage: Stage) -> None:
    found = await stage.fetch()
    assert torch.equal(found.flat_sum, stage.late.average)
    assert all(len(numbers) >= stage.num_chunks // 5 for numbers in stage.asked.values())
    assert {number for numbers in stage.asked.values() for number in numbers} == set(range(stage.num_chunks))
    assert stage.blamed == {}


async def test_the_chunks_of_a_finished_average_come_from_the_logs_of_several_mates(stage: Stage) -> None:
    for peer in stage.mates:
        mate = stage.group.members[peer]
        mate.rounds.applied(mate.state.commit())
        for task in [*mate.rounds._tasks.running]:
            await task
        assert not mate.rounds.kept._unlogged
    assert torch.equal((await stage.fetch()).flat_sum, stage.late.average)
    assert all(stage.asked.values())


async def test_a_mate_whose_chunks_are_wrong_is_to_blame_alone_and_others_give_them(stage: Stage) -> None:
    stage.liars = {LIAR}
    with capture_logs() as logs:
        found = await stage.fetch()
    assert torch.equal(found.flat_sum, stage.late.average)
    assert [*stage.blamed] == [LIAR]
    assert isinstance(stage.blamed[LIAR], BadMessageError)
    assert [line["mate"] for line in logs if "wrong" in line["event"]] == [LIAR]
    assert len(stage.asked[LIAR]) <= 2


async def test_hole_53_of_an_average_that_is_not_believed_by_its_header_nothing_is_downloaded(stage: Stage) -> None:
    def believe(_roster: Roster, average_id: AverageId) -> None:
        raise UnbelievedError(f"too few hold {average_id.hex()}")

    with pytest.raises(UnbelievedError):
        await stage.late.rounds.fetcher.fetch(stage.mates[0], 0, believe=believe)
    assert not any(stage.asked.values())


async def test_a_mate_that_is_gone_or_offers_another_average_than_others_is_not_needed(stage: Stage) -> None:
    member = stage.group.members[PeerId("member3")]
    assert member.state.average is not None
    member.state.average.flat_sum[0] += 1

    async def fault(kind: str, _sender: PeerId, receiver: PeerId) -> None:
        if kind == "get_average" and receiver == PeerId("member4"):
            raise PeerGoneError("gone")

    stage.group.fault = fault
    found = await stage.fetch(*stage.mates, PeerId("member4"))
    assert torch.equal(found.flat_sum, stage.late.average)
    assert {peer: type(error) for peer, error in stage.blamed.items()}.keys() == {member.peer, PeerId("member4")}
    assert isinstance(stage.blamed[member.peer], WrongStateError)


async def test_if_nobody_gives_an_average_the_error_of_the_first_mate_tells_why(stage: Stage) -> None:
    stage.liars = set(stage.mates)
    with pytest.raises(BadMessageError, match="does not match its hash"):
        await stage.fetch()
    assert stage.mates[0] not in stage.blamed, "the caller knows that one from the error"
    with pytest.raises(WrongStateError, match="no average"):
        await stage.late.rounds.fetcher.fetch(stage.mates[0], 9)


async def test_a_small_average_comes_from_one_mate(make_group: MakeGroup) -> None:
    """Where a mate is slow to offer it, others would be waited for longer than the whole takes."""
    small = averaged(make_group(4))
    assert small.late.average.nbytes < fetcher.LEAST_OF_EACH
    await small.fetch()
    assert [bool(numbers) for numbers in small.asked.values()] == [True, False, False]


LIES: dict[str, dict[str, Any]] = {
    "endless": {"num_bytes": 1 << 50},
    "of nothing": {"num_bytes": 0},
    "with a sum that no stage ties": {"tied_sum": b"t", "num_bytes": 1 << 50},
    "a hash too few": {"chunk_hashes": ()},
    "a hash too many": {"chunk_hashes": (bytes(32),) * (1 << 10)},
}


@pytest.mark.parametrize("lie", sorted(LIES))
async def test_an_average_of_another_size_is_refused_before_a_chunk_of_it(stage: Stage, monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    kept = stage.group.members[LIAR].rounds.kept
    true = kept.get_average

    async def lied(*asked: Any) -> tuple[Average, CutFile, bool]:
        header, file, is_urgent = await true(*asked)
        return replace(header, **LIES[lie]), file, is_urgent

    monkeypatch.setattr(kept, "get_average", lied)
    tracemalloc.start()
    with pytest.raises(BadMessageError):
        await stage.fetch(LIAR)
    grown = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert stage.asked[LIAR] == []
    assert grown < 8 << 20
    assert torch.equal((await stage.fetch(LIAR, *stage.mates)).flat_sum, stage.late.average)

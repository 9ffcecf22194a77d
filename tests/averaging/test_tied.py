"""Rounds of the first and the last stage: each gives the other its share of a weight that both hold, and later the sum."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from peerd.averaging.log import AverageLog
from peerd.averaging.rounds import Rounds
from peerd.errors import BadMessageError, PeerGoneError, WrongStateError
from peerd.link.links import Bytes
from peerd.policy.step.roster import Roster, entry_of
from peerd.policy.step.tied import sum_id
from peerd.stage.executor import Executor, Priority
from peerd.stage.state import StageState
from peerd.table.record import AverageId, PeerId, PeerRecord
from peerd.wire.chunk_streams import Offer
from peerd.wire.clients import AveragingClient
from peerd.wire.deliveries import Lending
from peerd.wire.messages import Average
from tests.averaging.rounds_group import AVERAGING_S, MICROBATCHES, fill
from tests.paper_host import PaperHost
from tests.strategies import view_of
from tests.tiny_run import tiny_manifest
from tests.wire.lent import Lent

MANIFEST = tiny_manifest(2, microbatches_per_step=MICROBATCHES, accumulate="float64", max_gradient_norm=0.5)
MANIFEST = replace(MANIFEST, model=replace(MANIFEST.decoder, tie_word_embeddings=True))


class End:
    """The only peer of the first or the last stage, with its step's average; its client calls the other directly."""

    def __init__(self, stage: int, folder: Path) -> None:
        record = PeerRecord(peer=PeerId(f"end{stage}"), incarnation=1, stage=stage)
        self.state = StageState(MANIFEST, record, torch.device("cpu"), lambda: view_of(record))
        self.state.serve()
        fill(self.state, range(MICROBATCHES))
        self.executor = Executor()
        log = AverageLog(folder / str(stage), torch.float64)
        self.rounds = Rounds(self.state, self.executor, cast(AveragingClient, self), log, AVERAGING_S, lambda: 0.0, PaperHost())
        entry = entry_of(self.state.record)
        self.roster = Roster(stage, 0, 0, entry.peer, (entry,))
        _, share = self.state.open_round(self.roster)
        assert share is not None
        self.state.take_average(self.roster, share)
        self.other: End

    async def get_tied(self, _peer: PeerId, step: int, wanted: AverageId, num_bytes: int, _patience_s: float) -> tuple[Bytes, ...]:
        chunks = tuple((await self.other.rounds.kept.get_tied(step, wanted)).chunks())
        assert sum(map(len, chunks)) == num_bytes
        return chunks

    @contextlib.asynccontextmanager
    async def open_average(self, _peer: PeerId, stage: int, step: int, *_asked: object) -> AsyncIterator[Offer[Average]]:
        average, file, _is_urgent = await self.rounds.kept.get_average(stage, step)  # as a mate of its own stage would ask it
        with Lending(file, AVERAGING_S) as lending:
            yield Lent(average, lending)


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[list[End]]:
    found = [End(stage, tmp_path) for stage in (0, 1)]
    found[0].other, found[1].other = found[1], found[0]
    yield found
    for end in found:
        end.rounds.shut()
        end.executor.close()


async def exchange(ends: list[End]) -> AverageId:
    wanted = sum_id(ends[0].roster.average_id, ends[1].roster.average_id)
    for end in ends:
        given = end.other.roster.average_id
        share = await end.rounds.fetcher.fetch_tied(end.other.state.record.peer, 0, given)
        end.state.take_tied(end.roster.average_id, wanted, given, share)
    return wanted


async def test_both_ends_come_to_the_same_bits_and_the_first_ones_norm_has_them(ends: list[End]) -> None:
    first = ends[0]
    before = [end.state.record.gradient_norm for end in ends]
    assert before[0] is None, "the weight counts in the first stage's norm"
    wanted = await exchange(ends)
    held = [end.state.average.tied for end in ends if end.state.average is not None]
    assert held[0] is not None
    assert held[1] is not None
    assert held[0].id == held[1].id == wanted == first.state.record.tied_sum
    assert torch.equal(held[0].values, held[1].values)
    after = [end.state.record.gradient_norm for end in ends]
    assert after[0] is not None
    assert after[1] == before[1] is not None


async def test_who_is_behind_gets_the_sum_from_memory_and_later_from_the_log(ends: list[End]) -> None:
    first, last = ends
    wanted = await exchange(ends)
    assert first.state.average is not None
    tied = first.state.average.tied
    assert tied is not None
    first.rounds.applied(first.state.commit(1.0, wanted))
    from_memory = await last.rounds.fetcher.fetch_tied(first.state.record.peer, 0, wanted)
    await asyncio.sleep(0)  # until the log's job is queued
    await first.executor.run(Priority.IDLE, lambda: None)
    from_log = await last.rounds.fetcher.fetch_tied(first.state.record.peer, 0, wanted)
    assert torch.equal(from_memory, tied.values)
    assert torch.equal(from_log, tied.values)


async def test_an_average_is_given_with_the_sum_once_the_step_is_finished(ends: list[End]) -> None:
    first = ends[0]
    wanted = await exchange(ends)
    assert (await first.rounds.fetcher.fetch(first.state.record.peer, 0)).tied is None
    average, _, is_urgent = await first.rounds.kept.get_average(0, 0)
    assert (average.tied_sum, is_urgent) == (b"", True)
    held = first.state.commit(1.0, wanted)
    first.rounds.applied(held)
    average, file, is_urgent = await first.rounds.kept.get_average(0, 0)
    assert (average.tied_sum, is_urgent) == (wanted, False)
    assert held.tied is not None
    assert file.num_bytes == average.num_bytes == 8 * (held.flat_sum.numel() + held.tied.values.numel())
    assert average.chunk_hashes == file.hashes()


async def test_what_nobody_holds_is_refused_and_what_is_not_finite_too(ends: list[End]) -> None:
    first, last = ends
    with pytest.raises(WrongStateError, match="no such gradients"):
        await first.rounds.fetcher.fetch_tied(last.state.record.peer, 0, AverageId(b"odd"))
    with pytest.raises(WrongStateError, match="no such gradients"):
        await first.rounds.fetcher.fetch_tied(last.state.record.peer, 7, last.roster.average_id)
    assert last.state.average is not None
    last.state.average.flat_sum.fill_(torch.nan)
    with pytest.raises(BadMessageError, match="not finite"):
        await first.rounds.fetcher.fetch_tied(last.state.record.peer, 0, last.roster.average_id)


async def test_a_log_that_could_not_be_written_says_so_and_the_sum_is_not_told(ends: list[End], tmp_path: Path) -> None:
    first, folder = ends[0], tmp_path / "full"
    first.rounds.kept._log = AverageLog(folder, torch.float64)
    folder.mkdir()
    (folder / "next.part").symlink_to("/dev/full")
    held = first.state.commit(1.0, await exchange(ends))
    assert [known.step for known in first.state.record.tied_sums] == [0]
    await first.rounds.kept.hold(held)
    assert first.state.record.tied_sums == ()


async def test_hole_82_all_who_ask_for_gradients_of_a_tied_weight_share_one_copy_and_keep_none_for_ever(ends: list[End]) -> None:
    """Each question copied this stage's share, which is as large as the weight, for as long as its caller cared to read it."""
    first = ends[0]
    wanted = first.roster.average_id
    one, other = [await first.rounds.kept.get_tied(0, wanted) for _ in range(2)]
    assert one is other
    for step in range(2):
        first.rounds.kept._lent.finished(step, None, {0} if step == 0 else {1})
        assert one.is_in_memory == (step == 0)
    with pytest.raises(PeerGoneError, match="not kept"):
        list(other.chunks())

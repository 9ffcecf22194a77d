"""Results that leave the device beside what it computes: none is read before it is there, and no pinned memory is kept."""

from __future__ import annotations

import asyncio
import gc

import pytest
import torch

from peerd import transfers
from peerd.config.codec import EXAMPLES, NONE, parse_codec
from peerd.errors import NotFiniteError
from peerd.stage import checks as checking
from peerd.stage import leaving as room
from peerd.stage.checks import Checks
from peerd.stage.leaving import Leaving
from peerd.transfers import QueuedFetch, _stream_from, fetch_into
from peerd.wire.tensors import decode, encode
from tests.life import CPU
from tests.pretend import METERS, streams
from tests.pretend.life import PRETEND

METER = METERS[0]


def test_a_fetch_beside_the_work_makes_the_processor_wait_only_when_it_is_taken() -> None:
    made, before = torch.arange(8.0).to(PRETEND), METER.to_host
    with METER.counted() as waits:
        coming = QueuedFetch(made)
    assert not waits
    assert METER.to_host == before.and_one_of(32)
    assert coming._pinned.isnan().all(), "what is read too early is no number"
    with METER.counted() as waits:
        assert coming.take().tolist() == [float(number) for number in range(8)]
    assert set(waits) == {"synchronize"}


@pytest.mark.parametrize("what", ["not waited for", "not recorded", "not pinned"])
def test_the_pretend_device_notices_what_a_gpu_would_not(what: str) -> None:
    """It copies what is not computed yet, or memory that has been given away."""
    side, usual = streams.Stream(PRETEND), streams.current_stream()
    early, made = usual.record_event(), torch.ones(4).to(PRETEND) + 1
    target = torch.empty(4, pin_memory=what != "not pinned")
    side.wait_event(early if what == "not waited for" else usual.record_event())
    if what != "not recorded":
        made.record_stream(side)  # type: ignore[arg-type]
    told = {"not waited for": "has not waited", "not recorded": "not recorded", "not pinned": "needs pinned memory"}[what]
    with streams.stream(side), pytest.raises(RuntimeError, match=told):
        target.copy_(made, non_blocking=True)


@pytest.mark.parametrize("codec", ["none", *EXAMPLES])
async def test_what_leaves_beside_the_work_is_what_encoding_gives(codec: str) -> None:
    tensor = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    leaving, expected = Leaving(parse_codec(codec)), encode(tensor, parse_codec(codec))
    there = tensor.to(PRETEND)
    with METER.counted() as waits:
        assert not leaving.send(there, Checks())
    assert not waits
    assert leaving.is_begun
    assert leaving.num_bytes == expected.num_bytes
    values = await asyncio.gather(leaving.value(), leaving.value())
    assert values[0] is values[1], "it is fetched once"
    assert torch.equal(decode(values[0], CPU), decode(expected, CPU))


async def test_what_has_left_takes_no_memory_of_the_device() -> None:
    gc.collect()
    before = METER.allocated
    leaving = Leaving(NONE)
    leaving.send(torch.ones(1000).to(PRETEND), Checks())
    await leaving.value()
    assert METER.allocated == before


async def test_where_no_memory_can_be_pinned_the_job_fetches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_tensor: torch.Tensor) -> QueuedFetch:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(room, "QueuedFetch", refuse)
    leaving = Leaving(NONE)
    leaving.send(torch.ones(3).to(PRETEND), Checks())
    assert leaving._value is not None
    assert decode(await leaving.value(), CPU).tolist() == [1.0] * 3


@pytest.mark.parametrize("refused", [1, 2])
async def test_where_no_memory_can_be_pinned_what_is_wrong_with_a_result_is_still_told(
    refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the thread meant to go on. `refused`: how many fetches there are, of the looks and of the result, until none is made."""
    made = 0

    def few(tensor: torch.Tensor) -> QueuedFetch:
        nonlocal made
        made += 1
        if made >= refused:
            raise RuntimeError("CUDA error: out of memory")
        return QueuedFetch(tensor)

    monkeypatch.setattr(room, "QueuedFetch", few)
    monkeypatch.setattr(checking, "QueuedFetch", few)
    tensor, checks = torch.full((3,), torch.inf).to(PRETEND), Checks()
    checks.usable([tensor], NotFiniteError("too large"))
    with pytest.raises(NotFiniteError, match="too large"):
        Leaving(NONE, ahead=True).send(tensor, checks)


async def test_on_a_processor_the_job_gives_it() -> None:
    side = _stream_from(PRETEND)
    before = side.done
    leaving = Leaving(NONE)
    leaving.send(torch.ones(3), Checks())
    assert decode(await leaving.value(), CPU).tolist() == [1.0] * 3
    assert side.done == before


async def test_what_is_wrong_with_a_result_is_told_where_it_is_taken_if_the_thread_goes_on() -> None:
    """As often as it is asked for; a thread that waits is told at once."""
    tensor, told = torch.full((3,), torch.inf).to(PRETEND), NotFiniteError("too large")
    checks, ahead = Checks(), Leaving(NONE, ahead=True)
    checks.usable([tensor], told)
    with METER.counted() as waits:
        ahead.send(tensor, checks)
    assert not waits
    assert ahead.is_under_way
    for _ in range(2):
        with pytest.raises(NotFiniteError, match="too large"):
            await ahead.value()
    checks.usable([tensor], told)
    with pytest.raises(NotFiniteError, match="too large"):
        Leaving(NONE).send(tensor, checks)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 24, 31])
def test_a_large_vector_comes_in_pieces_and_whole(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PIECE_BYTES", 8 * 8)
    source = torch.arange(float(count), dtype=torch.float64)
    target, there = torch.full((count,), -1.0, dtype=torch.float64), source.to(PRETEND)
    fetch_into(target, there)
    assert torch.equal(target, source)
    fetch_into(target, -source)
    assert torch.equal(target, -source), "on a processor as well"


def test_the_pretend_device_leaves_new_tensors_where_a_context_puts_them() -> None:
    with torch.device("meta"):
        assert torch.empty(3).device.type == torch.nn.Linear(2, 2).weight.device.type == "meta"

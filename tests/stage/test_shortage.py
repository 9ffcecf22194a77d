"""A device whose memory does not suffice: fewer microbatches, then no graphs, then the stage is given up; no work is lost or done twice."""

from __future__ import annotations

import gc
import traceback
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from peerd.errors import BusyError
from peerd.stage.results import HeldMicrobatch, Ticket
from peerd.table.record import Phase
from peerd.transfers import is_out_of_memory
from tests.life import Life
from tests.paper_host import PaperHost
from tests.pretend import METERS
from tests.pretend.life import PRETEND
from tests.tiny_run import tiny_manifest

METER = METERS[0]
MANIFEST = tiny_manifest(2)


@pytest.fixture
async def life() -> AsyncIterator[Life]:
    gc.collect()
    made = Life(MANIFEST, PRETEND, keep_graph=True)
    yield made
    METER.allowed_bytes = None
    await made.close()


def allow(more_bytes: int) -> None:
    """Let the device give so many bytes more than it gives now."""
    gc.collect()
    METER.allowed_bytes = METER.allocated + more_bytes


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_devices_say_that_have_no_memory_is_known(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


async def test_a_pass_without_memory_is_made_again_without_graphs_and_fewer_microbatches_are_held(life: Life) -> None:
    service, refusal = life.services[0], BusyError("no memory")

    def forward(index: int) -> HeldMicrobatch:
        call, record = life.call(0, index), life.states[0].record
        ticket = Ticket(record.step, index, (record.incarnation, record.ledger_no), accumulate=True)
        return service._jobs.forward(call, ticket, (*call.inputs.chunks, *call.labels.chunks), service.pace)[0]

    METER.reset_peak()
    before = METER.allocated
    batch = forward(0)
    graph, pass_bytes = METER.allocated - before, METER.peak - before
    allow(pass_bytes - graph // 2)  # not enough beside the graph of another
    again = service.shortage.through(lambda: forward(1), service.slots, refusal)
    outputs = [again.output, batch.output]
    assert [output is None for output in outputs] == [False, True], "the graph that was kept is gone, and will be computed again"
    assert (service.shortage.most_slots, service.shortage.times) == (service.slots // 2, 1)
    assert f"{service.slots // 2} microbatches at once instead of {service.slots}" in service.shortage.told


async def test_where_nothing_helps_the_caller_hears_it_and_the_stage_is_given_up(life: Life) -> None:
    allow(1000)
    service = life.services[0]
    host = service._host
    assert isinstance(host, PaperHost)
    for _ in range(10):
        with pytest.raises(BusyError, match="no memory") as refused:
            await life.microbatch(0, 0)
        assert refused.value.retry_after_s >= 1
        if service.shortage.is_hopeless:
            break
    assert service.slots == 1
    assert not life.states[0].keep_graph
    assert "does not suffice for one microbatch" in service.shortage.told
    assert "cannot compute" in host.told
    assert life.states[0].record.done == 0


async def test_what_was_refused_for_want_of_memory_counts_once_when_there_is_some(life: Life) -> None:
    allow(1000)
    with pytest.raises(BusyError):
        await life.microbatch(0, 0)
    METER.allowed_bytes = None
    await life.train(1)
    fresh = Life(MANIFEST, PRETEND)
    await fresh.train(1)
    assert life.losses() == fresh.losses()
    assert all(torch.equal(value, fresh.parameters()[name]) for name, value in life.parameters().items())
    await fresh.close()


async def test_a_round_without_memory_to_pin_copies_its_sum_all_the_same(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def unpinned(*size: int, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*size, **how)

    monkeypatch.setattr(torch, "empty", unpinned)
    await life.train(1)
    monkeypatch.undo()
    fresh = Life(MANIFEST, PRETEND)
    await fresh.train(1)
    assert life.losses() == fresh.losses()
    assert all(torch.equal(value, fresh.parameters()[name]) for name, value in life.parameters().items())
    await fresh.close()


async def test_a_round_without_memory_on_the_device_keeps_the_ledger_and_can_be_made_again() -> None:
    manifest = tiny_manifest(2, average_parameters="always", average_parameters_every_steps=1)
    here, fresh = Life(manifest, PRETEND), Life(manifest, PRETEND)
    for index in range(manifest.train.microbatches_per_step):
        await here.microbatch(0, index)
    done = [state.record.done for state in here.states]
    allow(0)
    try:
        assert is_short(here.average), "parameters are put together on the device"
    finally:
        METER.allowed_bytes = None
    assert {state.record.phase for state in here.states} == {Phase.ACCUMULATING}
    assert [state.record.done for state in here.states] == done
    here.average()
    here.commit()
    await fresh.train(1)
    assert all(torch.equal(value, fresh.parameters()[name]) for name, value in here.parameters().items())
    for each in (here, fresh):
        await each.close()


async def test_an_update_without_memory_leaves_nothing_on_the_device_once_the_stage_is_left() -> None:
    """The parameters may be half updated, so nothing of them is kept: a daemon leaves the stage (daemon/run.py)."""
    gc.collect()
    before, here = METER.allocated, Life(MANIFEST, PRETEND)
    for index in range(MANIFEST.train.microbatches_per_step):
        await here.microbatch(0, index)
    here.average()
    allow(0)
    try:
        assert is_short(here.commit)
    finally:
        METER.allowed_bytes = None
    assert [state.record.step for state in here.states] == [0, 0]
    await here.close()
    gc.collect()
    assert METER.allocated == before


async def test_a_state_that_found_no_memory_can_be_loaded_again(life: Life) -> None:
    given, taken = life, Life(MANIFEST, PRETEND)
    await given.train(2)
    allow(0)
    try:
        assert is_short(lambda: taken.take_over(given))
    finally:
        METER.allowed_bytes = None
    assert taken.states[0].record.phase is Phase.JOINING
    state, found = taken.states[0], given.own(0)
    state.load(found.tensors, found.step, found.lineage, found.history)
    state.serve()
    taken.load(1, given.own(1))
    for each in (given, taken):
        await each.train(1)
    assert all(torch.equal(value, taken.parameters()[name]) for name, value in given.parameters().items())
    await taken.close()


def is_short(work: Callable[[], None]) -> bool:
    """Whether this fails for want of memory. What it held is let go of."""
    try:
        work()
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)
        return True
    return False

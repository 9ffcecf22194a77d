"""A device whose memory does not suffice: fewer microbatches, then no graphs, then the stage is given up; no work is lost or done twice."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator

import pytest
import torch

from peerd.errors import BusyError
from peerd.stage.results import HeldMicrobatch, Ticket
from peerd.stage.shortage import is_out_of_memory
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

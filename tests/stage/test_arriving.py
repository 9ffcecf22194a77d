"""Tensors that go to the device beside what it computes: none is used before it is there, nobody waits, a processor has none of it."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import torch

from peerd.config.codec import EXAMPLES, parse_codec
from peerd.config.manifest import WireConfig
from peerd.errors import BadMessageError
from peerd.stage.arriving import Arriving
from peerd.transfers import QueuedCopy, _stream_to, has_copy_streams
from peerd.wire.messages import TensorBytes
from peerd.wire.tensors import decode, encode
from tests.life import CPU, Life
from tests.pretend import METERS, streams
from tests.pretend.life import PRETEND
from tests.tiny_run import tiny_manifest

METER = METERS[0]


def test_a_copy_beside_the_work_makes_the_processor_wait_for_nothing() -> None:
    before = METER.to_device
    with METER.counted() as waits:
        found = QueuedCopy(torch.arange(8.0), PRETEND).take() + 1
    assert not waits
    assert METER.to_device == before.and_one_of(32)
    assert found.cpu().tolist() == [float(number) for number in range(1, 9)]


@pytest.mark.parametrize("what", ["not waited for", "not recorded", "waited for too early", "not pinned", "blocking"])
def test_the_pretend_device_notices_what_a_gpu_would_not(what: str) -> None:
    """It computes with a tensor that is not there yet, or gives its memory to another one."""
    side, usual = streams.Stream(PRETEND), streams.current_stream()
    if what in ("not pinned", "blocking"):
        source = torch.ones(4) if what == "not pinned" else torch.ones(4).pin_memory()
        with streams.stream(side), pytest.raises(RuntimeError, match="needs pinned memory, and must not block"):
            source.to(PRETEND, non_blocking=what != "blocking")
        return
    early = side.record_event()
    with streams.stream(side):
        tensor = torch.ones(4).pin_memory().to(PRETEND, non_blocking=True)
    if what == "waited for too early":
        usual.wait_event(early)
    if what == "not recorded":
        usual.wait_event(side.record_event())
    else:
        tensor.record_stream(usual)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="not recorded" if what == "not recorded" else "has not waited"):
        tensor + 1


@pytest.mark.parametrize("codec", ["none", *EXAMPLES])
async def test_what_arrives_beside_the_work_is_what_decoding_gives(codec: str) -> None:
    value = encode(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), parse_codec(codec))
    arriving = Arriving(value, PRETEND)
    before = METER.to_device.count
    await arriving.begin()
    assert METER.to_device.count == before + 1
    first = arriving.take()
    assert METER.to_device.count == before + 1, "it was there"
    assert torch.equal(first.cpu(), decode(value, CPU))
    assert torch.equal(arriving.take().cpu(), first.cpu()), "a second attempt decodes it again"


async def test_what_was_taken_is_held_by_its_user_alone() -> None:
    gc.collect()
    before = METER.allocated
    arriving = Arriving(encode(torch.ones(1000)), PRETEND)
    await arriving.begin()
    taken = arriving.take()
    assert METER.allocated == before + taken.nbytes
    del taken
    assert METER.allocated == before


async def test_bytes_that_are_no_tensor_are_refused_before_the_job() -> None:
    good = encode(torch.randn(256), parse_codec("int8"))
    broken = TensorBytes(good.dtype, good.shape, (b"\xff" * (good.num_bytes - 1),), good.codec)
    with pytest.raises(BadMessageError):
        await Arriving(broken, PRETEND).begin()


async def test_where_there_is_no_memory_ahead_of_its_turn_the_job_decodes_it() -> None:
    gc.collect()
    value = encode(torch.ones(1000))
    arriving, METER.allowed_bytes = Arriving(value, PRETEND), METER.allocated
    try:
        await arriving.begin()
    finally:
        METER.allowed_bytes = None
    assert arriving.take().cpu().tolist() == [1.0] * 1000


async def test_on_a_processor_nothing_is_begun() -> None:
    assert not has_copy_streams(CPU)
    arriving = Arriving(encode(torch.ones(4)), CPU)
    await arriving.begin()
    assert arriving._finish is None
    assert arriving.take().tolist() == [1.0] * 4


@pytest.fixture
async def life() -> AsyncIterator[Life]:
    found = Life(replace(tiny_manifest(3), wire=WireConfig(activations="int8", activation_gradients="int8")), PRETEND)
    yield found
    await found.close()


async def test_activations_and_gradients_of_calls_come_on_their_own_stream(life: Life) -> None:
    side = _stream_to(PRETEND)
    before = side.done
    await life.microbatch(0, 0)
    assert side.done - before == 4, "two stages took activations, two took gradients"

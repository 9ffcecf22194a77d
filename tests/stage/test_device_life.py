"""The whole life of a stage on an accelerator: it gives the processor's numbers, waits rarely, and leaves nothing behind.

The accelerator is a pretend one (tests/pretend), which refuses tensors that do not lie where they should.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from peerd.config.codec import EXAMPLES, parse_codec
from peerd.config.manifest import Manifest, WireConfig
from peerd.stage.export import write_export
from peerd.stage.parameters import OfKind
from peerd.stage.snapshots import Downloaded
from peerd.timeline.spans import SpanKind
from peerd.wire.codecs import encode
from tests.life import CPU, HALVES, MOST_WAITS, OPTIONS, RUNS, STEPS, Life
from tests.pretend import METERS
from tests.pretend.life import PRETEND, waits_of_passes
from tests.pretend.streams import Event
from tests.tiny_run import tiny_manifest

METER = METERS[0]
DECODERS: dict[str, dict[str, Any]] = {
    "tied weights": {"tie_word_embeddings": True},
    "subspace": {"boundary": "subspace", "boundary_rank": 8},
}
OF_LIBRARY = ("llama", "gpt2", "bert", "gemma3", "mixtral", "qwen3_moe")


def small(num_stages: int, **train: Any) -> Manifest:
    """Three layers, which two stages share unevenly. A run on the pretend device takes several times as long as on the processor."""
    manifest = tiny_manifest(num_stages, **train)
    return replace(manifest, model=replace(manifest.decoder, num_layers=3))


def of_model(name: str, num_stages: int) -> Manifest:
    """A run of another model than the plain decoder. Skips the test where the library of that model is not installed."""
    if name in DECODERS:
        manifest = small(num_stages)
        return replace(manifest, model=replace(manifest.decoder, **DECODERS[name]))
    pytest.importorskip("transformers")
    from tests.models.hf_models import hf_manifest, hf_model

    return hf_manifest(num_stages, hf_model(name))


@pytest.fixture
async def life() -> AsyncIterator[Callable[..., Life]]:
    """Makes lives, which end with the test; then nothing is left on the device."""
    gc.collect()
    gc.freeze()  # what is there by now is not looked at again: a test collects its own garbage several times
    lives, before = list[Life](), METER.allocated

    def make(manifest: Manifest, device: torch.device = PRETEND, **how: Any) -> Life:
        lives.append(Life(manifest, device, **how))
        return lives[-1]

    yield make
    for each in lives:
        await each.close()
    gc.collect()
    assert METER.allocated == before, "a stage that was left holds memory of the device"


Numbers = tuple[list[float], dict[str, Tensor]]
"""Losses and parameters."""


@cache
def of_processor(option: str, keep_graph: bool) -> Numbers:
    """What the processor makes of a run. Where the optimizer's state lies is a matter of devices."""

    async def lived() -> Numbers:
        there = Life(small(2, **OPTIONS[option]), CPU, keep_graph=keep_graph)
        with sdpa_kernel(SDPBackend.MATH):  # a processor has another kernel as well
            await there.train(STEPS)
        found = there.losses(), {name: value.clone() for name, value in there.parameters().items()}
        await there.close()
        return found

    with ThreadPoolExecutor(1) as other:  # the test's own loop runs in this one
        return other.submit(asyncio.run, lived()).result()


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= tolerance, name


@pytest.mark.parametrize(("option", "keep_graph", "offloads"), RUNS)
async def test_a_run_gives_the_processors_numbers_and_leaves_nothing_on_the_device(
    life: Callable[..., Life], option: str, keep_graph: bool, offloads: bool
) -> None:
    """The same numbers to the bit, except where precision is mixed: a processor and a GPU do not lower the same operations.

    Nothing is left although something still refers to the stage, with microbatches under way and a late one just computed.
    """
    before, (losses, parameters) = METER.allocated, of_processor(option, keep_graph)
    here = life(small(2, **OPTIONS[option]), keep_graph=keep_graph, offloads=offloads)
    with sdpa_kernel(SDPBackend.MATH):
        await here.train(STEPS)
    if option in HALVES:
        assert here.losses() == pytest.approx(losses, rel=1e-3)
    else:
        assert here.losses() == losses
        assert_close(here.parameters(), parameters, 0.0)
    await here.microbatch(STEPS, 0)
    if not OPTIONS[option].get("delayed_updates"):
        await here.microbatch(STEPS - 1, 1)
    if "evaluation" in option:
        await here.microbatch(STEPS - 1, 0, evaluation=True)
    states = list(here.states)
    await here.close()
    gc.collect()
    assert METER.allocated == before
    torch.pretend.empty_cache()  # type: ignore[attr-defined]
    assert METER.reserved == METER.allocated
    assert [state.record.step for state in states] == [STEPS, STEPS], "their records can still be read"


@pytest.mark.parametrize("codec", EXAMPLES)
async def test_every_codec_gives_the_processors_numbers_and_waits_twice(life: Callable[..., Life], codec: str) -> None:
    manifest = replace(small(3), wire=WireConfig(activations=codec, activation_gradients=codec))
    here, there = life(manifest), life(manifest, CPU)
    with sdpa_kernel(SDPBackend.MATH):
        await here.train(1)
        await there.train(1)
        with waits_of_passes(here) as waits:
            await here.microbatch(1, 0)
    assert max(waits.values()) <= MOST_WAITS, METER.waits
    assert here.losses() == there.losses()
    assert_close(here.parameters(), there.parameters(), 0.0)


@pytest.mark.parametrize("keep_graph", [False, True])
@pytest.mark.parametrize("option", ["float32", *HALVES, "float64 sums", "dropout"])
async def test_a_microbatch_waits_for_the_device_twice_at_most(life: Callable[..., Life], option: str, keep_graph: bool) -> None:
    here = life(small(3, **OPTIONS[option]), keep_graph=keep_graph)
    await here.microbatch(0, 0)
    with waits_of_passes(here) as waits:
        await here.microbatch(0, 1)
    assert max(waits.values()) <= MOST_WAITS, METER.waits


@pytest.mark.parametrize("name", [*DECODERS, *OF_LIBRARY])
async def test_every_kind_of_model_gives_the_processors_numbers_and_waits_twice(life: Callable[..., Life], name: str) -> None:
    """The library's numbers differ in the last bit where memory is aligned otherwise, and AdamW makes more of that: 1 % of an update."""
    manifest = of_model(name, 3)
    here, there = life(manifest), life(manifest, CPU)
    with sdpa_kernel(SDPBackend.MATH):
        await here.train(1)
        await there.train(1)
        with waits_of_passes(here) as waits:
            await here.microbatch(1, 0)
    assert max(waits.values()) <= MOST_WAITS, METER.waits
    assert here.losses() == pytest.approx(there.losses(), rel=1e-6)
    assert_close(here.parameters(), there.parameters(), 1e-5 if name in OF_LIBRARY else 0.0)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize(("codec", "keep_graph"), [("none", False), ("none", True), ("int8", False), ("topk:0.1", False)])
async def test_a_microbatch_is_copied_once_each_way_in_its_codec(
    life: Callable[..., Life], num_stages: int, codec: str, keep_graph: bool
) -> None:
    """By chains of one, two and three stages: what the first, a middle and the last one copy.

    To the device go tokens to the first stage, labels to each, and over each boundary activations and their gradients; the same two come
    from it, packed, and of each pass its few bytes of peaks and loss.
    """
    manifest = replace(small(num_stages), wire=WireConfig(activations=codec, activation_gradients=codec))
    here, train = life(manifest, keep_graph=keep_graph), manifest.train
    await here.microbatch(0, 0)
    before = METER.to_device, METER.to_host
    await here.microbatch(0, 1)
    to_device, to_host = METER.to_device, METER.to_host
    num_tokens, boundaries = train.microbatch_size * train.sequence_length, num_stages - 1
    boundary_bytes = encode(parse_codec(codec), torch.ones(num_tokens * manifest.decoder.d_model)).nbytes
    assert to_device.count - before[0].count == 1 + num_stages + 2 * boundaries
    assert to_device.num_bytes - before[0].num_bytes == 4 * num_tokens * (1 + num_stages) + 2 * boundaries * boundary_bytes
    assert to_host.count - before[1].count == 2 * boundaries + 2 * num_stages
    assert 0 < to_host.num_bytes - before[1].num_bytes - 2 * boundaries * boundary_bytes <= 16 * num_stages


async def test_an_evaluation_waits_once(life: Callable[..., Life]) -> None:
    here = life(small(2, evaluate_every_steps=1, evaluation_fraction=0.1))
    with waits_of_passes(here) as waits:
        result = await here.microbatch(0, 0, evaluation=True)
    assert result.loss is not None
    assert waits == {0: 1, 1: 1}


@pytest.mark.parametrize("option", ["float32", "sgd", "delayed updates", "parameter averaging", "evaluation"])
async def test_a_commit_waits_for_nothing(life: Callable[..., Life], option: str) -> None:
    """And a round for its copy of the sum. (Where the optimizer's state is offloaded, every parameter comes to the machine's memory.)"""
    here = life(small(2, **OPTIONS[option]))
    await here.train(1)
    for index in range(3):
        await here.microbatch(1, index)
    with METER.counted() as in_round:
        here.average()
    with METER.counted() as in_commit:
        here.commit()
    assert set(in_round) == {"synchronize"}
    assert in_round.total() == 2 * (3 if option == "parameter averaging" else 1), "each stage for its sum, parameters, and their drift"
    assert not in_commit


async def test_an_update_takes_the_devices_time_and_not_that_of_the_thread_that_orders_it(
    life: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Event, "elapsed_time", lambda *_events: 5000.0)
    here, there = life(small(2)), life(small(2), CPU)
    kinds = SpanKind.OPTIMIZER, SpanKind.COMMIT
    for each in (here, there):
        await each.train(1)
    spent = [state.spans.spent_s for state in here.states]
    assert [times[kind] for times in spent for kind in kinds] == [0.0] * 4, "nobody has waited for the device since"
    assert all(0 < state.spans.spent_s[kind] < 5 for state in there.states for kind in kinds)
    await here.microbatch(1, 0)
    assert [times[kind] for times in spent for kind in kinds] == pytest.approx([5.0] * 4)


@pytest.mark.parametrize("option", ["float32", "float16", "8 bits", "delayed updates", "evaluation"])
async def test_what_is_given_away_and_taken_over_goes_on_to_the_bit(life: Callable[..., Life], option: str, tmp_path: Path) -> None:
    """A checkpoint, a joiner's download and an export leave the device; a resume and a join bring a state onto it."""
    manifest = small(2, **OPTIONS[option])
    first = life(manifest)
    await first.train(2)
    joiner, resumed = life(manifest), life(manifest)
    first.hand_on(joiner, resumed, tmp_path)
    given: dict[str, Tensor] = {}
    for stage in range(2):
        given |= first.own(stage).tensors
    write_export(tmp_path / "export", manifest, OfKind(given, "parameters"), OfKind(given, "optimizer"), first.states[-1].history)
    for each in (first, joiner, resumed):
        await each.train(1)
    assert_close(joiner.parameters(), first.parameters(), 0.0)
    assert_close(resumed.parameters(), first.parameters(), 0.0)
    assert joiner.losses() == resumed.losses() == first.losses()


async def test_a_checkpoint_copies_each_tensor_once_and_needs_no_memory_of_the_device(life: Callable[..., Life], tmp_path: Path) -> None:
    """A peer that leaves its stage for want of memory may be the only one that holds the state."""
    here = life(small(2))
    await here.train(1)
    sizes = [value.nbytes for stage in range(2) for value in here.own(stage).tensors.values()]
    before = METER.to_host
    METER.allowed_bytes = METER.allocated
    try:
        here.keep_checkpoints(tmp_path)
    finally:
        METER.allowed_bytes = None
    assert METER.to_host.num_bytes - before.num_bytes <= sum(sizes)


async def test_a_move_never_holds_two_stages(life: Callable[..., Life]) -> None:
    manifest, peaks = small(2), []
    for _ in range(2):
        METER.reset_peak()
        before = METER.allocated
        here = life(manifest)
        await here.train(1)
        await here.close()
        peaks.append(METER.peak - before)
    assert peaks[1] <= 1.01 * peaks[0]


async def test_an_offloading_peer_keeps_less_on_the_device(life: Callable[..., Life]) -> None:
    held = []
    for offloads in (False, True):
        gc.collect()
        before = METER.allocated
        here = life(small(2), offloads=offloads)
        await here.train(2)
        gc.collect()
        held.append(METER.allocated - before)
        parameters = sum(value.nbytes for value in here.parameters().values())
        await here.close()
    assert held[1] == pytest.approx(2 * parameters, rel=0.01), "parameters, and sums of gradients"
    assert held[0] == pytest.approx(5 * parameters, rel=0.01), "and the previous ones, and two moments"


async def test_an_offloading_joiner_that_asks_for_the_previous_parameters_later_sets_them_aside(life: Callable[..., Life]) -> None:
    """As a peer does that joins while steps are long: the state comes without them."""
    manifest = small(2)
    given = life(manifest, CPU)
    await given.train(2)
    gc.collect()
    before = METER.allocated
    joiner = life(manifest, offloads=True)
    for stage in range(2):
        found = given.own(stage)
        previous = {name: value for name, value in found.tensors.items() if name.startswith("previous/")}
        joiner.load(stage, replace(found, tensors={name: value for name, value in found.tensors.items() if name not in previous}))
        joiner.states[stage].holdings.take_previous(previous)
    await joiner.train(1)
    gc.collect()
    parameters = sum(value.nbytes for value in joiner.parameters().values())
    assert METER.allocated - before == pytest.approx(2 * parameters, rel=0.01), "parameters, and sums of gradients"


async def test_a_state_that_is_given_away_lies_in_the_machines_memory(life: Callable[..., Life]) -> None:
    here = life(small(2))
    await here.train(1)
    found: Downloaded = here.own(0)
    assert {value.device for value in found.tensors.values()} == {CPU}

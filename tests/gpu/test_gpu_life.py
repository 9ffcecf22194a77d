"""What the pretend accelerator's tests show of a stage's whole life, on a real GPU. Skipped where there is none.

`scripts/test tests/gpu` on a machine with a GPU is the check before a release. It runs in a process of its own: where torch has the
pretend accelerator as well, its backward passes fail.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peerd.config.codec import EXAMPLES
from peerd.config.manifest import Manifest, WireConfig
from peerd.daemon.device import give_back_memory
from tests.gpu.card import NEEDS_GPU
from tests.life import CPU, HALVES, MOST_WAITS, OPTIONS, RUNS, STEPS, Life
from tests.tiny_run import tiny_manifest

pytestmark = NEEDS_GPU
GPU = torch.device("cuda", 0)
TOLERANCES = {"bfloat16": 3e-2, "float16": 1e-2, "tf32": 5e-3}
"""The largest difference of a loss from the processor's, as a share of it; 1e-4 in other options."""
WORKSPACES_BYTES = 64 << 20
"""What the device's libraries may keep of its memory."""


@pytest.fixture
async def life() -> AsyncIterator[Callable[..., Life]]:
    """Makes lives, which end with the test; then no tensor is left on the device."""
    if "tests.pretend" in sys.modules:
        pytest.skip("torch has the pretend accelerator in this process: run tests/gpu alone")
    give_back_memory(GPU)
    before, lives = torch.cuda.memory_allocated(GPU), list[Life]()

    def make(manifest: Manifest, device: torch.device = GPU, **how: Any) -> Life:
        lives.append(Life(manifest, device, **how))
        return lives[-1]

    yield make
    for each in lives:
        await each.close()
    give_back_memory(GPU)
    assert torch.cuda.memory_allocated(GPU) == before


@contextmanager
def watched(how: str) -> Iterator[None]:
    """Have torch watch for operations that make the processor wait for the device: `warn` or `error`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it does not find all of them
        torch.cuda.set_sync_debug_mode(how)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_near(found: Life, right: Life, first: dict[str, Tensor], option: str) -> None:
    """Losses as near as the precision allows, and parameters that changed alike.

    AdamW divides by a gradient's size, which makes rounding large where that is small.
    """
    most = TOLERANCES.get(option, 1e-4)
    assert found.losses() == pytest.approx(right.losses(), rel=most)
    mine, theirs = (
        torch.cat([(value - first[name]).flatten().double() for name, value in each.parameters().items()]) for each in (found, right)
    )
    assert float((mine - theirs).norm() / theirs.norm()) <= max(0.02, 10 * most)


@pytest.mark.parametrize(("option", "keep_graph", "offloads"), RUNS)
async def test_a_run_gives_the_processors_numbers(life: Callable[..., Life], option: str, keep_graph: bool, offloads: bool) -> None:
    manifest = tiny_manifest(2, **OPTIONS[option])
    exact = tiny_manifest(2, **{**OPTIONS[option], "precision": "float32", "loss_scale": 1.0})
    here, there = life(manifest, keep_graph=keep_graph, offloads=offloads), life(exact, CPU, keep_graph=keep_graph)
    first = {name: value.clone() for name, value in there.parameters().items()}
    await here.train(STEPS)
    await there.train(STEPS)
    assert_near(here, there, first, option)


@pytest.mark.parametrize("codec", EXAMPLES)
async def test_every_codec_gives_the_processors_numbers(life: Callable[..., Life], codec: str) -> None:
    manifest = replace(tiny_manifest(3), wire=WireConfig(activations=codec, activation_gradients=codec))
    here, there = life(manifest), life(manifest, CPU)
    await here.train(1)
    await there.train(1)
    assert here.losses() == pytest.approx(there.losses(), rel=5e-3)


@pytest.mark.parametrize("keep_graph", [False, True])
@pytest.mark.parametrize("option", ["float32", *HALVES, "float64 sums", "dropout"])
async def test_a_microbatch_waits_for_the_device_twice_at_most_in_each_stage(
    life: Callable[..., Life], option: str, keep_graph: bool
) -> None:
    """By torch's own watch for operations that wait."""
    here = life(tiny_manifest(3, **OPTIONS[option]), keep_graph=keep_graph)
    await here.microbatch(0, 0)
    with warnings.catch_warnings(record=True) as waits, watched("warn"):
        warnings.simplefilter("always")
        await here.microbatch(0, 1)
    told = [f"{each.filename}:{each.lineno}" for each in waits if "synchroniz" in str(each.message)]
    assert 0 < len(told) <= MOST_WAITS * 3, told


@pytest.mark.parametrize("option", ["float32", "sgd", "delayed updates", "evaluation"])
async def test_a_commit_waits_for_nothing(life: Callable[..., Life], option: str) -> None:
    here = life(tiny_manifest(2, **OPTIONS[option]))
    await here.train(1)
    for index in range(3):
        await here.microbatch(1, index)
    here.average()
    with watched("error"):
        here.commit()


@pytest.mark.parametrize("option", ["float32", "float16", "8 bits", "delayed updates", "evaluation"])
async def test_what_is_given_away_and_taken_over_goes_on(life: Callable[..., Life], option: str, tmp_path: Path) -> None:
    manifest = tiny_manifest(2, **OPTIONS[option])
    first = life(manifest)
    await first.train(2)
    joiner, resumed = life(manifest), life(manifest)
    first.hand_on(joiner, resumed, tmp_path)
    for each in (first, joiner, resumed):
        await each.train(1)
    for other in (joiner, resumed):
        assert other.losses() == pytest.approx(first.losses(), rel=1e-5)
        for name, value in first.parameters().items():
            assert torch.allclose(other.parameters()[name], value, rtol=0, atol=1e-5), name


@pytest.mark.parametrize(("keep_graph", "offloads"), [(False, False), (True, False), (False, True)])
async def test_a_stage_that_is_left_gives_its_memory_back(life: Callable[..., Life], keep_graph: bool, offloads: bool) -> None:
    here = life(tiny_manifest(2), keep_graph=keep_graph, offloads=offloads)
    await here.train(2)
    await here.microbatch(2, 0)
    await here.close()
    gc.collect()
    assert give_back_memory(GPU) <= WORKSPACES_BYTES

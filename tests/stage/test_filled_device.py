"""A device that does not wait for the thread: it is given the next forward pass before a backward pass is over. No number changes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from peerd.config.manifest import Manifest
from peerd.stage import computing
from peerd.stage.executor import Executor, Priority
from tests.life import Life
from tests.pretend.life import PRETEND
from tests.tiny_run import tiny_manifest


async def lived(manifest: Manifest, *, together: bool, keep_graph: bool = True) -> Life:
    """A step and the microbatches of a second one, which go through one after another, or all at once."""
    found = Life(manifest, PRETEND, keep_graph=keep_graph)
    await found.train(1)
    indices = range(manifest.train.microbatches_per_step)
    if together:
        await asyncio.gather(*(found.microbatch(1, index) for index in indices))
    else:
        for index in indices:
            await found.microbatch(1, index)
    return found


async def test_both_passes_count_in_the_time_of_a_microbatch_though_the_device_is_not_waited_for() -> None:
    """A job that ends before the device has done its work was said to have taken no time: peers with GPUs seemed three times as fast."""
    found = await lived(tiny_manifest(3), together=False)
    for service in found.services:
        tickets = service.computing._took_s
        assert len(tickets) >= computing.FEWEST_MEASURED
        assert min(tickets) > 0.0
    await found.close()


@pytest.mark.parametrize("keep_graph", [False, True])
async def test_forward_passes_begin_before_a_backward_pass_is_over_and_change_no_number(
    keep_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computing, "AHEAD_BELOW_S", float("inf"))  # however slow this machine is
    filled, within, fill, perform = 0, set[Executor](), Executor.fill, Executor._perform

    def filling(executor: Executor) -> None:
        within.add(executor)
        fill(executor)
        within.discard(executor)

    def performing(executor: Executor, job: Any) -> None:
        nonlocal filled
        filled += executor in within
        assert executor not in within or job.priority is Priority.FORWARD
        perform(executor, job)

    monkeypatch.setattr(Executor, "fill", filling)
    monkeypatch.setattr(Executor, "_perform", performing)
    manifest = tiny_manifest(3, accumulate="float64", microbatches_per_step=8)
    here = await lived(manifest, together=True, keep_graph=keep_graph)
    there = await lived(manifest, together=False, keep_graph=keep_graph)
    assert filled
    for mine, right in zip(here.states, there.states, strict=True):
        assert mine.record.done == right.record.done
        assert torch.equal(mine.accumulator.flat.cpu(), right.accumulator.flat.cpu()), "sums of float64"
    for each in (here, there):
        await each.close()

"""Short jobs between the layers of a pass: they come as soon as a layer is done, forward and backward, and change no bit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import torch

from peerd.config.manifest import ModelConfig
from peerd.models.stages import build_stage
from peerd.stage.breathing import let_breathe
from peerd.stage.executor import Executor, Priority
from tests.tiny_run import tiny_manifest

LAYERS = 3


class Watched(Executor):
    """Counts how often a pass stops for short jobs."""

    stops = 0

    @property
    def has_ledger_job(self) -> bool:
        self.stops += 1
        return super().has_ledger_job


@pytest.fixture
async def executor() -> AsyncIterator[Watched]:
    made = Watched()
    yield made
    made.close()


def gradients(breathes: bool) -> tuple[torch.Tensor, ...]:
    """Those of one microbatch in a stage of three layers."""
    manifest = tiny_manifest(1)
    manifest = replace(manifest, model=ModelConfig(num_layers=LAYERS, d_model=32, num_heads=2, d_ff=64))
    module = build_stage(manifest, 0, torch.device("cpu"))
    if breathes:
        let_breathe(module)
        let_breathe(module)  # once is enough
    chance = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, manifest.model.vocab_size, (2, 16), generator=chance)
    return torch.autograd.grad(module(tokens, tokens), list(module.parameters()))


async def test_a_pass_stops_after_each_layer_forward_and_backward_and_its_gradients_are_the_same_to_the_bit(executor: Watched) -> None:
    plain = await executor.run(Priority.FORWARD, lambda: gradients(breathes=False))
    assert executor.stops == 0
    stopping = await executor.run(Priority.FORWARD, lambda: gradients(breathes=True))
    assert executor.stops == 2 * LAYERS
    assert all(torch.equal(one, other) for one, other in zip(plain, stopping, strict=True))
    assert len(gradients(breathes=True)) == len(plain), "outside of an executor it stops for nothing"
    assert executor.stops == 2 * LAYERS


async def test_what_changes_no_parameter_runs_in_the_middle_of_a_pass_and_what_does_comes_after_it(executor: Watched) -> None:
    """Also what was asked for after a job that does: their order stays."""
    begun, may_go_on, ran = threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        begun.set()
        assert may_go_on.wait(10)
        executor.breathe()
        ran.append("pass")

    def queue(priority: Priority, name: str) -> asyncio.Task[None]:
        return asyncio.ensure_future(executor.run(priority, lambda: ran.append(name)))

    jobs = [asyncio.ensure_future(executor.run(Priority.BACKWARD, work))]
    await asyncio.to_thread(begun.wait, 10)
    asked = ((Priority.FORWARD, "next"), (Priority.LEDGER, "join"), (Priority.CONTROL, "commit"), (Priority.LEDGER, "late"))
    jobs += [queue(*each) for each in asked]
    await asyncio.sleep(0)
    may_go_on.set()
    await asyncio.gather(*jobs)
    assert ran == ["join", "pass", "commit", "late", "next"]


async def test_a_short_job_builds_no_graph_and_sees_full_precision(executor: Watched) -> None:
    seen, begun, queued = list[bool](), threading.Event(), threading.Event()
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4))

    def look() -> None:
        seen.append(torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))

    def work() -> None:
        begun.set()
        assert queued.wait(10)
        let_breathe(layer)  # type: ignore[arg-type]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(torch.ones(2, 4))

    passing = asyncio.ensure_future(executor.run(Priority.FORWARD, work))
    await asyncio.to_thread(begun.wait, 10)
    looking = asyncio.ensure_future(executor.run(Priority.LEDGER, look))
    await asyncio.sleep(0)
    queued.set()
    await asyncio.gather(passing, looking)
    assert seen == [False]

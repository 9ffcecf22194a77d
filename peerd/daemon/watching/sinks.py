"""What a daemon tells others of its training, where it was asked to: OpenTelemetry, TensorBoard, Weights & Biases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from peerd.config.settings import Settings
from peerd.daemon.answers import Answers
from peerd.daemon.node import Node
from peerd.observe.sinks import Sink, Sinks, TensorBoard, WeightsAndBiases


def makers_of(settings: Settings, node: Node) -> dict[str, Callable[[], Sink]]:
    """What makes the sinks that were asked for."""
    about = {
        "peer": node.membership.me,
        "run": node.place.signed.run,
        "stage": node.place.stage,
        "manifest": asdict(node.place.manifest),
    }
    makers: dict[str, Callable[[], Sink]] = {}
    if settings.tensorboard:
        makers["TensorBoard"] = partial(TensorBoard, Path(settings.tensorboard))
    if settings.wandb:
        makers["Weights & Biases"] = partial(WeightsAndBiases, settings.wandb, Path(settings.home) / "wandb", about)
    return makers


@asynccontextmanager
async def sinks_of(settings: Settings, node: Node) -> AsyncIterator[Sinks]:
    """Open until the block ends; what is left is then written."""
    sinks = Sinks(makers_of(settings, node))
    try:
        yield sinks
    finally:
        await asyncio.to_thread(sinks.close)


def scalars(node: Node, answers: Answers, loss: float) -> dict[str, float]:
    """What is told of a finished step."""
    live, counters, stages = node.membership.live(), answers.counters(), range(node.place.manifest.train.num_stages)
    return {
        "loss": loss,
        "swarm/tokens_per_second": answers.tokens_per_second(),
        "swarm/peers": sum(live.num_serving(stage) for stage in stages),
        "peer/stage": node.place.stage,
        "peer/queue": node.service.queue,
        "peer/samples_per_second": node.service.counters.throughput,
        "peer/microbatches": counters["accumulated_microbatches"],
        "peer/microbatches_replayed": counters["replayed_microbatches"],
        "peer/bytes_sent": counters["bytes_sent"],
        "peer/bytes_received": counters["bytes_received"],
    }

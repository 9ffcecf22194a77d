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
from peerd.daemon.peer import Peer
from peerd.observe.sinks import Sink, Sinks, TensorBoard, WeightsAndBiases


def makers_of(settings: Settings, peer: Peer) -> dict[str, Callable[[], Sink]]:
    """What makes the sinks that were asked for."""
    about = {
        "peer": peer.membership.me,
        "run": peer.place.signed.run,
        "stage": peer.seat.stage,
        "manifest": asdict(peer.place.manifest),
    }
    makers: dict[str, Callable[[], Sink]] = {}
    if settings.tensorboard:
        makers["TensorBoard"] = partial(TensorBoard, Path(settings.tensorboard))
    if settings.wandb:
        makers["Weights & Biases"] = partial(WeightsAndBiases, settings.wandb, Path(settings.home) / "wandb", about)
    return makers


@asynccontextmanager
async def sinks_of(settings: Settings, peer: Peer) -> AsyncIterator[Sinks]:
    """Open until the block ends; what is left is then written."""
    sinks = Sinks(makers_of(settings, peer))
    try:
        yield sinks
    finally:
        await asyncio.to_thread(sinks.close)


def scalars(peer: Peer, answers: Answers, loss: float) -> dict[str, float]:
    """What is told of a finished step."""
    live, counters, stages = peer.membership.live(), answers.counters(), range(peer.place.manifest.train.num_stages)
    return {
        "loss": loss,
        "swarm/tokens_per_second": answers.tokens_per_second(),
        "swarm/peers": sum(live.num_serving(stage) for stage in stages),
        "peer/stage": peer.seat.stage,
        "peer/queue": peer.seat.service.queue,
        "peer/samples_per_second": peer.seat.service.throughput,
        "peer/microbatches": counters["accumulated_microbatches"],
        "peer/microbatches_replayed": counters["replayed_microbatches"],
        "peer/bytes_sent": counters["bytes_sent"],
        "peer/bytes_received": counters["bytes_received"],
    }

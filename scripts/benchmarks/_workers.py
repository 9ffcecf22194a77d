"""The sides that peerd is compared with, each in its own processes: torch.distributed's GPipe and 1F1B, a trainer-mediated
pipeline on hivemind.moe (see _mediated.py), and one process alone.

`python -m scripts.benchmarks._workers JSON` is one such process. It runs until its standard input closes, so none outlives the
benchmark. The process of the last stage prints a line {"time_s": wall clock, "loss"} after each step.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from peerd.config import manifest as manifest_files
from peerd.config.manifest import Manifest
from peerd.config.paths import cache_folder
from peerd.data.sources import STDLIB
from peerd.data.tokens import prepare_tokens
from peerd.models.stages import StageModule, build_stage
from peerd.stage.executor import BACKWARD_SHARE, FORWARD_SHARE, Pace
from peerd.stage.optimizer import Optimizer
from peerd.train.corpus import Corpus, agree_on_data

Kind = Literal["alone", "gpipe", "1f1b", "mediated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The arguments of one worker."""

    run_file: str
    threads: int
    kind: Kind = "alone"
    rank: int = 0
    """The worker's stage; the trainer of a mediated pipeline comes after the last."""
    folder: str = ""
    """The folder in which the ranks find one another."""
    stand_in_ms: float = 0.0
    """Sleep so that a microbatch takes at least this long in a stage, as a peer does; 0: off."""
    host: str = "127.0.0.1"
    """The address on which hivemind listens."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Stage(nn.Module):
    """A peerd stage for GPipe: the last stage returns logits, because the schedule computes the loss itself."""

    def __init__(self, module: StageModule, recompute: bool) -> None:
        super().__init__()
        self.module = module
        self.recompute = recompute

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.recompute or not torch.is_grad_enabled():
            output: Tensor = self.module(inputs)
            return output
        recomputed: Tensor = checkpoint(self.module, inputs, use_reentrant=False)
        return recomputed


class PacedStage(PipelineStage):
    """A stage that takes as long for a pass as a peer with the same stand-in."""

    pace = Pace()

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        began_s = time.monotonic()
        output = super().forward_one_chunk(*args, **kwargs)
        self.pace.hold(began_s, FORWARD_SHARE)
        return output

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        began_s = time.monotonic()
        super().backward_one_chunk(*args, **kwargs)
        self.pace.hold(began_s, BACKWARD_SHARE)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def pipeline_steps(job: Job, manifest: Manifest, corpus: Corpus) -> Iterator[float]:
    """One rank of ScheduleGPipe or Schedule1F1B over gloo; yields each step's loss (meaningless except on the last rank)."""
    train = manifest.train
    distributed.init_process_group("gloo", init_method=f"file://{job.folder}/store", rank=job.rank, world_size=train.num_stages)
    module = build_stage(manifest, job.rank, "cpu")
    optimizer = Optimizer(manifest, parameters := dict(module.named_parameters()))
    stage = PacedStage(Stage(module, manifest.compute.recompute == "always"), job.rank, train.num_stages, torch.device("cpu"))
    stage.pace = Pace(job.stand_in_ms / 1000)
    schedule = (Schedule1F1B if job.kind == "1f1b" else ScheduleGPipe)(stage, train.microbatches_per_step, loss_fn=cross_entropy)
    for step in itertools.count():
        pairs = [corpus.microbatch(step, index) for index in range(train.microbatches_per_step)]
        inputs = (torch.cat([tokens for tokens, _ in pairs]),) if module.is_first else ()
        losses: list[Tensor] = []
        if module.is_last:
            schedule.step(*inputs, target=torch.cat([labels for _, labels in pairs]), losses=losses, return_outputs=False)
        else:
            schedule.step(*inputs, return_outputs=False)
        optimizer.update(step, {name: _gradient(parameter) for name, parameter in parameters.items()})
        module.zero_grad()
        yield float(torch.stack(losses).detach().mean()) if losses else 0.0


def alone_steps(_job: Job, manifest: Manifest, corpus: Corpus) -> Iterator[float]:
    """All stages in this process, with graphs kept; yields each step's loss."""
    from peerd.reference import mean_gradients  # it loads gRPC, which does not survive hivemind's forks

    stages = [build_stage(manifest, stage, "cpu") for stage in range(manifest.train.num_stages)]
    optimizers = [Optimizer(manifest, dict(stage.named_parameters())) for stage in stages]
    for step in itertools.count():
        loss, gradients = mean_gradients(manifest, corpus, stages, step)
        for optimizer, of_stage in zip(optimizers, gradients, strict=True):
            optimizer.update(step, of_stage)
        yield loss


def mediated_steps(job: Job, manifest: Manifest, corpus: Corpus) -> Iterator[float]:
    from scripts.benchmarks import _mediated  # imported only here, because hivemind forks processes from this one

    tempfile.tempdir = job.folder  # what hivemind's forks leave there is removed with the folder
    if job.rank < manifest.train.num_stages:
        _mediated.serve(manifest, job.rank, Path(job.folder), Pace(job.stand_in_ms / 1000), job.host)
        return iter(())
    return _mediated.steps_of_trainer(manifest, corpus, Path(job.folder), job.host)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _end_with_parent() -> None:
    """Kill this process and its forks when standard input ends. os.read avoids Python's lock, which a fork would copy."""
    while os.read(0, 4096):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def work(job: Job) -> None:
    """Train until the process is killed."""
    torch.set_num_threads(job.threads)
    manifest = manifest_files.load(Path(job.run_file))
    tokens = prepare_tokens(STDLIB, cache_folder())
    manifest = agree_on_data(manifest, tokens)
    corpus = Corpus(tokens, manifest)
    steps = {"alone": alone_steps, "mediated": mediated_steps}.get(job.kind, pipeline_steps)
    for loss in steps(job, manifest, corpus):
        print(json.dumps({"time_s": time.time(), "loss": loss}), flush=True)


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    work(job)


if __name__ == "__main__":
    main()

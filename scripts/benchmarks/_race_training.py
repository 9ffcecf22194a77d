"""The trainings of `scripts/bench race`: one process computes what the peers of a small run compute, with their codecs and averages.

A training may be stopped and gone on with: at each evaluation all of it is written into a file, and read from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from peerd.config.manifest import ComputeConfig, DataConfig, Manifest, ModelConfig, TrainConfig
from peerd.data.sources import STDLIB
from peerd.models.stages import StageModule, build_stage
from peerd.planner.contenders import NUM_REPLICAS, WARMUP_UPDATES, Contender
from peerd.reference import backpropagate, backward_of, evaluate
from peerd.replicas import Replicas
from peerd.stage.optimizer import Optimizer
from peerd.stage.update import apply_sums
from peerd.train.corpus import Corpus
from scripts.benchmarks.convergence import Group, Method

MARKS = 16
"""Evaluations of each training, at equal distances."""

Losses = list[tuple[int, float]]
"""Evaluation losses, with the updates before each."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is searched for each row by itself."""

    rate: float
    outer_rate: float = 0.0
    """Of the averages of local steps, like the momentum; 0 where there are none."""
    outer_momentum: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.rate:g}" + (f", {self.outer_rate:g}:{self.outer_momentum:g}" if self.outer_rate else "")


@dataclass(frozen=True, slots=True)
class Cell:
    """One training. `row` has no `auto`: its codecs are those of a link."""

    row: Contender
    seed: int
    tuning: Tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What all trainings have in common. All its fields are part of a result's key."""

    d_model: int
    layers: int
    stages: int
    sequences: int
    sequence_length: int
    updates: int
    tokenizer: str

    @property
    def name(self) -> str:
        return (
            f"{self.layers} layers of width {self.d_model} in {self.stages} stages, {self.updates} updates of"
            f" {NUM_REPLICAS * self.sequences * self.sequence_length} tokens, {self.tokenizer}"
        )

    def manifest(self, cell: Cell) -> Manifest:
        """Two microbatches an update, one of each peer. A row with larger ones makes fewer updates, of as much data together."""
        row, tuning = replace(cell.row, batch=1.0), cell.tuning
        updates = int(self.updates / cell.row.batch)
        steps = updates // row.updates_per_step
        train = TrainConfig(
            num_stages=self.stages,
            microbatches_per_step=NUM_REPLICAS,
            microbatch_size=int(self.sequences * cell.row.batch),
            sequence_length=self.sequence_length,
            learning_rate=tuning.rate,
            warmup_steps=math.ceil(min(WARMUP_UPDATES, updates // 5) / row.updates_per_step),
            steps=steps,
            evaluate_every_steps=max(1, steps // MARKS),
            evaluation_microbatches=16,
            outer_learning_rate=tuning.outer_rate,
            outer_momentum=tuning.outer_momentum,
        )
        vocabulary = 256 if self.tokenizer == "bytes" else int(self.tokenizer.partition(":")[2])
        model = ModelConfig(d_model=self.d_model, d_ff=4 * self.d_model, num_layers=self.layers, num_heads=4, vocab_size=vocabulary)
        data = DataConfig(source=STDLIB, tokenizer=self.tokenizer, evaluation_fraction=0.05)
        return row.applied(Manifest(seed=cell.seed, model=model, data=data, train=train, compute=ComputeConfig(threads=1)))


class Training:
    """A run in one process, after `step` steps. Each stage has two peers, whose averages lose what a round's lose."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.step = 0
        self.losses: Losses = []
        self._stages = [build_stage(manifest, stage, "cpu") for stage in range(manifest.train.num_stages)]
        self._optimizers = [Optimizer(manifest, dict(stage.named_parameters())) for stage in self._stages]
        self._replicas = Replicas(manifest, self._stages, NUM_REPLICAS) if manifest.train.local_batch else None
        method = Method(weights="none" if self._replicas else manifest.wire.weight_gradients)
        self._groups = [Group([parameter.shape for parameter in stage.parameters()], method) for stage in self._stages]

    @property
    def is_over(self) -> bool:
        return self.step == self.manifest.train.steps and bool(self.losses) and self.losses[-1][0] == self._num_updates

    def go_on(self, corpus: Corpus) -> None:
        """Train up to the next evaluation, and make it."""
        train = self.manifest.train
        if self.losses:
            self._train_step(corpus)
        while not train.evaluates_at(self.step):
            self._train_step(corpus)
        self.losses.append((self._num_updates, evaluate(self.manifest, corpus, self._stages, self.step).loss))

    @property
    def _num_updates(self) -> int:
        """So many updates each peer has made."""
        train = self.manifest.train
        return self.step * (train.microbatches_per_step // NUM_REPLICAS if train.local_batch else 1)

    def _train_step(self, corpus: Corpus) -> None:
        if self._replicas is not None:
            _, gradients = self._replicas.mean_changes(self.step, backward_of(self.manifest, corpus, self.step))
        else:
            by_peer = [_gradients(self._stages, self.manifest, corpus, self.step, peer) for peer in range(NUM_REPLICAS)]
            gradients = [
                _named(stage, group.average(self.step, [of_peer[number] for of_peer in by_peer])[:-1] / NUM_REPLICAS)
                for number, (stage, group) in enumerate(zip(self._stages, self._groups, strict=True))
            ]
        for optimizer, of_stage in zip(self._optimizers, gradients, strict=True):
            apply_sums(self.manifest.train, optimizer, self.step, of_stage, 1, None)
        self.step += 1


def _named(stage: StageModule, flat: Tensor) -> dict[str, Tensor]:
    pieces = torch.split(flat, [parameter.numel() for parameter in stage.parameters()])
    return {name: piece.view_as(value) for (name, value), piece in zip(stage.named_parameters(), pieces, strict=True)}


def _gradients(stages: Sequence[StageModule], manifest: Manifest, corpus: Corpus, step: int, peer: int) -> list[Tensor]:
    """One vector for each stage, with the loss at its end."""
    loss = backpropagate(stages, *corpus.microbatch(step, peer), manifest.wire, manifest.train)
    found = []
    for stage in stages:
        parts = [torch.zeros_like(value) if value.grad is None else value.grad for value in stage.parameters()]
        found.append(torch.cat([*(part.flatten() for part in parts), torch.tensor([loss])]))
        stage.zero_grad()
    return found


def train(manifest: Manifest, corpus: Corpus, path: Path | None = None, may_go_on: Callable[[], bool] = lambda: True) -> Losses | None:
    """Train to the end. None if it was to stop before; then the file has what it came to, and the next call goes on from there.

    A file of another training is written over.
    """
    torch.set_num_threads(1)
    training = _read(path, manifest) or Training(manifest)
    while not training.is_over:
        if not may_go_on():
            return None
        training.go_on(corpus)
        if path is not None:
            draft = path.with_name(f"{path.name}.draft")
            torch.save(training, draft)
            draft.replace(path)
    return training.losses


def _read(path: Path | None, manifest: Manifest) -> Training | None:
    """The training of this manifest that was written; None if there is none."""
    if path is None or not path.exists():
        return None
    found = torch.load(path, weights_only=False)
    return found if isinstance(found, Training) and found.manifest == manifest else None

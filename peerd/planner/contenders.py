"""Ways to train over a home line: codecs, narrow boundaries, local steps and optimizers, and which of them a line wants.

How many updates a way needs to a loss was measured by training (`scripts/bench race`; race.toml has its results). How long a step takes on
a line is asked of the caller, who simulates it. The product decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from peerd.config.manifest import Manifest
from peerd.config.model_kinds import AnyModel, NarrowBoundary

LOCAL_UPDATES = 8
"""Updates that a peer makes by itself between two averages, where steps are local."""
NUM_REPLICAS = 2
"""Peers of each stage, in what is measured and simulated."""
WARMUP_UPDATES = 20
"""Updates in which what is measured warms its learning rate up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to train. With the codec `auto` each link has its own."""

    codec: str = "int8"
    """Of activations and their gradients."""
    averages: str = "int8"
    boundary: Literal["none"] | NarrowBoundary = "none"
    narrower: int = 0
    """So many times narrower is that boundary."""
    is_local: bool = False
    optimizer: Literal["adamw", "muon"] = "adamw"
    batch: float = 1.0
    """So many times the microbatches of an update."""

    @property
    def updates_per_step(self) -> int:
        """A step is what ends with an average."""
        return LOCAL_UPDATES if self.is_local else 1

    @property
    def name(self) -> str:
        """What it consists of, in the words of run.toml."""
        parts = [f"{self.codec} at boundaries", f"{self.averages} in averages"]
        if self.narrower:
            parts.append(f'boundary "{self.boundary}" of 1/{self.narrower} of the width')
        if self.is_local:
            parts.append(f"{LOCAL_UPDATES} local updates between averages")
        if self.batch != 1:
            parts.append(f"{self.batch:g} times the microbatches of an update")
        return ", ".join([*parts, self.optimizer])

    def applied(self, manifest: Manifest) -> Manifest:
        """A run that trains so. Each of its updates has `batch` times the microbatches of a step of the given run.

        Raises ValueError if its model, or another field, does not go with it.
        """
        microbatches = self.batch * manifest.train.microbatches_per_step
        if not microbatches.is_integer():
            raise ValueError(f"{manifest.train.microbatches_per_step} microbatches cannot become {self.batch:g} times as many")
        train = replace(
            manifest.train,
            optimizer=self.optimizer,
            microbatches_per_step=int(microbatches) * self.updates_per_step,
            local_batch=max(1, int(microbatches) // NUM_REPLICAS) if self.is_local else 0,
        )
        wire = replace(manifest.wire, activations=self.codec, activation_gradients=self.codec, weight_gradients=self.averages)
        return replace(manifest, model=self._narrowed(manifest), train=train, wire=wire)

    def _narrowed(self, manifest: Manifest) -> AnyModel:
        model = manifest.model
        if self.boundary == "none":
            return model
        if manifest.start.state:
            raise ValueError("a checkpoint's weights do not fit a narrow boundary")
        return model.narrowed(self.boundary, self.narrower)


CONTENDERS: Mapping[str, Contender] = {
    "dense float32": Contender(codec="none", averages="none"),
    "int8": Contender(),
    "int4": Contender(codec="int4"),
    "auto": Contender(codec="auto"),
    "subspace 1/4": Contender(boundary="subspace", narrower=4),
    "subspace 1/8": Contender(boundary="subspace", narrower=8),
    "subspace 1/16": Contender(boundary="subspace", narrower=16),
    "residual 1/8": Contender(boundary="token-residual", narrower=8),
    "residual 1/16": Contender(boundary="token-residual", narrower=16),
    "local steps": Contender(is_local=True),
    "local, sparse": Contender(is_local=True, averages="sparse:64"),
    "Muon": Contender(optimizer="muon"),
    "Muon, local": Contender(is_local=True, optimizer="muon"),
    "subspace, Muon, local": Contender(boundary="subspace", narrower=8, is_local=True, optimizer="muon"),
    "subspace, local": Contender(boundary="subspace", narrower=8, is_local=True, averages="sparse:64"),
    "residual, local": Contender(boundary="token-residual", narrower=8, is_local=True, averages="sparse:64"),
    "all": Contender(boundary="subspace", narrower=8, is_local=True, averages="sparse:64", optimizer="muon"),
    "half the batch": Contender(batch=0.5),
    "twice the batch": Contender(batch=2.0),
    "Muon, local, half": Contender(is_local=True, optimizer="muon", batch=0.5),
    "Muon, local, twice": Contender(is_local=True, optimizer="muon", batch=2.0),
    "subspace 1/4, Muon, local": Contender(boundary="subspace", narrower=4, is_local=True, optimizer="muon"),
}
"""Each of the first ones differs from `int8` in one thing, the others in several."""
BASE = "dense float32"
"""The row by whose updates and learning rate those of the others are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceRow:
    """What a race found for one row. Its rates are those with which it ended lowest."""

    row: str
    updates: float
    """To the race's loss, by those of `BASE` (mean of the seeds); infinite if it does not get there."""
    loss: float
    """At the end, with equal data: that of `BASE` is taken off. Nats per token, mean of the seeds."""
    learning_rate: float
    """By that of `BASE`."""
    outer_learning_rate: float = 0.0
    """Of the averages of local steps, like the momentum; 0 for other rows."""
    outer_momentum: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptChoices:
    """What the organiser has named, and no row may change."""

    optimizer: str | None = None
    microbatches: bool = False
    learning_rate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A row on a line."""

    measured: RaceRow
    contender: Contender
    manifest: Manifest
    update_s: float

    @property
    def row(self) -> str:
        return self.measured.row

    @property
    def time(self) -> float:
        """Seconds to a loss for which `BASE` makes one update."""
        return self.measured.updates * self.update_s


def ranked(
    manifest: Manifest, step_s: Callable[[Manifest], float], results: Iterable[RaceRow], kept: KeptChoices = KeptChoices()
) -> list[Ranked]:
    """The rows that get to the race's loss and go with this run, the one that is first there first.

    `step_s`: seconds that a step takes in a run. A step without local steps is an update, one with them has `LOCAL_UPDATES` of each peer.
    """
    found = []
    for measured in results:
        contender = CONTENDERS[measured.row]
        if not math.isfinite(measured.updates) or kept.optimizer not in (None, contender.optimizer):
            continue
        if kept.microbatches and contender.batch != 1:
            continue
        try:
            run = _with_rates(contender.applied(manifest), measured, kept)
        except ValueError:  # this model has no such boundary, or another field of the run forbids it
            continue
        found.append(Ranked(measured=measured, contender=contender, manifest=run, update_s=step_s(run) / contender.updates_per_step))
    return sorted(found, key=lambda each: each.time)


def _with_rates(run: Manifest, measured: RaceRow, kept: KeptChoices) -> Manifest:
    """With the learning rate and warm-up, and with the rates of averages, that the row was measured with."""
    train, warmup_steps = run.train, math.ceil(WARMUP_UPDATES / CONTENDERS[measured.row].updates_per_step)
    if not kept.learning_rate:
        rate = train.learning_rate * measured.learning_rate
        train = replace(train, learning_rate=rate, warmup_steps=max(train.warmup_steps, warmup_steps))
    if train.local_batch:
        train = replace(train, outer_learning_rate=measured.outer_learning_rate, outer_momentum=measured.outer_momentum)
    return replace(run, train=train)

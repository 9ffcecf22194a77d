"""Ways to train over a home line: codecs, narrow boundaries, local steps and optimizers, and which of them a line wants.

How many updates a way needs to a loss was measured by training (`scripts/bench race`); how long an update takes on a line is asked of the
caller, who simulates it. The product decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from peerd.config.manifest import Manifest
from peerd.config.model_kinds import AnyModel, NarrowBoundary

LOCAL_UPDATES = 8
"""Updates that a peer makes by itself between two averages, where steps are local."""
NUM_REPLICAS = 2
"""Peers of each stage, in what is measured and simulated."""


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
        return ", ".join([*parts, self.optimizer])

    def applied(self, manifest: Manifest) -> Manifest:
        """A run that trains so. Its steps have as many microbatches for each update as the given one's.

        Raises ValueError if its model, or another field, does not go with it.
        """
        train = replace(
            manifest.train,
            optimizer=self.optimizer,
            microbatches_per_step=manifest.train.microbatches_per_step * self.updates_per_step,
            local_batch=max(1, manifest.train.microbatches_per_step // NUM_REPLICAS) if self.is_local else 0,
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
}
"""Each differs from `int8` in one thing, the last ones in several."""

UPDATES: Mapping[str, float] = {
    "dense float32": 1.0,
    "int8": 0.97,
    "subspace 1/8": 0.65,
    "residual 1/8": 1.16,
    "local steps": 1.05,
    "Muon": 0.40,
    "Muon, local": 0.48,
}
"""Updates to a loss, by those of `dense float32`, of those that get there (peerd/docs/performance.md, "The race").

Measured with one seed and 128 updates of width 64: longer races may change them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A contender on a line."""

    row: str
    contender: Contender
    manifest: Manifest
    update_s: float
    updates: float
    """To a loss, by those of `dense float32`."""

    @property
    def time(self) -> float:
        """Seconds to a loss for which float32 without codecs makes one update."""
        return self.updates * self.update_s


def ranked(
    manifest: Manifest, update_s: Callable[[Manifest], float], updates: Mapping[str, float], optimizer: str | None = None
) -> list[Ranked]:
    """The contenders whose updates are known and which go with this run, the one that is first at a loss first.

    `update_s`: seconds that an update takes in a run, of a peer's own where steps are local. `optimizer`: only those with this one.
    """
    found = []
    for row, number in updates.items():
        contender = CONTENDERS[row]
        if not math.isfinite(number) or optimizer not in (None, contender.optimizer):
            continue
        try:
            run = contender.applied(manifest)
        except ValueError:  # this model has no such boundary, or another field of the run forbids it
            continue
        found.append(Ranked(row=row, contender=contender, manifest=run, update_s=update_s(run), updates=number))
    return sorted(found, key=lambda each: each.time)

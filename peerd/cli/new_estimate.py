"""Estimates of `peerd new`: the cost of each stage, and the number of stages that a small device needs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerd.config.manifest import Manifest
    from peerd.planner.workload import ModelLoads, StageEstimate


def loads_of(manifest: Manifest) -> ModelLoads:
    """The costs of the model's parts. If the model must be built to know them, a child process builds it without allocating memory."""
    from peerd.cli.launch import run_child
    from peerd.planner.kinds import planned_loads
    from peerd.planner.workload import Load, ModelLoads

    planned = planned_loads(manifest)
    if planned is not None:
        return planned
    reply = run_child("peerd.costs", dataclasses.asdict(manifest), what="estimating the costs")
    parts = {name: Load(**reply[name]) for name in ("first", "last", "narrowing", "widening")}
    return ModelLoads(groups=tuple(Load(**each) for each in reply["groups"]), **parts)


def estimates(manifest: Manifest, loads: ModelLoads) -> list[StageEstimate]:
    from peerd.planner.cutting import stage_layers
    from peerd.planner.workload import estimate_stage

    return [estimate_stage(manifest, loads, layers) for layers in stage_layers(manifest, loads)]


def fitted_to(manifest: Manifest, loads: ModelLoads, device_bytes: int, stages_given: bool) -> Manifest:
    """The manifest with a cut that fits devices with this much memory, of which torch takes some."""
    from peerd.cli.render_estimate import usable_bytes
    from peerd.config.cut import cut_points
    from peerd.planner.cutting import fitted

    numbers = [manifest.train.num_stages] if stages_given else range(1, len(cut_points(manifest.model)) + 2)
    return fitted(manifest, loads, usable_bytes(device_bytes), numbers)

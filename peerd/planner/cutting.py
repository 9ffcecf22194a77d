"""Chooses where to cut a model: into stages of about equal work, each of which fits the smallest device."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Literal

from peerd.config.cut import cut_points
from peerd.config.manifest import Manifest
from peerd.errors import ManifestError
from peerd.planner.memory import least_on_device, stage_memory
from peerd.planner.workload import ModelLoads, estimate_stage, stage_flops, stage_load

NO_LIMIT = 1 << 62


def balanced_cut(manifest: Manifest, loads: ModelLoads, most_bytes: int = NO_LIMIT) -> tuple[int, ...] | None:
    """The number of layers of each stage that minimises the slowest stage's work; None if no cut fits into `most_bytes` a stage.

    The layers are a chain, so dynamic programming over the cut points is exact. Ties go to the least sum of squares.
    """
    num_stages, num_layers = manifest.train.num_stages, manifest.model.num_layers

    @functools.cache
    def cost_of(start: int, end: int) -> tuple[int, int]:
        """Memory and work of a stage that holds these layers."""
        load = stage_load(manifest, loads, range(start, end))
        memory_bytes = stage_memory(manifest, load, manifest.slots, least_on_device(manifest)).device
        return memory_bytes, stage_flops(manifest, load, end == num_layers)

    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    """Layers before the cut -> the slowest stage's work so far, the sum of squares, the counts."""
    for stage in range(num_stages):
        found: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for start, (slowest, squares, counts) in best.items():
            for end in (num_layers,) if stage == num_stages - 1 else cut_points(manifest.model):
                if end <= start:
                    continue
                memory_bytes, work = cost_of(start, end)
                if memory_bytes > most_bytes:
                    break
                candidate = (max(slowest, work), squares + work * work, (*counts, end - start))
                found[end] = min(found.get(end, candidate), candidate)
        best = found
    return best[num_layers][2] if num_layers in best else None


def stage_layers(manifest: Manifest, loads: ModelLoads | None) -> list[range]:
    """The layers of every stage. A cut by cost needs `loads`."""
    counts = manifest.layer_counts or (loads and balanced_cut(manifest, loads))
    assert counts  # without a memory limit there is always a cut
    return [range(start, end) for start, end in pairwise((0, *accumulate(counts)))]


def resolved(manifest: Manifest, loads: ModelLoads) -> Manifest:
    """The manifest with `cut` replaced by the numbers of layers that it comes to."""
    counts = tuple(len(layers) for layers in stage_layers(manifest, loads))
    return replace(manifest, train=replace(manifest.train, cut=counts))


def fitted(manifest: Manifest, loads: ModelLoads, device_bytes: int, numbers_of_stages: Iterable[int]) -> Manifest:
    """The run cut into the first of these numbers of stages with which every stage fits a device of `device_bytes`.

    An even cut is preferred if it fits. Raises ManifestError if no cut fits.
    """
    for num_stages in numbers_of_stages:
        even = _cut(manifest, num_stages, "even")
        if even is not None and all(estimate_stage(even, loads, each).memory_bytes <= device_bytes for each in stage_layers(even, loads)):
            return even
        by_cost = _cut(manifest, num_stages, "cost")
        counts = balanced_cut(by_cost, loads, device_bytes) if by_cost is not None else None
        if by_cost is not None and counts is not None:
            return replace(by_cost, train=replace(by_cost.train, cut=counts))
    raise ManifestError(
        f"no cut of the model has stages of at most {device_bytes / 1e9:.3g} GB each",
        "allow more stages, or lower the model's width, the sequence length or the microbatch size",
    )


def _cut(manifest: Manifest, num_stages: int, cut: Literal["even", "cost"]) -> Manifest | None:
    """The manifest with this cut; None if the model cannot be cut so."""
    try:
        return replace(manifest, train=replace(manifest.train, num_stages=num_stages, cut=cut))
    except ValueError:
        return None

"""The estimated costs of a new run, as `peerd new` prints them: a line for each stage, or for several equal ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peerd.planner.link_needs import StageNeed
    from peerd.planner.workload import StageEstimate

HOME_MBIT = 20
"""Upload of a usual home line, Mbit/s: estimates say what it carries."""
NOMINAL_FLOPS = 1e12
"""Device speed for which tokens/s are printed; they are proportional to it."""
USUAL_GPUS_GIB = (4, 6, 8, 10, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192)
"""Usual memory sizes of GPUs, which are sold as GB."""
GIB = 1 << 30
TORCH_GIB = 1
"""GPU memory for the driver, torch's kernels and the slack of its allocator."""


def usable_bytes(device_bytes: int) -> int:
    """How many bytes of a device's memory a stage may take. A GPU sold with 8 GB has 8 GiB; less than the smallest GPU has is no GPU's."""
    sold_gb = device_bytes / 1e9
    if sold_gb < USUAL_GPUS_GIB[0]:
        return device_bytes
    return (round(sold_gb) * GIB if sold_gb in USUAL_GPUS_GIB else device_bytes) - TORCH_GIB * GIB


def estimate_lines(stages: list[StageEstimate], needs: list[StageNeed], slots: int) -> list[str]:
    rows = []
    for _, alike in groupby(enumerate(stages), key=lambda each: _cells(each[1])):
        (first, begins), *rest = alike
        last, ends = rest[-1] if rest else (first, begins)
        rows.append((_span(first, last), _span(begins.layers.start, ends.layers.stop - 1), *_cells(begins)))
    head = ("stage", "layers", "parameters", "memory", "GPU", "computes", f"{HOME_MBIT} Mbit/s up", "averaging")
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    num_tied = max(stage.load.num_tied for stage in stages)
    tied = f"parameters: {num_tied / 1e6:,.2f} M of them are the tied embeddings, which the first and the last stage each hold"
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return [
        *lines,
        *[tied] * (num_tied > 0),
        f"memory: a GPU's at most, with {slots} microbatches in hand; torch's own comes on top",
        f"machine: up to {_most_gb(stage.host_bytes for stage in stages)} of its memory beside that",
        f"processor: up to {_most_gb(stage.together_bytes for stage in stages)} in all where there is no GPU",
        f"GPU: the smallest usual one that has so much, and {TORCH_GIB} GB for torch itself",
        "computes: tokens/s of a device that sustains 1 TFLOP/s",
        f"{HOME_MBIT} Mbit/s up: tokens/s that such a home line carries, at most, in the codecs of [wire]",
        "speed: the smaller of these two; the peers of a stage add up",
        "averaging: uploaded once a step by each peer, at most (where many peers serve the stage)",
        f"line: at least {_rates(needs)} up and down where two such devices serve each stage; a slower peer is left out of averages",
    ]


def _most_gb(sizes: Iterable[int]) -> str:
    return f"{max(sizes) / 1e9:,.2f} GB"


def _rates(needs: list[StageNeed]) -> str:
    """The least and the most that a stage's rounds need."""
    least, most = (f"{8e-6 * rate:.2g}" if rate < 12.5e6 else f"{8e-6 * rate:,.0f}" for rate in _ends([need.rounds for need in needs]))
    return f"{least} Mbit/s" if least == most else f"{least} to {most} Mbit/s"


def _ends(rates: list[float]) -> tuple[float, float]:
    return min(rates), max(rates)


def _span(first: int, last: int) -> str:
    return f"{first}-{last}" if last > first else str(first)


def _cells(stage: StageEstimate) -> tuple[str, ...]:
    tokens_per_s = NOMINAL_FLOPS / max(stage.flops_per_token, 1)  # a stage may have no matrix products
    return (
        f"{stage.load.num_parameters / 1e6:,.2f} M",
        f"{stage.memory_bytes / 1e9:,.2f} GB",
        smallest_gpu(stage.memory_bytes),
        f"{tokens_per_s:,.0f}",
        f"{HOME_MBIT * 1e6 / 8 / stage.upload_bytes_per_token:,.0f}" if stage.upload_bytes_per_token else "-",
        f"{stage.averaging_bytes / 1e6:,.1f} MB",
    )


def smallest_gpu(memory_bytes: int) -> str:
    needed_gib = memory_bytes / GIB + TORCH_GIB
    return next((f"{size} GB" for size in USUAL_GPUS_GIB if size >= needed_gib), "none")


def estimate_fields(stage: StageEstimate, need: StageNeed) -> dict[str, Any]:
    """The estimate of a stage for --json, in bytes and operations; its line's in bytes per second for devices of `NOMINAL_FLOPS`."""
    return {
        "first_layer": stage.layers.start,
        "num_layers": len(stage.layers),
        "num_parameters": stage.load.num_parameters,
        "parameter_bytes": stage.load.parameter_bytes,
        "activation_bytes": stage.load.graph_bytes,
        **{name: value for name, value in asdict(stage).items() if name not in ("layers", "load")},
        "round_bytes_per_s": need.rounds,
        "boundary_up_bytes_per_s": need.boundary_up,
        "boundary_down_bytes_per_s": need.boundary_down,
    }

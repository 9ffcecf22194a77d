"""The table of docs/install.md: what a machine with so much memory can serve, by the estimate that joining goes by."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from peerd.cli.new_estimate import loads_of
from peerd.cli.render_estimate import usable_bytes
from peerd.config.manifest import Manifest, ModelConfig, TrainConfig
from peerd.planner.memory import Memory, Placing, stage_memory
from peerd.planner.workload import stage_load

PAGE = Path(__file__).resolve().parents[2] / "peerd" / "docs" / "install.md"
MOST_LAYERS = 40


@cache
def stage_of(num_layers: int, placing: Placing) -> tuple[int, Memory]:
    """Parameters of the middle stage of three, each with so many layers, and the memory it takes."""
    precision = "float32" if placing is Placing.TOGETHER else "bfloat16"
    manifest = Manifest(
        model=ModelConfig(num_layers=3 * num_layers, d_model=2048, d_ff=8192, num_heads=32, vocab_size=32000),
        train=TrainConfig(num_stages=3, sequence_length=1024, microbatch_size=1, microbatches_per_step=64, precision=precision),  # type: ignore[arg-type]
    )
    load = stage_load(manifest, loads_of(manifest), range(num_layers, 2 * num_layers))
    return load.num_parameters, stage_memory(manifest, load, manifest.slots, placing)


def largest(memory_bytes: int, placing: Placing) -> tuple[int, Memory]:
    """The same of the largest stage that fits a device with this memory."""
    fitting = [found for layers in range(1, MOST_LAYERS) if (found := stage_of(layers, placing))[1].device <= usable_bytes(memory_bytes)]
    assert 0 < len(fitting) < MOST_LAYERS - 1
    return fitting[-1]


def test_the_table_says_what_the_estimate_says() -> None:
    rows = re.findall(
        r"^\| (\d+) GB \| ([\d,]+) million \| ([\d,]+) million, with (\d+) GB \| ([\d,]+) million \|$", PAGE.read_text(), re.MULTILINE
    )
    assert [int(row[0]) for row in rows] == [8, 12, 16, 24]
    computed = []
    for size, *_ in rows:
        alone, offloaded, together = (
            largest(int(size) * 10**9, placing) for placing in (Placing.DEVICE, Placing.OFFLOADED, Placing.TOGETHER)
        )
        millions = [f"{round(found[0] / 1e6):,}" for found in (alone, offloaded, together)]
        computed.append((size, millions[0], millions[1], f"{offloaded[1].host / 1e9:.0f}", millions[2]))
    assert rows == computed

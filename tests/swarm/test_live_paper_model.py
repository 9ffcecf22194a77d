"""The paper's model over a live swarm: shared layers, narrow boundaries, growing sequences and 8-bit tensors, against one machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest
from safetensors.torch import load_file

from peerd.config.manifest import Manifest, WireConfig, dump
from tests.swarm.daemons import Swarm
from tests.swarm.runs import assert_close, swarm_manifest
from tests.swarm.test_live_equality import demo_and_reference, losses_in

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(300)]


def paper_manifest() -> Manifest:
    """Four layers in two groups, one a stage; 8 bits a value at a boundary half as wide as the model."""
    tiny = swarm_manifest(num_stages=2, cut="cost", first_sequence_length=16, sequence_length_steps=3)
    model = replace(tiny.decoder, num_layers=4, layers_per_group=2, boundary="maxout")
    return replace(tiny, model=model, wire=WireConfig(activations="int8", activation_gradients="int8"))


@pytest.fixture
def place() -> Iterator[Swarm]:
    with Swarm(paper_manifest()) as swarm:
        yield swarm


def test_the_papers_model_with_8_bit_boundaries_equals_one_machine(place: Swarm) -> None:
    """What codecs lose is part of the run: the reference loses the same at the same boundaries."""
    found, out, expected = demo_and_reference(place, "--run", place.run_file, "--peers", 3)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert_close(load_file(out / name), load_file(expected / name))
    assert losses_in(out) == losses_in(expected) == found["losses"]
    assert found["boundary_tensor_bytes"] == 4 * 2 * 32 * 16, "full length, half width"


@pytest.mark.parametrize("boundary", ["subspace", "token-residual"])
def test_a_subspace_equals_one_machine_and_crosses_narrowly(place: Swarm, boundary: Literal["subspace", "token-residual"]) -> None:
    plain = swarm_manifest(num_stages=3)
    narrow = replace(plain, model=replace(plain.decoder, boundary=boundary, boundary_rank=8))
    place.run_file.write_text(dump(narrow))
    found, out, expected = demo_and_reference(place, "--run", place.run_file, "--peers", 4)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert_close(load_file(out / name), load_file(expected / name))
    assert losses_in(out) == losses_in(expected) == found["losses"]
    assert found["boundary_tensor_bytes"] == plain.boundary_bytes // 4 == 4 * 2 * 32 * 8


def test_averaging_in_8_bits_learns_what_one_machine_learns(place: Swarm) -> None:
    """Not the same bits: who computed what decides what compression leaves out."""
    plain = swarm_manifest(num_stages=2)
    place.run_file.write_text(dump(replace(plain, wire=WireConfig(weight_gradients="int8"))))
    _, out, expected = demo_and_reference(place, "--run", place.run_file, "--peers", 4)
    assert losses_in(out) == pytest.approx(losses_in(expected), abs=0.01)
    assert losses_in(out) != losses_in(expected)

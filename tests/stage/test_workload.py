"""What the planner expects of a stage is what a real one holds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from peerd.averaging.compression import Compression
from peerd.config.codec import parse_averaged
from peerd.config.manifest import Manifest, WireConfig
from peerd.models.stages import layers_of, measured_loads, model_loads
from peerd.planner.memory import Placing, stage_memory
from peerd.planner.workload import estimate_stage, stage_load
from peerd.stage.state import StageState
from peerd.table.record import PeerId, PeerRecord
from tests.strategies import view_of
from tests.tiny_run import replace_train, tiny_manifest

VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_layers": 6, "layers_per_group": 2},
    {"num_layers": 6, "boundary": "subspace", "boundary_rank": 8},
    {"num_layers": 6, "boundary": "bottleneck", "boundary_factor": 4},
    {"num_layers": 6, "boundary": "maxout", "boundary_factor": 4, "boundary_layers": (1, 2, 4)},
]


def manifest_of(model: dict[str, Any]) -> Manifest:
    tiny = tiny_manifest(3)
    return dataclasses.replace(
        tiny, model=dataclasses.replace(tiny.model, **model), train=dataclasses.replace(tiny.train, cut="cost", num_stages=3)
    )


@pytest.mark.parametrize(("model", "optimizer"), [*((model, "adamw") for model in VARIANTS), (VARIANTS[1], "muon"), (VARIANTS[3], "muon")])
def test_parameters_and_optimizer_take_the_bytes_that_were_planned(model: dict[str, Any], optimizer: Any) -> None:
    """To the byte, but for the optimizer's step counts: 4 bytes a parameter tensor."""
    manifest = replace_train(manifest_of(model), optimizer=optimizer)
    for stage in range(3):
        record = PeerRecord(peer=PeerId("me"), stage=stage)
        state = StageState(manifest, record, torch.device("cpu"), lambda record=record: view_of(record))  # type: ignore[misc]
        load = stage_load(manifest, model_loads(manifest), layers_of(manifest, stage))
        parameters = list(state.holdings.module.parameters())
        assert load.parameter_bytes == sum(parameter.nbytes for parameter in parameters)
        planned = estimate_stage(manifest, model_loads(manifest), layers_of(manifest, stage))
        assert planned.optimizer_bytes == optimizer_bytes_of(state)
        assert load.num_parameters == state.accumulator.flat.numel() - 1  # the loss rides along


def optimizer_bytes_of(state: StageState) -> int:
    """Without the step counts, 4 bytes a parameter tensor."""
    return sum(tensor.nbytes for tensor in state.holdings.optimizer.tensors().values()) - 4 * len(list(state.holdings.module.parameters()))


@pytest.mark.parametrize(
    ("train", "numbers"),
    [({"optimizer": "lamb"}, 2), ({"optimizer": "sgd"}, 1), ({"optimizer": "sgd", "momentum": 0.0}, 0)],
    ids=["lamb", "sgd", "sgd without momentum"],
)
def test_each_optimizer_takes_the_bytes_that_were_planned(train: dict[str, Any], numbers: int) -> None:
    manifest = tiny_manifest(1, **train)
    record = PeerRecord(peer=PeerId("me"), stage=0)
    state = StageState(manifest, record, torch.device("cpu"), lambda: view_of(record))
    planned = estimate_stage(manifest, model_loads(manifest), range(manifest.model.num_layers))
    assert planned.optimizer_bytes == numbers * planned.load.parameter_bytes == optimizer_bytes_of(state)


def test_packed_moments_take_a_quarter_but_for_their_scales() -> None:
    tiny = tiny_manifest(1, optimizer_bits=8)
    manifest = dataclasses.replace(tiny, model=dataclasses.replace(tiny.decoder, d_model=128, d_ff=512))
    state = StageState(manifest, PeerRecord(peer=PeerId("me")), torch.device("cpu"), lambda: view_of(state.record))
    planned = estimate_stage(manifest, model_loads(manifest), range(manifest.model.num_layers))
    assert planned.optimizer_bytes == planned.load.parameter_bytes // 2
    assert planned.optimizer_bytes <= optimizer_bytes_of(state) <= 1.01 * planned.optimizer_bytes


def test_what_a_peer_that_offloads_holds_on_its_device_is_what_was_planned() -> None:
    """Parameters and sums last: 8 bytes a parameter. The rest of what lasts is set aside."""
    manifest = tiny_manifest(2)
    record = PeerRecord(peer=PeerId("me"), stage=0)
    state = StageState(manifest, record, torch.device("cpu"), lambda: view_of(record), offloads=True)
    state.holdings.advance(lambda: None)
    assert state.holdings.previous is not None
    values, previous = ([*module.parameters()] for module in (state.holdings.module, state.holdings.previous))
    on_device = sum(each.nbytes for each in values) + state.accumulator.flat.nbytes
    aside = sum(each.nbytes for each in previous) + optimizer_bytes_of(state)
    load = stage_load(manifest, model_loads(manifest), layers_of(manifest, 0))
    planned = stage_memory(manifest, load, 0, Placing.OFFLOADED)
    assert on_device == 8 * load.num_parameters + 4  # the loss rides along
    assert planned.device == on_device - 4 + 4 * load.num_parameters  # a pass's gradients
    assert planned.host == aside + 4 * load.num_parameters  # a round's copy


@pytest.mark.parametrize("model", VARIANTS[:3])
def test_costs_asked_of_built_stages_are_those_counted_by_hand(model: dict[str, Any]) -> None:
    """How kinds are planned that nobody has counted."""
    assert measured_loads(manifest_of(model)) == model_loads(manifest_of(model))


def test_upload_is_a_tensor_to_each_neighbour() -> None:
    manifest = tiny_manifest(3)
    loads = model_loads(manifest)
    uploads = [estimate_stage(manifest, loads, layers_of(manifest, stage)).upload_bytes_per_token for stage in range(3)]
    assert uploads == [4 * 32, 2 * 4 * 32, 4 * 32]


def test_factors_are_planned_to_be_as_large_as_a_round_sends_them() -> None:
    tiny = tiny_manifest(3)
    manifest = dataclasses.replace(tiny, wire=WireConfig(weight_gradients="powersgd:2"))
    for stage in range(3):
        record = PeerRecord(peer=PeerId("me"), stage=stage)
        accumulator = StageState(manifest, record, torch.device("cpu"), lambda record=record: view_of(record)).accumulator  # type: ignore[misc]
        allowed = parse_averaged(manifest.wire.weight_gradients)
        compression = Compression(allowed, torch.float32, accumulator.shapes)
        whole = compression.piece(accumulator.flat.numel(), 0, accumulator.flat.numel(), allowed.most_exact)
        planned = estimate_stage(manifest, model_loads(manifest), layers_of(manifest, stage))
        assert planned.averaging_bytes == 2 * (compression.num_bytes(whole) - 4), "the loss rides along"


def test_codecs_spare_upload_and_error_feedback_takes_memory() -> None:
    plain = tiny_manifest(3)
    small = dataclasses.replace(plain, wire=WireConfig(activations="int8", activation_gradients="bfloat16", weight_gradients="int8"))
    before, after = (estimate_stage(manifest, model_loads(manifest), layers_of(manifest, 1)) for manifest in (plain, small))
    assert after.upload_bytes_per_token == pytest.approx(32 * (1 + 4 / 256) + 2 * 32)
    assert after.averaging_bytes < 0.26 * before.averaging_bytes
    assert after.memory_bytes == before.memory_bytes
    assert after.host_bytes == before.host_bytes + 3 * before.load.parameter_bytes

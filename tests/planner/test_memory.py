"""What a stage takes of a device and of its machine, where its tensors lie, and how few stages a home's cards need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.cli.new_estimate import estimates, fitted_to
from peerd.cli.render_estimate import smallest_gpu
from peerd.config.manifest import ComputeConfig, Manifest, SwarmConfig, TrainConfig, WireConfig
from peerd.planner.load import Load
from peerd.planner.memory import Memory, Placing, Room, placing_in, stage_memory
from peerd.stage.witnessing import most_kept_bytes

LOAD = Load(num_parameters=1000, num_in_layers=1000)
GB = 10**9


def manifest_of(offload: Any = "auto", **train: Any) -> Manifest:
    return Manifest(train=TrainConfig(**train), compute=ComputeConfig(offload=offload))


def bytes_of(manifest: Manifest, placing: Placing) -> tuple[float, float]:
    """Of a parameter, on the device and on the host."""
    found = stage_memory(manifest, LOAD, 0, placing)
    return found.device / LOAD.num_parameters, found.host / LOAD.num_parameters


def test_the_tensors_that_are_kept_for_audits_are_counted_where_they_lie_and_fit_what_a_peer_may_keep() -> None:
    for num_microbatches in (1, 16, 4096):
        plain = manifest_of(microbatches_per_step=num_microbatches, microbatch_size=1)
        audited = replace(plain, swarm=SwarmConfig(trust="audits", group_size=0))
        for placing in Placing:
            without, needed = (stage_memory(each, replace(LOAD, num_parameters=10**8), 2, placing) for each in (plain, audited))
            together = placing is Placing.TOGETHER
            a_sum = 4 * 10**8  # of a mate's part that is computed again
            room, before = (needed.device, without.device + a_sum) if together else (needed.host, without.host)
            assert room - before == pytest.approx(min(8 * num_microbatches * plain.boundary_bytes, before / 3), abs=1)
            assert room - most_kept_bytes(audited, room) >= before - 1, "what is kept leaves the stage what it needs"
            assert together or needed.device == without.device + a_sum


@pytest.mark.parametrize(
    ("train", "together", "device", "offloaded"),
    [
        ({}, 24, (24, 4), (12, 16)),
        ({"accumulate": "float64"}, 32, (28, 8), (16, 20)),
        ({"optimizer_bits": 8}, 18, (18, 4), (12, 10)),
        ({"optimizer": "muon"}, 20, (20, 4), (12, 12)),
        ({"optimizer": "sgd"}, 20, (20, 4), (12, 12)),
        ({"optimizer": "sgd", "momentum": 0.0}, 16, (16, 4), (12, 8)),
        ({"delayed_updates": True}, 36, (32, 4), (24, 12)),
        ({"average_parameters": "always"}, 24, (24, 4), (12, 16)),
        ({"local_batch": 1}, 40, (40, 4), (28, 16)),
        ({"local_batch": 1, "outer_momentum": 0.9}, 44, (44, 4), (28, 20)),
        ({"local_batch": 1, "local_steps_after": 9}, 48, (48, 4), (28, 24)),
        ({"local_batch": 1, "outer_momentum": 0.9, "accumulate": "float64"}, 60, (56, 8), (40, 24)),
    ],
)
def test_bytes_of_a_parameter(train: dict[str, Any], together: int, device: tuple[int, int], offloaded: tuple[int, int]) -> None:
    manifest = manifest_of(**train)
    expected = {Placing.TOGETHER: (together, 0), Placing.DEVICE: device, Placing.OFFLOADED: offloaded}
    assert {placing: bytes_of(manifest, placing) for placing in Placing} == expected


def test_a_lossy_codec_takes_the_machines_memory_alone() -> None:
    lossy = replace(manifest_of(), wire=WireConfig(weight_gradients="int8"))
    assert bytes_of(lossy, Placing.OFFLOADED) == (12, 28)
    assert bytes_of(lossy, Placing.TOGETHER) == (36, 0)


@pytest.mark.parametrize(
    ("offload", "room", "expected"),
    [
        ("all", Room(100_000), Placing.TOGETHER),
        ("none", Room(10_000, 10_000), Placing.DEVICE),
        ("all", Room(100_000, 10_000), Placing.OFFLOADED),
        ("auto", Room(48_000, 100_000), Placing.DEVICE),
        ("auto", Room(47_999, 100_000), Placing.OFFLOADED),
        ("auto", Room(47_999, 15_999), Placing.DEVICE),
        ("auto", Room(23_999, 15_999), Placing.OFFLOADED),
    ],
)
def test_where_a_stage_lies(offload: str, room: Room, expected: Placing) -> None:
    assert placing_in(room, manifest_of(offload), LOAD, 0) is expected


@given(st.integers(0, 60_000), st.integers(0, 60_000))
def test_auto_chooses_what_fits_wherever_something_does(device: int, host: int) -> None:
    room, manifest = Room(device, host), manifest_of()
    needed = {placing: stage_memory(manifest, LOAD, 0, placing) for placing in (Placing.DEVICE, Placing.OFFLOADED)}
    chosen = placing_in(room, manifest, LOAD, 0)
    assert room.holds(needed[chosen]) == any(room.holds(each) for each in needed.values())
    assert bool(room.lacks(needed[chosen])) == (not room.holds(needed[chosen]))


def test_what_is_lacking_is_named_by_whose_memory_it_is() -> None:
    assert Room(10 * GB, GB).lacks(Memory(9 * GB, GB)) == ""
    assert Room(10 * GB, GB).lacks(Memory(11 * GB, 0)) == "11.00 GB of memory; 10.00 GB may be had"
    assert Room(10 * GB, GB).lacks(Memory(9 * GB, 2 * GB)) == "2.00 GB of the machine's memory beside its device's; 1.00 GB may be had"
    assert Room(10 * GB).lacks(Memory(9 * GB, 2 * GB)) == ""


LLAMA_7B = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008}
LLAMA_1_3B = {"num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 5504}


@pytest.mark.parametrize(
    ("sizes", "tokens", "card_gb", "most_stages"),
    [
        pytest.param(LLAMA_7B, 2048, 24, 5, id="7B", marks=pytest.mark.slow),  # a minute, for what the other shows as well
        pytest.param(LLAMA_1_3B, 1024, 8, 3, id="1.3B"),
    ],
)
@pytest.mark.timeout(600)  # the library of models alone takes seconds of a processor to load
def test_a_llama_fits_into_few_cards_of_a_home(sizes: dict[str, int], tokens: int, card_gb: int, most_stages: int) -> None:
    """With so many tokens a microbatch, and --device-memory; the estimate names no larger card."""
    pytest.importorskip("transformers")
    from peerd.models.hf.manifest_model import choose_model
    from peerd.models.stages import model_loads

    model = choose_model("llama", {}, sizes | {"vocab_size": 32000, "max_position_embeddings": 2048})
    manifest = Manifest(model=model, train=TrainConfig(microbatch_size=1, sequence_length=tokens))
    loads = model_loads(manifest)  # what the command has a child process compute
    cut = fitted_to(manifest, loads, card_gb * 10**9, stages_given=False)
    assert cut.train.num_stages <= most_stages
    needed = max(stage.memory_bytes for stage in estimates(cut, loads))
    assert smallest_gpu(needed) == f"{card_gb} GB"

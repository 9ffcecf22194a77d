"""The costs of models that are measured without memory are those of the real model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from peerd.cli.main import run
from peerd.config import manifest as manifests
from peerd.config.manifest import Manifest, TrainConfig
from peerd.costs import run as run_child
from peerd.models.blocks import describe_entry
from peerd.models.stages import StageModule, build_stage, layers_of
from peerd.planner.workload import Load, ModelLoads, estimate_stage, stage_load

NUM_STAGES = 3


def run_of(kind: str) -> Manifest:
    """A dozen layers, so that stages have several layers, and different numbers of them."""
    train = TrainConfig(num_stages=NUM_STAGES, microbatch_size=2, sequence_length=32)
    if kind == "resnet":
        return Manifest(model=describe_entry("resnet"), train=train)
    pytest.importorskip("transformers")
    from tests.models.hf_models import hf_model

    return Manifest(model=hf_model(kind, num_hidden_layers=7, hidden_size=64, intermediate_size=160), train=train)


def told_of(manifest: Manifest) -> ModelLoads:
    """The loads as `peerd new` reads them."""
    told = run_child(dataclasses.asdict(manifest))
    groups = tuple(Load(**each) for each in told.pop("groups"))
    return ModelLoads(groups=groups, **{name: Load(**fields) for name, fields in told.items()})


def microbatch(manifest: Manifest, stage: int) -> tuple[Tensor, Tensor]:
    rows = (manifest.train.microbatch_size, manifest.train.sequence_length)
    tokens = torch.randint(0, manifest.model.vocab_size, rows, generator=torch.Generator().manual_seed(0))
    if manifest.model.kind == "blocks":
        shape = describe_entry("resnet").input_shape if stage == 0 else manifest.boundary_shape(layers_of(manifest, stage).start)[1:]
        return torch.randn(rows[0], *shape, requires_grad=stage > 0), tokens[:, 0]
    return tokens if stage == 0 else torch.randn(manifest.boundary_shape(1), requires_grad=True), tokens


def really_kept_bytes(module: StageModule, inputs: Tensor) -> int:
    """Bytes that autograd keeps of one forward pass, without parameters and the input, which a microbatch in hand holds anyway."""
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    own = {value.untyped_storage().data_ptr() for value in (inputs, *module.parameters(), *module.buffers())}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = module(inputs)
    assert output.requires_grad
    return sum(tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in own)


def really_computed(module: StageModule, inputs: Tensor, labels: Tensor) -> int:
    whole: Any = getattr(module, "whole", None)
    if whole is not None:
        whole.config._attn_implementation = "eager"  # torch's counter knows attention only as plain products
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(inputs, labels if module.is_last else None)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("kind", ["llama", "resnet"])
def test_the_estimate_of_each_stage_is_what_a_real_one_takes(kind: str) -> None:
    manifest = run_of(kind)
    loads = told_of(manifest)
    for stage in range(NUM_STAGES):
        layers = layers_of(manifest, stage)
        load, module = stage_load(manifest, loads, layers), build_stage(manifest, stage, "cpu")
        inputs, labels = microbatch(manifest, stage)
        assert load.num_parameters == sum(parameter.numel() for parameter in module.parameters())
        assert load.forward_flops == pytest.approx(really_computed(module, inputs.detach(), labels), rel=0.1)
        assert estimate_stage(manifest, loads, layers).flops_per_token == 3 * load.forward_flops // manifest.tokens_per_microbatch
        if stage < NUM_STAGES - 1:  # the last stage's has room for the loss, too
            assert load.graph_bytes == pytest.approx(really_kept_bytes(build_stage(manifest, stage, "cpu"), inputs), rel=0.1)


def test_of_layers_that_are_alike_one_is_asked() -> None:
    pytest.importorskip("transformers")
    from peerd.models.hf.cost import kinds_of_layers
    from tests.models.hf_models import hf_model

    assert len(set(kinds_of_layers(hf_model("llama", num_hidden_layers=6)))) == 1
    layer_types = ["sliding_attention", "full_attention"] * 3
    kinds = kinds_of_layers(hf_model("gemma2", num_hidden_layers=6, layer_types=layer_types))
    assert kinds[::2] == (kinds[0],) * 3
    assert kinds[1::2] == (kinds[1],) * 3
    assert kinds[0] != kinds[1]


def test_new_says_what_a_list_of_blocks_takes_and_cuts_it_for_a_device(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["new", str(tmp_path), "--model", "blocks:resnet", "--device-memory", "3MB"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["stage", "layers"]
    made = manifests.load(tmp_path / "run.toml")
    assert made.train.num_stages > 1
    loads = told_of(made)
    biggest = max(estimate_stage(made, loads, layers_of(made, stage)).memory_bytes for stage in range(made.train.num_stages))
    assert biggest <= 3_000_000


@pytest.mark.slow
def test_new_says_what_a_transformers_model_takes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    sizes = ["--layers", "6", "--d-model", "64", "--heads", "4", "--d-ff", "128", "--set", "vocab_size=512", "--stages", "3"]
    assert run(["new", str(tmp_path), "--model", "hf:llama", *sizes, "--json"]) == 0
    stages: list[dict[str, Any]] = json.loads(capfd.readouterr().out)["stages"]
    made = manifests.load(tmp_path / "run.toml")
    parameters = [sum(value.numel() for value in build_stage(made, stage, "cpu").parameters()) for stage in range(3)]
    assert [stage["num_parameters"] for stage in stages] == parameters
    assert all(stage["flops_per_token"] > 6 * (stage["num_parameters"] - 512 * 64 * (not stage["first_layer"])) for stage in stages)

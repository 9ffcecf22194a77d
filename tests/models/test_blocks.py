"""A model of named blocks is the same in any number of stages, and refused if the installed package is not the right one."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from peerd.config.manifest import ComputeConfig, Manifest, TrainConfig, parse_bytes
from peerd.config.model_kinds import BlocksConfig
from peerd.equality import check_split
from peerd.errors import ManifestError
from peerd.models import blocks
from peerd.models.blocks import describe_entry, load_entry
from peerd.models.dropout import dropout_of
from peerd.models.resnet import IMAGE_SHAPE, samples
from peerd.models.stages import build_stage, estimate_forward_flops, input_of, labels_shape
from peerd.reference import train_reference
from peerd.train.samples import Samples


def resnet_manifest(num_stages: int = 3, **train: Any) -> Manifest:
    settings: dict[str, Any] = {"microbatches_per_step": 4, "microbatch_size": 4} | train
    return Manifest(
        seed=7, model=describe_entry("resnet"), train=TrainConfig(num_stages=num_stages, **settings), compute=ComputeConfig(threads=1)
    )


def test_a_resnet_in_three_stages_has_the_gradients_of_the_whole() -> None:
    check_split(resnet_manifest())


def test_the_check_does_not_depend_on_where_the_run_is_cut() -> None:
    check_split(resnet_manifest(4, cut=(1, 3, 2, 2)))


def test_boundaries_have_the_shape_of_their_cut() -> None:
    manifest = resnet_manifest()
    assert [input_of(manifest, stage, 1) for stage in range(3)] == [
        ("float32", (4, *IMAGE_SHAPE)),
        ("float32", (4, 16, 16, 16)),
        ("float32", (4, 64, 4, 4)),
    ]
    assert labels_shape(manifest, 1) == (4,)
    assert manifest.boundary_bytes == 4 * 4 * 16**3
    assert manifest.tokens_per_step == 4 * 4, "an image counts as one token"
    assert parse_bytes(manifest.canonical_bytes(), "test") == manifest


def test_it_learns_to_tell_the_generated_images_apart() -> None:
    manifest = resnet_manifest(1, microbatch_size=16, learning_rate=1e-3)
    losses = [entry.loss for entry in train_reference(manifest, Samples(manifest), 10).history]
    assert losses[-1] < 0.7 * losses[0]


def test_it_is_evaluated_on_images_that_it_never_trains_on_whatever_the_split() -> None:
    whole, split = (
        train_reference(manifest, Samples(manifest), 4).evaluations
        for manifest in (
            resnet_manifest(stages, microbatch_size=16, learning_rate=1e-3, evaluate_every_steps=2, evaluation_microbatches=2, steps=4)
            for stages in (1, 3)
        )
    )
    assert [each.step for each in whole] == [0, 2, 4]
    assert whole == split
    assert whole[-1].loss < whole[0].loss
    corpus = Samples(resnet_manifest())
    assert torch.equal(corpus.evaluation_microbatch(1)[0], corpus.evaluation_microbatch(1)[0])
    assert not any(torch.equal(corpus.evaluation_microbatch(0)[0], corpus.microbatch(step, 0)[0]) for step in range(4))


def test_images_depend_on_seed_step_and_index_alone() -> None:
    torch.manual_seed(1)
    images, labels = samples(7, 3, 1, 4)
    torch.manual_seed(2)
    again, labels_again = samples(7, 3, 1, 4)
    assert torch.equal(images, again)
    assert torch.equal(labels, labels_again)
    for other in ((8, 3, 1, 4), (7, 4, 1, 4), (7, 3, 2, 4)):
        assert not torch.equal(samples(*other)[0], images)


def test_first_weights_do_not_depend_on_the_split_and_torchs_own_generator_goes_on_as_it_was() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    whole = dict(build_stage(resnet_manifest(1), 0, "cpu").named_parameters())
    assert torch.equal(torch.rand(3), expected)
    for stage in range(3):
        for name, value in build_stage(resnet_manifest(3), stage, "cpu").named_parameters():
            assert torch.equal(value, whole[name])


def test_costs_grow_with_the_microbatch() -> None:
    small, large = resnet_manifest(), resnet_manifest(microbatch_size=8)
    graphs = [build_stage(each, 0, "cpu").graph_bytes(each.tokens_per_microbatch) for each in (small, large)]
    assert graphs[1] == 2 * graphs[0] > 0
    assert estimate_forward_flops(large, 0) == 2 * estimate_forward_flops(small, 0) > 0


def test_a_package_that_is_not_installed_is_named() -> None:
    missing = BlocksConfig(entry="unet", input_shape=(3,), shapes=((3,),), num_labels=2)
    with pytest.raises(ManifestError, match=r"no installed package has the model 'unet'; install the package.*peerd\.blocks"):
        build_stage(dataclasses.replace(resnet_manifest(1), model=missing), 0, "cpu")


def test_another_version_of_the_package_is_refused() -> None:
    model = describe_entry("resnet")
    fewer = dataclasses.replace(model, shapes=model.shapes[:-1])
    with pytest.raises(ManifestError, match="installed here has 8 blocks, not 7"):
        build_stage(dataclasses.replace(resnet_manifest(1), model=fewer), 0, "cpu")
    wider = dataclasses.replace(model, shapes=(*model.shapes[:-1], (12,)))
    with pytest.raises(ManifestError, match=r"blocks that return \[10\] instead of \[12\]"):
        build_stage(dataclasses.replace(resnet_manifest(1), model=wider), 0, "cpu")


PACKAGE = """
import torch
from torch import nn
from peerd.models.blocks import BlockModel
from peerd.models.dropout import Dropout

def samples(seed, step, index, count):
    return torch.ones(count, 4), torch.zeros(count, dtype=torch.int64)

def made(middle):
    blocks = {"in": lambda: nn.Linear(4, 6), "middle": middle, "out": lambda: nn.Linear(6, 2)}
    return BlockModel(blocks=blocks, input_shape=(4,), num_labels=2, loss=nn.functional.cross_entropy, samples=samples)

def good():
    return made(lambda: nn.Tanh())

def noisy():
    return made(lambda: nn.Dropout(0.5))

def repeatable():
    return made(lambda: Dropout(0.5))

def odd():
    return None
"""


def test_entries_come_from_installed_packages_and_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere.py").write_text(PACKAGE)
    told = tmp_path / "elsewhere-1.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1\n")
    entries = "".join(f"{name} = elsewhere:{name}\n" for name in ("good", "noisy", "repeatable", "odd"))
    (told / "entry_points.txt").write_text("[peerd.blocks]\n" + entries)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "elsewhere", None)
    monkeypatch.delitem(sys.modules, "elsewhere")
    blocks.load_entry.cache_clear()
    check_split(dataclasses.replace(resnet_manifest(), model=describe_entry("good")))
    with pytest.raises(ManifestError, match=r"does not split: the gradient of blocks\.\S+ differs"):
        check_split(dataclasses.replace(resnet_manifest(), model=describe_entry("noisy")))
    repeatable = dataclasses.replace(resnet_manifest(), model=describe_entry("repeatable"))
    check_split(repeatable)
    assert_left_out_by_microbatch(repeatable)
    with pytest.raises(ManifestError, match="returns a NoneType, not a BlockModel"):
        load_entry("odd")


def assert_left_out_by_microbatch(manifest: Manifest) -> None:
    whole = build_stage(dataclasses.replace(manifest, train=dataclasses.replace(manifest.train, num_stages=1)), 0, "cpu")
    found = []
    for step in (0, 0, 1):
        with torch.no_grad(), dropout_of(whole, manifest, step, 0):
            found.append(whole(torch.ones(16, 4)))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])

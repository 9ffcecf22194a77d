"""A manifest survives every conversion, and one that breaks a rule is refused with the name of the field."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.config import manifest
from peerd.config.manifest import MAX_MANIFEST_BYTES, Manifest
from peerd.config.run_file import explained
from peerd.errors import ManifestError
from tests.config.strategies import manifests

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
field_names = [field.name for field in dataclasses.fields(Manifest)]
leaf_paths = [
    (section.name, entry.name)
    for section in dataclasses.fields(Manifest)
    if dataclasses.is_dataclass(getattr(Manifest(), section.name))
    for entry in dataclasses.fields(getattr(Manifest(), section.name))
]

AUDITS = {"trust": "audits", "group_size": 0}


@given(manifests())
def test_canonical_bytes_come_back_equal(run: Manifest) -> None:
    assert manifest.parse_bytes(run.canonical_bytes(), "test") == run


@given(manifests())
def test_toml_comes_back_equal(run: Manifest) -> None:
    assert manifest.parse(tomllib.loads(manifest.dump(run)), "test") == run


@given(manifests())
def test_an_explained_run_file_comes_back_equal(run: Manifest) -> None:
    assert manifest.parse(tomllib.loads(explained(run)), "test") == run


@given(manifests(), manifests())
def test_unequal_manifests_are_signed_as_unequal_bytes(one: Manifest, other: Manifest) -> None:
    assert (one == other) == (one.canonical_bytes() == other.canonical_bytes())


@given(st.binary(max_size=300))
def test_bytes_from_the_network_are_parsed_or_refused_and_nothing_else(raw: bytes) -> None:
    try:
        manifest.parse_bytes(raw, "a peer's manifest")
    except ManifestError as error:
        assert str(error).startswith("a peer's manifest: ")


@given(st.dictionaries(st.sampled_from(field_names) | st.text(max_size=8), json_values, max_size=5))
def test_any_document_is_parsed_or_refused_and_nothing_else(document: dict[str, Any]) -> None:
    try:
        manifest.parse(document, "test")
    except ManifestError as error:
        assert str(error).startswith("test: ")


@given(st.sampled_from(leaf_paths), json_values)
def test_any_value_of_any_field_is_taken_or_refused_and_nothing_else(path: tuple[str, str], value: object) -> None:
    document = dataclasses.asdict(Manifest())
    document[path[0]][path[1]] = value
    try:
        manifest.parse(document, "test")
    except ManifestError as error:
        assert str(error).startswith("test: ")


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("train", "num_stages", 0),
        ("train", "num_stages", 5),
        ("train", "learning_rate", float("nan")),
        ("train", "microbatches_per_step", 8193),
        ("train", "accumulate", "float16"),
        ("train", "optimizer", "adam"),
        ("train", "momentum", 1.0),
        ("train", "schedule", "cosine"),
        ("train", "final_learning_rate", 1e-4),
        ("train", "decay_steps", 100),
        ("train", "no_decay", "bias"),
        ("train", "no_decay", [""]),
        ("train", "max_gradient_norm", -1.0),
        ("train", "dropout", 1.0),
        ("train", "precision", "float8"),
        ("train", "loss_scale", 1000.0),
        ("train", "loss_scale_growth_steps", 0),
        ("model", "d_model", 100),
        ("model", "vocab_size", -1),
        ("model", "kind", "transformer"),
        ("compute", "threads", -1),
        ("swarm", "announce_period_s", 0.0),
        ("swarm", "rebalance", "sometimes"),
        ("swarm", "group_size", 1),
        ("swarm", "group_size", 1025),
        ("swarm", "placement", ["somebody"]),
        ("swarm", "placement", ["a=0", "a=1"]),
        ("swarm", "placement", ["a=2"]),
        ("data", "tokenizer", "words"),
        ("wire", "activations", "int3"),
        ("wire", "weight_gradients", "topk:2"),
        ("wire", "weight_gradients", "powersgd:0"),
        ("wire", "weight_gradients", "powersgd:65"),
        ("wire", "weight_gradients", "auto:powersgd:4"),
        ("wire", "activation_gradients", "powersgd:4"),
        ("train", "cut", [1, 1]),
        ("train", "cut", "best"),
        ("model", "boundary_layers", [-1]),
    ],
)
def test_a_broken_rule_is_told_by_the_name_of_its_field(section: str, field: str, value: object) -> None:
    with pytest.raises(ManifestError, match=field):
        manifest.parse({section: {field: value}}, "test")


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"train": {"local_steps_after": 3}}, "train.local_steps_after (3) needs train.local_batch"),
        ({"train": {"local_batch": 17}}, "must not exceed train.microbatches_per_step"),
        ({"train": {"local_batch": 2, "delayed_updates": True}}, "train.delayed_updates cannot go with train.local_batch"),
        ({"train": {"local_batch": 2, "precision": "float16"}}, 'train.precision "float16" cannot go with train.local_batch'),
        ({"train": {"local_batch": 2, "max_gradient_norm": 1.0}}, "train.max_gradient_norm cannot go with train.local_batch"),
        ({"train": {"local_batch": 2, "average_parameters": "always"}}, 'train.average_parameters = "always" cannot go with'),
        (
            {"train": {"local_batch": 2}, "model": {"tie_word_embeddings": True}},
            "model.tie_word_embeddings cannot go with train.local_batch",
        ),
        ({"wire": {"weight_gradients": "sparse:64"}}, 'wire.weight_gradients "sparse" needs train.local_batch'),
    ],
)
def test_what_does_not_go_with_local_steps_is_told(document: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError, match=re.escape(words)):
        manifest.parse(document, "test")


def test_local_steps_go_with_a_sparse_codec_groups_and_tied_weights_of_one_stage() -> None:
    document = {
        "train": {"local_batch": 16, "num_stages": 1, "optimizer_bits": 8, "accumulate": "float64"},
        "wire": {"weight_gradients": "sparse:64"},
        "swarm": {"group_size": 4},
        "model": {"tie_word_embeddings": True},
    }
    run = manifest.parse(document, "test")
    assert not run.may_average_parameters
    assert run.train.inner == replace(run.train, local_batch=0)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"swarm": {"trust": "audits"}}, "needs swarm.group_size 0"),
        ({"swarm": AUDITS, "train": {"local_batch": 2}}, "train.local_batch"),
        ({"swarm": AUDITS, "train": {"delayed_updates": True}}, "train.delayed_updates"),
        ({"swarm": AUDITS, "train": {"precision": "float16"}}, 'train.precision "float16"'),
        ({"swarm": AUDITS, "wire": {"weight_gradients": "powersgd:4"}}, "powersgd"),
        ({"swarm": AUDITS, "wire": {"weight_gradients": "int8"}}, "what a codec leaves out of one part is in the next one"),
        ({"swarm": AUDITS, "wire": {"weight_gradients": "auto"}}, 'wire.weight_gradients "auto"'),
        ({"swarm": AUDITS, "model": {"boundary": "subspace", "boundary_rank": 8}}, "subspace"),
    ],
)
def test_what_does_not_go_with_audits_is_told(document: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError, match=re.escape('swarm.trust "audits"') + ".*" + re.escape(words)):
        manifest.parse(document, "test")


def test_averages_in_groups_are_certified_and_a_group_has_two_members_or_more() -> None:
    run = manifest.parse({"swarm": {"trust": "on", "group_size": 2}}, "test")
    assert (run.swarm.certifies, run.swarm.group_size) == (True, 2)
    with pytest.raises(ManifestError, match="a group has at least 2 peers"):
        manifest.parse({"swarm": {"trust": "on", "group_size": 1}}, "test")


def test_audits_include_certificates_and_are_off_unless_the_organiser_wants_them() -> None:
    assert (Manifest().swarm.certifies, Manifest().swarm.audits) == (False, False)
    for trust, audits in (("on", False), ("audits", True)):
        swarm = manifest.parse({"swarm": {**AUDITS, "trust": trust}}, "test").swarm
        assert (swarm.certifies, swarm.audits) == (True, audits)


def test_a_misspelt_field_is_refused_rather_than_ignored() -> None:
    with pytest.raises(ManifestError, match=r"unknown field train\.stepz"):
        manifest.parse({"train": {"stepz": 3}}, "test")


def test_a_manifest_of_any_size_is_not_read() -> None:
    with pytest.raises(ManifestError, match="at most"):
        manifest.parse_bytes(b" " * (MAX_MANIFEST_BYTES + 1), "test")


@pytest.mark.parametrize("raw", [b"[" * 60_000, b'{"name": ' * 8_000])
def test_deep_nesting_is_refused_like_any_other_nonsense(raw: bytes) -> None:
    with pytest.raises(ManifestError):
        manifest.parse_bytes(raw[:MAX_MANIFEST_BYTES], "test")


def test_the_run_id_depends_on_key_and_name_alone() -> None:
    key = bytes(range(32))
    assert manifest.run_id(key, "a") == manifest.run_id(key, "a")
    assert len({manifest.run_id(key, "a"), manifest.run_id(key, "b"), manifest.run_id(bytes(32), "a")}) == 3
    assert len(bytes.fromhex(manifest.run_id(key, "a"))) == 16


def test_a_folder_in_place_of_a_run_file_is_told(tmp_path: Path) -> None:
    from peerd.errors import DiskError

    with pytest.raises(DiskError, match="directory"):
        manifest.load(tmp_path)

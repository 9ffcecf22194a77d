"""What is exported loads with transformers and computes what the swarm's stages compute."""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, UntypedStorage

from peerd.config.manifest import DataConfig, Manifest
from peerd.config.paths import cache_folder
from peerd.data.tokenizer import tokenizer_path
from peerd.data.tokens import prepare_tokens
from peerd.errors import UsageError
from peerd.generate import GenerationRequest, generate, generate_tokens, open_text_model, run
from peerd.models.blocks import describe_entry
from peerd.models.published import byte_signs, check_publishable, publish
from peerd.models.stages import build_stage
from peerd.policy.inference.sampling import Sampling
from peerd.stage.export import write_export
from peerd.stage.hf_export import split_into_shards, write_hf_export
from peerd.train.corpus import agree_on_data
from tests.pretend.life import PRETEND
from tests.tiny_run import real_text, replace_train, tiny_manifest


def trained_a_little(manifest: Manifest) -> dict[str, Tensor]:
    """First weights, each moved so that no norm is ones and no bias zero."""
    stages = [build_stage(manifest, stage, "cpu") for stage in range(manifest.train.num_stages)]
    chance = torch.Generator().manual_seed(1)
    return {
        name: value.detach() + 0.02 * torch.randn(value.shape, generator=chance)
        for stage in stages
        for name, value in stage.named_parameters()
    }


def stages_logits(manifest: Manifest, parameters: dict[str, Tensor], tokens: Tensor) -> Tensor:
    hidden = tokens
    for stage in range(manifest.train.num_stages):
        module = build_stage(manifest, stage, "cpu")
        with torch.no_grad():
            for name, value in module.named_parameters():
                value.copy_(parameters[name])
            hidden = module(hidden)
    return hidden


@pytest.mark.parametrize(
    "model",
    [{}, {"tie_word_embeddings": True}, {"num_layers": 6, "layers_per_group": 2}],
    ids=["as it is", "tied", "layers that share their weights"],
)
def test_the_decoder_loads_as_a_stablelm_with_the_stages_logits(model: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    manifest = tiny_manifest(3)
    manifest = dataclasses.replace(manifest, model=dataclasses.replace(manifest.decoder, **model))
    parameters = trained_a_little(manifest)
    written = write_hf_export(tmp_path, manifest, parameters, step=3)
    assert sorted(written) == sorted(path.name for path in tmp_path.iterdir())
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values())
    stored = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert ("lm_head.weight" in stored) != manifest.decoder.tie_word_embeddings, "a tied weight is written once"
    assert loaded.config.num_hidden_layers == manifest.model.num_layers
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        apart = (loaded(input_ids=tokens).logits - stages_logits(manifest, parameters, tokens)).abs().max()
    assert float(apart) < 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "if \u00e9 == 'x':\n\treturn"
    assert tokenizer(text)["input_ids"] == [*text.encode()]
    assert tokenizer.decode([*text.encode()]) == text


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("llama", False),
        ("gpt2", True),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("gpt2", "mixtral", "bert")),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("llama", "bert")),
    ],
)
def test_a_transformers_model_loads_with_the_stages_logits(name: str, tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tests.models.hf_models import hf_manifest, hf_model

    manifest = hf_manifest(3, dataclasses.replace(hf_model(name), tie_word_embeddings=tied))
    parameters = trained_a_little(manifest)
    write_hf_export(tmp_path, manifest, parameters, step=3)
    stored = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert stored.keys() == parameters.keys()
    kind = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    loaded = kind.from_pretrained(tmp_path)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        apart = (loaded(input_ids=tokens).logits - stages_logits(manifest, parameters, tokens)).abs().max()
    assert float(apart) < 1e-5
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(loaded).__name__]
    shared = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert shared == tied


def test_both_formats_say_the_same_from_a_prompt(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    manifest = tiny_manifest(2)
    parameters = trained_a_little(manifest)
    write_export(tmp_path / "a", manifest, parameters, None, ())
    write_hf_export(tmp_path / "b", manifest, parameters, step=0)
    for temperature in (0.0, 0.8):
        request = GenerationRequest(sources=[], prompt="def ", max_tokens=20, temperature=temperature, seed=3)
        said = [generate(open_text_model([tmp_path / name]), request) for name in ("a", "b")]
        assert said[0] == said[1]
        assert said[0] == generate(open_text_model([tmp_path / "a"]), request)


def test_a_model_says_on_another_device_what_it_says_on_the_processor(tmp_path: Path) -> None:
    """The pretend device refuses tensors of two devices in one operation, as a GPU does."""
    pytest.importorskip("transformers")
    manifest = tiny_manifest(2)
    parameters = trained_a_little(manifest)
    write_export(tmp_path / "a", manifest, parameters, None, ())
    write_hf_export(tmp_path / "b", manifest, parameters, step=0)
    request = GenerationRequest(sources=[], prompt="def ", max_tokens=8)
    for name in ("a", "b"):
        elsewhere = open_text_model([tmp_path / name], PRETEND)
        assert elsewhere.logits([1, 2, 3]).device == torch.device("cpu")
        assert generate(elsewhere, request) == generate(open_text_model([tmp_path / name]), request)
    with pytest.raises(UsageError, match="is not a device"):
        run(GenerationRequest(sources=[str(tmp_path / "a")], prompt="def ", device="abacus"))


def test_greedy_text_is_that_of_transformers_token_by_token(tmp_path: Path) -> None:
    """From the cache of keys and values, in the run's own stages and in the exported model; past the context, without it."""
    transformers = pytest.importorskip("transformers")
    manifest = tiny_manifest(2)
    parameters = trained_a_little(manifest)
    write_export(tmp_path / "a", manifest, parameters, None, ())
    write_hf_export(tmp_path / "b", manifest, parameters, step=0)
    loaded, given = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b"), [*b"def "]
    length = manifest.train.sequence_length
    due = loaded.generate(torch.tensor([given]), max_new_tokens=length - len(given), do_sample=False, eos_token_id=None)[0].tolist()
    for name in ("a", "b"):
        model = open_text_model([tmp_path / name])
        assert [*given, *generate_tokens(model, given, length - len(given), Sampling())] == due
    model, beyond = open_text_model([tmp_path / "a"]), [*generate_tokens(model, given, 2 * length, Sampling())]
    windows = [[*given, *beyond[:number]][-length:] for number in range(2 * length)]
    with torch.no_grad():
        assert beyond == [int(loaded(torch.tensor([window])).logits[0, -1].argmax()) for window in windows]


@pytest.mark.parametrize("model", [{}, {"boundary": "maxout"}, {"tie_word_embeddings": True}], ids=["as it is", "narrow", "tied"])
def test_a_run_speaks_with_the_stages_that_it_has(model: dict[str, Any], tmp_path: Path) -> None:
    """Cut by numbers of layers, as every run is signed that was cut by cost; in one stage it may be another model, or none."""
    manifest = replace_train(tiny_manifest(2), cut=(1, 4))
    manifest = dataclasses.replace(manifest, model=dataclasses.replace(manifest.decoder, **model))
    parameters, tokens = trained_a_little(manifest), [*b"def f"]
    write_export(tmp_path, manifest, parameters, None, ())
    expected = stages_logits(manifest, parameters, torch.tensor([tokens]))[0, -1]
    assert torch.equal(open_text_model([tmp_path]).logits(tokens), expected)


def test_a_masked_model_does_not_go_on_from_a_prompt_in_either_format(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.models.hf_models import hf_manifest, hf_model

    manifest = hf_manifest(2, hf_model("bert"))
    parameters = trained_a_little(manifest)
    write_export(tmp_path / "a", manifest, parameters, None, ())
    write_hf_export(tmp_path / "b", manifest, parameters, step=0)
    for name in ("a", "b"):
        with pytest.raises(UsageError, match="a masked language model does not go on from a prompt"):
            open_text_model([tmp_path / name])


def test_a_masked_models_tokenizer_says_what_hides_a_token(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from peerd.data.tokenizer import train_bpe
    from tests.models.hf_models import hf_manifest, hf_model

    tokenizer = json.loads(train_bpe([b"some text"], 264))
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 300, "content": "[MASK]"})
    model = dataclasses.replace(hf_model("bert", vocab_size=301), masked_share=0.15, mask_token=300)
    for mask_token, said in ((300, "[MASK]"), (299, None)):
        manifest = hf_manifest(2, dataclasses.replace(model, mask_token=mask_token))
        manifest = dataclasses.replace(manifest, data=DataConfig(tokenizer="local", tokenizer_blake3="0" * 64))
        write_hf_export(tmp_path, manifest, trained_a_little(manifest), step=0, tokenizer=json.dumps(tokenizer))
        assert transformers.AutoTokenizer.from_pretrained(tmp_path).mask_token == said


def test_what_transformers_has_no_architecture_for_is_refused() -> None:
    blocks = dataclasses.replace(tiny_manifest(), model=describe_entry("resnet"))
    with pytest.raises(UsageError, match="a list of blocks is not an architecture of transformers"):
        check_publishable(blocks)


def test_every_parameter_of_the_decoder_goes_out_once() -> None:
    manifest = tiny_manifest(1)
    parameters = dict(build_stage(manifest, 0, "cpu").named_parameters())
    tensors = publish(manifest, parameters).tensors
    assert sum(value.numel() for value in tensors.values()) == sum(value.numel() for value in parameters.values())


class FromDisk(Mapping[str, Tensor]):
    """Tensors that are read when they are asked for, and how many of them are in memory at once."""

    def __init__(self, held: Mapping[str, Tensor]) -> None:
        self._held = held
        self._alive = weakref.WeakSet[UntypedStorage]()
        self.most = 0

    def __getitem__(self, name: str) -> Tensor:
        found = self._held[name].clone()
        self._alive.add(found.untyped_storage())
        self.most = max(self.most, len(self._alive))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def test_an_export_has_one_tensor_in_memory_at_a_time(tmp_path: Path) -> None:
    manifest = tiny_manifest(1)
    disk = FromDisk({name: value.detach() for name, value in build_stage(manifest, 0, "cpu").named_parameters()})
    write_hf_export(tmp_path, manifest, disk, step=3)
    assert disk.most == 1


def test_every_byte_has_a_sign_of_its_own() -> None:
    signs = byte_signs()
    assert len(set(signs)) == 256
    assert (signs[ord("a")], signs[ord(" ")]) == ("a", "\u0120")


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 50), max_size=12), st.integers(1, 60))
def test_shards_hold_everything_in_order_and_no_more_than_they_may(sizes: dict[str, int], most: int) -> None:
    shards = split_into_shards(sizes, most)
    assert [name for held in shards for name in held] == list(sizes)
    assert all(sum(sizes[name] for name in held) <= most or len(held) == 1 for held in shards)


def test_both_formats_speak_by_the_runs_own_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    manifest = tiny_manifest(2)
    model = dataclasses.replace(manifest.decoder, vocab_size=300)
    manifest = dataclasses.replace(manifest, model=model, data=DataConfig(tokenizer="bpe:300"))
    manifest = agree_on_data(manifest, prepare_tokens(str(real_text()), cache_folder(), manifest.data))
    tokenizer = tokenizer_path(manifest.data, cache_folder())
    assert tokenizer is not None
    stages = [build_stage(manifest, stage, "cpu") for stage in range(2)]
    parameters = {name: value.detach() for stage in stages for name, value in stage.named_parameters()}
    write_export(tmp_path / "a", manifest, parameters, None, ())
    write_hf_export(tmp_path / "b", manifest, parameters, 0, tokenizer.read_text())
    told = [generate(open_text_model([tmp_path / name]), GenerationRequest(sources=[], prompt="def f", max_tokens=12)) for name in "ab"]
    assert told[0] == told[1] != ""
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    ends = [each["id"] for each in json.loads(tokenizer.read_text())["added_tokens"] if each["content"] == manifest.data.end_of_text]
    assert [config["eos_token_id"]] == ends


@pytest.mark.parametrize(("tokenizer", "ends"), [("bytes", None), ("bpe:300", 7), ("local", 2)])
def test_generation_ends_where_the_runs_tokenizer_says(tokenizer: str, ends: int | None) -> None:
    """A Llama's own end is token 2, which is a quote in a BPE of the run's own."""
    pytest.importorskip("transformers")
    from tests.models.hf_models import hf_manifest

    own = "" if tokenizer == "bytes" else json.dumps({"added_tokens": [{"content": "<end>", "id": 7}]})
    manifest = dataclasses.replace(hf_manifest(), data=DataConfig(tokenizer=tokenizer, end_of_text="<end>" if own else ""))
    assert publish(manifest, {}, own).config["eos_token_id"] == ends

"""A config, a folder with weights or an installed entry becomes a run, or gives one clear error and writes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from peerd.cli.main import run
from peerd.config import manifest
from peerd.config.model_kinds import BlocksConfig, HuggingFaceConfig
from peerd.config.run_file import explained
from peerd.errors import ManifestError, UsageError
from peerd.intake import IntakeRequest, take_in
from peerd.models.stages import initial_parameter_spec
from peerd.reference import ReferenceRequest
from peerd.reference import run as run_reference
from tests.tiny_run import real_text

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 256}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A GPT-2 with tied embeddings, as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=256, n_positions=64)
    folder = tmp_path / "gpt2"
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_a_checkpoint_goes_on_from_its_weights(checkpoint: Path, tmp_path: Path) -> None:
    """The reference's first loss is that of the checkpoint as transformers computes it."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "run"
    folder.mkdir()
    reply = take_in(IntakeRequest(model=str(checkpoint), num_stages=2, start=str(folder / "start.safetensors")))
    assert reply["start"]
    assert any("tied elsewhere, are trained apart; --tie-word-embeddings keeps them one" in remark for remark in reply["remarks"])
    made = manifest.parse(
        {
            "model": reply["model"],
            "data": {"source": str(real_text())},
            "start": {"state": "start.safetensors"},
            "train": {"num_stages": 2, "microbatches_per_step": 2, "microbatch_size": 2, "sequence_length": 16},
        },
        "test",
    )
    (folder / "run.toml").write_text(explained(made))
    assert manifest.load(folder / "run.toml") == made, "the config comes back from the run file as it went"
    found = run_reference(ReferenceRequest(run_file=str(folder / "run.toml"), steps=1, out=str(tmp_path / "out")))
    whole = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert found["loss_first"] == pytest.approx(_loss_of(whole, folder), abs=1e-5)


def test_a_tied_checkpoint_goes_on_from_its_one_weight(checkpoint: Path, tmp_path: Path) -> None:
    start = tmp_path / "start.safetensors"
    reply = take_in(IntakeRequest(model=str(checkpoint), tie_word_embeddings=True, num_stages=2, start=str(start)))
    assert not any("tied" in remark for remark in reply["remarks"])
    made = manifest.parse({"model": reply["model"], "train": {"num_stages": 2}}, "test")
    assert made.ties_stages
    with safe_open(start, framework="pt") as file:
        held = {name.removeprefix("parameters/") for name in file.keys()}  # noqa: SIM118 - not a dict
    assert held == {name for stage in range(2) for name in initial_parameter_spec(made, stage)}
    assert "lm_head.weight" not in held


def test_a_checkpoint_comes_with_its_tokenizer_and_without_weights_it_says_so(checkpoint: Path) -> None:
    def told() -> dict[str, Any]:
        return take_in(IntakeRequest(model=str(checkpoint), start=str(checkpoint / "start")))

    assert told()["tokenizer"] == "", "it has none"
    (checkpoint / "tokenizer.json").write_text("{}")
    (checkpoint / "model.safetensors").unlink()
    reply = told()
    assert reply["tokenizer"] == f"{checkpoint}/"
    assert not reply["start"]
    assert any("training starts from first weights" in remark for remark in reply["remarks"])


def _loss_of(whole: torch.nn.Module, folder: Path) -> float:
    from peerd.config.paths import cache_folder
    from peerd.data.tokens import prepare_tokens
    from peerd.train.corpus import Corpus

    made = manifest.load(folder / "run.toml")
    corpus = Corpus(prepare_tokens(made.data.source, cache_folder()), made)
    losses = []
    with torch.no_grad():
        for index in range(2):
            tokens, labels = corpus.microbatch(0, index)
            losses.append(float(torch.nn.functional.cross_entropy(whole(input_ids=tokens).logits.flatten(0, 1), labels.flatten())))
    return sum(losses) / 2


def test_weights_that_do_not_fit_the_config_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"transformer\.\S+ of the shape|cannot be read"):
        take_in(IntakeRequest(model=str(checkpoint), changes={"n_inner": 77}, start=str(tmp_path / "s")))
    assert not (tmp_path / "s").exists()


def test_a_config_file_is_taken_as_it_is_and_may_be_changed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **SIZES, "num_key_value_heads": 1, "architectures": ["X"]}))
    reply = take_in(IntakeRequest(model="hf:qwen2", config=str(tmp_path / "config.json"), changes={"num_hidden_layers": 3}, start=""))
    model = HuggingFaceConfig(**reply["model"])
    assert (model.num_layers, model.d_model, model.objective) == (3, 32, "causal")
    assert model.fields["num_key_value_heads"] == 1
    with pytest.raises(UsageError, match="is of a qwen2, and --model says hf:llama"):
        take_in(IntakeRequest(model="hf:llama", config=str(tmp_path / "config.json"), start=""))


def test_a_config_with_code_of_its_own_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, "auto_map": {"AutoConfig": "own.Config"}}))
    with pytest.raises(ManifestError, match="auto_map"):
        take_in(IntakeRequest(model=str(tmp_path), start=""))


def test_a_list_of_blocks_is_described_by_what_is_installed() -> None:
    reply = take_in(IntakeRequest(model="blocks:resnet", start=""))
    model = BlocksConfig(**reply["model"])
    assert model.shapes[-1] == (10,)
    with pytest.raises(UsageError, match="no word embeddings to tie"):
        take_in(IntakeRequest(model="blocks:resnet", tie_word_embeddings=True, start=""))
    assert initial_parameter_spec(manifest.Manifest(model=model), 0)["blocks.stem.norm.bias"] == (16,)
    with pytest.raises(UsageError, match="no config"):
        take_in(IntakeRequest(model="blocks:resnet", changes={"hidden_size": 3}, start=""))


SMALL_LLAMA = ["hf:llama", "--layers", "3", "--d-model", "32", "--heads", "2", "--d-ff", "48", "--evaluation-fraction", "0.1"]


@pytest.mark.parametrize("model", [["blocks:resnet"], pytest.param(SMALL_LLAMA, marks=pytest.mark.slow)], ids=["resnet", "llama"])
def test_a_model_that_is_not_peerds_own_can_be_evaluated_while_it_trains(model: list[str], tmp_path: Path) -> None:
    assert run(["new", str(tmp_path), "--model", *model, "--evaluate-every", "5", "--evaluation-microbatches", "3"]) == 0
    train = manifest.load(tmp_path / "run.toml").train
    assert (train.evaluate_every_steps, train.evaluation_microbatches) == (5, 3)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--model", "/nowhere"], "no folder with a config.json"),
        (["--model", "blocks:unet"], "no installed package has the model 'unet'"),
        (["--set", "a=1"], "are for models of transformers"),
        (["--model", "hf:llama", "--set", "vocab_size"], "not KEY=VALUE"),
    ],
)
def test_what_cannot_be_taken_in_is_one_line_and_leaves_no_run_file(
    flags: list[str], told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["new", str(tmp_path / "r"), *flags]) in (2, 3)
    said = capfd.readouterr().err.strip().splitlines()
    assert told in said[-1]
    assert not (tmp_path / "r" / "run.toml").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("t5", "t5 is an encoder with a decoder"),
        ("whisper", "whisper is an encoder with a decoder"),
        ("vit", "it is not a language model that can be split"),
        ("zamba2", "`num_hidden_layers` (2) must be equal to the number of `layer_types` (54)"),
        ("modernbert", "its code reads `weight` of a module that another stage holds; this model cannot be trained in stages"),
    ],
)
def test_an_architecture_that_does_not_fit_is_told_so_in_one_sentence_and_before_its_fields(name: str, words: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ManifestError) as caught:
        take_in(IntakeRequest(model=f"hf:{name}", changes=dict(SIZES), start=str(tmp_path / "start")))
    assert words in str(caught.value)
    assert "Error" not in str(caught.value)


def test_a_number_of_key_heads_that_a_config_leaves_open_is_that_of_its_heads(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    reply = take_in(IntakeRequest(model="hf:nemotron", changes=dict(SIZES), start=str(tmp_path / "start")))
    assert json.loads(reply["model"]["config"])["num_key_value_heads"] == 2

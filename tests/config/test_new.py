"""The files that `peerd new` writes make a run that starts."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from peerd.cli.main import run
from peerd.cli.new_data import mask_token_of
from peerd.config import manifest
from peerd.config.organiser import load_key, public_bytes
from peerd.data.tokenizer import FileTokenizer, train_bpe
from peerd.errors import UsageError
from peerd.planner.contenders import CONTENDERS


def test_a_name_that_differs_from_the_folders_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["new", str(tmp_path / "my run!"), "--d-model", "64"]) == 0
    assert "name:   myrun (" in capfd.readouterr().out
    for arguments in ((str(tmp_path / "plain"),), (str(tmp_path / "a b"), "--name", "chosen")):
        assert run(["new", *arguments, "--d-model", "64"]) == 0
        assert "name:" not in capfd.readouterr().out


def test_the_estimate_says_what_a_home_line_carries(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["new", str(tmp_path / "r"), "--d-model", "64"]) == 0
    told = capfd.readouterr().out
    head, first, _ = told.splitlines()[1:4]
    assert "20 Mbit/s up" in head
    assert first.split()[-3] == f"{20e6 / 8 / (4 * 64):,.0f}", "float32 activations of width 64"
    assert "1 TFLOP/s" in told


def test_new_writes_the_run_its_flags_describe_and_prints_its_id(tmp_path: Path) -> None:
    folder = tmp_path / "my run!"
    assert run(["new", str(folder), "--stages", "3", "--d-model", "64", "--steps", "7", "--accumulate", "float64"]) == 0
    made = manifest.load(folder / "run.toml")
    assert made.name == "myrun"
    assert (made.train.num_stages, made.decoder.num_layers, made.decoder.d_model, made.decoder.d_ff) == (3, 4, 64, 256)
    assert (made.train.steps, made.train.accumulate) == (7, "float64")
    assert stat.S_IMODE((folder / "organiser.key").stat().st_mode) == 0o600


def test_new_estimates_muons_state(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = []
    for optimizer in ("adamw", "muon"):
        assert run(["new", str(tmp_path / optimizer), "--optimizer", optimizer, "--d-model", "64", "--json"]) == 0
        said.append(json.loads(capfd.readouterr().out)["stages"][0])
        assert manifest.load(tmp_path / optimizer / "run.toml").train.optimizer == optimizer
    matrices = 2 * (4 * 64 * 64 + 3 * 64 * 256)  # of two layers
    assert said[0]["optimizer_bytes"] - said[1]["optimizer_bytes"] == 4 * matrices
    assert said[0]["host_bytes"] - said[1]["host_bytes"] == 4 * matrices
    assert run(["new", str(tmp_path / "8"), "--optimizer", "muon", "--optimizer-bits", "8"]) == 2


def test_new_packs_moments_where_it_is_told_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = []
    for bits in ("32", "8"):
        assert run(["new", str(tmp_path / bits), "--optimizer-bits", bits, "--d-model", "64", "--json"]) == 0
        said.append(json.loads(capfd.readouterr().out)["stages"][0])
        assert manifest.load(tmp_path / bits / "run.toml").train.optimizer_bits == int(bits)
    assert said[0]["optimizer_bytes"] == 4 * said[1]["optimizer_bytes"] == 2 * said[0]["parameter_bytes"]
    assert said[0]["host_bytes"] - said[1]["host_bytes"] == 3 * said[1]["optimizer_bytes"]
    assert run(["new", str(tmp_path / "7"), "--optimizer-bits", "7"]) == 2


def test_new_ties_embeddings_where_it_is_told_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--stages", "3", "--d-model", "64", "--name", "a"]
    assert run(["new", str(tmp_path / "apart"), *flags]) == 0
    apart = capfd.readouterr().out
    assert run(["new", str(tmp_path / "tied"), *flags, "--tie-word-embeddings"]) == 0
    told = capfd.readouterr().out
    made = manifest.load(tmp_path / "tied" / "run.toml")
    assert made.ties_stages
    assert not manifest.load(tmp_path / "apart" / "run.toml").ties_stages
    assert "0.02 M of them are the tied embeddings" in told
    assert "tied" not in apart
    assert run(["new", str(tmp_path / "tied"), "--from", str(tmp_path), "--tie-word-embeddings", "--force"]) == 2
    assert "--tie-word-embeddings cannot go with --from" in capfd.readouterr().err


def test_new_narrows_the_boundary_where_it_is_told_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--stages", "3", "--d-model", "64", "--name", "a"]
    for name in ("subspace", "token-residual"):
        assert run(["new", str(tmp_path / name), *flags, "--boundary", name, "--boundary-rank", "8"]) == 0
        made = manifest.load(tmp_path / name / "run.toml").decoder
        assert (made.boundary, made.boundary_rank, made.boundary_width) == (name, 8, 8)
    assert run(["new", str(tmp_path / "a"), *flags, "--boundary", "subspace"]) == 2
    assert 'with the boundary "subspace" it must be 1 to model.d_model (64)' in capfd.readouterr().err
    assert run(["new", str(tmp_path / "a"), "--from", str(tmp_path), "--boundary-rank", "4"]) == 2
    assert "--boundary-rank cannot go with --from" in capfd.readouterr().err


def test_a_new_run_certifies_its_averages_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    for flags, trust, group_size in (([], "on", 32), (["--trust", "off"], "off", 32), (["--trust", "audits"], "audits", 0)):
        assert run(["new", str(tmp_path / trust), *flags]) == 0
        made = manifest.load(tmp_path / trust / "run.toml").swarm
        assert (made.trust, made.group_size) == (trust, group_size)
    assert manifest.parse({"name": "a"}, "a file without the field").swarm.trust == "off"


def test_new_chooses_for_a_line_and_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--d-model", "256", "--microbatches", "4", "--name", "a", "--rtt", "60ms", "--link"]
    assert run(["new", str(tmp_path / "home"), *flags, "20Mbit", "--json"]) == 0
    said = json.loads(capfd.readouterr().out)["link"]
    best, *others = said["contenders"]
    assert said["chosen"] == best["name"]
    assert all(best["relative_time_s"] <= each["relative_time_s"] for each in others)
    made = manifest.load(tmp_path / "home" / "run.toml")
    chosen = CONTENDERS[best["name"]]
    assert (made.wire.activations, made.wire.weight_gradients, made.train.optimizer) == (chosen.codec, chosen.averages, chosen.optimizer)
    assert made.train.microbatches_per_step == 4 * chosen.updates_per_step
    assert run(["new", str(tmp_path / "lan"), *flags, "400Gbit", "--optimizer", "adamw", "--learning-rate", "1e-3"]) == 0
    told = capfd.readouterr().out
    assert "of those that were measured it is the first at a loss" in told
    assert "tokens/s; a peer computes" in told
    assert "learning rate: 0.001; warmed up in 0 steps" in told
    train = manifest.load(tmp_path / "lan" / "run.toml").train
    assert (train.optimizer, train.learning_rate) == ("adamw", 1e-3)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--rtt", "60ms"], "--rtt goes with --link"),
        (["--tflops", "3"], "--tflops goes with --link"),
        (["--link", "20Mbit", "--boundary", "maxout"], "--boundary cannot go with --link"),
        (["--link", "20Mbit", "--from", "."], "--from cannot go with --link"),
        (["--link", "20Mbit", "--trust", "audits"], "--trust audits cannot go with --link"),
        (["--link", "none"], "is not a rate such as 20Mbit"),
        (["--link", "20Mbit", "--rtt", "60"], "is not a time of at most 10s, such as 60ms"),
        (["--link", "20Mbit", "--optimizer", "lamb"], "no way to train that was measured goes with this run"),
    ],
)
def test_new_refuses_what_does_not_go_with_a_line(flags: list[str], why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["new", str(tmp_path / "a"), *flags]) == 2
    assert why in capfd.readouterr().err


def test_force_overwrites_the_run_and_keeps_the_key(tmp_path: Path) -> None:
    assert run(["new", str(tmp_path), "--name", "a"]) == 0
    key = public_bytes(load_key(tmp_path / "organiser.key"))
    assert run(["new", str(tmp_path), "--name", "b"]) == 2
    assert run(["new", str(tmp_path), "--name", "b", "--force"]) == 0
    assert manifest.load(tmp_path / "run.toml").name == "b"
    assert public_bytes(load_key(tmp_path / "organiser.key")) == key


def test_every_line_of_a_new_run_file_fits_a_terminal(tmp_path: Path) -> None:
    assert run(["new", str(tmp_path), "--name", "a"]) == 0
    text = (tmp_path / "run.toml").read_text()
    assert max(map(len, text.splitlines())) <= 130
    assert json.loads(manifest.load(tmp_path / "run.toml").canonical_bytes())["name"] == "a"


def test_new_takes_text_tokenizer_and_evaluation_from_its_flags(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    flags = ["--data", str(tmp_path / "texts.jsonl"), "--tokenizer", "bpe:300", "--evaluation-fraction", "0.1", "--evaluate-every", "5"]
    assert run(["new", str(tmp_path / "run"), *flags]) == 0
    made = manifest.load(tmp_path / "run" / "run.toml")
    assert (made.data.field, made.data.tokenizer, made.data.evaluation_fraction) == ("text", "bpe:300", 0.1)
    assert (made.model.vocab_size, made.train.evaluate_every_steps, made.train.evaluation_microbatches) == (300, 5, 16)


def test_new_reads_a_tokenizers_vocabulary_and_its_path_is_found_from_anywhere(tmp_path: Path) -> None:
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(train_bpe([b"some text " * 9], 270))
    assert run(["new", str(tmp_path / "run"), "--tokenizer", str(folder)]) == 0
    made = manifest.load(tmp_path / "run" / "run.toml")
    assert made.model.vocab_size == FileTokenizer(folder / "tokenizer.json", "").vocab_size <= 270
    assert made.data.located(Path("/elsewhere")).tokenizer == str(folder)


def test_evaluation_without_text_for_it_is_refused_with_what_to_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["new", str(tmp_path), "--evaluate-every", "5"]) == 2
    assert "set data.evaluation_fraction" in capsys.readouterr().err
    assert run(["new", str(tmp_path), "--tokenizer", "bpe:12"]) == 2
    assert "bpe:SIZE with 257 to" in capsys.readouterr().err
    assert run(["new", str(tmp_path), "--tokenizer", "/nowhere"]) == 2
    assert "--tokenizer: /nowhere: no such file or folder" in capsys.readouterr().err


def test_the_token_file_can_be_made_ahead_and_is_described(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "some text"}\n' * 500)
    flags = ["--data", str(tmp_path / "texts.jsonl"), "--evaluation-fraction", "0.1", "--sequence-length", "8"]
    assert run(["new", str(tmp_path / "run"), *flags]) == 0
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", "from peerd.cli.main import main; main()", "data", str(tmp_path / "run"), "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert (told["num_tokens"], told["num_evaluation_tokens"], told["token_bytes"], told["vocab_size"]) == (4999, 499, 1, 256)
    assert Path(told["file"]).read_bytes() == b"\n".join([b"some text"] * 500)
    assert told["steps_per_pass"] == 4500 / (16 * 4 * 8)


def test_new_says_what_each_stage_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["new", str(tmp_path / "a"), "--stages", "4", "--layers", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["stage", "layers", "parameters", "memory", "GPU", "computes", "20", "Mbit/s", "up", "averaging"]
    assert [line.split()[:2] for line in lines[2:5]] == [["0", "0-1"], ["1-2", "2-5"], ["3", "6-7"]]
    assert max(map(len, lines[1:8])) <= 85
    assert all(" GB  4 GB  " in line for line in lines[2:5]), "the smallest GPU takes so small a stage"
    assert run(["new", str(tmp_path / "b"), "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [(stage["first_layer"], stage["num_layers"]) for stage in stages] == [(0, 2), (2, 2)]
    assert all(stage["memory_bytes"] > stage["parameter_bytes"] + stage["optimizer_bytes"] for stage in stages)


def test_a_small_device_gets_small_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["new", str(tmp_path / "a"), "--layers", "8", "--device-memory", "32MB"]) == 0
    made = manifest.load(tmp_path / "a" / "run.toml")
    assert made.train.num_stages > 2
    assert run(["new", str(tmp_path / "b"), "--layers", "8", "--device-memory", "1GB"]) == 0
    assert manifest.load(tmp_path / "b" / "run.toml").train.num_stages == 1
    capsys.readouterr()
    assert run(["new", str(tmp_path / "c"), "--layers", "8", "--stages", "2", "--device-memory", "10MB"]) == 3
    assert "no cut of the model has stages of at most 0.01 GB each" in capsys.readouterr().err
    assert run(["new", str(tmp_path / "d"), "--device-memory", "lots"]) == 2


def test_tokens_are_hidden_behind_the_tokenizers_mask_or_one_that_no_text_has(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    assert mask_token_of("bytes", 300) == 299
    with pytest.raises(UsageError, match=r"none is left to hide others behind; give it one more: --set vocab_size=257"):
        mask_token_of("bytes", 256)
    fields = json.loads(train_bpe([b"some text, and some more text"], 270))
    fields["added_tokens"].append({**fields["added_tokens"][0], "id": 260, "content": "[MASK]"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    own = FileTokenizer(tmp_path / "tokenizer.json", "").mask_token
    assert own is not None
    assert mask_token_of(f"{tmp_path}/", 1000) == mask_token_of(str(tmp_path / "tokenizer.json"), 1000) == own


@pytest.mark.slow
def test_a_masked_model_is_asked_for_hidden_tokens(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    bert = ["--model", "hf:bert", "--layers", "2", "--d-model", "32", "--heads", "2", "--set", "vocab_size=300"]
    assert run(["new", str(tmp_path / "run"), *bert]) == 0
    model = manifest.load(tmp_path / "run" / "run.toml").model
    assert (getattr(model, "masked_share", None), getattr(model, "mask_token", None)) == (0.15, 299)
    assert "15% of the tokens are hidden behind token 299, and learned; [model] says both" in capfd.readouterr().err

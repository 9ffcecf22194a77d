"""The token file: the same after any interruption, in the smallest number type, with ends of documents."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from peerd.config.manifest import DataConfig
from peerd.data import tokens
from peerd.data.progress import ByteProgress, Interrupted
from peerd.data.tokenizer import FileTokenizer, end_token, tokenizer_path
from peerd.data.tokens import CHUNK_BYTES, chunk_hashes, hash_of_hashes, kept_tokens, prepare_tokens
from peerd.errors import ManifestError

BPE = DataConfig(field="text", tokenizer="bpe:300")
TEXTS = [f"def function_{number}(value):\n    return value + {number}\n" for number in range(200)]


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(path)


class InterruptedAfter:
    """A report that raises at its n-th call about tokenizing."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.first: ByteProgress | None = None

    def __call__(self, progress: ByteProgress) -> None:
        if progress.what == "tokenizing":
            self.first = self.first or progress
            self.count -= 1
            if self.count == 0:
                raise Interrupted


def test_a_bpe_trained_on_the_text_gives_two_bytes_a_token_and_ends_every_document(tmp_path: Path, source: str) -> None:
    cache = tmp_path / "cache"
    made = prepare_tokens(source, cache, BPE)
    assert (made.token_bytes, made.vocab_size, made.end_of_text) == (2, 300, "<|endoftext|>")
    data = replace(BPE, tokenizer_blake3=made.tokenizer_blake3)
    kept = tokenizer_path(data, cache)
    assert kept is not None
    tokenizer = FileTokenizer(kept, made.end_of_text)
    found = np.fromfile(made.path, dtype="<u2")
    assert len(found) == made.num_tokens < sum(map(len, TEXTS)) / 2
    assert int((found == tokenizer.after[0]).sum()) == len(TEXTS)
    assert tokenizer.decode(found.tolist()).split("<|endoftext|>") == [*TEXTS, ""]
    assert prepare_tokens(source, tmp_path / "other", BPE).blake3 == made.blake3, "training is the same every time"


def test_any_tokenizer_json_will_do_and_a_change_of_it_makes_another_token_file(tmp_path: Path, source: str) -> None:
    cache = tmp_path / "cache"
    trained = prepare_tokens(source, cache, BPE)
    named = tmp_path / "mine"
    named.mkdir()
    (named / "tokenizer.json").write_bytes((cache / f"{trained.tokenizer_blake3}.tokenizer.json").read_bytes())
    by_folder = prepare_tokens(source, cache, replace(BPE, tokenizer=str(named)))
    assert (by_folder.blake3, by_folder.tokenizer_blake3) == (trained.blake3, trained.tokenizer_blake3)
    (named / "tokenizer_config.json").write_text('{"eos_token": {"content": "!"}}')
    other = prepare_tokens(source, cache, replace(BPE, tokenizer=str(named / "tokenizer.json")))
    assert other.end_of_text == "!"
    assert other.blake3 != trained.blake3


def test_who_has_the_organisers_tokenizer_makes_his_token_file_of_the_same_text(tmp_path: Path, source: str) -> None:
    cache, told = tmp_path / "cache", InterruptedAfter(10**6)
    named = tmp_path / "tokenizer.json"
    trained = prepare_tokens(source, tmp_path / "his", BPE)
    named.write_bytes((tmp_path / "his" / f"{trained.tokenizer_blake3}.tokenizer.json").read_bytes())
    his = prepare_tokens(source, cache, replace(BPE, tokenizer=str(named)))
    published = replace(BPE, tokenizer="local", tokenizer_blake3=his.tokenizer_blake3, end_of_text=his.end_of_text)
    assert prepare_tokens(source, cache, published, told) == his
    assert told.first is None, "it is the same file, and made already"
    with pytest.raises(ManifestError, match=r"the run's tokenizer is its organiser's own; fetch the data .* --data swarm"):
        prepare_tokens(source, tmp_path / "elsewhere", published)
    other = replace(BPE, tokenizer_blake3=trained.tokenizer_blake3, end_of_text=trained.end_of_text)
    assert prepare_tokens(source, cache, other).blake3 == trained.blake3, "a BPE of the run is not trained again where it is kept"


def test_records_as_bytes_are_parted_as_texts_always_were(tmp_path: Path, source: str) -> None:
    made = prepare_tokens(source, tmp_path / "cache", DataConfig(field="text"))
    assert made.path.read_bytes() == "\n".join(TEXTS).encode()
    assert made.token_bytes == 1


@pytest.mark.parametrize("data", [BPE, DataConfig(field="text")])
def test_what_was_interrupted_is_gone_on_with_and_ends_the_same(
    tmp_path: Path, source: str, data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "BATCH_BYTES", 2000)
    whole = prepare_tokens(source, tmp_path / "one", data)
    cache, reached = tmp_path / "two", 0
    for count in (3, 1):
        interrupted = InterruptedAfter(count)
        with pytest.raises(Interrupted):
            prepare_tokens(source, cache, data, interrupted)
        assert interrupted.first is not None
        assert interrupted.first.done_bytes > reached
        reached = interrupted.first.done_bytes + (count - 1) * 1000
        assert {path.suffix for path in cache.iterdir()} >= {".part", ".note"}
    last = InterruptedAfter(10**6)
    assert prepare_tokens(source, cache, data, last).blake3 == whole.blake3
    assert last.first is not None
    assert last.first.done_bytes > reached
    assert {path.suffix for path in cache.iterdir()} == {".bin", ".json"}


def test_two_that_want_the_same_file_make_it_once(tmp_path: Path, source: str) -> None:
    cache = tmp_path / "cache"
    made: list[str] = []
    heard: list[ByteProgress] = []

    def prepare() -> None:
        made.append(prepare_tokens(source, cache, DataConfig(field="text"), heard.append).blake3)

    threads = [threading.Thread(target=prepare) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert len(set(made)) == [progress.what for progress in heard].count("tokenizing") == 1
    assert len(list(cache.iterdir())) == 2


def test_the_runs_token_file_is_known_again_by_its_hash_alone(tmp_path: Path, source: str) -> None:
    cache = tmp_path / "cache"
    made = prepare_tokens(source, cache, DataConfig(field="text"))
    data = DataConfig(blake3=made.blake3, num_tokens=made.num_tokens, chunks_blake3=made.chunks_blake3)
    found = kept_tokens(data, cache)
    assert found is not None
    assert (found.path, found.chunks_blake3) == (made.path, made.chunks_blake3)
    assert kept_tokens(replace(data, num_tokens=made.num_tokens - 1), cache) is None
    made.path.write_bytes(bytes(made.num_tokens))
    assert kept_tokens(data, cache) is None
    assert kept_tokens(DataConfig(), cache) is None


def test_the_hash_of_chunks_is_of_all_of_them_in_order(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * CHUNK_BYTES + b"b")
    hashes = chunk_hashes(path)
    assert len(hashes) == 2
    assert hash_of_hashes(hashes) != hash_of_hashes(hashes[::-1])


def test_a_tokenizer_that_is_none_is_refused_by_name(tmp_path: Path, source: str) -> None:
    path = tmp_path / "tokenizer.json"
    for content, told in (("[]", "is not a JSON object"), ('{"model": 1}', "is not a tokenizer")):
        path.write_text(content)
        with pytest.raises(ManifestError, match=told):
            prepare_tokens(source, tmp_path / "cache", replace(BPE, tokenizer=str(path)))
    with pytest.raises(ManifestError, match=r"no tokenizer\.json there; correct data\.tokenizer"):
        prepare_tokens(source, tmp_path / "cache", replace(BPE, tokenizer=str(tmp_path / "nowhere.json")))


def test_what_ends_a_document_is_what_the_configuration_says_or_its_usual_name() -> None:
    vocabulary = {"model": {"vocab": {"a": 0, "</s>": 1, "<eos>": 2}}, "added_tokens": [{"content": "<stop>"}]}
    assert end_token(vocabulary, {"eos_token": "<stop>"}) == "<stop>"
    assert end_token(vocabulary, {"eos_token": {"content": "<eos>"}}) == "<eos>"
    assert end_token(vocabulary, {"eos_token": "<gone>"}) == end_token(vocabulary, {}) == "</s>"
    assert end_token({"model": {"vocab": []}}, {}) == ""

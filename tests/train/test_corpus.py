"""Text becomes one token file that all agree on, and every microbatch is a pure function of it."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import re
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from peerd.config.manifest import DataConfig
from peerd.data.sources import STDLIB
from peerd.data.tokens import TokenFile, prepare_tokens
from peerd.errors import DiskError, ManifestError
from peerd.train.corpus import Corpus, agree_on_data, window_start
from tests.tiny_run import corpus_of, real_text, replace_train, tiny_manifest

DOCS = Path(__file__).resolve().parents[2] / "peerd" / "docs"
UINT63 = st.integers(0, 2**63 - 1)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_the_standard_library_is_text_enough_and_the_same_each_time(tmp_path: Path) -> None:
    first = prepare_tokens(STDLIB, tmp_path / "one")
    again = prepare_tokens(STDLIB, tmp_path / "two")
    assert first.blake3 == again.blake3
    assert first.num_tokens == first.path.stat().st_size > 5_000_000
    content = first.path.read_bytes()
    assert content.count(b"class ArgumentParser(") == 1
    assert b"class BuiltinTest(unittest.TestCase)" not in content, "the library's tests are not wanted"
    assert first.path.name == f"{blake3(content).hexdigest()}.bin"


def test_a_folder_is_its_text_files_in_order_of_their_names(tmp_path: Path) -> None:
    files = {
        "b.txt": b"two",
        "a/z.md": b"one",
        "c.py": b"three",
        "B.txt": b"zero",
        "empty.txt": b"",
        "latin.txt": b"\xe9t\xe9",
        "cut.txt": "\u20ac".encode()[:2],
        "picture.png": b"not text",
        ".hidden/d.txt": b"secret",
        ".env.txt": b"secret",
    }
    made = prepare_tokens(str(write(tmp_path / "texts", files)), tmp_path / "cache")
    assert made.path.read_bytes() == b"zero\none\ntwo\nthree"
    assert made.num_tokens == 18


def test_a_single_file_needs_no_suffix_and_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = write(tmp_path, {"book": "na\u00efve\r\n".encode()})
    assert prepare_tokens(str(folder / "book"), tmp_path / "cache").path.read_bytes() == "na\u00efve\r\n".encode()


def test_a_token_file_is_made_once_and_made_again_when_its_source_or_itself_changed(tmp_path: Path) -> None:
    source, cache = write(tmp_path / "texts", {"a.txt": b"some text"}), tmp_path / "cache"
    first = prepare_tokens(str(source), cache)
    made_at = first.path.stat().st_mtime_ns
    assert prepare_tokens(str(source), cache) == first
    assert first.path.stat().st_mtime_ns == made_at
    first.path.write_bytes(b"S0me text")
    assert prepare_tokens(str(source), cache) == first
    assert first.path.read_bytes() == b"some text"
    next(cache.glob("*.json")).write_text("[1")
    assert prepare_tokens(str(source), cache) == first
    write(source, {"b.txt": b"more"})
    changed = prepare_tokens(str(source), cache)
    assert changed.path.read_bytes() == b"some text\nmore"
    assert {path.suffix for path in cache.iterdir()} == {".bin", ".json"}


def test_a_missing_source_says_what_to_correct(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"nowhere: no such file or folder; correct data\.source"):
        prepare_tokens(str(tmp_path / "nowhere"), tmp_path / "cache")


@pytest.mark.parametrize("files", [{}, {"a.png": b"x"}, {"a.txt": b""}, {"a.txt": b"\xff"}])
def test_a_source_without_text_is_refused_and_leaves_nothing_behind(tmp_path: Path, files: dict[str, bytes]) -> None:
    (tmp_path / "texts").mkdir()
    with pytest.raises(ManifestError, match="name a UTF-8 text file or a folder of them"):
        prepare_tokens(str(write(tmp_path / "texts", files)), tmp_path / "cache")
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


def test_a_write_that_fails_is_a_disk_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    source = write(tmp_path / "texts", {"a.txt": b"word " * 10_000})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(DiskError) as caught:
            prepare_tokens(str(source), tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EFBIG
    assert not list((tmp_path / "cache").iterdir())


def test_data_is_filled_into_a_manifest_and_other_data_refused(tmp_path: Path) -> None:
    manifest = tiny_manifest()
    mine = TokenFile(path=tmp_path, blake3="ab" * 32, num_tokens=1000)
    agreed = agree_on_data(manifest, mine)
    assert (agreed.data.blake3, agreed.data.num_tokens) == (mine.blake3, 1000)
    assert agree_on_data(agreed, mine) == agreed
    with pytest.raises(ManifestError, match=r"this machine's data has blake3 cdcdcdcdcdcd\.\.\. \(9 tokens\), the run's has abab"):
        agree_on_data(agreed, TokenFile(path=tmp_path, blake3="cd" * 32, num_tokens=9))


@given(UINT63, UINT63, st.integers(0, 8191), st.integers(0, 65535), st.integers(1, 2**40))
def test_windows_are_pure_and_in_range(seed: int, step: int, index: int, sample: int, num_starts: int) -> None:
    start = window_start(seed, step, index, sample, num_starts)
    assert 0 <= start < num_starts
    assert start == window_start(seed, step, index, sample, num_starts)


def test_windows_are_frozen() -> None:
    """Every peer of a run, whatever its release, must cut the same windows."""
    assert [window_start(7, 0, 0, 0, 10**6), window_start(7, 1, 2, 3, 10**6)] == WINDOW_STARTS


WINDOW_STARTS = [649169, 717383]


def test_the_researchers_page_shows_the_function_that_is_used() -> None:
    (shown,) = re.findall(r"^```python\n(.*?)^```", (DOCS / "research.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"struct": struct, "hashlib": hashlib}
    exec(shown, names)  # noqa: S102 - the code of a page of this repository
    for arguments in ((7, 0, 0, 0, 10**6), (2**63 - 1, 2**64 - 1, 8191, 65535, 2**40), (1, 2, 3, 4, 5)):
        assert names["window_start"](*arguments) == window_start(*arguments)


def test_windows_spread_over_the_whole_file() -> None:
    tenths = [window_start(0, step, index, 0, 10) for step in range(40) for index in range(25)]
    assert all(60 < tenths.count(tenth) < 140 for tenth in range(10))


@given(step=st.integers(0, 2**40), index=st.integers(0, 8191))
def test_labels_are_the_next_tokens_of_the_text(corpus: Corpus, step: int, index: int) -> None:
    tokens, labels = corpus.microbatch(step, index)
    assert tokens.shape == labels.shape == (2, 16)
    assert tokens.dtype == labels.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    content = corpus.token_file.path.read_bytes()
    for sample in range(2):
        start = window_start(7, step, index, sample, len(content) - 16)
        assert bytes(tokens[sample].tolist()) == content[start : start + 16]
        assert int(labels[sample, -1]) == content[start + 16]


def test_the_same_microbatch_is_the_same_in_another_process_of_the_run(tmp_path: Path) -> None:
    first, second = (corpus_of(tiny_manifest(num_stages), tmp_path) for num_stages in (1, 3))
    assert all(torch.equal(left, right) for left, right in zip(first.microbatch(5, 1), second.microbatch(5, 1), strict=True))
    assert not torch.equal(first.microbatch(5, 1)[0], first.microbatch(5, 2)[0])
    assert not torch.equal(first.microbatch(5, 1)[0], first.microbatch(6, 1)[0])
    reseeded = Corpus(first.token_file, dataclasses.replace(tiny_manifest(), seed=8))
    assert not torch.equal(first.microbatch(5, 1)[0], reseeded.microbatch(5, 1)[0])


def test_the_shortest_text_that_fits_is_used_to_its_end(tmp_path: Path) -> None:
    text = bytes(range(65, 65 + 18))
    token_file = prepare_tokens(str(write(tmp_path, {"a.txt": text}) / "a.txt"), tmp_path / "cache")
    corpus = Corpus(token_file, tiny_manifest(microbatch_size=64))
    tokens, labels = corpus.microbatch(0, 0)
    assert {bytes(row.tolist()) for row in tokens} == {text[:16], text[1:17]}
    assert int(labels.max()) == text[17]
    with pytest.raises(ManifestError, match="the data has 18 tokens, too few"):
        Corpus(token_file, replace_train(tiny_manifest(), sequence_length=17))


def test_a_vocabulary_below_the_bytes_is_refused(tmp_path: Path) -> None:
    manifest = tiny_manifest()
    small = dataclasses.replace(manifest, model=dataclasses.replace(manifest.decoder, vocab_size=255))
    with pytest.raises(ManifestError, match=r"model\.vocab_size is 255; byte tokens need at least 256"):
        corpus_of(small, tmp_path)


def test_a_token_file_that_is_gone_is_a_disk_error(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="No such file"):
        Corpus(TokenFile(path=tmp_path / "gone.bin", blake3="", num_tokens=1000), tiny_manifest())


@given(st.integers(0, 8191))
def test_no_token_is_both_trained_on_and_evaluated(split: Corpus, index: int) -> None:
    content = split.token_file.path.read_bytes()
    assert split.num_train_tokens + split.num_evaluation_tokens == len(content)
    for sample in range(2):
        trained = window_start(7, 3, index, sample, split.num_train_tokens - 16)
        assert bytes(split.microbatch(3, index)[0][sample].tolist()) == content[trained : trained + 16]
        assert trained + 16 < split.num_train_tokens
    tokens, labels = split.evaluation_microbatch(index)
    tail = content[split.num_train_tokens :]
    assert all(bytes(row.tolist()) in tail for row in tokens)
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    assert torch.equal(split.evaluation_microbatch(index)[0], tokens), "the same at every step"


def test_too_little_text_to_evaluate_on_is_refused(tmp_path: Path) -> None:
    manifest = tiny_manifest(evaluate_every_steps=2, evaluation_fraction=0.0001)
    with pytest.raises(ManifestError, match=r"tokens are kept for evaluation, too few .*; raise data\.evaluation_fraction"):
        corpus_of(manifest, tmp_path)


def test_wider_tokens_are_read_as_they_were_written(tmp_path: Path) -> None:
    manifest = tiny_manifest()
    model = dataclasses.replace(manifest.decoder, vocab_size=300)
    manifest = dataclasses.replace(manifest, model=model, data=DataConfig(tokenizer="bpe:300"))
    made = prepare_tokens(str(real_text()), tmp_path, manifest.data)
    agreed = agree_on_data(manifest, made)
    assert (agreed.data.token_bytes, agreed.data.end_of_text) == (2, "<|endoftext|>")
    tokens, _ = Corpus(made, agreed).microbatch(0, 0)
    assert 256 < int(tokens.max()) < 300
    small = dataclasses.replace(agreed, model=dataclasses.replace(model, vocab_size=299))
    with pytest.raises(ManifestError, match=r"has 300 tokens; set model\.vocab_size = 300 or more"):
        Corpus(made, small)
    with pytest.raises(ManifestError, match=r"this machine's tokenizer has blake3"):
        agree_on_data(agreed, dataclasses.replace(made, tokenizer_blake3="ab" * 32))


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpus_of(tiny_manifest(evaluation_fraction=0.01), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpus_of(tiny_manifest(), tmp_path_factory.mktemp("cache"))

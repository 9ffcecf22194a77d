"""Tokenizers: bytes as they are, a BPE trained on the run's own text, or any tokenizer.json. Peers agree on its hash.

A tokenizer.json is kept in the cache under its hash, next to the token file. It is data: nothing in it is executed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from peerd.config.atomic import replace_file
from peerd.config.data_config import DataConfig
from peerd.errors import ManifestError, UsageError, disk_error

BYTES = "bytes"
BPE_PREFIX = "bpe:"
BYTE_VOCABULARY = 256
SEPARATOR = b"\n"
TOKENIZER_FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
MAX_TOKENIZER_BYTES = 64 << 20
BPE_TRAINED_ON_BYTES = 256 << 20
"""Of a larger corpus only every n-th piece is used."""
# Usual names of the token that ends a document, for tokenizers whose configuration does not name it.
USUAL_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
USUAL_MASKS = ("[MASK]", "<mask>")
Tokens = NDArray[np.unsignedinteger[Any]]


class Tokenizer(Protocol):
    vocab_size: int
    """The largest token plus one."""

    @property
    def between(self) -> Sequence[int]:
        """Tokens between two documents, if no token ends a document."""
        ...

    @property
    def after(self) -> Sequence[int]:
        """Tokens that end a document."""
        ...

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]: ...


class ByteTokenizer:
    """A token is a byte."""

    vocab_size = BYTE_VOCABULARY
    between: Sequence[int] = tuple(SEPARATOR)
    after: Sequence[int] = ()

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]


class FileTokenizer:
    """A tokenizer.json of the `tokenizers` library."""

    def __init__(self, path: Path, end_of_text: str) -> None:
        """Raises ManifestError if the file is no tokenizer or lacks the token, UsageError if the library is missing."""
        try:
            self._tokenizer = _library().Tokenizer.from_file(str(path))
        except UsageError:
            raise
        except Exception as error:  # the library has no error of its own
            raise ManifestError(f"{path} is not a tokenizer: {error}", "name a tokenizer.json") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if not self.vocab_size:
            raise ManifestError(f"{path} has no tokens", "name another tokenizer.json")
        ends = self._tokenizer.token_to_id(end_of_text) if end_of_text else None
        if end_of_text and ends is None:
            raise ManifestError(f"{path} has no token {end_of_text}", "name the tokenizer that the run was started with")
        self.after: Sequence[int] = () if ends is None else (ends,)
        newline = self._tokenizer.encode(SEPARATOR.decode(), add_special_tokens=False).ids
        self.between: Sequence[int] = () if self.after else tuple(newline)

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        found = self._tokenizer.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        return [np.asarray(each.ids, dtype=np.uint32) for each in found]

    @property
    def mask_token(self) -> int | None:
        """The token that stands for a hidden one; None if the tokenizer has none."""
        found = (self._tokenizer.token_to_id(name) for name in USUAL_MASKS)
        return next((token for token in found if token is not None), None)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def tokenizer_path(data: DataConfig, cache: Path) -> Path | None:
    """The run's tokenizer.json in the cache; None for bytes, or if this machine does not have it yet."""
    path = kept_tokenizer(data.tokenizer_blake3, cache) if data.tokenizer_blake3 else None
    return path if path is not None and path.is_file() else None


def coding_of(data: DataConfig, cache: Path) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str], Sequence[int]]:
    """The run's functions from text to tokens and back, and the tokens that end a text.

    Raises UsageError if this machine does not have the run's tokenizer.
    """
    if data.tokenizer == BYTES:
        return lambda text: [*text.encode()], lambda tokens: bytes(token for token in tokens if token < 256).decode("utf-8", "replace"), ()
    kept = tokenizer_path(data, cache)
    if kept is None:
        raise UsageError("this machine does not have the run's tokenizer", "export with --format hf and name that folder")
    tokenizer = FileTokenizer(kept, data.end_of_text)
    return lambda text: [*map(int, tokenizer.encode([text.encode()])[0])], tokenizer.decode, tokenizer.after


def kept_tokenizer(digest: str, cache: Path) -> Path:
    return cache / f"{digest}.{TOKENIZER_FILE}"


def open_tokenizer(digest: str, end_of_text: str, cache: Path) -> Tokenizer:
    """The tokenizer kept under a hash; the byte tokenizer if the hash is empty."""
    return FileTokenizer(kept_tokenizer(digest, cache), end_of_text) if digest else ByteTokenizer()


def keep_tokenizer(content: bytes, cache: Path) -> str:
    """Put a tokenizer.json into the cache and return its hash. Raises DiskError."""
    digest = blake3(content).hexdigest()
    replace_file(kept_tokenizer(digest, cache), content)
    return digest


def read_tokenizer(named: Path) -> tuple[bytes, str]:
    """The content of a tokenizer.json, or of that in a folder, and the token that ends a document (empty if there is none).

    Raises ManifestError if it is missing, not JSON, or too large; DiskError if it cannot be read.
    """
    path = named / TOKENIZER_FILE if named.is_dir() else named
    try:
        if not path.is_file():
            raise ManifestError(f"tokenizer {named}: no {TOKENIZER_FILE} there", "correct data.tokenizer")
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ManifestError(f"{path}: a tokenizer has at most {MAX_TOKENIZER_BYTES >> 20} MiB", "name another tokenizer.json")
        content = path.read_bytes()
        beside = path.with_name("tokenizer_config.json")
        configuration = beside.read_bytes() if beside.is_file() else b"{}"
    except OSError as error:
        raise disk_error(named, error, "check the file and its permissions") from error
    return content, end_token(_json_object(content, path), _json_object(configuration, beside))


def end_token(tokenizer: dict[str, Any], configuration: dict[str, Any]) -> str:
    """The token that ends a document: from the configuration, else one of the usual names; empty if the tokenizer has none."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    known = {str(each.get("content")) for each in added if isinstance(each, dict)} if isinstance(added, list) else set()
    known |= set(vocabulary) if isinstance(vocabulary, dict) else set()
    said = configuration.get("eos_token")
    said = said.get("content") if isinstance(said, dict) else said
    return next((end for end in (said, *USUAL_ENDS) if isinstance(end, str) and end in known), "")


def train_bpe(texts: Iterable[bytes], vocab_size: int) -> bytes:
    """Train a byte-level BPE with all bytes and an end-of-text token; returns its tokenizer.json. UsageError if the library is missing."""
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((text.decode() for text in texts), trainer)
    content: str = tokenizer.to_str()
    return content.encode()


def sampled(texts: Iterator[bytes], total_bytes: int) -> Iterator[bytes]:
    """Every n-th text, so that about BPE_TRAINED_ON_BYTES remain."""
    every = max(1, -(-total_bytes // BPE_TRAINED_ON_BYTES))
    return (text for number, text in enumerate(texts) if number % every == 0)


def _json_object(content: bytes, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ManifestError(f"{path} is not a JSON object", "name a tokenizer.json of the tokenizers library")
    return found


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UsageError("tokenizers other than bytes need the library tokenizers", "pip install 'peerd[tokenizers]'") from None
    return tokenizers

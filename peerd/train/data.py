"""From text to microbatches: one token file that all peers agree on by hash, and the window of it that each sample is.

With the byte tokenizer a token is a byte, so the token file is the texts themselves, one after the other.
"""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import json
import struct
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from peerd.config.atomic import commit, draft
from peerd.config.manifest import Manifest
from peerd.errors import DiskError, ManifestError

STDLIB = "stdlib"
BYTE_VOCABULARY = 256
SEPARATOR = b"\n"
CHUNK_BYTES = 1 << 20
INDEX_VERSION = 1

# Third-party code, test suites and generated files are not the library's own text.
STDLIB_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
TEXT_SUFFIXES = frozenset(
    {".txt", ".md", ".rst", ".tex", ".log", ".csv", ".tsv", ".json", ".jsonl", ".xml", ".html", ".toml", ".yaml", ".yml"}
    | {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cs", ".go", ".rs", ".java", ".kt", ".js", ".ts", ".rb", ".sh", ".sql"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A token file in the cache."""

    path: Path
    blake3: str
    """Hash of its content, hex."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _SourceFile:
    path: Path
    name: str
    """Relative to the source, with forward slashes: the order of the texts must not depend on the system."""
    num_bytes: int
    modified_ns: int


def prepare_tokens(source: str, cache: Path) -> TokenFile:
    """The token file of `stdlib`, a text file or a folder of text files; made once and kept as `cache/<blake3>.bin`.

    An unchanged source is recognised by its files' sizes and times, and the kept file by its hash.
    Raises ManifestError where there is no text, DiskError where a file cannot be read or written.
    """
    files = _list_source(source)
    if not files:
        raise ManifestError(f"data source {source}: no text files in it", "name a UTF-8 text file or a folder of them")
    index = cache / f"{_listing_key(source, files)}.json"
    kept = _look_up(index, cache)
    if kept is not None:
        return kept
    made = _write_tokens(source, files, cache)
    with draft(cache) as path:
        path.write_text(json.dumps({"version": INDEX_VERSION, "blake3": made.blake3, "num_tokens": made.num_tokens}), encoding="utf-8")
        commit(path, index)
    return made


def agree_on_data(manifest: Manifest, token_file: TokenFile) -> Manifest:
    """The manifest with its data's hash and length filled in.

    Raises ManifestError when they are filled in already and differ: this machine's text is not the run's.
    """
    data = manifest.data
    if data.blake3 and data.blake3 != token_file.blake3:
        raise ManifestError(
            f"this machine's data has blake3 {token_file.blake3[:12]}... ({token_file.num_tokens} tokens), "
            f"the run's has {data.blake3[:12]}... ({data.num_tokens} tokens)",
            "use the organiser's own text file or folder as data",
        )
    agreed = dataclasses.replace(data, blake3=token_file.blake3, num_tokens=token_file.num_tokens)
    return dataclasses.replace(manifest, data=agreed)


class Corpus:
    """The run's microbatches, read from a memory-mapped token file.

    Contract: `microbatch(step, index)` depends on the token file's content, the manifest and its arguments alone, so any peer
    can make any microbatch, and a resumed run sees the same data.
    """

    def __init__(self, token_file: TokenFile, manifest: Manifest) -> None:
        """Raises ManifestError when the file is too short for one window or the vocabulary too small for its tokens."""
        train = manifest.train
        if token_file.num_tokens <= train.sequence_length + 1:
            raise ManifestError(
                f"the data has {token_file.num_tokens} tokens, too few for train.sequence_length = {train.sequence_length}",
                "use more text or a shorter sequence",
            )
        if manifest.model.vocab_size < BYTE_VOCABULARY:
            raise ManifestError(f"model.vocab_size is {manifest.model.vocab_size}", f"byte tokens need at least {BYTE_VOCABULARY}")
        self.token_file = token_file
        self.seed = manifest.seed
        self.microbatch_size = train.microbatch_size
        self.sequence_length = train.sequence_length
        self.length_at = manifest.sequence_length_at
        try:
            self._tokens = np.memmap(token_file.path, dtype=np.uint8, mode="r")
        except OSError as error:
            raise DiskError(f"{token_file.path}: {error.strerror}", "start again: the file is made anew") from error

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels (each token's successor) of microbatch (step, index), int64 [microbatch_size, sequence_length].

        While sequences grow, a window is the beginning of the one that full length would give.
        """
        rows, length = [], self.length_at(step)
        for sample in range(self.microbatch_size):
            start = window_start(self.seed, step, index, sample, self.token_file.num_tokens - self.sequence_length)
            rows.append(self._tokens[start : start + length + 1])
        windows = torch.from_numpy(np.stack(rows).astype(np.int64))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def window_start(seed: int, step: int, index: int, sample: int, num_starts: int) -> int:
    """Where sample `sample` of microbatch (step, index) starts in the token file: a hash, below num_starts.

    The bias of the modulo is below 1e-8 for any file under 10^11 tokens.
    """
    key = struct.pack("<4Q", seed, step, index, sample)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"peerd window").digest(), "little") % num_starts


def _list_source(source: str) -> list[_SourceFile]:
    """The source's text files, sorted by name. Raises ManifestError for a missing path, DiskError for an unreadable one."""
    root = Path(sysconfig.get_path("stdlib")) if source == STDLIB else Path(source).expanduser()
    try:
        if root.is_file():
            return [_describe(root, root.name)]
        if not root.is_dir():
            raise ManifestError(f"data source {source}: no such file or folder", "correct data.source")
        paths = _stdlib_paths(root) if source == STDLIB else _folder_paths(root)
        return sorted((_describe(path, path.relative_to(root).as_posix()) for path in paths), key=lambda file: file.name)
    except OSError as error:
        raise _unreadable(error) from error


def _stdlib_paths(root: Path) -> Iterator[Path]:
    return (path for path in root.rglob("*.py") if STDLIB_SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts) and path.is_file())


def _folder_paths(root: Path) -> Iterator[Path]:
    """Text files by suffix; hidden files and folders are left out."""
    for path in root.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if path.suffix.lower() in TEXT_SUFFIXES and not hidden and path.is_file():
            yield path


def _describe(path: Path, name: str) -> _SourceFile:
    status = path.stat()
    return _SourceFile(path, name, status.st_size, status.st_mtime_ns)


def _listing_key(source: str, files: list[_SourceFile]) -> str:
    """What an unchanged source is recognised by."""
    listing = [(str(file.path), file.num_bytes, file.modified_ns) for file in files]
    return blake3(repr((INDEX_VERSION, source, sys.version, listing)).encode()).hexdigest(length=16)


def _look_up(index: Path, cache: Path) -> TokenFile | None:
    """The kept token file, if it is there and has the content it is named for."""
    try:
        entry = json.loads(index.read_text(encoding="utf-8"))
        path = cache / f"{entry['blake3']}.bin"
        intact = path.stat().st_size == entry["num_tokens"] and blake3().update_mmap(path).hexdigest() == entry["blake3"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no index, or a damaged one: make both anew
    return TokenFile(path=path, blake3=entry["blake3"], num_tokens=entry["num_tokens"]) if intact else None


def _write_tokens(source: str, files: list[_SourceFile], cache: Path) -> TokenFile:
    """Join the texts into a draft while hashing it, then name it by its hash. Raises ManifestError when nothing is left."""
    hasher, num_tokens = blake3(), 0
    with draft(cache) as path:
        with path.open("wb") as stream:
            for chunk in _text_chunks(files):
                stream.write(chunk)
                hasher.update(chunk)
                num_tokens += len(chunk)
        if not num_tokens:
            raise ManifestError(f"data source {source}: no UTF-8 text in it", "name a UTF-8 text file or a folder of them")
        target = cache / f"{hasher.hexdigest()}.bin"
        commit(path, target)
    return TokenFile(path=target, blake3=hasher.hexdigest(), num_tokens=num_tokens)


def _text_chunks(files: list[_SourceFile]) -> Iterator[bytes]:
    """The texts' bytes with a separator between each two; empty files and those that are not UTF-8 are left out."""
    follows = False
    for file in files:
        if not file.num_bytes or not _is_utf8(file.path):
            continue
        if follows:
            yield SEPARATOR
        yield from _read_chunks(file.path)
        follows = True


def _is_utf8(path: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in _read_chunks(path):
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _read_chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise _unreadable(error) from error


def _unreadable(error: OSError) -> DiskError:
    return DiskError(f"{error.filename}: cannot be read: {error.strerror}", "check the file and its permissions")

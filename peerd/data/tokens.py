"""Makes the token file: a run's whole text as tokens of 1, 2 or 4 bytes, little endian, made once and named by its hash.

An interruption loses nothing: the part written so far stays in the cache with a note of the position in the source, and the next
run continues from there. With the byte tokenizer the file is the concatenation of the texts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from blake3 import blake3

from peerd.config.atomic import commit, replace_file
from peerd.config.data_config import AGREED, LOCAL, REMOTE, DataConfig
from peerd.data.progress import ByteProgress, Report, silent
from peerd.data.sources import STDLIB, Piece, SourceFile, list_source, pieces
from peerd.data.tokenizer import (
    BPE_PREFIX,
    BYTES,
    END_OF_TEXT,
    Tokenizer,
    keep_tokenizer,
    kept_tokenizer,
    open_tokenizer,
    read_tokenizer,
    sampled,
    train_bpe,
)
from peerd.errors import ManifestError, disk_error

INDEX_VERSION = 2
CHUNK_BYTES = 16 << 20
"""Chunk size in which a token file is sent; each chunk is checked by its hash."""
BATCH_BYTES = 4 << 20
"""Text that the tokenizer gets at once; it uses several threads."""
NOTED_EVERY_BYTES = 64 << 20
WAIT_S = 0.1
ALWAYS_HASHED_BYTES = 1 << 30
"""A larger file is not hashed again at each start if its modification time has not changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A token file in the cache."""

    path: Path
    blake3: str
    """Hash of the content, hex."""
    num_tokens: int
    token_bytes: int = 1
    chunks_blake3: str = ""
    vocab_size: int = 256
    """Vocabulary size of the tokenizer; 0: unknown."""
    tokenizer_blake3: str = ""
    end_of_text: str = ""
    source_blake3: str = ""
    """Hash of the file downloaded from a URL, if there was one."""


@dataclass(slots=True)
class _ConvertedSoFar:
    """The progress of a conversion."""

    file: int = 0
    position: int = 0
    written_bytes: int = 0
    any_document: bool = False


@dataclass(frozen=True, slots=True)
class _Conversion:
    """One conversion: its files, its tokenizer, and its names in the cache."""

    files: Sequence[SourceFile]
    field: str
    tokenizer: Tokenizer
    cache: Path
    key: str
    report: Report

    @property
    def part(self) -> Path:
        return self.cache / f"{self.key}.part"

    @property
    def note(self) -> Path:
        return self.cache / f"{self.key}.note"

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        return np.dtype(f"<u{bytes_per_token(self.tokenizer.vocab_size)}")


def prepare_tokens(source: str, cache: Path, data: DataConfig | None = None, report: Report = silent) -> TokenFile:
    """The token file of a source, tokenized as `data` says; made once and kept as `cache/<blake3>.bin`.

    An unchanged source is recognised by the sizes and times of its files, the kept file by its hash. An exception from `report`
    interrupts the work; the next call continues it. Raises ManifestError if there is no text or no tokenizer, DiskError if a file
    cannot be read or written, UnreachableError if a download fails.
    """
    data = data or DataConfig()
    place, source_blake3 = _obtained(source, cache, data, report) if source.startswith(REMOTE) else (source, "")
    files = list_source(place, data.field)
    if not files:
        raise ManifestError(f"data source {source}: no text files in it", "name a UTF-8 text file or a folder of them")
    key = _key(source, files, data)
    kept = _look_up(cache / f"{key}.json", cache)
    if kept is not None and data.tokenizer_blake3 in ("", kept.tokenizer_blake3):
        return replace(kept, source_blake3=source_blake3)
    digest, end_of_text = _tokenizer_of(files, data, cache, report)
    tokenizer = open_tokenizer(digest, end_of_text, cache)
    work = _Conversion(files, data.field, tokenizer, cache, blake3(f"{key} {digest} {end_of_text}".encode()).hexdigest(length=16), report)
    with _owned(work) as stream:
        kept = _look_up(cache / f"{key}.json", cache)  # another process may have made it meanwhile
        if kept is not None and kept.tokenizer_blake3 == digest:
            work.part.unlink(missing_ok=True)
            work.note.unlink(missing_ok=True)
            return replace(kept, source_blake3=source_blake3)
        num_tokens = _convert(work, stream, source)
        return replace(_finish(work, num_tokens, digest, end_of_text, cache / f"{key}.json"), source_blake3=source_blake3)


def kept_tokens(data: DataConfig, cache: Path) -> TokenFile | None:
    """The run's token file, if the cache has it with the right content; its source does not matter."""
    path = cache / f"{data.blake3}.bin"
    if not data.blake3 or not _is_intact(path, data.blake3, data.num_tokens * data.token_bytes, 0):
        return None
    return TokenFile(path=path, vocab_size=0, **{name: getattr(data, name) for name in AGREED})


def bytes_per_token(vocab_size: int) -> int:
    return 1 if vocab_size <= 1 << 8 else 2 if vocab_size <= 1 << 16 else 4


def chunk_hashes(path: Path) -> list[bytes]:
    """The BLAKE3 hash of each chunk of a file."""
    hashes = []
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            hashes.append(blake3(chunk).digest())
    return hashes


def hash_of_hashes(hashes: Sequence[bytes]) -> str:
    return blake3(b"".join(hashes)).hexdigest()


def _obtained(source: str, cache: Path, data: DataConfig, report: Report) -> tuple[str, str]:
    """The path of a download, and the hash of its file; empty for a folder."""
    from peerd.data.download import file_hash, obtain

    place = obtain(source, cache, data.source_blake3, report)
    return place, file_hash(Path(place)) if Path(place).is_file() else ""


def _tokenizer_of(files: Sequence[SourceFile], data: DataConfig, cache: Path, report: Report) -> tuple[str, str]:
    """Put the tokenizer into the cache. Returns its hash and the token that ends documents; both are empty for bytes."""
    if data.tokenizer == BYTES:
        return "", ""
    if data.tokenizer_blake3 and kept_tokenizer(data.tokenizer_blake3, cache).is_file():
        return data.tokenizer_blake3, data.end_of_text
    if data.tokenizer == LOCAL:
        raise ManifestError("the run's tokenizer is its organiser's own", "fetch the data from a peer with --data swarm")
    if data.tokenizer.startswith(BPE_PREFIX):
        total_bytes = _total_bytes(files)

        def texts() -> Iterator[bytes]:
            for piece in pieces(files, data.field):
                report(ByteProgress("reading for the tokenizer", _read_bytes(files, piece), total_bytes))
                yield piece.text

        content = train_bpe(sampled(texts(), total_bytes), int(data.tokenizer.removeprefix(BPE_PREFIX)))
        end_of_text = END_OF_TEXT
    else:
        content, end_of_text = read_tokenizer(_tokenizer_place(data, cache, report))
    return keep_tokenizer(content, cache), end_of_text


def _tokenizer_place(data: DataConfig, cache: Path, report: Report) -> Path:
    if data.tokenizer_is_path:
        return Path(data.tokenizer).expanduser()
    from peerd.data.download import obtain_tokenizer

    return obtain_tokenizer(data.tokenizer, cache, report)


@contextlib.contextmanager
def _owned(work: _Conversion) -> Iterator[IO[bytes]]:
    """The unfinished file, locked for this process; a second process that wants the same file waits.

    A failure (no text, a full disk) deletes the file; an interruption keeps it.
    """
    try:
        work.cache.mkdir(parents=True, exist_ok=True)
        while True:
            with work.part.open("ab") as stream:
                _lock(stream, work.report)
                if _is_same(stream, work.part):
                    try:
                        yield stream
                    except Exception:
                        work.part.unlink(missing_ok=True)
                        work.note.unlink(missing_ok=True)
                        raise
                    return
    except OSError as error:
        raise disk_error(work.cache, error) from error


def _lock(stream: IO[bytes], report: Report) -> None:
    """Lock the file, waiting as long as it takes; an exception from `report` interrupts the wait."""
    while True:
        try:
            return fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(ByteProgress("waiting for another peerd that makes the same file", 0, 0))
            time.sleep(WAIT_S)


def _is_same(stream: IO[bytes], path: Path) -> bool:
    """True if the open file is still the one at the path: the process that held it before may have finished and renamed it."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _convert(work: _Conversion, stream: IO[bytes], source: str) -> int:
    """Write the rest of the file. Returns the number of tokens; raises ManifestError if there are none."""
    reached = _read_note(work, stream)
    stream.truncate(reached.written_bytes)
    noted_bytes = reached.written_bytes
    total_bytes = _total_bytes(work.files)
    try:
        for batch in _batches(pieces(work.files, work.field, (reached.file, reached.position))):
            _write(work, stream, batch, reached)
            last = batch[-1]
            if last.position is not None:
                reached.file, reached.position, reached.written_bytes = last.file, last.position, stream.tell()
            work.report(ByteProgress("tokenizing", _read_bytes(work.files, last), total_bytes))
            if reached.written_bytes - noted_bytes >= NOTED_EVERY_BYTES:
                _write_note(work, stream, reached)
                noted_bytes = reached.written_bytes
    except Exception:
        raise
    except BaseException:  # an interruption: the next run continues from here
        _write_note(work, stream, reached)
        raise
    stream.flush()
    num_tokens = stream.tell() // work.dtype.itemsize
    if not num_tokens:
        raise ManifestError(f"data source {source}: no UTF-8 text in it", "name a UTF-8 text file or a folder of them")
    return num_tokens


def _batches(found: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Batches of pieces for the tokenizer. A batch ends where the work can be continued, so that an interruption loses little."""
    batch: list[Piece] = []
    size = 0
    for piece in found:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_BYTES and piece.position is not None:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write(work: _Conversion, stream: IO[bytes], batch: Sequence[Piece], reached: _ConvertedSoFar) -> None:
    between, after = (np.asarray(tokens, dtype=work.dtype).tobytes() for tokens in (work.tokenizer.between, work.tokenizer.after))
    for piece, tokens in zip(batch, work.tokenizer.encode([piece.text for piece in batch]), strict=True):
        if piece.begins and reached.any_document:
            stream.write(between)
        stream.write(tokens.astype(work.dtype, copy=False).tobytes())
        if piece.ends:
            stream.write(after)
        reached.any_document = True


def _read_note(work: _Conversion, stream: IO[bytes]) -> _ConvertedSoFar:
    try:
        reached = _ConvertedSoFar(**json.loads(work.note.read_text(encoding="utf-8")))
        sound = reached.written_bytes <= os.fstat(stream.fileno()).st_size and reached.file < len(work.files)
    except (OSError, ValueError, TypeError):
        return _ConvertedSoFar()
    return reached if sound else _ConvertedSoFar()


def _write_note(work: _Conversion, stream: IO[bytes], reached: _ConvertedSoFar) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    replace_file(work.note, json.dumps(asdict(reached)))


def _finish(work: _Conversion, num_tokens: int, digest: str, end_of_text: str, index: Path) -> TokenFile:
    """Give the finished file its name. The index is written first: a process that waited for the file must find both."""
    content = blake3().update_mmap(work.part).hexdigest()
    made = TokenFile(
        path=work.cache / f"{content}.bin",
        blake3=content,
        num_tokens=num_tokens,
        token_bytes=work.dtype.itemsize,
        chunks_blake3=hash_of_hashes(chunk_hashes(work.part)),
        vocab_size=work.tokenizer.vocab_size,
        tokenizer_blake3=digest,
        end_of_text=end_of_text,
    )
    entry = asdict(made) | {"version": INDEX_VERSION, "modified_ns": work.part.stat().st_mtime_ns}
    del entry["path"]
    replace_file(index, json.dumps(entry))
    commit(work.part, made.path)
    work.note.unlink(missing_ok=True)
    return made


def _look_up(index: Path, cache: Path) -> TokenFile | None:
    """The kept token file, if it and its tokenizer exist and its content matches its name."""
    try:
        entry = json.loads(index.read_text(encoding="utf-8"))
        modified_ns = entry.pop("modified_ns")
        if entry.pop("version") != INDEX_VERSION:
            return None
        found = TokenFile(path=cache / f"{entry['blake3']}.bin", **entry)
        tokenizer_kept = not found.tokenizer_blake3 or kept_tokenizer(found.tokenizer_blake3, cache).is_file()
        intact = tokenizer_kept and _is_intact(found.path, found.blake3, found.num_tokens * found.token_bytes, modified_ns)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # no index, or a damaged one: make both again
    return found if intact else None


def _is_intact(path: Path, digest: str, num_bytes: int, modified_ns: int) -> bool:
    try:
        status = path.stat()
        if status.st_size != num_bytes:
            return False
        untouched = num_bytes > ALWAYS_HASHED_BYTES and status.st_mtime_ns == modified_ns
        return untouched or blake3().update_mmap(path).hexdigest() == digest
    except OSError:
        return False


def _key(source: str, files: Sequence[SourceFile], data: DataConfig) -> str:
    """The key that identifies an unchanged source and tokenizer."""
    listing = [(str(file.path), file.num_bytes, file.modified_ns) for file in files]
    tokenizer = [data.tokenizer]
    if data.tokenizer_is_path:
        content, end_of_text = read_tokenizer(Path(data.tokenizer).expanduser())
        tokenizer = [LOCAL, blake3(content).hexdigest(), end_of_text]
    elif data.tokenizer == LOCAL:
        tokenizer += [data.tokenizer_blake3, data.end_of_text]
    build = sys.version if source == STDLIB else ""
    return blake3(repr((INDEX_VERSION, source, build, listing, data.field, tokenizer)).encode()).hexdigest(length=16)


def _total_bytes(files: Sequence[SourceFile]) -> int:
    return sum(file.num_bytes for file in files)


def _read_bytes(files: Sequence[SourceFile], piece: Piece) -> int:
    return _total_bytes(files[: piece.file]) + piece.read_bytes

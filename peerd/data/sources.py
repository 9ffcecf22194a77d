"""Reads a run's text: the files of a source and the documents in them, in the same order on every machine.

A text file is one document. If a field is named, each line of a jsonl file and each row of a parquet file is a document.
Documents are read in pieces of bounded size, so that a text may be larger than memory.
"""

from __future__ import annotations

import codecs
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerd.errors import ManifestError, PeerdError, UsageError, disk_error

STDLIB = "stdlib"
PIECE_BYTES = 1 << 20
MAX_LINE_BYTES = 256 << 20
ROWS_AT_ONCE = 256

# Third-party code, test suites and generated files do not count as the library's text.
STDLIB_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
TEXT_SUFFIXES = frozenset(
    {".txt", ".md", ".rst", ".tex", ".log", ".csv", ".tsv", ".json", ".jsonl", ".xml", ".html", ".toml", ".yaml", ".yml"}
    | {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cs", ".go", ".rs", ".java", ".kt", ".js", ".ts", ".rb", ".sh", ".sql"}
)
JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
PARQUET_SUFFIX = ".parquet"
RECORD_SUFFIXES = JSONL_SUFFIXES | {PARQUET_SUFFIX}


@dataclass(frozen=True, slots=True)
class SourceFile:
    path: Path
    name: str
    """Path relative to the source, with forward slashes: the order of the texts must not depend on the system."""
    num_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document as UTF-8, and its position in the source."""

    text: bytes
    begins: bool
    ends: bool
    """True if the document begins or ends with this piece."""
    file: int
    position: int | None
    """The position in the file (byte, or row of a parquet file) to continue from after this piece; None within a record."""
    read_bytes: int
    """Bytes of this file read so far."""


def list_source(source: str, field: str) -> list[SourceFile]:
    """The source's files, sorted by name. Raises ManifestError for a missing path, DiskError for an unreadable one."""
    root = Path(sysconfig.get_path("stdlib")) if source == STDLIB else Path(source).expanduser()
    try:
        if root.is_file():
            _check_field(root, field)
            return [_describe(root, root.name)]
        if not root.is_dir():
            raise ManifestError(f"data source {source}: no such file or folder", "correct data.source")
        paths = _stdlib_paths(root) if source == STDLIB else _folder_paths(root, field)
        return sorted((_describe(path, path.relative_to(root).as_posix()) for path in paths), key=lambda file: file.name)
    except OSError as error:
        raise _unreadable(error) from error


def pieces(files: Sequence[SourceFile], field: str, start: tuple[int, int] = (0, 0)) -> Iterator[Piece]:
    """The documents of all files, beginning at `start`, a piece's (file, position). Raises ManifestError, DiskError.

    Empty documents and text files that are not UTF-8 are skipped.
    """
    first, position = start
    for number, file in enumerate(files[first:], first):
        if file.num_bytes:
            try:
                yield from _pieces_of(file, number, field, position)
            except OSError as error:
                raise _unreadable(error) from error
        position = 0


def guess_field(source: str) -> str:
    """The value of data.field that `peerd new` writes: "text" if the source holds records, else empty. DiskError if it cannot be read."""
    if source.startswith("hub:"):
        return "text"
    path = Path(source.partition("?")[0])
    if path.suffix.lower() in RECORD_SUFFIXES and not path.is_dir():
        return "text"
    try:
        holds_records = path.is_dir() and any(_is_shown(each, path) and each.suffix.lower() in RECORD_SUFFIXES for each in path.rglob("*"))
    except OSError as error:
        raise _unreadable(error) from error
    return "text" if holds_records else ""


def _pieces_of(file: SourceFile, number: int, field: str, position: int) -> Iterator[Piece]:
    suffix = file.path.suffix.lower()
    if field and suffix in JSONL_SUFFIXES:
        return _jsonl_pieces(file, number, field, position)
    if field and suffix == PARQUET_SUFFIX:
        return _parquet_pieces(file, number, field, position)
    return _text_pieces(file, number, position)


def _text_pieces(file: SourceFile, number: int, position: int) -> Iterator[Piece]:
    if position == 0 and not _is_utf8(file.path):
        return
    with file.path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        stream.seek(position)
        rest = b""
        while block := rest + stream.read(PIECE_BYTES - len(rest)):
            text = block if position + len(block) >= size else block[: _cut(block)]
            rest = block[len(text) :]
            begins, position = position == 0, position + len(text)
            yield Piece(text, begins, position >= size, number, position, position)


def _jsonl_pieces(file: SourceFile, number: int, field: str, position: int) -> Iterator[Piece]:
    with file.path.open("rb") as stream:
        stream.seek(position)
        while line := stream.readline(MAX_LINE_BYTES + 1):
            where, position = f"{file.path}, byte {position}", position + len(line)
            if len(line) > MAX_LINE_BYTES:
                raise ManifestError(f"{where}: a line of more than {MAX_LINE_BYTES >> 20} MiB", "is it one JSON object per line?")
            if not line.isspace():
                yield from _cut_up(_field_of(line, field, where), number, position, position)


def _field_of(line: bytes, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise ManifestError(f"{where}: not a JSON object", "a jsonl file has one JSON object per line") from None
    if not isinstance(record, dict):
        raise ManifestError(f"{where}: not a JSON object", "a jsonl file has one JSON object per line")
    value = record.get(field)
    if value is not None and not isinstance(value, str):
        raise ManifestError(f"{where}: the field {field} is not text", _name_field(record))
    if field not in record:
        raise ManifestError(f"{where}: no field {field}", _name_field(record))
    return value or ""


def _parquet_pieces(file: SourceFile, number: int, field: str, position: int) -> Iterator[Piece]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UsageError(f"{file.path} is a parquet file, which needs the library pyarrow", "pip install 'peerd[parquet]'") from None
    try:
        with ParquetFile(file.path) as table:
            if field not in table.schema_arrow.names:
                raise ManifestError(f"{file.path}: no column {field}", _name_field(dict.fromkeys(table.schema_arrow.names)))
            yield from _rows(table, file, number, field, position)
    except ArrowException as error:
        told = str(error).splitlines()[0]
        raise ManifestError(f"{file.path} cannot be read as parquet: {told}", "is it whole, and a parquet file?") from None


def _rows(table: Any, file: SourceFile, number: int, field: str, position: int) -> Iterator[Piece]:
    """Read row group by row group; groups before `position` are skipped."""
    row, total = 0, max(1, table.metadata.num_rows)
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if row + rows <= position:
            row += rows
            continue
        for batch in table.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=[group], columns=[field]):
            for value in batch.column(0).to_pylist():
                row += 1
                if row <= position or value is None:
                    continue
                if not isinstance(value, str):
                    raise ManifestError(
                        f"{file.path}: the column {field} is not text", _name_field(dict.fromkeys(table.schema_arrow.names))
                    )
                yield from _cut_up(value, number, row, file.num_bytes * row // total)


def _cut_up(document: str, number: int, position: int, read_bytes: int) -> Iterator[Piece]:
    """The pieces of one record's text. Half a surrogate pair, which JSON allows and UTF-8 does not, becomes a question mark."""
    rest, begins = document.encode(errors="replace"), True
    while rest:
        text = rest if len(rest) <= PIECE_BYTES else rest[: _cut(rest[:PIECE_BYTES])]
        rest = rest[len(text) :]
        yield Piece(text, begins, not rest, number, None if rest else position, read_bytes)
        begins = False


def _cut(block: bytes) -> int:
    """The index at which to cut UTF-8 text: after its last newline, or before an incomplete character."""
    end = block.rfind(b"\n") + 1
    if end:
        return end
    end = len(block) - 1
    while end > 0 and block[end] & 0xC0 == 0x80:
        end -= 1
    return end or len(block)


def _check_field(path: Path, field: str) -> None:
    if path.suffix.lower() == PARQUET_SUFFIX and not field:
        raise ManifestError(f"{path} is a parquet file, and data.field is empty", "name the column that holds the text in data.field")


def _name_field(record: dict[str, Any]) -> str:
    return f"name the field that holds the text in data.field (it has: {', '.join(map(str, list(record)[:12]))})"


def _stdlib_paths(root: Path) -> Iterator[Path]:
    """Walk without entering the skipped folders: installed packages may have ten times as many files."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in STDLIB_SKIPPED_FOLDERS]
        for name in names:
            path = Path(folder, name)
            if name.endswith(".py") and path.is_file():
                yield path


def _folder_paths(root: Path, field: str) -> Iterator[Path]:
    """Text files by suffix and, if a field is named, files of records. Hidden files and folders are skipped."""
    suffixes = TEXT_SUFFIXES | RECORD_SUFFIXES if field else TEXT_SUFFIXES
    for path in root.rglob("*"):
        if path.suffix.lower() in suffixes and _is_shown(path, root):
            yield path


def _is_shown(path: Path, root: Path) -> bool:
    return not any(part.startswith(".") for part in path.relative_to(root).parts) and path.is_file()


def _describe(path: Path, name: str) -> SourceFile:
    status = path.stat()
    return SourceFile(path, name, status.st_size, status.st_mtime_ns)


def _is_utf8(path: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(PIECE_BYTES):
                decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _unreadable(error: OSError) -> PeerdError:
    return disk_error(Path(error.filename or ""), error, "check the file and its permissions")

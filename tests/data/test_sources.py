"""Documents are read completely, in order and in bounded pieces, from any position."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from peerd.data import sources
from peerd.data.sources import Piece, guess_field, list_source, pieces
from peerd.errors import ManifestError


def documents(found: list[Piece]) -> list[str]:
    texts: list[bytes] = []
    for piece in found:
        assert 0 < len(piece.text) <= sources.PIECE_BYTES
        piece.text.decode()
        if piece.begins:
            texts.append(b"")
        texts[-1] += piece.text
    return [text.decode() for text in texts]


def read(source: Path, field: str = "", start: tuple[int, int] = (0, 0)) -> list[Piece]:
    return list(pieces(list_source(str(source), field), field, start))


def write_records(folder: Path, texts: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text, "id": 1}) + "\n\n" for text in texts), encoding="utf-8")
    parquet.write_table(pyarrow.table({"id": list(range(len(texts))), "text": texts}), folder / "b.parquet", row_group_size=2)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_each_record_is_a_document_and_reading_goes_on_after_any_of_them(tmp_path: Path, suffix: str) -> None:
    texts = ["one", "", "two\nlines", "na\u00efve \U0001f600", "four", "five"]
    write_records(tmp_path, texts)
    source = next(tmp_path.glob(f"*.{suffix}"))
    found = read(source, "text")
    expected = [text for text in texts if text]
    assert documents(found) == expected
    assert [piece.read_bytes for piece in found] == sorted(piece.read_bytes for piece in found)
    for count, piece in enumerate(found, 1):
        assert piece.position is not None
        assert documents(read(source, "text", (0, piece.position))) == expected[count:]


def test_a_folder_mixes_text_and_records_by_name_only_where_a_field_is_named(tmp_path: Path) -> None:
    write_records(tmp_path, ["one", "two"])
    (tmp_path / "c.txt").write_text("three")
    assert documents(read(tmp_path, "text")) == ["one", "two", "one", "two", "three"]
    plain = documents(read(tmp_path))
    assert plain == [(tmp_path / "a.jsonl").read_text(), "three"]


def test_large_documents_come_in_pieces_cut_after_a_line_or_a_whole_character(tmp_path: Path) -> None:
    for name, text in (("lines.txt", "a line\n" * 400_000), ("wide.txt", "\u20ac" * 800_000)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        found = read(tmp_path / name)
        assert len(found) > 2
        assert documents(found) == [text]
        begun_later = read(tmp_path / name, "", (0, found[0].position or 0))
        assert [piece.text for piece in begun_later] == [piece.text for piece in found[1:]]


def test_a_record_that_is_larger_than_a_piece_is_gone_on_with_only_after_its_end(tmp_path: Path) -> None:
    write_records(tmp_path, ["x" * (2 * sources.PIECE_BYTES + 1), "short"])
    found = read(tmp_path / "a.jsonl", "text")
    assert [piece.position is None for piece in found] == [True, True, False, False]
    assert [(piece.begins, piece.ends) for piece in found] == [(True, False), (False, False), (False, True), (True, True)]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", b'{"text": "one"}\nwords\n', r"byte 16: not a JSON object; a jsonl file has one"),
        ("a.jsonl", b"[1]\n", r"byte 0: not a JSON object"),
        ("a.jsonl", b'{"body": "one"}\n', r"byte 0: no field text; name the field .* \(it has: body\)"),
        ("a.jsonl", b'{"text": 7}\n', r"the field text is not text"),
        ("a.parquet", b"PAR1 not really", r"cannot be read as parquet: .*; is it whole"),
    ],
)
def test_a_record_that_cannot_be_read_is_told_by_its_place(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ManifestError, match=told):
        read(tmp_path / name, "text")


def test_a_parquet_file_needs_the_name_of_a_column_it_has(tmp_path: Path) -> None:
    write_records(tmp_path, ["one"])
    with pytest.raises(ManifestError, match=r"b\.parquet is a parquet file, and data\.field is empty"):
        read(tmp_path / "b.parquet")
    with pytest.raises(ManifestError, match=r"no column body; .*\(it has: id, text\)"):
        read(tmp_path / "b.parquet", "body")
    with pytest.raises(ManifestError, match=r"the column id is not text"):
        read(tmp_path / "b.parquet", "id")


def test_half_a_surrogate_pair_does_not_stop_a_conversion(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d"}\n')
    assert documents(read(tmp_path / "a.jsonl", "text")) == ["a?"]


def test_the_field_is_guessed_where_there_are_records(tmp_path: Path) -> None:
    assert guess_field(str(tmp_path)) == ""
    assert guess_field("https://host/a.jsonl?x=1") == guess_field("hub:owner/name") == guess_field(str(tmp_path / "a.parquet")) == "text"
    assert guess_field("stdlib") == guess_field("https://host/a.txt") == ""
    write_records(tmp_path / "deep", ["one"])
    assert guess_field(str(tmp_path)) == "text"


@given(st.text(alphabet="a\u20ac\U0001f600\n", min_size=1).map(str.encode))
def test_a_cut_leaves_whole_characters_on_both_sides_and_always_something(text: bytes) -> None:
    end = sources._cut(text)
    assert 0 < end <= len(text)
    assert text[:end].decode() + text[end:].decode() == text.decode()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_an_entry_of_a_folder_that_cannot_be_read_is_named() -> None:
    """Another user may list the folder inside and look at nothing in it."""
    with tempfile.TemporaryDirectory(prefix="peerd-t-", dir="/tmp") as name:
        _assert_named(Path(name))


def _assert_named(folder: Path) -> None:
    folder.chmod(0o755)
    inside = folder / "inside"
    inside.mkdir()
    (inside / "a.jsonl").touch()
    inside.chmod(0o744)
    guess = "import os, sys; from peerd.data.sources import guess_field; os.setuid(65534); guess_field(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", guess, str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert (
        done.stderr.splitlines()[-1]
        == f"peerd.errors.DiskError: {inside / 'a.jsonl'}: Permission denied; check the file and its permissions"
    )

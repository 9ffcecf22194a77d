"""A state as a file: what is put together by hand, in the tensors' own memory, is what safetensors writes and reads."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, save

from peerd.wire.tensors import file_bytes, file_of, tensors_of_file

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
NAMES = st.text("abz/._09", min_size=1, max_size=8)


@given(st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from([torch.float32, torch.uint8])), max_size=6))
def test_it_is_what_the_library_writes_and_is_read_back(forms: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    tensors = {name: torch.randint(256, shape).to(dtype) for name, (shape, dtype) in forms.items()}
    data = b"".join(file_of(tensors))
    assert data == save(tensors)
    assert len(data) == file_bytes(tensors)
    found = tensors_of_file(bytearray(data))
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in tensors.items()}
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_tensors_that_lie_otherwise_in_memory_and_metadata_are_read_back(tmp_path: Path) -> None:
    tensors = {"turned": torch.arange(6.0).view(2, 3).T, "number": torch.tensor(2.5)}
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"".join(file_of(tensors, {"lineage": "ab", "history": '[[0, 5.5, "x"]]'})))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"lineage": "ab", "history": '[[0, 5.5, "x"]]'}
    assert {name: value.tolist() for name, value in load(path.read_bytes()).items()} == {
        name: value.tolist() for name, value in tensors.items()
    }

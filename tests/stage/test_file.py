"""A state as a file: what is put together by hand, in the tensors' own memory, is what safetensors writes and reads."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, save

from peerd.wire.tensors import file_of

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
NAMES = st.text("abz/._09", min_size=1, max_size=8)


@given(st.dictionaries(NAMES, SHAPES, max_size=6))
def test_it_is_what_the_library_writes(shapes: dict[str, tuple[int, ...]]) -> None:
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    assert b"".join(file_of(tensors)) == save(tensors)


def test_tensors_that_lie_otherwise_in_memory_and_metadata_are_read_back(tmp_path: Path) -> None:
    tensors = {"turned": torch.arange(6.0).view(2, 3).T, "number": torch.tensor(2.5)}
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"".join(file_of(tensors, {"lineage": "ab", "history": '[[0, 5.5, "x"]]'})))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"lineage": "ab", "history": '[[0, 5.5, "x"]]'}
    assert {name: value.tolist() for name, value in load(path.read_bytes()).items()} == {
        name: value.tolist() for name, value in tensors.items()
    }

"""A state in a file without a name is the same as one in memory. Where the disk has no room for it, it lies in memory."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peerd.stage.disk_room import DiskRoom
from peerd.stage.spool import Landing, Spools, StoredState, split_off_previous, stored_bytes
from peerd.wire.chunks import CutFile
from peerd.wire.tensors import file_of
from tests.stage.test_export import largest_file

STATE = {
    "parameters/w": torch.arange(6.0).view(2, 3),
    "optimizer/w.exp_avg": torch.arange(5, dtype=torch.uint8),
    "optimizer/w.step": torch.tensor(2.0),
    "previous/w": torch.ones(2, 3),
}


def stored(folder: Path, tensors: dict[str, torch.Tensor]) -> StoredState:
    file = Spools(folder, least_bytes=0).file(stored_bytes(tensors))
    assert file is not None
    return StoredState(file, tensors)


def test_a_stored_state_has_the_same_tensors_and_travels_as_the_same_bytes(tmp_path: Path) -> None:
    for names in (STATE.keys(), STATE.keys() - {"previous/w"}):
        tensors = {name: STATE[name] for name in names}
        found = stored(tmp_path, tensors)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == tensors[name].dtype for name in tensors)
        main, previous = split_off_previous(tensors)
        last = file_of(previous) if previous else ()
        in_memory, cut = CutFile((*file_of(main), *last)), found.cut()
        assert found.previous_bytes == sum(map(len, last))
        assert found.num_bytes == cut.num_bytes == in_memory.num_bytes == stored_bytes(tensors)
        assert cut.hashes() == in_memory.hashes()
    assert not [*tmp_path.iterdir()]


def test_a_stored_state_never_changes(tmp_path: Path) -> None:
    tensors = {name: value.clone() for name, value in STATE.items()}
    found = stored(tmp_path, tensors)
    tensors["parameters/w"].zero_()
    found["parameters/w"].zero_()
    assert torch.equal(found["parameters/w"], STATE["parameters/w"])


@given(order=st.permutations(range(8)), in_file=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_that_come_in_any_order_are_the_file(tmp_path: Path, order: list[int], in_file: bool) -> None:
    data = b"".join(file_of({name: STATE[name] for name in ("parameters/w", "optimizer/w.exp_avg")}))
    size = -(-len(data) // 8)
    landing = Landing(len(data), Spools(tmp_path if in_file else None, least_bytes=0))
    for number in order:
        landing.write(number * size, data[number * size : (number + 1) * size])
    found = landing.tensors()
    assert all(torch.equal(found[name], STATE[name]) for name in ("parameters/w", "optimizer/w.exp_avg"))


def test_what_lies_on_the_disk_counts_for_the_owners_limit_while_it_is_needed(tmp_path: Path) -> None:
    room = DiskRoom(tmp_path)
    room.quota_bytes = 1000
    spools = Spools(tmp_path, room, least_bytes=100)
    assert spools.file(99) is None, "it is small"
    assert spools.file(1001) is None, "it is larger than the limit"
    first = spools.file(600)
    assert first is not None
    assert spools.file(600) is None
    del first
    gc.collect()
    assert spools.file(600) is not None


def test_a_state_that_a_disk_does_not_take_lies_in_memory(tmp_path: Path) -> None:
    data = b"".join(file_of(STATE))
    with largest_file(len(data) - 1):
        landing = Landing(len(data), Spools(tmp_path, least_bytes=0))
        landing.write(0, data)
    assert torch.equal(landing.tensors()["parameters/w"], STATE["parameters/w"])
    assert not [*tmp_path.iterdir()]

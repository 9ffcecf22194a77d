"""A checkpoint is written from the tensors where they are: what changes them waits, and it holds the state of one step."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from peerd.stage.checkpoints import CheckpointStore
from peerd.stage.holdings import Holdings
from peerd.stage.leases import Leases
from peerd.stage.snapshots import Downloaded
from peerd.table.record import Lineage, PeerId, PeerRecord
from tests.pretend.life import PRETEND
from tests.tiny_run import tiny_manifest

RECORD = PeerRecord(peer=PeerId("me"), stage=0)
PEAK = """
import json, sys
from pathlib import Path
import torch
from peerd.stage.checkpoints import CheckpointStore
from peerd.stage.snapshots import Downloaded
from peerd.table.record import Lineage

MB, folder = 1 << 20, Path(sys.argv[1])

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1024

held = {f"parameters/{number}": torch.ones(MB) for number in range(64)}
store = CheckpointStore(folder, 1)
Path("/proc/self/clear_refs").write_text("5")
before = peak()
store.save(0, Downloaded(1, Lineage(), held, ()))
assert store.scan()
found = store.load(0, 1)
for name, value in held.items():
    value.copy_(found.tensors[name])
print((peak() - before) / 256)
"""


def changed_on_another_thread(change: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=change)
    thread.start()
    return thread


def test_a_step_that_ends_waits_until_its_tensors_are_given_back() -> None:
    holdings = Holdings(tiny_manifest(2), 0, torch.device("cpu"))
    lease = holdings.lend(RECORD)
    before = {name: value.clone() for name, value in lease.tensors.items()}

    def update() -> None:
        with torch.no_grad():
            for parameter in holdings.module.parameters():
                parameter.add_(1)

    thread = changed_on_another_thread(lambda: holdings.advance(update))
    thread.join(0.05)
    assert thread.is_alive()
    assert all(torch.equal(value, before[name]) for name, value in lease.tensors.items())
    lease.end()
    thread.join(10)
    assert not thread.is_alive()
    assert not torch.equal(holdings.tensors(RECORD)["parameters/embedding.weight"], before["parameters/embedding.weight"])


def test_one_that_nobody_refers_to_any_more_holds_nothing_up() -> None:
    leases = Leases()
    lease = leases.lend({})
    thread = changed_on_another_thread(leases.wait)
    thread.join(0.05)
    assert thread.is_alive()
    del lease
    thread.join(10)
    assert not thread.is_alive()


def test_the_tensors_are_given_back_before_the_disk_is_waited_for(tmp_path: Path) -> None:
    """Writing them to the system's memory is fast; a slow disk takes its time until the file outlasts a power cut, and gets its name."""
    named_then = list[Path]()
    state = Downloaded(1, Lineage(), {"parameters/w": torch.ones(3)}, ())
    CheckpointStore(tmp_path, 1).save(0, state, lambda: named_then.extend(tmp_path.glob("*.safetensors")))
    assert named_then == []
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def state_of(holdings: Holdings) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in holdings.tensors(RECORD).items()}


def test_on_a_device_a_step_ends_meanwhile_and_the_checkpoint_holds_the_step_before(tmp_path: Path) -> None:
    """The step ends while the third tensor is on its way to the machine's memory, which is when most can go wrong."""
    holdings = Holdings(tiny_manifest(2), 0, PRETEND)
    lease, before, copied = holdings.lend(RECORD), state_of(holdings), list[str]()

    def end_step() -> None:
        with torch.no_grad():
            holdings.advance(lambda: [parameter.add_(1) for parameter in holdings.module.parameters()])  # type: ignore[arg-type]

    class Slow(dict[str, torch.Tensor]):
        """The tensors that are lent, each of which takes so long to be read that a step may end."""

        def __getitem__(self, name: str) -> torch.Tensor:
            found = lease.tensors[name]
            copied.append(name)
            if len(copied) == 2 * len(before) + 3:  # after the header, which asks for each twice
                changed_on_another_thread(end_step).join(10)
            return found

    state = Downloaded(1, Lineage(), Slow(before), ())
    store = CheckpointStore(tmp_path, 2)
    store.save(0, state, lease.end)
    assert len(copied) > 2 * len(before) + 3
    kept = store.load(0, 1)
    assert kept is not None
    assert all(torch.equal(kept.tensors[name], value) for name, value in before.items())
    assert not torch.equal(holdings.tensors(RECORD)["parameters/embedding.weight"], before["parameters/embedding.weight"])


def test_on_a_device_it_waits_where_the_machine_has_no_room_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerd.stage.leases.ROOM_SHARE", 0.0)
    holdings = Holdings(tiny_manifest(2), 0, PRETEND)
    lease = holdings.lend(RECORD)
    thread = changed_on_another_thread(lambda: holdings.advance(lambda: None))
    thread.join(0.05)
    assert thread.is_alive()
    lease.end()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak of a process's memory")
def test_a_state_is_never_held_twice_while_it_is_written_checked_and_loaded(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert not found.returncode, found.stderr
    assert float(found.stdout) < 0.15, "times the size of the state, above the state itself"

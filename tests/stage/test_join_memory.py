"""The memory that a joiner's download takes: none of the state where it goes to a disk, otherwise the state once, until it is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import asyncio, ctypes, resource, sys
from pathlib import Path
from typing import cast
import torch
from blake3 import blake3
from peerd.wire.chunks import state_chunk_bytes
from peerd.wire.messages import Snapshot
from peerd.wire.tensors import file_of
from peerd.table.record import Lineage
from peerd.stage.spool import Spools
from tests.stage.test_download import Donors, Donor, downloader

MB, SIZE = 1 << 20, 256
CHUNK_BYTES = state_chunk_bytes(SIZE * MB)

def memory(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) // 1024

class FromDisk(Donor):
    '''It makes each chunk as it is sent.'''
    @property
    def header(self):
        return Snapshot(step=3, lineage=Lineage(), num_bytes=SIZE * MB, chunk_hashes=self.header_changes["hashes"], metadata="[]")

    def chunk(self, number):
        return chunk(number)

head = file_of({"parameters/w": torch.zeros(0)})[0]
count = (SIZE * MB - 4096) // 4
text = ('{"parameters/w":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (count, 4 * count)).encode()
text += b" " * (4096 - 8 - len(text))
first = len(text).to_bytes(8, "little") + text + bytes(CHUNK_BYTES - 4096)

def chunk(number):
    return bytes(bytearray(first)) if number == 0 else bytes(bytearray(CHUNK_BYTES))

same = blake3(chunk(1)).digest()
hashes = (blake3(first).digest(), *[same] * (SIZE * MB // CHUNK_BYTES - 1))
donor = FromDisk(3, b"", header_changes={"hashes": hashes})
ctypes.CDLL(None).malloc_trim(0)
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")

async def download():
    made = downloader(Donors(near=donor))
    made._spools = Spools(Path(sys.argv[1])) if sys.argv[1:] else Spools()
    return await made.download(0)

found = asyncio.run(download())
assert len(found.tensors) == 1
print((memory("VmHWM") - before) / SIZE)
assert found.tensors["parameters/w"].numel() == count
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak of a process's memory")
def test_a_state_is_in_memory_once_while_it_is_downloaded() -> None:
    assert measured() < 1.4, "times the size of the state"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak of a process's memory")
def test_a_state_that_is_downloaded_to_a_disk_is_not_in_memory(tmp_path: Path) -> None:
    assert measured(str(tmp_path)) < 0.3, "times the size of the state"
    assert not [*tmp_path.iterdir()]


def measured(*arguments: str) -> float:
    """The peak of a process that downloads a state, over the size of the state."""
    command, root = [sys.executable, "-c", SCRIPT, *arguments], Path(__file__).parents[2]
    found = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert not found.returncode, found.stderr
    return float(found.stdout)

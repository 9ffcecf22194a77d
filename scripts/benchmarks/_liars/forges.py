"""Gives its mates other numbers than the reducers have signed, under a false id that makes them ask; the hashes of the chunks fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peerd.averaging.kept import KeptAverages
from peerd.daemon.peer import Peer
from peerd.link.links import CHUNK_BYTES
from peerd.table.record import AverageId, Phase
from peerd.wire.chunks import CutFile
from peerd.wire.messages import Average
from scripts.benchmarks._liars import _speech


async def lie(peer: Peer, _arguments: Mapping[str, Any]) -> None:
    true_hashed = KeptAverages._hashed

    def hashed(self: KeptAverages, average: Average, file: CutFile) -> tuple[Average, CutFile]:
        whole = bytearray(b"".join(file.chunk(number) for number in range(-(-file.num_bytes // CHUNK_BYTES))))
        whole[0] ^= 1
        self._hashes.clear()  # those of the true one
        return true_hashed(self, average, CutFile((memoryview(bytes(whole)),), chunk_bytes=CHUNK_BYTES))

    setattr(KeptAverages, "_hashed", hashed)  # noqa: B010 - it is a lie
    _speech.say(lambda record: replace(record, average_id=AverageId(bytes(16))) if record.phase is Phase.AVERAGED else record)
    peer.announce(True)

"""Gives joiners a made-up state under its true step and lineage: every parameter times a factor.

With `busy` it tells each joiner once that it is busy, as donors do while a pass runs. A factor near 1 stands for a device that rounds in
another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peerd.daemon.peer import Peer
from peerd.errors import BusyError
from peerd.stage import snapshots
from peerd.stage.snapshots import Downloaded, SnapshotServer
from peerd.stage.spool import StoredState
from peerd.table.record import PeerId
from peerd.wire.messages import StateRequest

FACTOR, AGAIN_S = -1.0, 1.0


async def lie(_peer: Peer, arguments: Mapping[str, Any]) -> None:
    factor, is_busy = float(arguments.get("factor", FACTOR)), bool(arguments.get("busy"))
    true_copy, true_answer, told = snapshots._as_snapshot, SnapshotServer.snapshot, set[PeerId]()

    def false(state: Downloaded, tied_only: bool) -> Any:
        tensors = state.tensors
        if not isinstance(tensors, StoredState):
            tensors = {name: factor * value if name.startswith("parameters/") else value for name, value in tensors.items()}
        return true_copy(replace(state, tensors=tensors), tied_only)

    async def answer(self: SnapshotServer, caller: PeerId, wanted: StateRequest) -> Any:
        if is_busy and caller not in told:
            told.add(caller)
            raise BusyError("a pass runs", AGAIN_S)
        return await true_answer(self, caller, wanted)

    setattr(snapshots, "_as_snapshot", false)  # noqa: B010 - it is a lie
    setattr(SnapshotServer, "snapshot", answer)  # noqa: B010

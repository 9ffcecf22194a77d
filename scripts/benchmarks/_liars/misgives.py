"""Gives joiners a made-up state under its true step and lineage: every parameter times a factor.

`late_s`: it answers after that time, or its next step: of the newest states that as many donors offer, joiners take the first one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peerd.daemon.peer import Peer
from peerd.stage import snapshots
from peerd.stage.snapshots import Downloaded, SnapshotServer
from peerd.stage.spool import StoredState
from peerd.table.record import PeerId
from peerd.wire.messages import StateRequest

FACTOR = -1.0


async def lie(peer: Peer, arguments: Mapping[str, Any]) -> None:
    factor, late_s = float(arguments.get("factor", FACTOR)), float(arguments.get("late_s", 0.0))
    true_copy, true_answer = snapshots._as_snapshot, SnapshotServer.snapshot

    def false(state: Downloaded, tied_only: bool) -> Any:
        tensors = state.tensors
        if not isinstance(tensors, StoredState):
            tensors = {name: factor * value if name.startswith("parameters/") else value for name, value in tensors.items()}
        return true_copy(replace(state, tensors=tensors), tied_only)

    async def answer(self: SnapshotServer, caller: PeerId, wanted: StateRequest) -> Any:
        if late_s and not wanted.snapshot:
            await peer.seat.stepper.committed(late_s)
        return await true_answer(self, caller, wanted)

    setattr(snapshots, "_as_snapshot", false)  # noqa: B010 - it is a lie
    setattr(SnapshotServer, "snapshot", answer)  # noqa: B010

"""The daemon that the services' tests attack."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from peerd.averaging.log import AverageLog
from peerd.averaging.rounds import Rounds
from peerd.daemon.reception import Reception
from peerd.link.traffic import Traffic
from peerd.policy.step.following import Followers
from peerd.stage.calls import StageService
from peerd.stage.executor import Executor, Pace, Priority
from peerd.stage.snapshots import SnapshotServer
from peerd.stage.state import StageState
from peerd.swarm.clock import clock_s
from peerd.swarm.membership import Membership
from peerd.table.record import PeerRecord
from peerd.wire.clients import AveragingClient
from peerd.wire.door import Door
from peerd.wire.services import AveragingServicer, StageServicer, StateServicer, SwarmServicer
from tests.link.local_peers import serving
from tests.wire.callee import (
    DOOR_PATIENCE_S,
    MANIFEST,
    RUN,
    Callee,
    Host,
    Listener,
    Nowhere,
    StateRow,
    Unanswering,
    new_identity,
)


@pytest.fixture
async def callee(tmp_path: Path) -> AsyncIterator[Callee]:
    torch.set_num_threads(1)
    row = StateRow()
    membership, executor = Membership(new_identity(), RUN, ttl_s=30.0, row=row), Executor()
    state = StageState(MANIFEST, PeerRecord(peer=membership.me, incarnation=1, stage=1), torch.device("cpu"), membership.live)
    await executor.run(Priority.CONTROL, state.serve)
    row.state = state
    membership.publish()
    host = Host(membership=membership)
    service = StageService(MANIFEST, state, executor, Nowhere(), Pace(), host)
    door = Door(RUN, DOOR_PATIENCE_S, Traffic(), slots=lambda: service.slots)

    listener = Listener(membership)
    servicers: list[Any] = [
        SwarmServicer(door, listener, listener),
        StageServicer(door, service),
        StateServicer(door, SnapshotServer(state, executor, Followers(), DOOR_PATIENCE_S)),
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(executor.close)
        log = AverageLog(tmp_path / "averages", state.accumulator.flat.dtype)
        rounds = Rounds(state, executor, cast(AveragingClient, Unanswering()), log, 0.3, clock_s, host)
        stack.callback(rounds.shut)
        reception, seat = Reception(), cast(Any, SimpleNamespace(rounds=rounds, executor=executor, state=state))
        reception.open(seat)
        servicers.append(AveragingServicer(door, reception))
        async with serving(servicers) as served:
            yield Callee(served, door, membership, state, service, rounds, host, new_identity(), servicers)

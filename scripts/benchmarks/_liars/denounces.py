"""Does its work, and says of all work of its mates that it computes again that it is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peerd.audit.replays import AuditedStep, Replays, Told
from peerd.daemon.peer import Peer
from peerd.policy.step.auditing import AuditWord
from peerd.stage.executor import Priority

WRONG, TOLERANCE = 2.0, 1e-4


async def lie(_peer: Peer, _arguments: Mapping[str, Any]) -> None:
    async def measure(_self: Replays, _told: Told, _finished: AuditedStep, _priority: Priority) -> AuditWord:
        return AuditWord(WRONG, TOLERANCE)

    setattr(Replays, "measure", measure)  # noqa: B010 - it is a lie

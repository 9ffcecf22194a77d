"""Launches nothing of what it owns as a trainer, and does its share of a step otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peerd.daemon.peer import Peer
from peerd.train.trainer import Trainer


async def lie(_peer: Peer, _arguments: Mapping[str, Any]) -> None:
    setattr(Trainer, "_launch_missing", lambda _trainer: None)  # noqa: B010 - the class is another room's

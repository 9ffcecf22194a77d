"""Says that it is ten steps further than it is, with an average of its own there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peerd.daemon.peer import Peer
from scripts.benchmarks._liars import _speech


async def lie(_peer: Peer, arguments: Mapping[str, Any]) -> None:
    _speech.say(lambda record: replace(record, step=record.step + int(arguments["steps"])))

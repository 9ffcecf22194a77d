"""Suspects everybody, up to version 2^62."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peerd.daemon.peer import Peer
from peerd.table.record import Suspicion
from scripts.benchmarks._liars import _speech


async def lie(peer: Peer, _arguments: Mapping[str, Any]) -> None:
    _speech.say(lambda record: replace(record, suspects=tuple(Suspicion(other, 1 << 62, 1 << 62) for other in _speech.others(peer))))

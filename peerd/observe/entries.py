"""The words of the history: a finished step, a sample of the swarm, an event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStep:
    """One step that this daemon applied, or heard of with the state it downloaded."""

    step: int
    loss: float | None
    """None where nobody has told it yet."""
    tokens: int
    time_s: float | None
    """Wall clock of the commit here; None where it happened before this daemon was there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The swarm over `span_s` seconds up to `time_s`, as this daemon saw it."""

    time_s: float
    span_s: float
    step: int
    tokens_per_second: float
    peers: tuple[int, ...]
    """Live peers per stage."""
    queue: tuple[int, ...]
    """Microbatches held per stage."""
    suspects: int
    counters: Mapping[str, int] = field(default_factory=dict)
    """By how much each of this daemon's own counters grew; those that did not are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that changed in the swarm or in this daemon."""

    time_s: float
    kind: str
    peer: str = ""
    stage: int | None = None
    text: str = ""
    number: int = 0
    """Its place in the history; 0 before it has one."""

"""Entries of the history: a finished step, a sample of the swarm, an event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStep:
    """A step that this daemon applied, or learned of with the state it downloaded."""

    step: int
    loss: float | None
    """None if not known yet."""
    tokens: int
    time_s: float | None
    """Wall clock of this daemon's commit; None if the step ended before this daemon joined."""


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
    """Increase of each of this daemon's counters; counters that did not grow are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A change in the swarm or in this daemon."""

    time_s: float
    kind: str
    peer: str = ""
    stage: int | None = None
    text: str = ""
    number: int = 0
    """Its number in the history; 0 before it is written."""

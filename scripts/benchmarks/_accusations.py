"""What daemons have said against peers: what their logs note, and what came of their audits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from peerd.cli.demo_process import DemoDaemon

BANNED = ("it is banned", "it counts for nothing")
ACCUSED = (*BANNED, "member left out", "it does not count for a while", "an average that nobody else has")
"""What the log says of a peer that is shut out, or left out."""
RIGHT, MISSED = "right", "missed"
"""Outcomes of an audit that say nothing against anybody."""


def noted_of(named: Iterable[DemoDaemon], observers: Iterable[DemoDaemon], texts: Sequence[str]) -> list[str]:
    """Lines of the observers' logs with one of these texts that name one of the others."""
    names = [daemon.ready.peer for daemon in named if daemon.ready is not None]
    lines = [line for daemon in observers for line in daemon.whole_log().splitlines()]
    return [line for line in lines if any(text in line for text in texts) and any(name in line for name in names)]


@dataclass(slots=True)
class Audited:
    """What came of the audits of all daemons that answer."""

    drawn: int = 0
    """Microbatches and parts that were computed again."""
    largest_deviation: float = 0.0
    """Of those that each daemon remembers; a peer accuses above four times the tolerance."""
    against: list[str] = field(default_factory=list)
    """Each audit that did not find the work right, and each case, in words."""


def audited_by(daemons: Iterable[DemoDaemon], silence_s: float, spared: frozenset[str] = frozenset()) -> Audited:
    """Ask these daemons for their audits. Those of `spared` peers are left out of `against`."""
    found = Audited()
    for daemon in daemons:
        told: dict[str, Any] = dict(daemon.client.request("audit", silence_s=silence_s))
        if told["audits"] is None:
            continue
        found.drawn += told["audits"]["drawn"]
        for note in told["last"]:
            if note["outcome"] == RIGHT:
                found.largest_deviation = max(found.largest_deviation, note["deviation"])
            elif note["outcome"] != MISSED and note["peer"] not in spared:
                found.against.append(_in_words(daemon, note, note["outcome"]))
        found.against += [_in_words(daemon, case, case["ruling"]) for case in told["cases"] if case["peer"] not in spared]
        lost = Counter(name for name in told["audits"]["lost"] if name not in spared)
        found.against += [f"peer {daemon.peer}: {name} has lost its standing" for name in lost]
    return found


def _in_words(daemon: DemoDaemon, told: dict[str, Any], outcome: str) -> str:
    what = "part" if told["index"] is None else f"microbatch {told['index']}"
    deviation = told.get("deviation")
    return f"peer {daemon.peer}: {what} of {told['peer']} in step {told['step']} {outcome}" + (f", {deviation:.1e}" if deviation else "")

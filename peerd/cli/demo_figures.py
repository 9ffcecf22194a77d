"""The numbers of the demo's summary, from the reports of its daemons. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from peerd.cli.demo_plan import DemoPlan
from peerd.control.protocol import SCHEMA, Counters, StatusReply, StepInfo

STAND_IN_NOTE = "a stand-in sleeps in place of real work: tokens_per_second shows how the swarm shares work, not how fast it computes"

STALL_MICROBATCHES = 3
"""A run may stand still for as long as so many microbatches take in all stages."""
TOTALS = ("duplicate_microbatches", "lost_microbatches", "replayed_microbatches", "suppressed_microbatches", "inexact_steps")
"""Counters that are added up over the daemons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of a daemon during the demo."""

    t_s: float
    """Seconds since the demo began."""
    peer: int
    stage: int
    phase: str
    """Its last known phase."""
    kind: str
    """A kind of --chaos (`kill` also for --kill), or `ended` if the daemon ended by itself."""
    detail: str
    lasted_s: float | None = None
    """Seconds until its stage had recovered, for a fault that chaos follows to its end."""
    steps_again: int = 0
    """Steps that the run went back, and computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything that the daemons reported."""

    steps: tuple[StepInfo, ...]
    """Finished steps in order."""
    counters: Mapping[int, Counters]
    """By peer; for a dead one its last report."""
    faults: tuple[Fault, ...]
    duration_s: float
    stages_of_replacements: tuple[int, ...] = ()
    """Stage of each daemon that replaced a dead one, in the order of their numbers."""


def tokens_per_second(steps: Sequence[StepInfo]) -> float | None:
    """Speed between the first and the last step with a known end time; None if there is no such span."""
    steps = [step for step in steps if step["time_s"]]
    if len(steps) < 2:
        return None
    span_s = steps[-1]["time_s"] - steps[0]["time_s"]
    return sum(step["tokens"] for step in steps[1:]) / span_s if span_s > 0 else None


def summary_of(plan: DemoPlan, seen: Observed) -> dict[str, Any]:
    """The JSON object that `peerd demo --json` prints."""
    losses = [step["loss"] for step in seen.steps]
    stages = [*(plan.stage_of(peer) for peer in range(plan.num_peers)), *seen.stages_of_replacements]
    crossings = _total(seen, "boundary_crossings")
    boundaries = plan.num_stages - 1
    journeys = len(losses) * plan.manifest.train.microbatches_per_step * boundaries
    summary: dict[str, Any] = {
        "schema": SCHEMA,
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "steps": len(losses),
        "peers": plan.num_peers,
        "stages": plan.num_stages,
        "tokens_per_second": tokens_per_second(seen.steps),
        "duration_s": round(seen.duration_s, 3),
        **{name: _total(seen, name) for name in TOTALS},
        "faults": [asdict(fault) for fault in seen.faults],
        "bytes_per_boundary_crossing": _total(seen, "boundary_bytes") / crossings if crossings else None,
        "boundary_tensor_bytes": plan.manifest.boundary_bytes,
        "transfers_per_boundary": crossings / journeys if journeys else None,
        "microbatches_by_peer": [
            seen.counters[peer]["accumulated_microbatches"] if peer in seen.counters else 0 for peer in range(len(stages))
        ],
        "stage_of_peer": stages,
        "compute_stand_in_ms": plan.stand_in_ms,
        "slow": {str(peer): factor for peer, factor in sorted(plan.slow.items())},
        "seed": plan.manifest.seed,
        "accumulate": plan.manifest.train.accumulate,
        "losses": losses,
    }
    if plan.stand_in_ms:
        summary["note"] = STAND_IN_NOTE
    return summary


def _total(seen: Observed, name: str) -> int:
    return sum(int(counters.get(name, 0)) for counters in seen.counters.values())  # type: ignore[call-overload]


def longest_still_s(statuses: Iterable[StatusReply | None], least_s: float) -> float:
    """How long a run may stand still: `least_s`, or as long as a few microbatches take in all stages, by what its daemons say."""
    told = [status["peer"] for status in statuses if status is not None]
    stages = {peer["stage"] for peer in told}
    microbatch_s = sum(max(peer.get("microbatch_s", 0.0) for peer in told if peer["stage"] == stage) for stage in stages)
    return max(least_s, STALL_MICROBATCHES * microbatch_s)

"""Compares rebalancing rules as SWARM's section 4.4 does (Table 5, figures 5 and 6), with the improved rule added."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from peerd.errors import UsageError
from peerd.policy.swarm.rebalance import Rebalancing, Rule
from peerd.sim.devices import Devices
from peerd.sim.meter import Window
from peerd.sim.rebalance import Scenario, SimulationResult, simulate
from peerd.sim.trace import PEERS_PER_STAGE, ChangeFile, Trace, generate

UNLIKE_SPREAD = 8.0
PAPER_STAGES = (4, 8, 16, 32)
CONTENDERS = ((Rule.NONE, 0.0), (Rule.QUEUES, 300.0), (Rule.QUEUES, 60.0), (Rule.IMPROVED, 60.0))
"""Rule and period. Joiners take a random stage, as in the paper; under the improved rule they take the weakest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSettings:
    """What the rules are compared on. Times are in seconds."""

    num_stages: tuple[int, ...] = PAPER_STAGES
    changes: ChangeFile | None = None
    """A user's trace; None: one is generated for each run."""
    num_peers: int | None = None
    """Peers at the start. None: 100 per stage, as in the paper."""
    download_s: float = 0.0
    seed: int = 0
    num_runs: int = 1
    """Each run uses the next seed; the rows are means over runs."""
    unlike: bool = False
    view_delay_s: float = 0.0
    noise: float = 0.0

    def trace(self, num_stages: int, seed: int) -> Trace:
        usual = PEERS_PER_STAGE * num_stages
        if self.changes is not None:
            trace = self.changes.trace(self.num_peers, usual)
        else:
            trace = generate(usual if self.num_peers is None else self.num_peers, seed)
        if trace.most_peers < num_stages:
            raise UsageError(f"{trace.most_peers} peers cannot serve {num_stages} stages", "name more with --peers, or fewer --stages")
        return trace


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Means over one interval, in samples/s."""

    hour: float
    throughput: float
    optimum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One rule on one number of stages. `overall`, `first` and `last` (hour) are percent of optimal throughput."""

    rule: str
    period_s: float
    """0: never."""
    stages: int
    download_s: float
    overall: float
    first: float
    last: float
    moves: float
    course: tuple[CurvePoint, ...]


def compare(question: ComparisonSettings) -> Iterator[ComparisonRow]:
    """Yields each row as soon as it is computed."""
    for num_stages in question.num_stages:
        traces = [question.trace(num_stages, question.seed + run) for run in range(question.num_runs)]
        for rule, period_s in CONTENDERS:
            outcomes = [_outcome(question, trace, (rule, period_s, num_stages), run) for run, trace in enumerate(traces)]
            yield _row(question, outcomes, (rule, period_s, num_stages))


def _outcome(question: ComparisonSettings, trace: Trace, what: tuple[Rule, float, int], run: int) -> SimulationResult:
    rule, period_s, num_stages = what
    devices = Devices.downloading(question.download_s, UNLIKE_SPREAD if question.unlike else 1.0)
    # a rule knows how noisy measurements are, and assumes at least its default noise
    noise = max(question.noise, Rebalancing().noise)
    params = Rebalancing(rule=rule, period_s=period_s or 60.0, download_s=devices.median_download_s, noise=noise)
    return simulate(
        Scenario(
            trace=trace,
            num_stages=num_stages,
            params=params,
            devices=devices,
            seed=question.seed + run,
            joiners_to_weakest=rule is Rule.IMPROVED,
            view_delay_s=question.view_delay_s,
            noise=question.noise,
        )
    )


def _row(question: ComparisonSettings, outcomes: list[SimulationResult], what: tuple[Rule, float, int]) -> ComparisonRow:
    rule, period_s, num_stages = what
    meters = [outcome.meter for outcome in outcomes]
    return ComparisonRow(
        rule=rule.value,
        period_s=period_s,
        stages=num_stages,
        download_s=question.download_s,
        overall=fmean(meter.overall.percent for meter in meters),
        first=fmean(meter.first.percent for meter in meters),
        last=fmean(meter.last.percent for meter in meters),
        moves=fmean(outcome.num_moves for outcome in outcomes),
        course=tuple(_point([meter.parts[place] for meter in meters]) for place in range(len(meters[0].parts))),
    )


def _point(windows: list[Window]) -> CurvePoint:
    first = windows[0]
    length_s = (first.end_s - first.start_s) * len(windows)
    middle_s = (first.start_s + first.end_s) / 2
    return CurvePoint(middle_s / 3600, sum(w.done for w in windows) / length_s, sum(w.possible for w in windows) / length_s)

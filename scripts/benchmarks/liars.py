"""One liar among eight daemons, two stages of four (--mates): what its lies cost the honest ones. `all` runs one scenario after the other.

Each scenario starts a swarm, measures it while all are honest, orders the last daemon of the second stage to lie, lets ten seconds pass and
measures again. Then the run is exported and compared with the same run in one process. A row has

step_ratio  time of a step with the liar, divided by that of the honest run before it (1.33 where one of four mates does nothing)
memory_mb   the most that an honest daemon and its processes have grown from the first lie on, less what one grew in the honest run
reloads     the most state downloads of an honest peer
refused     messages that honest peers refused, of the liar's or of others'
honest_bans honest peers that honest ones have shut out, for a lie
accusations how often honest peers have noted of honest ones that they leave them out, doubt them or shut them out
out_after_steps  steps from the first lie until the liar counts in no honest peer's table; absent: it always did
distance    the largest difference of a parameter to the reference; absent if the run could not be exported
loss_apart  of lies that audits find: how far the loss of the last five steps is from the reference's, 30 steps after the liar was out

It ends with 1, and says why, where a limit does not hold: step_ratio 1.125 times what one mate less makes (1.5 of four), memory_mb 64, one
reload a peer, no honest peer out of another one's live rows for longer than a record lives, no daemon that ends, the losses and parameters
of the reference, no honest peer shut out; and where the lie is signed twice, the liar out within two steps. --trust off: averages are not
certified; --trust audits: peers audit each other, without which the scenarios from falsifies on are left out, as they falsify what peers
sign. These are watched until the liar is out, --until-out seconds at most. --stage 0: the liar is one of the first stage, and what it
sends on is false, too.

`scripts/bench liars honest` has no liar: are honest peers that audit each other left alone? It has its own --help.

--liar loads a liar of your own in place of the scenario's: a file that ends with .py, or the dotted name of a module, with a coroutine
lie(peer, arguments) (peerd/daemon/liars.py). The daemons sleep in place of computing, so that eight of them share a few cores. The liar's
processes yield to the others': what it costs itself is no cost of theirs, as it has a machine of its own.

--liars N: so many of the last daemons of that stage lie. With --trust audits they collude: none accuses another one, and as a judge each
signs that the others' work is right. --with names the lies of all but the first, in turn. --others N: so many peers of the other stage.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from peerd.cli.demo_daemons import DemoSwarm, Placement
from peerd.cli.demo_plan import DemoPlan
from peerd.errors import PeerdError
from peerd.table.view import TTL_PERIODS
from scripts.benchmarks._accusations import ACCUSED, BANNED
from scripts.benchmarks._disturbed import NUM_STAGES, PARAMETERS_APART, TINY, beside_reference, largest_difference, run_of
from scripts.benchmarks._honest import honest
from scripts.benchmarks._report import SCHEMA, progress, run
from scripts.benchmarks._watched import Watched, with_children

MATES = 4
STAND_IN_MS = 200.0
SETTLE_S = 10.0
"""From the first lie until steps are timed."""
ANSWER_S = 60.0
LOWEST_PRIORITY = 19
MOST_RATIO, MOST_MEMORY_MB, MOST_RELOADS = 1.125, 64.0, 1
"""The first one of what a step takes with one mate less."""
STEPS_AFTER, LAST_STEPS, MOST_LOSS_APART, PATIENCE_TIMES = 30, 5, 0.01, 3
"""So many steps after the liar is out, the mean loss of the last ones is compared; so many times as long as honest steps are waited for."""
FLOODS = ("gossip", "aborts", "cancels", "proposals", "news", "want_all")
HERE = "scripts.benchmarks._liars"
SCENARIOS: dict[str, tuple[str, dict[str, Any]]] = {
    "suspicions": ("suspicions", {}),
    "step-ahead": ("step_ahead", {"steps": 10}),
    "throughput": ("ghosts", {"peers": 8160, "throughput": 1e308}),
    "silent": ("silent", {}),
    "withholds": ("withholds", {}),
    "ghosts-50": ("ghosts", {"peers": 50}),
    "ghosts-5000": ("ghosts", {"peers": 5000}),
    "two-records": ("two_records", {}),
    "slow-calls-80": ("slow_calls", {"calls": 80, "num_bytes": 0, "every_s": 1.0}),
    "slow-calls-1024": ("slow_calls", {"calls": 1024, "num_bytes": 0, "every_s": 1.0}),
    "huge-header": ("slow_calls", {"calls": 8, "num_bytes": 1 << 50, "every_s": 0.01}),
    **{f"flood-{kind}": ("floods", {"kind": kind, "at_once": 16}) for kind in FLOODS},
    "overstates": ("overstates", {"slower_s": 0.3}),
    "forks": ("forks", {}),
    "fabricates": ("fabricates", {}),
    "hoards": ("fabricates", {"hoards": True}),
    "forges": ("forges", {}),
    "falsifies": ("falsifies", {"factor": -1.0}),
    "falsifies-100": ("falsifies", {"factor": 100.0}),
    "noise": ("falsifies", {"factor": 1.0, "noise": True}),
    **{f"own-part-x{factor:g}": ("own_part", {"factor": factor}) for factor in (-1.0, -10.0, 1000.0)},
    "rides-free": ("own_part", {"factor": 0.0}),
    "own-loss-x100": ("own_part", {"factor": 1.0, "loss": 100.0}),
    "conceals": ("own_part", {"factor": 1000.0, "conceals": True}),
    "denounces": ("denounces", {}),
    "injects": ("injects", {}),
}
"""The module in `_liars/`, and its arguments."""
SIGNED, OUT_WITHIN_STEPS = ("two-records", "forks"), 2
"""The lies that two signatures prove."""
FOUND_LATER = tuple(name for name, (module, _) in SCENARIOS.items() if module in ("falsifies", "own_part", "denounces", "injects"))
"""The lies that audits find steps later: what was falsified by then stays in the parameters, and `distance` tells how much that is."""
COLLUDES = f"{HERE}.colludes"


@dataclass(slots=True, kw_only=True)
class Row:
    scenario: str
    step_ratio: float | None = None
    memory_mb: float | None = None
    reloads: int = 0
    refused: int = 0
    honest_bans: int = 0
    accusations: int = 0
    out_after_steps: int | None = None
    """Of several liars the last one."""
    each_out_after_steps: dict[str, int | None] = field(default_factory=dict)
    distance: float | None = None
    loss_apart: float | None = None
    missed: list[str] = field(default_factory=list)
    """The limits that do not hold."""


COLUMNS = ("step_ratio", "memory_mb", "reloads", "refused", "honest_bans", "accusations", "out_after_steps", "distance", "loss_apart")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiarsPlan(DemoPlan):
    """Peers take the stages in turn, until one of them has all of its own."""

    stage: int
    """Of the liars."""
    mates: int
    """The number of its peers; those of the other stage are the rest."""

    def stage_of(self, peer: int) -> int:
        in_turn = NUM_STAGES * min(self.mates, self.num_peers - self.mates)
        return peer % NUM_STAGES if peer < in_turn else (self.stage if in_turn < NUM_STAGES * self.mates else 1 - self.stage)

    def last_of_stage(self, number: int) -> tuple[int, ...]:
        return tuple(peer for peer in range(self.num_peers) if self.stage_of(peer) == self.stage)[-number:]


Lie = tuple[str, str, dict[str, Any]]
"""A scenario's name, its module and its arguments."""


def try_scenario(lies: Sequence[Lie], given: argparse.Namespace) -> Row:
    """`lies`: of the first liar, of the second one, and so on."""
    mates, seconds, stage = int(given.mates), float(given.seconds), int(given.stage)
    manifest = run_of(TINY, microbatches_per_step=given.microbatches or 3 * mates)
    manifest = replace(manifest, swarm=replace(manifest.swarm, trust=given.trust, group_size=0))
    size: dict[str, Any] = {"num_peers": mates + int(given.others or mates), "mates": mates, "stage": stage}
    alone: dict[str, Any] = {"slow": {}, "kills": (), "chaos": None, "observed": False}
    plan = LiarsPlan(manifest=manifest, stand_in_ms=given.stand_in_ms, **size, **alone)
    liars = plan.last_of_stage(len(lies))
    row = Row(scenario="+".join(name for name, _, _ in lies))
    with DemoSwarm(plan, lambda _text: None, place=partial(_place, liars)) as swarm:
        swarm.start()
        watched = Watched(swarm, liars, TTL_PERIODS * manifest.swarm.announce_period_s)
        watched.until_all_serve()
        for process in (each for liar in liars for each in with_children(swarm.daemons[liar])):
            process.nice(LOWEST_PRIORITY)
        before_mb = watched.memory_mb()
        honest_s = watched.watch(seconds)
        watched.hidden_s, at_first_mb = 0.0, watched.memory_mb()
        reloads, refused = watched.counted("reloads"), sum(watched.counted("messages_refused"))
        _order(lies, watched, colludes=given.trust == "audits")
        watched.watch(SETTLE_S)
        if lies[0][0] in FOUND_LATER:
            watched.until_out(given.until_out)
        row.step_ratio = round(watched.watch(seconds) / honest_s, 3)
        if lies[0][0] in FOUND_LATER and watched.are_out:
            watched.until_steps_after_out(STEPS_AFTER, STEPS_AFTER * PATIENCE_TIMES * honest_s)
        usual_mb = max((at_first_mb[peer] - mb for peer, mb in before_mb.items() if peer in at_first_mb), default=0.0)
        grown_mb = max((mb - at_first_mb[peer] for peer, mb in watched.memory_mb().items() if peer in at_first_mb), default=0.0)
        row.memory_mb = round(grown_mb - max(0.0, usual_mb), 1)
        row.reloads = max((now - then for now, then in zip(watched.counted("reloads"), reloads, strict=False)), default=0)
        row.refused = sum(watched.counted("messages_refused")) - refused
        row.honest_bans, row.accusations = watched.noted_of_honest(BANNED), watched.noted_of_honest(ACCUSED)
        outs = watched.out_after_steps
        row.out_after_steps = max(outs.values()) if watched.are_out else None
        row.each_out_after_steps = {f"{liar}: {name}": outs.get(liar) for liar, (name, _, _) in zip(liars, lies, strict=True)}
        row.missed = _missed(row, watched, MOST_RATIO * mates / (mates - len(liars)), lies[0][0])
        if watched.errors_of_liars:
            row.missed.append("a liar had an error of its own, so it may have told nothing: its log says more")
        for liar in liars:
            swarm.daemons[liar].kill()
        _compare(row, watched, lies[0][0])
    return row


def _order(lies: Sequence[Lie], watched: Watched, colludes: bool) -> None:
    """Order each liar to lie. If they collude, each knows the others."""
    watched.lied_at_step = watched.swarm.num_steps_told
    daemons = [watched.swarm.daemons[liar] for liar in watched.liars]
    fellows = [daemon.ready.peer for daemon in daemons if daemon.ready is not None]
    for daemon, (_, module, arguments) in zip(daemons, lies, strict=True):
        told: dict[str, Any] = {"module": module, **arguments}
        if colludes and len(lies) > 1:
            told = {**arguments, "module": COLLUDES, "tells": module, "fellows": fellows}
        daemon.client.request("lie", silence_s=ANSWER_S, **told)


def _place(liars: Sequence[int], peer: int) -> Placement:
    return Placement(settings={"allow_faults": True} if peer in liars else {})


def _missed(row: Row, watched: Watched, most_ratio: float, scenario: str) -> list[str]:
    missed = [f"peer {daemon.peer} has ended:\n{daemon.log_tail()[-2000:]}" for daemon in watched.honest if not daemon.alive]
    if row.step_ratio is not None and row.step_ratio > most_ratio:
        missed.append(f"a step takes {row.step_ratio:.2f} times as long, not {most_ratio:.3g}")
    if row.memory_mb is not None and row.memory_mb > MOST_MEMORY_MB:
        missed.append(f"a daemon has grown by {row.memory_mb:.0f} MB, not {MOST_MEMORY_MB:g}")
    if row.reloads > MOST_RELOADS:
        missed.append(f"a peer has downloaded its state {row.reloads} times")
    if watched.hidden_s > watched.ttl_s:
        missed.append(f"an honest peer was hidden from another for {watched.hidden_s:.1f} s; a record lives {watched.ttl_s:g} s")
    if row.honest_bans:
        missed.append(f"an honest peer was shut out {row.honest_bans} times")
    if scenario in FOUND_LATER and row.out_after_steps is None:
        missed.append("a liar still counts")
    if scenario in SIGNED and (row.out_after_steps is None or row.out_after_steps > OUT_WITHIN_STEPS):
        missed.append(f"the liar was out after {row.out_after_steps} steps, not {OUT_WITHIN_STEPS}")
    errors = sum(watched.counted("internal_errors"))
    return missed + ([f"{errors} internal errors"] if errors else [])


def _compare(row: Row, watched: Watched, scenario: str) -> None:
    try:
        found = beside_reference(watched.swarm, largest_difference)
    except PeerdError as error:
        row.missed.append(f"the run cannot be exported: {error}")
        return
    row.distance = found.differ
    if scenario in FOUND_LATER:
        row.loss_apart = found.losses_apart(LAST_STEPS) if watched.are_out else None
        if row.loss_apart is not None and row.loss_apart > MOST_LOSS_APART:
            row.missed.append(f"the loss is {row.loss_apart:.1%} from the reference's, not {MOST_LOSS_APART:.0%}")
        return
    if found.losses != found.expected:
        row.missed.append(f"the losses of {len(found.losses)} steps are not those of the reference")
    if row.distance > PARAMETERS_APART:
        row.missed.append(f"a parameter is {row.distance:.1e} away from the reference")


def report(rows: Sequence[Row], as_json: bool) -> int:
    if as_json:
        print(json.dumps({"schema": SCHEMA, "rows": [asdict(row) for row in rows]}))
    else:
        width = max(len(row.scenario) for row in rows)
        print("  ".join([" " * width, *COLUMNS]))
        for row in rows:
            cells = (f"{_cell(getattr(row, name)):>{len(name)}}" for name in COLUMNS)
            print("  ".join([f"{row.scenario:<{width}}", *cells]))
            if len(row.each_out_after_steps) > 1:
                print("out after steps: " + ", ".join(f"{name} {_cell(steps)}" for name, steps in row.each_out_after_steps.items()))
    for row in rows:
        for reason in row.missed:
            print(f"{row.scenario}: {reason}", file=sys.stderr)
    return 1 if any(row.missed for row in rows) else 0


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def main() -> int:
    if sys.argv[1:2] == ["honest"]:
        return honest(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="scripts/bench liars", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", nargs="?", default="all", choices=["all", *SCENARIOS], help="default: all")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--liar", metavar="MODULE", help="a liar of your own, with the arguments of the scenario, which is named after it")
    parser.add_argument("--seconds", type=float, default=12.0, metavar="S", help="how long steps are timed, each time (default 12)")
    parser.add_argument("--until-out", type=float, default=300.0, metavar="S", help="longest wait for what audits find (default 300)")
    parser.add_argument("--stage", type=int, choices=range(NUM_STAGES), default=NUM_STAGES - 1, help="the liar's stage (default the last)")
    parser.add_argument("--mates", type=int, default=MATES, metavar="N", help=f"peers of each stage, the liar included (default {MATES})")
    parser.add_argument("--liars", type=int, default=1, metavar="N", help="liars of the stage; with audits they collude (default 1)")
    parser.add_argument("--with", dest="lies", nargs="*", default=[], metavar="LIE", choices=[*SCENARIOS], help="lies of the other liars")
    parser.add_argument("--others", type=int, metavar="N", help="peers of the other stage (default: as many)")
    parser.add_argument("--microbatches", type=int, metavar="N", help="of a step (default: 3 for each mate)")
    parser.add_argument("--stand-in-ms", type=float, default=STAND_IN_MS, metavar="MS", help=f"of a microbatch (default {STAND_IN_MS:g})")
    parser.add_argument("--trust", choices=["off", "on", "audits"], default="on", help="swarm.trust of the run (default on)")
    given = parser.parse_args()
    if given.mates < 2 or given.seconds <= 0 or not 0 < given.liars < given.mates:
        parser.error("there are two peers of a stage at least, one of them honest, and steps take time")
    if given.others is not None and given.others < 1:
        parser.error("each stage has a peer")
    scenarios = {given.scenario: SCENARIOS[given.scenario]} if given.scenario != "all" else SCENARIOS
    if given.scenario == "all" and given.trust != "audits":
        scenarios = {name: each for name, each in scenarios.items() if name not in FOUND_LATER}
    chosen = {name: (f"{HERE}.{module}", arguments) for name, (module, arguments) in scenarios.items()}
    if given.liar:
        path = Path(given.liar)
        arguments = SCENARIOS[given.scenario][1] if given.scenario != "all" else {}
        chosen = {path.stem: (str(path.resolve()) if path.suffix == ".py" else given.liar, arguments)}
    rows = []
    for name, (module, arguments) in chosen.items():
        more = [(lie, f"{HERE}.{SCENARIOS[lie][0]}", SCENARIOS[lie][1]) for lie in given.lies] or [(name, module, arguments)]
        lies = [(name, module, arguments), *itertools.islice(itertools.cycle(more), given.liars - 1)]
        rows.append(try_scenario(lies, given))
        progress(f"{name}: {'does not hold' if rows[-1].missed else 'holds'}")
    return report(rows, given.json)


if __name__ == "__main__":
    sys.exit(run(main))

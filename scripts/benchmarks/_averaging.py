"""Rounds of one stage over home links: how long they take beside the least that the links allow, and whether all peers are in each.

A scenario has one stage of 2 or 4 peers. They start on fast links; then each gets the links of the scenario, and some steps are watched. An
exchange begins with the first peer that is in a round of the step, and ends when the last one has its average, failed rounds
included. Moments are seen to within `LOOK_S`. `_home_scenarios.py` has the links and the bounds.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from peerd.cli.demo_daemons import DemoSwarm, Placement
from peerd.cli.demo_plan import DemoPlan
from peerd.cli.demo_process import DemoDaemon
from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from peerd.errors import PeerdError, TimedOutError
from peerd.models.stages import initial_parameter_spec
from peerd.policy.round.needs import averaging_s
from scripts.benchmarks._disturbed import far_from_reference
from scripts.benchmarks._equality import apart
from scripts.benchmarks._home_scenarios import BROKEN_S, DOWN_MBIT, MOST_RATIO, ROUND_TRIP_MS, Scenario
from scripts.benchmarks._namespaces import Network
from scripts.benchmarks._report import SCHEMA, progress
from scripts.benchmarks._switch import Links
from scripts.benchmarks._turns import place_in

FAST = Links(mbit_per_s=DOWN_MBIT, round_trip_ms=1)
"""While the daemons start, and when all is compared in the end."""
MICROBATCHES, STAND_IN_MS = 8, 1000.0
D_MODEL = 64
LOOK_S, SILENCE_S, READY_S, ANSWER_S = 0.2, 3.0, 240.0, 60.0
REMEMBERED_S = 2.5
"""A daemon gives the same answer for so long."""
TIMES_THE_BOUND, MORE_S = 3.0, 60.0
"""A scenario is given up after so many times its bound, and so much more for each step."""
LOSSES_APART, PARAMETERS_APART = 1e-4, 1e-4
"""Sums in float32 depend on their order: 1e-6 and 1e-6. One missing gradient of eight moves the embedding by 1e-2 of its largest value."""
LIARS = "scripts.benchmarks._liars"
AVERAGING_TIMES, AGAIN_S = 3, 2 * MICROBATCHES * STAND_IN_MS / 1000
"""The others end a step without a liar within so many averaging times, the bound, and the time to compute the liar's microbatches."""
MUST_BE_0 = ("duplicate_microbatches", "lost_microbatches", "inexact_steps", "internal_errors")


@dataclass(slots=True, kw_only=True)
class Row:
    scenario: str
    peers: int
    seconds: float | None = None
    """Median of the exchanges; None: not one ended in time."""
    bound_s: float
    exchange_ratio: float | None = None
    """Median of seconds / bound."""
    rounds_failed: int = 0
    replayed: int = 0
    left_out: int = 0
    """In how many averages a peer's gradients are missing, summed over all peers."""
    steps: int = 0
    """Number of exchanges that ended in time."""
    each_s: list[float] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    """What does not hold."""


@dataclass(slots=True, kw_only=True)
class Exchange:
    step: int
    began_s: float | None = None
    struck_s: float | None = None
    ended_s: float | None = None


def manifest_of(megabytes: float) -> Manifest:
    """Next to no work, and so many bytes of gradients, nearly all of the two embeddings. With SGD rounding stays as small as it is."""
    rows = round(megabytes * 1e6 / 4 / (2 * D_MODEL))
    return Manifest(
        name="bench",
        model=ModelConfig(num_layers=1, d_model=D_MODEL, num_heads=2, d_ff=64, vocab_size=max(256, rows)),
        train=TrainConfig(
            num_stages=1,
            microbatches_per_step=MICROBATCHES,
            microbatch_size=1,
            sequence_length=8,
            steps=1_000_000,
            optimizer="sgd",
        ),
        compute=ComputeConfig(threads=1),
        swarm=SwarmConfig(rebalance_period_s=0.0, checkpoint_every_steps=0),
    )


def gradient_bytes(manifest: Manifest) -> int:
    return 4 * sum(math.prod(shape) for shape in initial_parameter_spec(manifest, 0).values())


@dataclass(slots=True)
class Watched:
    """A swarm on the links of a scenario."""

    scenario: Scenario
    swarm: DemoSwarm
    network: Network
    num_bytes: int

    @property
    def honest(self) -> Sequence[DemoDaemon]:
        return self.swarm.daemons[: self.scenario.num_honest]

    def lie(self) -> None:
        """Let the last peer do from now on what the scenario says."""
        self.swarm.daemons[-1].client.request("lie", module=f"{LIARS}.{self.scenario.liar}", silence_s=ANSWER_S)

    def change(self, struck: bool) -> None:
        self.network.change(self.scenario.links([self.network.address(peer) for peer in range(self.scenario.num_peers)], struck))

    def look(self) -> None:
        time.sleep(LOOK_S)
        self.swarm.ask(self.swarm.living, SILENCE_S)
        for daemon in self.honest:
            if not daemon.alive:
                raise PeerdError(f"peer {daemon.peer} has ended: {daemon.log_tail()[-500:]}")

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + READY_S
        while not holds():
            if time.monotonic() > deadline_s:
                raise TimedOutError(f"not within {READY_S:.0f} s: {what}")
            self.look()

    def exchanges(self, num_steps: int) -> list[Exchange]:
        """Watch so many steps, or fewer if it takes too long."""
        usual_s = self.scenario.bound_s(self.num_bytes)
        longest_s = self.scenario.bound_s(self.num_bytes, usual_s / 2)
        deadline_s = time.monotonic() + num_steps * (TIMES_THE_BOUND * longest_s + MORE_S)
        self.look()
        begun = not all(daemon.phase == "accumulating" for daemon in self.honest)  # maybe while the links were fast
        found = [Exchange(step=max(daemon.step for daemon in self.honest) + begun)]
        while time.monotonic() < deadline_s:
            self.look()
            now_s, current = time.monotonic(), found[-1]
            self._follow(current, now_s, usual_s / 2)
            if current.ended_s is not None:
                bound_s = bound_of(self.scenario, current, self.num_bytes)
                progress(f"{self.scenario.name}, {self.scenario.num_peers} peers: {took_s(current):.1f} s, bound {bound_s:.1f} s")
                if len(found) == num_steps:
                    break
                found.append(Exchange(step=current.step + 1))
        return [exchange for exchange in found if exchange.ended_s is not None]

    def _follow(self, current: Exchange, now_s: float, strike_after_s: float) -> None:
        """Note how far the exchange is, and change the link that is to become worse in its middle."""
        daemons, strikes = self.honest, self.scenario.worse in ("drop", "break")
        if current.began_s is None and any(is_in(daemon, current.step) or has_average(daemon, current.step) for daemon in daemons):
            current.began_s = now_s
        if current.began_s is None:
            return
        if all(has_average(daemon, current.step) for daemon in daemons):
            current.ended_s = now_s
        elif strikes and current.struck_s is None and now_s - current.began_s >= strike_after_s:
            current.struck_s = now_s
            self.change(struck=True)
        over = self.scenario.worse == "break" and current.struck_s is not None and now_s - current.struck_s >= BROKEN_S
        if strikes and current.struck_s is not None and (current.ended_s is not None or over):
            self.change(struck=False)

    def total(self, counter: str) -> int:
        told = [dict(daemon.status["counters"]) for daemon in self.honest if daemon.status is not None]
        return sum(int(each[counter]) for each in told)  # type: ignore[call-overload]

    def averages_of_all(self) -> tuple[int, dict[str, int]]:
        """The same once each peer is in an average: one that has just joined has no work in the step under way."""
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s:
            step, counted = self.averages()
            if len(counted) == self.scenario.num_peers:
                return step, counted
        raise TimedOutError(f"not within {READY_S:.0f} s: each peer is in an average")

    def averages(self) -> tuple[int, dict[str, int]]:
        """The step that all honest peers are at, and by peer the number of averages so far that have its gradients."""
        steps: set[int] = set()

        def at_one_step() -> bool:
            nonlocal steps
            steps = {daemon.step for daemon in self.honest}
            return len(steps) == 1 and all(daemon.phase == "accumulating" for daemon in self.honest)

        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s:
            self.until(at_one_step, "all peers are at one step")
            before = steps
            stages = self.swarm.daemons[0].client.request("contributions", silence_s=30.0)["stages"]
            self.look()
            if at_one_step() and steps == before and stages:
                return min(steps), {row["peer"]: row["steps"] for row in stages[0]["peers"]}
            time.sleep(REMEMBERED_S)
        raise TimedOutError("no daemon told who is in which averages")


def is_in(daemon: DemoDaemon, step: int) -> bool:
    return daemon.step == step and daemon.phase == "averaging"


def has_average(daemon: DemoDaemon, step: int) -> bool:
    return daemon.step > step or (daemon.step == step and daemon.phase == "averaged")


def took_s(exchange: Exchange) -> float:
    assert exchange.began_s is not None
    assert exchange.ended_s is not None
    return exchange.ended_s - exchange.began_s


def bound_of(scenario: Scenario, exchange: Exchange, num_bytes: int) -> float:
    assert exchange.began_s is not None
    return scenario.bound_s(num_bytes, None if exchange.struck_s is None else exchange.struck_s - exchange.began_s)


def observed_in(network: Network, liar: int | None = None) -> Callable[[int], Placement]:
    """The daemons keep a history, which tells who is in which averages; none has a dashboard. One may lie."""
    place = place_in(network)
    return lambda peer: replace(place(peer), settings={"observe": True, "allow_faults": peer == liar})


def try_scenario(scenario: Scenario, megabytes: float, num_steps: int) -> Row:
    manifest = manifest_of(megabytes)
    num_bytes = gradient_bytes(manifest)
    row = Row(scenario=scenario.name, peers=scenario.num_peers, bound_s=scenario.bound_s(num_bytes))
    plan = DemoPlan(manifest=manifest, num_peers=scenario.num_peers, slow={}, kills=(), chaos=None, stand_in_ms=STAND_IN_MS, observed=False)
    with (
        Network(scenario.num_peers, FAST, offload=scenario.worse != "rough") as network,  # else packets of 64 KB would be lost whole
        DemoSwarm(plan, lambda _text: None, place=observed_in(network, scenario.num_peers - 1 if scenario.liar else None)) as swarm,
    ):
        swarm.start()
        watched = Watched(scenario, swarm, network, num_bytes)
        watched.until(lambda: all(daemon.serves for daemon in swarm.daemons), "all peers serve")
        began = watched.averages_of_all()
        counters = {name: watched.total(name) for name in ("rounds_failed", "replayed_microbatches")}
        watched.change(struck=False)
        if scenario.liar:
            watched.lie()
        _fill(row, scenario, num_bytes, watched.exchanges(num_steps))
        row.rounds_failed, row.replayed = (watched.total(name) - before for name, before in counters.items())
        if row.rounds_failed:
            tell_why(watched.honest)
        network.change(FAST)
        row.missed = _missed(row, scenario, num_steps, AVERAGING_TIMES * averaging_s(manifest.swarm.announce_period_s))
        if scenario.liar:
            swarm.daemons[-1].kill()
        _compare(row, watched, began)
    return row


def tell_why(daemons: Sequence[DemoDaemon]) -> None:
    """Print what the logs tell of rounds that gave no average, and of bugs."""
    lines = (line for daemon in daemons for line in os.pread(daemon.log.fileno(), daemon.log_bytes(), 0).decode().splitlines())
    told = [line for line in lines if '"round closed"' in line or '"level": "error"' in line]
    for line in sorted(told, key=lambda line: str(json.loads(line)["timestamp"])):
        progress(line)


def _fill(row: Row, scenario: Scenario, num_bytes: int, exchanges: Sequence[Exchange]) -> None:
    row.steps, row.each_s = len(exchanges), [round(took_s(exchange), 2) for exchange in exchanges]
    if exchanges:
        bounds_s = [bound_of(scenario, exchange, num_bytes) for exchange in exchanges]
        row.seconds, row.bound_s = statistics.median(row.each_s), statistics.median(bounds_s)
        row.exchange_ratio = statistics.median(took_s(each) / bound_s for each, bound_s in zip(exchanges, bounds_s, strict=True))


def _missed(row: Row, scenario: Scenario, num_steps: int, without_s: float) -> list[str]:
    """What does not hold. `without_s`: seconds within which a round ends without a liar."""
    missed = [f"{row.steps} of {num_steps} exchanges ended in time"] if row.steps < num_steps else []
    if scenario.liar:
        longest_s, most_s = max(row.each_s, default=0.0), without_s + MOST_RATIO * row.bound_s + AGAIN_S
        return missed + ([f"an exchange took {longest_s:.0f} s, not {most_s:.0f}"] if longest_s > most_s else [])
    missed += [f"{row.rounds_failed} rounds failed"] if row.rounds_failed > scenario.most_failed else []
    missed += [f"{row.replayed} microbatches were launched again"] if row.replayed > scenario.most_replayed else []
    if row.exchange_ratio is not None and row.exchange_ratio > scenario.most_ratio:
        missed.append(f"an exchange takes {row.exchange_ratio:.2f} of its bound, not {scenario.most_ratio}")
    return missed


def _compare(row: Row, watched: Watched, began: tuple[int, dict[str, int]]) -> None:
    """Find out whose gradients are missing, and whether the run equals one process."""
    try:
        step, ended = watched.averages()
        counted = {peer: count - began[1].get(peer, 0) for peer, count in ended.items()}
        honest = {daemon.ready.peer for daemon in watched.honest if daemon.ready is not None}
        lied = max((count for peer, count in counted.items() if peer not in honest), default=0)
        row.missed += [f"the liar is in {lied} averages: it did not lie"] if lied > 1 else []  # it may be in the one under way
        counted = {peer: count for peer, count in counted.items() if peer in honest}
        row.left_out = sum(step - began[0] - count for count in counted.values())
        if row.left_out:
            row.missed.append(f"of {step - began[0]} averages the peers are in {', '.join(map(str, sorted(counted.values())))}")
        wrong = {name: watched.total(name) for name in MUST_BE_0}
        row.missed += [f"{count} {name.replace('_', ' ')}" for name, count in wrong.items() if count]
        row.missed += unlike_one_process(watched.swarm)
    except PeerdError as error:
        row.missed.append(f"the run cannot be compared: {error}")


def unlike_one_process(swarm: DemoSwarm) -> list[str]:
    losses, differ = far_from_reference(swarm, apart, LOSSES_APART)
    progress(f"the parameters are {differ:.1e} apart from the reference")
    parameters = f"parameters are {differ:.1e} apart from the reference" if differ > PARAMETERS_APART else ""
    return [unlike for unlike in (losses, parameters) if unlike]


def congestion_control() -> str:
    """How the kernel reacts to loss: "bbr" hardly, "cubic" by sending less."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()


def report(rows: Sequence[Row], megabytes: float, as_json: bool) -> int:
    if as_json:
        kernel = {"congestion_control": congestion_control(), "load": [round(value, 2) for value in os.getloadavg()]}
        print(json.dumps({"schema": SCHEMA, "rows": [asdict(row) for row in rows], "megabytes": megabytes, **kernel}))
    else:
        print(f"{megabytes:g} MB of gradients a peer, {ROUND_TRIP_MS:g} ms, {DOWN_MBIT:g} Mbit/s down; a stand-in sleeps in place of work")
        print_table(rows)
    for row in rows:
        for reason in row.missed:
            print(f"{row.scenario}, {row.peers} peers: {reason}", file=sys.stderr)
    return 1 if any(row.missed for row in rows) else 0


def print_table(rows: Sequence[Row]) -> None:
    width = max(len(row.scenario) for row in rows)
    print(f"{'':<{width}}  peers  seconds  bound_s  exchange_ratio  rounds_failed  replayed  left_out  steps")
    for row in rows:
        seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
        ratio = "" if row.exchange_ratio is None else f"{row.exchange_ratio:.2f}"
        print(
            f"{row.scenario:<{width}}  {row.peers:>5}  {seconds:>7}  {row.bound_s:>7.1f}  {ratio:>14}"
            f"  {row.rounds_failed:>13}  {row.replayed:>8}  {row.left_out:>8}  {row.steps:>5}"
        )


def averaging(scenarios: Sequence[Scenario], megabytes: float, num_steps: int, as_json: bool) -> int:
    """Try these scenarios, one after the other, and print a row for each. Returns the exit code."""
    rows = []
    for scenario in scenarios:
        rows.append(try_scenario(scenario, megabytes, num_steps))
        progress(f"{scenario.name}, {scenario.num_peers} peers: {'does not hold' if rows[-1].missed else 'holds'}")
    return report(rows, megabytes, as_json)

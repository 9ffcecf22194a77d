"""Tables and figures of papers, made by the planner and the simulator, beside the papers' own figures (peerd/docs/papers.md).

`swarm-1`: utilisation by round trip (SWARM, table 1 and figure 1). `swarm-2`: what 100 +- 50 ms cost (table 2). `swarm-3`: fleets of slow,
fast and both (tables 3 and 4). `swarm-5`: rebalancing (table 5). `swarm-6`: parameters and FLOPs (table 6). `swarm-fig7`: more peers
(figure 7). `swarm-9`: time and cost of three fleets (table 9). `dtfm-3`, `dtfm-4`: DT-FM's figures 3 (schedulers) and 4 (search), of the
study's networks in --networks FOLDER. `fusion-10`: FusionLLM's schedulers with compression (figures 10 and 11). `hybrid-2`, `hybrid-fig2`:
the hybrid parameter server's four cases, and peers that go (table 2, figure 2). Each takes seconds, `swarm-fig7`, `swarm-9`, `dtfm-3` and
`dtfm-4` minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from peerd.cli.plan import network_of
from peerd.errors import UsageError
from peerd.planner.dtfm import PairCosts, PlacedStages, pair_costs
from peerd.planner.genetic import genetic
from peerd.planner.network import PeerSpec, Topology
from peerd.planner.search import at_random, dealt, searched
from peerd.planner.steady import Members, RunCost, StageDemand
from peerd.sim.comparison import ComparisonSettings, compare
from peerd.sim.network import Homes, Pairs, SimulatedLinks
from peerd.sim.run import simulate_run
from peerd.sim.step_run import RunSettings, joined
from scripts.benchmarks import _paper_fleets as fleets_of_papers
from scripts.benchmarks._report import SCHEMA, run

TOKENS = 512
"""Of a microbatch in sections 4.1 and 4.2."""
LINE = 500e6 / 8
"""Bytes per second each way in section 4."""
V100_FLOPS = 14e12
"""What a V100 does of a layer's products: an assumption, with which the widest layers without latency come to the paper's utilisation."""
NOISE = 0.05
STEPS = 4
Cells = Mapping[str, float | str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """A stage of the paper's section 4.1 and appendix F. `activation_bytes`: 2 for 16 bits, 1 for 8."""

    name: str
    width: int
    per_stage: int
    stages: int
    activation_bytes: float
    passes: int = 1
    """Times that a stage's layers are passed, with the same weights."""
    microbatch: int = 1
    paper: tuple[float, ...] = ()
    """Utilisation by round trip, percent."""

    @property
    def num_parameters(self) -> int:
        """Of a layer of torch's TransformerEncoderLayer with a feed-forward part four times as wide."""
        width = self.width
        return 12 * width**2 + 13 * width

    @property
    def flops(self) -> float:
        """Of 512 tokens, forward and backward, after Kaplan et al.: 6 a parameter and token."""
        return 6.0 * self.num_parameters * self.per_stage * self.passes * TOKENS * self.microbatch

    def cost(self, microbatches: int, gradient_bytes: float = 0.0) -> RunCost:
        boundary = self.activation_bytes * TOKENS * self.width * self.microbatch
        ends = [boundary] * (self.stages - 1) + [0.0]
        demands = [
            StageDemand(flops=self.flops, memory_bytes=0, forth_bytes=end, back_bytes=end, gradient_bytes=gradient_bytes) for end in ends
        ]
        slots = 2 * self.stages + 4
        return RunCost(
            stages=tuple(demands), microbatches_per_step=microbatches, tokens_per_microbatch=TOKENS, is_averaging_hidden=False, slots=slots
        )


LAYERS = (
    Layers(name="base", width=768, per_stage=1, stages=12, activation_bytes=2, paper=(18.0, 11.8, 4.88, 2.78, 1.53)),
    Layers(name="xxlarge", width=4096, per_stage=1, stages=12, activation_bytes=2, paper=(32.1, 28.9, 20.1, 14.9, 10.1)),
    Layers(name="GPT-3", width=12288, per_stage=1, stages=12, activation_bytes=2, paper=(82.1, 79.3, 70.3, 60.2, 48.5)),
    Layers(name="ours", width=4096, per_stage=3, stages=4, activation_bytes=1, paper=(89.5, 87.2, 79.5, 71.5, 59.2)),
)
ROUND_TRIPS_MS = (0, 10, 50, 100, 200)


def peers_of(count: int, delays: Callable[[], float], flops: Callable[[int], float], line: float = LINE) -> Topology:
    peers = tuple(PeerSpec(name=f"peer-{number:04}", flops=flops(number), up=line, down=line) for number in range(count))
    delay = [[0.0] * count for _ in range(count)]
    for a in range(count):
        for b in range(a):
            delay[a][b] = delay[b][a] = delays()
    return Topology(peers, tuple(map(tuple, delay)), ((math.inf,) * count,) * count)


def in_turn(count: int, stages: int) -> Members:
    return tuple(tuple(range(stage, count, stages)) for stage in range(stages))


def step_s(cost: RunCost, links: SimulatedLinks, members: Members) -> float:
    found = simulate_run(
        cost, links, members, RunSettings(num_steps=STEPS, slots=cost.slots, microbatch_size=1, noise=NOISE, slow_start=False)
    )
    return statistics.median(found.step_s[1:])


def utilisation(shown: Sequence[Layers] = LAYERS, round_trips_ms: Sequence[int] = ROUND_TRIPS_MS) -> list[Cells]:
    rows: list[Cells] = []
    for layers in shown:
        cost = layers.cost(32 * layers.stages)
        for round_trip_ms in round_trips_ms:
            links = peers_of(layers.stages, lambda ms=round_trip_ms: ms / 2000, lambda _number: V100_FLOPS)  # type: ignore[misc]
            took_s = step_s(cost, Pairs(links), in_turn(layers.stages, layers.stages))
            theirs = layers.paper[ROUND_TRIPS_MS.index(round_trip_ms)]
            ours = 100 * cost.microbatches_per_step * layers.flops / V100_FLOPS / took_s
            rows.append({"layers": layers.name, "round trip ms": round_trip_ms, "paper %": theirs, "peerd %": round(ours, 1)})
    return rows


SEQUENCES = 6250
PAPER_2 = {"xxlarge": (44.2, 48.2, 40.1, 108.8), "GPT-3": (168.3, 186.7, 164.5, 218.4)}


def latency() -> list[Cells]:
    """4 stages of 4 peers. A sixteenth of the paper's batch is simulated: the time of a batch grows with it."""
    rows: list[Cells] = []
    for layers in (LAYERS[1], LAYERS[2]):
        shape = Layers(
            name=layers.name, width=layers.width, per_stage=1, stages=4, activation_bytes=2, microbatch=4 if layers is LAYERS[1] else 1
        )
        cost = shape.cost(SEQUENCES // 16 // shape.microbatch)
        found = []
        for delayed in (False, True):
            random = Random(0)
            links = peers_of(16, lambda: random.uniform(0.05, 0.15) if delayed else 0.0, lambda _number: V100_FLOPS)  # noqa: B023 - called at once
            found.append(step_s(cost, Pairs(links), in_turn(16, 4)))
        swarm, swarm_late, gpipe, gpipe_late = PAPER_2[layers.name]
        theirs = {"paper's SWARM": round(swarm_late / swarm, 3), "paper's GPipe": round(gpipe_late / gpipe, 3)}
        rows.append({"layers": layers.name, **theirs, "peerd": round(found[1] / found[0], 3)})
    return rows


FLEETS = (("T4", 400, 0), ("A100", 0, 56), ("T4 & A100", 400, 56))
PAPER_3 = {"T4": (17.6, 19.2, 8.8, 19.3), "A100": (16.9, 25.5, 8.0, 25.1), "T4 & A100": (27.3, None, 13.4, None)}
STAGES_3 = 3
BOUNDARY_3 = 2048 * 4096.0
"""Bytes of a sample of 2,048 tokens in 8 bits."""


def fleets() -> list[Cells]:
    """Speeds from the paper's best cases: 400 T4 do 19.2 samples/s through three stages, 56 A100 25.5. Lines of 500 Mbit/s, 10 to 60 ms."""
    rates = {"T4": 19.2 * STAGES_3 / 400, "A100": 25.5 * STAGES_3 / 56}
    ends = [BOUNDARY_3] * (STAGES_3 - 1) + [0.0]
    demands = [StageDemand(flops=1.0, memory_bytes=0, forth_bytes=end, back_bytes=end, gradient_bytes=0.0) for end in ends]
    rows: list[Cells] = []
    for name, slow, fast in FLEETS:
        kinds = ["T4"] * slow + ["A100"] * fast
        Random(0).shuffle(kinds)
        random = Random(1)
        links = peers_of(len(kinds), lambda: random.uniform(0.005, 0.03), lambda number: rates[kinds[number]])  # noqa: B023 - called at once
        cost = RunCost(
            stages=tuple(demands), microbatches_per_step=4096, tokens_per_microbatch=2048, is_averaging_hidden=False, slots=2 * STAGES_3 + 4
        )
        members = joined(cost, Pairs(links))
        best = sum(rates[kind] for kind in kinds) / STAGES_3
        actual = cost.microbatches_per_step / step_s(cost, Pairs(links), members)
        shared, most, default, _ = PAPER_3[name]
        rows.append(
            {
                "fleet": name,
                "paper: actual": shared,
                "best": most,
                "without sharing": default,
                "peerd: actual": round(actual, 1),
                "peerd: best": round(best, 1),
            }
        )
    return rows


PAPER_5 = {("none", 0): (82.7, 99.0, 45.4), ("queues", 300): (95.8, 99.4, 88.9), ("queues", 60): (97.6, 99.8, 91.7)}


def rebalancing() -> list[Cells]:
    rows: list[Cells] = []
    for row in compare(ComparisonSettings(num_stages=(4,), num_runs=3)):
        paper = PAPER_5.get((str(row.rule), round(row.period_s)), (None, None, None))
        ours = (round(row.overall, 1), round(row.first, 1), round(row.last, 1))
        rows.append({"rule": str(row.rule), "period s": row.period_s, **_three("paper", paper), **_three("peerd", ours)})
    return rows


def _three(whose: str, percents: Sequence[float | None]) -> dict[str, float | None]:
    return {f"{whose} {what}": percent for what, percent in zip(("%", "first hour", "last hour"), percents, strict=True)}


PAPER_6 = {"base": ("7.08M", 2.2e10), "xxlarge": ("201M", 6.2e11), "GPT-3": ("1.81B", 5.5e12), "ours": ("201M", 1.8e12)}


def sizes() -> list[Cells]:
    """Of a layer; of `ours` the FLOPs of a stage's three."""
    return [
        {
            "layers": layers.name,
            "paper's parameters": PAPER_6[layers.name][0],
            "peerd's": f"{layers.num_parameters / 1e6:.4g}M",
            "paper's FLOPs": f"{PAPER_6[layers.name][1]:.2g}",
            "counted": f"{layers.flops:.3g}",
        }
        for layers in LAYERS
    ]


def scaling() -> list[Cells]:
    """Equal peers at homes, 16 microbatches for each peer of a stage in a step; in the paper, the picture shows a straight line to 128."""
    rows: list[Cells] = []
    first = 0.0
    for count in (8, 16, 32, 64, 128, 512, 2048, 10_000):
        layers = Layers(name="ours", width=4096, per_stage=3, stages=4, activation_bytes=1)
        cost = layers.cost(16 * max(1, count // layers.stages))
        homes = Homes(count, V100_FLOPS, 0)
        homes.peers = tuple(PeerSpec(name=peer.name, flops=V100_FLOPS, up=LINE, down=LINE) for peer in homes.peers)
        rate = cost.microbatches_per_step / step_s(cost, homes, in_turn(count, layers.stages))
        first = first or rate / count
        rows.append({"peers": count, "samples/s": round(rate, 2), "of a straight line %": round(100 * rate / count / first, 1)})
    return rows


PAPER_DTFM = (3.440, 49.50, 16.087, 34.802, 49.218)


def placements(folder: Path) -> list[Cells]:
    rows: list[Cells] = []
    for case, paper in enumerate(PAPER_DTFM):
        topology, study = network_of(folder / f"dtfm_case{case}.json")
        costs = pair_costs(topology.part(topology.canonical_order()), study)
        found = {name: round(place(costs, 0).comm_cost_s, 3) for name, place in METHODS.items()}
        rows.append({"case": case, "paper's search": paper, **found})
    return rows


METHODS: dict[str, Callable[[PairCosts, int], PlacedStages]] = {
    "random": at_random,
    "greedy": dealt,
    "search": searched,
    "genetic": genetic,
}
TABLES: dict[str, Callable[[], Sequence[Cells]]] = {
    "swarm-1": utilisation,
    "swarm-2": latency,
    "swarm-3": fleets,
    "swarm-5": rebalancing,
    "swarm-6": sizes,
    "swarm-fig7": scaling,
    "swarm-9": fleets_of_papers.costs_of_fleets,
    "fusion-10": fleets_of_papers.fusion,
    "hybrid-2": fleets_of_papers.hybrid_cases,
    "hybrid-fig2": fleets_of_papers.hybrid_disconnections,
}
OF_NETWORKS: dict[str, Callable[[Path], Sequence[Cells]]] = {"dtfm-3": fleets_of_papers.schedulers, "dtfm-4": placements}
"""Those that need the study's networks."""


def show(rows: Sequence[Cells]) -> None:
    told = [["-" if cell is None else str(cell) for cell in row.values()] for row in rows]
    headings = list(rows[0])
    widths = [max(len(row[place]) for row in [headings, *told]) for place in range(len(headings))]
    for row in [headings, *told]:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=[*TABLES, *OF_NETWORKS], help="the table or figure to make")
    parser.add_argument("--networks", type=Path, metavar="FOLDER", help="DT-FM's five networks, for dtfm-3 and dtfm-4")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    given = parser.parse_args()
    if given.table in TABLES:
        rows = TABLES[given.table]()
    elif given.networks is None:
        raise UsageError(
            f"{given.table} needs the study's networks", "name the folder with dtfm_case0.json to dtfm_case4.json: --networks FOLDER"
        )
    else:
        rows = OF_NETWORKS[given.table](given.networks)
    if given.json:
        print(json.dumps({"schema": SCHEMA, "table": given.table, "rows": rows}))
    else:
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))

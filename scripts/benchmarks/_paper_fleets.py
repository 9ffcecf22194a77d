"""Papers' tables about unlike links and about peers that go: DT-FM's figure 3, SWARM's table 9, FusionLLM's schedulers, the hybrid server's
table 2 and figure 2. `scripts/benchmarks/paper.py` shows them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from random import Random

from peerd.cli.plan import network_of
from peerd.planner.dtfm import pair_costs
from peerd.planner.fusion import LayerCosts, best_cut, equal_numbers, op_fence
from peerd.planner.network import PeerSpec, Topology
from peerd.planner.search import at_random, dealt, searched
from peerd.planner.steady import RunCost, StageDemand, SteadyModel
from peerd.sim.churn import Churn
from peerd.sim.network import Pairs
from peerd.sim.run import simulate_run
from peerd.sim.step_run import RunResult, RunSettings, joined

Cells = dict[str, float | str | None]
V100_FLOPS, T4_FLOPS, RTX_2080_FLOPS = 14e12, 3.7e12, 14e12 / 1.55
"""Of a layer's products: an assumption for the V100. A T4 has the share of an A100 that it has in SWARM's table 3, and a V100 0.4."""
TOKENS = 512


def run_of(width: int, per_stage: int, stages: int, microbatches: int, activation_bytes: float) -> RunCost:
    parameters = 12.0 * width**2 * per_stage
    ends = [activation_bytes * TOKENS * width] * (stages - 1) + [0.0]
    demands = [
        StageDemand(flops=6 * parameters * TOKENS, memory_bytes=0, forth_bytes=end, back_bytes=end, gradient_bytes=2 * parameters)
        for end in ends
    ]
    return RunCost(
        stages=tuple(demands),
        microbatches_per_step=microbatches,
        tokens_per_microbatch=TOKENS,
        is_averaging_hidden=False,
        slots=2 * stages + 4,
    )


def network(flops: list[float], delay_s: Callable[[], float], rate: Callable[[], float]) -> Topology:
    count = len(flops)
    delays, rates = ([[0.0] * count for _ in flops] for _ in range(2))
    for a in range(count):
        for b in range(a):
            delays[a][b] = delays[b][a] = delay_s()
            rates[a][b] = rates[b][a] = rate()
    peers = tuple(PeerSpec(name=f"peer-{number:03}", flops=each) for number, each in enumerate(flops))
    return Topology(peers, tuple(map(tuple, delays)), tuple(map(tuple, rates)))


def simulated(cost: RunCost, links: Topology, churn: Churn | None, num_steps: int = 8) -> RunResult:
    gone = churn.unreliable(len(links.peers), 0) if churn is not None else frozenset()
    settings = RunSettings(num_steps=num_steps, slots=cost.slots, microbatch_size=1, churn=churn, slow_start=False)
    return simulate_run(cost, Pairs(links), joined(cost, Pairs(links), gone), settings)


def mean_s(found: RunResult) -> float:
    return statistics.fmean(found.step_s[1:])


GPT_FLOPS, MICROBATCHES = 6.0 * 1.3e9 * 1024 * 2048, 128


def schedulers(folder: Path) -> list[Cells]:
    """GPT of 1.3 B parameters, 1,024 sequences of 2,048 tokens, in 8 stages of 8 replicas.

    By the study's model, computing and communication one after the other, and by peerd's, in which they overlap and each peer sends to all.
    """
    rows: list[Cells] = []
    for case in range(5):
        topology, study = network_of(folder / f"dtfm_case{case}.json")
        topology = topology.part(topology.canonical_order())
        topology = Topology(tuple(PeerSpec(name=peer.name, flops=V100_FLOPS) for peer in topology.peers), topology.delay_s, topology.rate)
        each = study.activation_bytes * study.num_replicas / MICROBATCHES
        ends = [each] * (study.num_stages - 1) + [0.0]
        flops = GPT_FLOPS / MICROBATCHES / study.num_stages
        demands = [
            StageDemand(flops=flops, memory_bytes=0, forth_bytes=end, back_bytes=end, gradient_bytes=study.gradient_bytes) for end in ends
        ]
        cost = RunCost(
            stages=tuple(demands), microbatches_per_step=MICROBATCHES, tokens_per_microbatch=8 * 2048, is_averaging_hidden=False, slots=20
        )
        costs = pair_costs(topology, study)
        placed = {"random": at_random(costs, 0), "greedy": dealt(costs, 0), "search": searched(costs, 0)}
        computed_s = GPT_FLOPS / V100_FLOPS / len(topology.peers)
        took_s = {name: computed_s + found.comm_cost_s for name, found in placed.items()}
        took_s["peerd"] = SteadyModel(cost, topology).state(placed["search"].groups).step_s
        pflops = {f"{name} PFLOP/s": round(GPT_FLOPS / seconds / 1e15, 3) for name, seconds in took_s.items()}
        rows.append({"case": case, **pflops, "scheduler's gain": round(took_s["random"] / took_s["search"], 2)})
    return rows


PAPER_9 = (("8 V100, reliable", 175.4, 7.834), ("8 V100, preemptible", 192.6, 5.383), ("32 T4, preemptible", 140.8, 3.536))
LEAVES_AN_HOUR = 3.1 / 32
"""Of SWARM's preemptible machines (figure 5): 400 peers, of which half and as many again as were replaced went in 32 hours."""


def costs_of_fleets() -> list[Cells]:
    """The layers of `ours`, 4 stages, 500 Mbit/s, 10 to 60 ms. Hours: the paper's of reliable V100s, times how much longer steps take."""
    cost = run_of(4096, 3, 4, 512, 1)
    random, rows = Random(0), list[Cells]()
    base_s = 0.0
    for (name, hours, dollars), flops in zip(PAPER_9, ([V100_FLOPS] * 8, [V100_FLOPS] * 8, [T4_FLOPS] * 32), strict=True):
        links = network(flops, lambda: random.uniform(0.005, 0.03), lambda: 500e6 / 8)
        usual_s = mean_s(simulated(cost, links, None))
        churn = Churn(share=1 - 4 / len(flops), rate=usual_s / 3600 * LEAVES_AN_HOUR, noticed_s=10.0) if base_s else None
        took_s = mean_s(simulated(cost, links, churn, 40))
        base_s = base_s or took_s
        ours = PAPER_9[0][1] * took_s / base_s
        told: Cells = {"fleet": name, "paper: hours": hours, "paper: $": round(hours * dollars)}
        rows.append({**told, "peerd: hours": round(ours, 1), "peerd: $": round(ours * dollars)})
    return rows


GPT2_XL_LAYERS, GPT2_XL_WIDTH, GPT2_XL_TOKENS = 48, 1600, 3 * 1024


def fusion() -> list[Cells]:
    """8 RTX 4090 in one machine and 16 RTX 2080 in four, links as `peerd help plan` states them, GPT2-XL, boundaries compressed."""
    machine_of = [("A", 0)] * 8 + [("B", number) for number in range(4) for _ in range(4)]
    Random(1).shuffle(machine_of)

    def link(a: tuple[str, int], b: tuple[str, int]) -> tuple[float, float]:
        if a == b:
            return 1e-4, 1.25e9
        return (1e-3, 125e6) if a[0] == b[0] else (0.03, 1e6)

    links = [[link(a, b) for b in machine_of] for a in machine_of]
    peers = tuple(
        PeerSpec(name=f"device-{number}", flops=33e12 if cluster == "A" else 4e12, memory_bytes=24e9 if cluster == "A" else 8e9)
        for number, (cluster, _) in enumerate(machine_of)
    )
    testbed = Topology(peers, tuple(tuple(d for d, _ in row) for row in links), tuple(tuple(r for _, r in row) for row in links))
    parameters, rows = 12 * GPT2_XL_WIDTH**2, list[Cells]()
    for ratio in (1, 100, 1000):
        boundary = 4.0 * GPT2_XL_TOKENS * GPT2_XL_WIDTH / ratio
        costs = LayerCosts(
            num_layers=GPT2_XL_LAYERS,
            flops=lambda start, end: (end - start) * 6.0 * parameters * GPT2_XL_TOKENS,
            memory_bytes=lambda start, end: (end - start) * parameters * 24.0,
            boundary_bytes=lambda _layer, each=boundary: (each, each),  # type: ignore[misc]
            num_microbatches=2,
        )
        order = range(len(peers))
        cuts = {
            "equal numbers": equal_numbers(testbed, costs, order),
            "best cut": best_cut(testbed, costs, order),
            "OP-Fence": op_fence(testbed, costs),
        }
        rows.append({"compressed by": ratio, **{f"{name} s": round(cut.iteration_s, 2) if cut else None for name, cut in cuts.items()}})
    return rows


PAPER_HYBRID_2 = {"ours": (56.1, 65.4, 74.8, 82.2), "SWARM": (53.7, 62.8, 77.5, 96.8)}


def hybrid_cases() -> list[Cells]:
    """Its four cases with layers as wide as xxlarge's, 4 stages of 16 devices, and a V100 as fast as its first case says."""
    cost, took_s = run_of(4096, 3, 4, 512, 2), list[float]()
    v100 = cost.stages[0].flops * 512 / 4 / (60 * PAPER_HYBRID_2["ours"][0])
    for case in range(1, 5):
        random = Random(case)
        flops = [v100] * 16 if case < 3 else [v100] * 8 + [v100 / 1.55] * 8
        delay_ms, rate = {1: ((0.5, 0.5), (2e9, 2e9)), 2: ((10, 100), (1e9, 3e9))}.get(case, ((100, 150), (50e6 / 8, 300e6 / 8)))
        links = network(flops, lambda: random.uniform(*delay_ms) / 1000, lambda: random.uniform(*rate))  # noqa: B023 - called at once
        took_s.append(mean_s(simulated(cost, links, Churn(share=0.5, rate=0.9) if case == 4 else None)))
    rows: list[Cells] = []
    for case in range(4):
        theirs = {f"paper: {name}": round(minutes[case] / minutes[0], 2) for name, minutes in PAPER_HYBRID_2.items()}
        rows.append({"case": case + 1, **theirs, "peerd": round(took_s[case] / took_s[0], 2)})
    return rows


SHARES = (0.2, 0.3, 0.4, 0.5, 0.6)


def hybrid_disconnections() -> list[Cells]:
    """16 devices, so many of them RTX 2080 that come and go, the others V100; 4 stages, 100 to 300 Mbit/s, 50 to 150 ms there and back."""
    cost, rows = run_of(4096, 3, 4, 512, 1), list[Cells]()
    for share in SHARES:
        churns = [Churn(share=share, rate=rate) for rate in (0.0, *SHARES)]
        gone = churns[0].unreliable(16, 0)
        random = Random(0)
        flops = [RTX_2080_FLOPS if number in gone else V100_FLOPS for number in range(16)]
        links = network(flops, lambda: random.uniform(0.025, 0.075), lambda: math.inf)  # noqa: B023 - called at once
        lines = [random.uniform(100e6, 300e6) / 8 for _ in flops]
        peers = tuple(PeerSpec(name=each.name, flops=each.flops, up=line, down=line) for each, line in zip(links.peers, lines, strict=True))
        found = [simulated(cost, Topology(peers, links.delay_s, links.rate), churn, 12) for churn in churns]
        calm_s = mean_s(found[0])
        times = {f"{churn.rate:.0%} go": round(mean_s(each) / calm_s, 2) for churn, each in zip(churns[1:], found[1:], strict=True)}
        inexact = sum(each.churn.inexact for each in found)
        fewest = min(each.churn.least_reliable for each in found)
        rows.append({"unreliable": f"{share:.0%}", "calm s": round(calm_s, 1), **times, "inexact": inexact, "reliable in a stage": fewest})
    return rows

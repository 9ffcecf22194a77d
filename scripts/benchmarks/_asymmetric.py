"""A link between two mates that loses all packets in one direction: what the run keeps of its speed. Needs root (network namespaces).

Two stages of two peers, or of three with --mates 3, on links of 100 Mbit/s and 10 ms. Packets from the second peer of a stage to its first
are lost for a while (TCP then works in neither direction, once what is under way has stalled), in one stage and then in both. Where a
stage has two peers, one of them trains on alone, so half of the speed is what can be kept; with three, rounds go around the link.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from scripts.benchmarks._disturbed import NUM_STAGES, SOUND, Disturbed, Outcome
from scripts.benchmarks._switch import Way

LEAST_KEPT = {2: 0.3, 3: 0.6}
"""The least share of the speed before, by the number of mates, that counts as a pass."""


def asymmetric(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench chaos asymmetric", description=__doc__)
    parser.add_argument("--mates", type=int, choices=(2, 3), default=2, help="peers a stage (default 2)")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="how long a link is dead (default 60)")
    given = parser.parse_args(arguments)
    missed = []
    for stages in (1, NUM_STAGES):
        found = disturbed(given.mates, given.seconds, stages)
        found.print()
        missed += found.missed
        kept = found.meanwhile / found.before
        if kept < LEAST_KEPT[given.mates]:
            missed.append(f"{found.name}: {kept:.2f} of the speed is kept, not {LEAST_KEPT[given.mates]}")
    for problem in missed:
        print(problem, file=sys.stderr)
    return 1 if missed else 0


def disturbed(mates: int, seconds: float, stages: int) -> Outcome:
    """A run in which the link is dead for a while, in so many stages."""
    run = Disturbed(name=f"{mates} mates, dead in {stages} of {NUM_STAGES} stages", mates=mates)

    def cut() -> None:
        by_stage = [[peer for peer, daemon in enumerate(run.swarm.daemons) if daemon.stage == stage] for stage in range(stages)]
        address = run.network.address
        ways = [Way(origin=address(second), target=address(first), delay_ms=0, loss=1) for first, second, *_ in by_stage]
        run.network.change(replace(SOUND, ways=ways))

    return run.run(seconds, cut, lambda: run.network.change(SOUND))

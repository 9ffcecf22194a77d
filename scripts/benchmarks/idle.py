"""The cost of idling on a volunteer's machine: processor time and memory of idle daemons with tiny stages."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from peerd.cli.demo_daemons import DemoSwarm
from scripts.benchmarks._report import Row, print_json, print_table, run
from scripts.benchmarks._usage import Usage, tiny_plan, wait_until_idle, watch

MOST_SHARE = 0.01
"""Allowed share of a core, without p2pd."""


def rows_of(found: Sequence[Usage], loss: float) -> list[Row]:
    """The rows, in percent of a core and in MB."""
    figures = {
        "daemon, % of a core": [100 * each.daemon_share for each in found],
        "its p2pd, % of a core": [100 * each.p2pd_share for each in found],
        "daemon, MB": [each.daemon_bytes / 1e6 for each in found],
        "its p2pd, MB": [each.p2pd_bytes / 1e6 for each in found],
    }
    return [Row(name=name, median=statistics.median(values), loss=loss) for name, values in figures.items()]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench idle", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="turns watched (default 5)")
    parser.add_argument("--turn", type=float, default=10.0, metavar="S", help="seconds of a turn (default 10)")
    parser.add_argument("--peers", type=int, default=4, metavar="N", help="daemons, in two stages (default 4)")
    given = parser.parse_args()
    if given.turns < 1 or given.turn <= 0 or given.peers < 2:
        parser.error("--turns and --turn must be positive and --peers at least 2")
    with DemoSwarm(tiny_plan(given.peers, 2, 5.0), lambda _text: None) as swarm:
        swarm.start()
        loss = wait_until_idle(swarm)
        rows = rows_of(watch(swarm, given.turn, given.turns), loss)
    if given.json:
        print_json(rows)
    else:
        print_table(f"{given.peers} idle daemons; medians of {given.turns} turns of {given.turn:g} s", "", rows)
    return 0 if rows[0].median < 100 * MOST_SHARE else 1


if __name__ == "__main__":
    sys.exit(run(main))

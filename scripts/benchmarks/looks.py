"""The time for which looks at a large table hold a daemon's event loop: simulated tables, and the daemon's own functions.

Every peer of two stages trains and holds its share of the step. A look gets a new view, as after any change of the table. With --against
another state of the code looks at the same tables in turn. It fails where the trainer's first look at a step takes 30 ms of processor
time, or a further one 1 ms, or a decision of the step's rules 2.5 ms: those for "groups" are of a stage that averages in two levels.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

from peerd.errors import PeerdError
from scripts.benchmarks._checkouts import Checkout, add_options, checkouts, rows_against
from scripts.benchmarks._report import Row, print_json, print_table, progress, run

LOOKS = Path(__file__).with_name("_looks.py")
BARS_MS = {"launches: first look at a step": 30.0, "launches: further look": 1.0, "step: ": 2.5, "groups: ": 2.5}
"""By the beginning of a look's name."""


def measured_ms(checkout: Checkout, peers: int, microbatches: int, times: int) -> dict[str, float]:
    """The median of each look, in one process."""
    sizes = (f"--peers={peers}", f"--microbatches={microbatches}", f"--times={times}")
    done = subprocess.run([*checkout.command, sys.executable, str(LOOKS), *sizes], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerdError(f"the looks{checkout.suffix} failed: {done.stderr.strip()}")
    return {name: 1e3 * statistics.median(took_s) for name, took_s in json.loads(done.stdout).items()}


def bar_ms_of(name: str) -> float:
    """How long a look may take."""
    return min((bar_ms for begins, bar_ms in BARS_MS.items() if name.startswith(begins)), default=math.inf)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench looks", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--peers", type=int, default=300, metavar="N", help="peers of each of two stages (default 300)")
    parser.add_argument("--microbatches", type=int, default=4096, metavar="N", help="microbatches of a step (default 4096)")
    parser.add_argument("--times", type=int, default=9, metavar="N", help="looks of each kind in a round (default 9)")
    add_options(parser, "rounds")
    given = parser.parse_args()
    if min(given.peers, given.microbatches, given.times, given.rounds) < 1:
        parser.error("--peers, --microbatches, --times and --rounds must be at least 1")
    return given


def main() -> int:
    given = parse()
    with checkouts(given.against) as sides:
        found: dict[str, dict[str, list[float]]] = {side.suffix: {} for side in sides}
        for number in range(given.rounds):
            progress(f"round {number + 1} of {given.rounds}")
            for side in sides if number % 2 == 0 else sides[::-1]:
                for name, took_ms in measured_ms(side, given.peers, given.microbatches, given.times).items():
                    found[side.suffix].setdefault(name, []).append(took_ms)
    ours = found[""]
    if given.against:
        suffix = sides[-1].suffix
        rows = list(rows_against(ours, found[suffix], suffix))
    else:
        rows = [Row(name=name, median=statistics.median(took_ms)) for name, took_ms in ours.items()]
    if given.json:
        print_json(rows)
    else:
        print_table(f"processor time of a look, two stages of {given.peers} peers, {given.microbatches} microbatches a step", "ms", rows)
    late = [name for name, took_ms in ours.items() if statistics.median(took_ms) > bar_ms_of(name)]
    for name in late:
        progress(f"{name}: more than {bar_ms_of(name):g} ms")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(run(main))

"""What being watched costs: the same run with history, metrics, dashboard and somebody who looks, against a run without any of it.

The looker reads /metrics every second and keeps the dashboard's live stream open. Both sides are real daemons that train in turns of a few
steps, each frozen while the other works.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

from peerd.config.manifest import ComputeConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from peerd.errors import ExitCode, PeerdError
from scripts.benchmarks._report import Row, interrupt, paired_ratio, print_json, print_table, progress
from scripts.benchmarks._turns import Contender, Peers, guard, thawed_at_exit

LONG_ENOUGH_S = 300.0
SCRAPE_PERIOD_S = 1.0
READ_TIMEOUT_S = 5.0
LOOKED, ALONE = "watched", "not watched"


def manifest() -> Manifest:
    return Manifest(
        name="bench",
        model=ModelConfig(num_layers=4, d_model=512, num_heads=8, d_ff=2048, vocab_size=256),
        train=TrainConfig(num_stages=2, microbatches_per_step=16, microbatch_size=4, sequence_length=128, learning_rate=3e-4),
        compute=ComputeConfig(threads=1, recompute="never"),
        swarm=SwarmConfig(announce_period_s=LONG_ENOUGH_S, checkpoint_every_steps=0, rebalance_period_s=0),
    )


def opened(address: str) -> Any:
    return urllib.request.urlopen(address, timeout=READ_TIMEOUT_S)  # noqa: S310 - a daemon of this benchmark


@contextlib.contextmanager
def looking_at(address: str) -> Iterator[list[int]]:
    """A browser and a Prometheus of sorts; the list grows by the bytes that each look brought."""
    stopped, brought = threading.Event(), list[int]()

    def scrape() -> None:
        while not stopped.wait(SCRAPE_PERIOD_S):
            with contextlib.suppress(OSError), opened(f"{address}metrics") as reply:
                brought.append(len(reply.read()))

    def stream() -> None:
        while not stopped.is_set():
            with contextlib.suppress(OSError), opened(f"{address}api/live") as reply:
                for line in reply:
                    brought.append(len(line))
                    if stopped.is_set():
                        return
            stopped.wait(SCRAPE_PERIOD_S)

    lookers = [threading.Thread(target=work, daemon=True) for work in (scrape, stream)]
    for looker in lookers:
        looker.start()
    try:
        yield brought
    finally:
        stopped.set()


def measure(rounds: int, steps: int, warmup: int) -> tuple[list[Row], int]:
    looked, alone = Peers(manifest()), Peers(manifest(), observed=False)
    sides = [Contender(LOOKED, looked), Contender(ALONE, alone)]
    seconds: dict[str, list[float]] = {LOOKED: [], ALONE: []}
    with contextlib.ExitStack() as stack:
        for side in sides:
            stack.enter_context(side.team)
        keeper = stack.enter_context(thawed_at_exit(sides))
        brought: list[int] = []
        for side in sides:
            progress(f"warming up {side.name}")
            side.warm_up(warmup)
            guard(keeper, side)
            if side.team is looked:
                brought = stack.enter_context(looking_at(looked.dashboard))
        for number in range(rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                seconds[side.name].append(side.turn(steps))
                progress(f"round {number + 1}  {side.name}: {seconds[side.name][-1]:.3f} s a step")
        rows = [
            Row(
                name=side.name,
                median=statistics.median(seconds[side.name]),
                ratio=paired_ratio(seconds[ALONE], seconds[side.name]) if side.name == LOOKED else None,
                baseline=ALONE if side.name == LOOKED else None,
                loss=side.steps[warmup + rounds * steps - 1].loss,
            )
            for side in sides
        ]
    return rows, sum(brought)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench watching", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="rounds, in each of which both sides have a turn (default 9)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps per turn (default 3)")
    parser.add_argument("--warmup", type=int, default=3, metavar="N", help="steps before those (default 3)")
    given = parser.parse_args()
    if min(given.rounds, given.steps, given.warmup) < 1:
        parser.error("--rounds, --steps and --warmup must be at least 1")
    for kind in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, interrupt)
    try:
        rows, brought = measure(given.rounds, given.steps, given.warmup)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except PeerdError as error:
        print(f"watching: error: {error}", file=sys.stderr)
        return error.exit_code
    if given.json:
        print_json(rows, looker_bytes=brought)
    else:
        print_table(f"2 stages of 1 peer and 1 thread; medians of {given.rounds} turns of {given.steps} steps", "s a step", rows)
        print(f"the looker was brought {brought / 1e6:.1f} MB")
    if not brought:
        print("the looker saw nothing: the sides are alike", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

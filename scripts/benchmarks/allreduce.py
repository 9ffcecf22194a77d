"""All-reduce of one vector between members on this machine: gloo, hivemind's AllReduceRunner and averager, and peerd's averaging rounds.

peerd's side is the averaging of real daemons: a roster with its ledgers, finite parts only, a leader, sums in the roster's order, averages
logged for members that missed them; through the tunnel and over direct TLS connections. In each round all sides take turns. Each member is
a process with one torch thread. The time ends when the last member has the average. `loss` is the sum's relative error.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from typing import Any

from scripts.benchmarks._allreduce import Job
from scripts.benchmarks._report import Row, paired_ratio, print_json, print_table, progress, run
from scripts.benchmarks._sides import Team, sweep_sockets

QUIETLY = {"GLOO_SOCKET_IFNAME": "lo", "HIVEMIND_LOGLEVEL": "CRITICAL"}
CODECS = ("none", "bfloat16", "int8")
BASELINE = "hivemind, AllReduceRunner"
LAYER_BYTES = 16.8e6
"""A decoder layer's parameters at d_model 512, d_ff 2048."""


@dataclass(slots=True)
class Side:
    """One line of the table."""

    name: str
    team: str
    variant: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    error: float = 0.0
    same_bits: bool = True


def sides_of(codecs: tuple[str, ...]) -> list[Side]:
    plain = [Side("gloo, no encryption", "gloo", {}), Side(BASELINE, "hivemind", {}), Side("hivemind, averager", "averager", {})]
    return plain + [
        Side(f"peerd, {path}, {codec}", "peerd", {"codec": codec, "direct": path == "TLS"})
        for path in ("tunnel", "TLS")
        for codec in codecs
    ]


def run_round(team: Team, side: Side, number: int) -> None:
    ready = team.ask("ready", number=number, **side.variant)
    took_s = max(team.ask("go", others=ready))
    results = team.ask("result", number=number)
    if number:
        side.seconds.append(took_s)
    else:
        side.error = max(result["error"] for result in results)
    side.same_bits &= len({result["digest"] for result in results}) == 1
    progress(f"{side.name}: {took_s:.3f} s")


def race(num_members: int, megabytes: float, rounds: int, codecs: tuple[str, ...]) -> tuple[list[Side], int]:
    """All sides with their times, and the number of bytes of the vector."""
    with contextlib.ExitStack() as stack:
        stack.callback(sweep_sockets)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="peerd-bench-"))
        layers = max(1, round(megabytes * 1e6 / LAYER_BYTES))

        def team(name: str, **more: Any) -> Team:
            jobs = [asdict(Job(side=name, rank=rank, num_members=num_members, folder=folder, **more)) for rank in range(num_members)]
            made: Team = stack.enter_context(Team(name, "scripts.benchmarks._allreduce", jobs, QUIETLY))
            made.ask("meet", others=(hellos := made.ask("open")))
            lengths.update(hello["length"] for hello in hellos if "length" in hello)
            return made

        lengths: set[int] = set()
        teams = {"peerd": team("peerd", num_layers=layers)}
        (length,) = lengths
        teams |= {name: team(name, length=length) for name in ("gloo", "hivemind", "averager")}
        sides = sides_of(codecs)
        for number in range(rounds + 1):  # the first round is the warm-up
            for side in sides if number % 2 else sides[::-1]:
                run_round(teams[side.team], side, number)
    return sides, 4 * length


def rows_of(sides: list[Side], num_members: int) -> list[Row]:
    base = next(side for side in sides if side.name == BASELINE)
    return [
        Row(
            name=f"{num_members} peers: {side.name}",
            median=statistics.median(side.seconds),
            ratio=None if side is base else paired_ratio(base.seconds, side.seconds),
            baseline=None if side is base else BASELINE,
            loss=side.error,
        )
        for side in sides
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench allreduce", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--peers", type=int, nargs="+", choices=(2, 4, 8), default=[2, 4], help="members (default 2 and 4)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="timed rounds, in each of which all sides run (default 5)")
    parser.add_argument("--megabytes", type=float, default=100.0, metavar="MB", help="about so many (default 100)")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS), help="peerd's (default all)")
    given = parser.parse_args()
    if given.rounds < 1 or not 1 <= given.megabytes <= 2000:
        parser.error("--rounds must be at least 1, --megabytes between 1 and 2000")
    return given


def main() -> int:
    given = parse()
    rows: list[Row] = []
    odd: list[str] = []
    num_bytes = 0
    for num_members in given.peers:
        sides, num_bytes = race(num_members, given.megabytes, given.rounds, tuple(given.codecs))
        rows += rows_of(sides, num_members)
        odd += [f"{num_members} peers: {side.name}" for side in sides if not side.same_bits]
    if given.json:
        print_json(rows, num_bytes=num_bytes, members_differ=odd)
    else:
        print_table(f"All-reduce of {num_bytes / 1e6:.1f} MB float32", "s", rows)
        print(f"members ended with different bits: {', '.join(odd) or 'none'}")
    return 1 if any("peerd" in name for name in odd) else 0


if __name__ == "__main__":
    sys.exit(run(main))

"""One call between two processes on this machine: hivemind's RPC, and peerd's through the tunnel and over a direct TLS connection.

The figures are medians in milliseconds of a call with a short answer; MB/s follow from them. All sides encrypt and authenticate the
caller. They take turns in each round. A unary call can carry at most 4 MiB on all sides. 1 KiB shows the latency. From 1 MiB on the
processor time of both ends together is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from typing import Any

from scripts.benchmarks._report import Row, paired_ratio, print_json, print_table, progress, run
from scripts.benchmarks._sides import Team
from scripts.benchmarks._wire import Job

KIB = (1, 64, 1024, 16 * 1024, 64 * 1024)
MAX_UNARY_KIB = 2048
BYTES_A_TURN = 16 << 20
MAX_REPEATS = 50


@dataclass(slots=True)
class Side:
    """One line of the table."""

    name: str
    team: str
    kib: int
    stream: bool
    variant: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    spent_s: list[float] = field(default_factory=list)
    """Processor time of a call, at both ends including their p2pd."""

    @property
    def label(self) -> str:
        size = f"{self.kib} KiB" if self.kib < 1024 else f"{self.kib // 1024} MiB"
        megabytes, kind = self.kib * 1024 / 1e6, "stream" if self.stream else "unary"
        spent = f", {1e3 * statistics.median(self.spent_s) / megabytes:.1f} ms of processor a MB" if self.kib >= 1024 else ""
        return f"{size} {kind}: {self.name}, {megabytes / statistics.median(self.seconds):.0f} MB/s{spent}"


def sides_of(kib: int, stream: bool) -> list[Side]:
    ours = [Side(name, "peerd", kib, stream, {"direct": direct}) for name, direct in (("tunnel", False), ("TLS", True))]
    return [Side("hivemind", "hivemind", kib, stream, {}), *ours]


def race(kibs: list[int], rounds: int) -> list[list[Side]]:
    """The sides, grouped by size and kind of call."""
    groups = [sides_of(kib, stream) for kib in kibs for stream in (False, True) if stream or kib <= MAX_UNARY_KIB]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="peerd-bench-"))
        teams = {}
        for name in ("peerd", "hivemind"):
            jobs = [asdict(Job(side=name, rank=rank, folder=folder)) for rank in range(2)]
            teams[name] = stack.enter_context(Team(name, "scripts.benchmarks._wire", jobs))
            teams[name].ask("meet", others=teams[name].ask("open"))
        for group in groups:
            for number in range(rounds + 1):  # the first round is the warm-up
                for side in group if number % 2 else group[::-1]:
                    repeats = max(1, min(MAX_REPEATS, BYTES_A_TURN // (side.kib * 1024)))
                    team, order = teams[side.team], {"stream": side.stream, "num_bytes": side.kib * 1024, "repeats": repeats}
                    before_s = sum(team.ask("spent_s"))
                    took_s = team.ask_one(0, "measure", **order, **side.variant)
                    spent_s = sum(team.ask("spent_s")) - before_s
                    if number:
                        side.seconds.append(statistics.median(took_s))
                        side.spent_s.append(spent_s / repeats)
            progress("; ".join(side.label for side in group))
    return groups


def rows_of(group: list[Side]) -> list[Row]:
    base, *others = group
    first = Row(name=base.label, median=1e3 * statistics.median(base.seconds))
    return [first] + [
        Row(
            name=side.label,
            median=1e3 * statistics.median(side.seconds),
            ratio=paired_ratio(base.seconds, side.seconds),
            baseline=base.name,
        )
        for side in others
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench wire", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="timed rounds, in each of which all sides run (default 5)")
    parser.add_argument("--kib", type=int, nargs="+", default=list(KIB), metavar="N", help="sizes in KiB (default 1 to 65536)")
    given = parser.parse_args()
    if given.rounds < 1 or not all(1 <= kib <= 1 << 20 for kib in given.kib):
        parser.error("--rounds must be at least 1, --kib between 1 and 1048576")
    return given


def main() -> int:
    given = parse()
    rows = [row for group in race(given.kib, given.rounds) for row in rows_of(group)]
    if given.json:
        print_json(rows)
    else:
        print_table("One call, there and a short answer back", "ms", rows)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))

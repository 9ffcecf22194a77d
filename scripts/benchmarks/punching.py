"""Two homes behind routers: tensors straight through both routers by QUIC, beside the relay, over the same lines.

Three machines: a relay with an address of its own, and two homes, each behind a router that lets in only what it was asked for. All have a
line of the same rate both ways (`--mbit`, `--round-trip`). In each round one home sends `--megabytes` to the other, then both send at once,
through the relay and by QUIC in turns. A row has the rate that arrives, in Mbit/s, and its share of the line; the direct path should have
0.8 of it. Then one router begins to lose all UDP while one home sends pieces of 256 KB one after another: each is sent again until it has
arrived, over the way that there is; from the loss to the next piece through the relay it should take 5 s at most. Then the same while it
fetches pieces: who waits for data has nothing to send, by which it would notice, and is told by who sends them.

Machines are network namespaces joined by a switch in user space, which needs root; the package iroh must be installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peerd.cli.launch import module_command
from peerd.errors import PeerdError
from peerd.link.quic import is_installed
from scripts.benchmarks._namespaces import Network
from scripts.benchmarks._report import progress, run
from scripts.benchmarks._switch import Links

PIECE_BYTES, NUM_BEFORE, NUM_AFTER = 256 * 1024, 10, 10
LEAST_SHARE, MOST_FALLBACK_S = 0.8, 5.0


@dataclass(slots=True)
class End:
    """The process of one machine."""

    process: subprocess.Popen[str]
    peer: str = ""
    addresses: list[str] = field(default_factory=list)

    @classmethod
    def begin(cls, network: Network, machine: int, folder: Path, relay: str = "") -> End:
        command = (*network.command(machine), *module_command("scripts.benchmarks._punching", str(folder / str(machine)), relay))
        end = cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        told = end.answer()
        end.peer, end.addresses = told["peer"], told["addresses"]
        return end

    def say(self, **order: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise PeerdError("a peer of the benchmark has ended", "its message is above")
        told: dict[str, Any] = json.loads(line)
        return told

    def ask(self, **order: object) -> dict[str, Any]:
        self.say(**order)
        return self.answer()

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()  # p2pd ends with it
            self.process.wait()
        self.process.stdout.close()


@dataclass(slots=True)
class Rates:
    """Mbit/s of the uploads of one kind, the sum of those at once."""

    name: str
    found: list[float] = field(default_factory=list)
    spent_s: list[float] = field(default_factory=list)
    """Processor time of a sender per MB."""


def exchange(ends: tuple[End, ...], num_bytes: int, way: str, rates: Rates) -> None:
    """Let each of the ends send to the next one, at once."""
    others = {ends[0].peer: ends[1], ends[1].peer: ends[0]}
    senders = ends if rates.name.startswith("both") else ends[:1]
    for end in senders:
        end.say(send=num_bytes, to=others[end.peer].peer, through=way)
    told = [end.answer() for end in senders]
    wrong = {each["path"] for each in told} - {way}
    if wrong:
        raise PeerdError(f"an upload took the path {wrong.pop()} in place of {way}")
    rates.found.append(8e-6 * sum(each["rate"] for each in told))
    rates.spent_s += [each["spent_s"] / (1e-6 * num_bytes) for each in told]


def fall_back(network: Network, ends: tuple[End, ...], order: dict[str, Any]) -> dict[str, float]:
    """Close the hole while pieces are carried. Returns the time to the first that arrives by relay, and how many were begun anew."""
    sender, other = ends
    network.let_udp(1, True)
    sender.ask(**{"await": "quic"}, to=other.peer)
    for _ in range(NUM_BEFORE):
        sender.ask(**order, to=other.peer)
    began = time.time()
    network.let_udp(1, False)
    first, failures = 0.0, 0
    for _ in range(NUM_AFTER):
        told = sender.ask(**order, to=other.peer)
        failures += told["failures"]
        first = first or told["ended"] - began
    return {"took_s": first, "failures": failures}


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    links = Links(mbit_per_s=args.mbit, round_trip_ms=args.round_trip)
    with Network(3, links, behind_routers=(1, 2)) as network:
        ends: list[End] = []
        try:
            ends.append(relay := End.begin(network, 0, folder))
            public = next(address for address in relay.addresses if network.address(0) in address)
            ends += [End.begin(network, machine, folder, public) for machine in (1, 2)]
            homes = ends[1], ends[2]
            for end, other in (homes, homes[::-1]):
                end.ask(meet=other.peer, at=other.addresses)
            opened = [end.ask(**{"await": "quic"}, to=other.peer)["took_s"] for end, other in (homes, homes[::-1])]
            progress(f"the paths through the routers opened after {opened[0]:.1f} and {opened[1]:.1f} s")
            rows = {(way, kind): Rates(kind) for kind in ("one way", "both ways at once") for way in ("relay", "quic")}
            for _ in range(args.rounds):
                for (way, kind), rates in rows.items():
                    exchange(homes, round(args.megabytes * 1e6), way, rates)
                    progress(f"{kind}, {way}: {rates.found[-1]:.1f} Mbit/s")
            orders: dict[str, dict[str, Any]] = {"sending": {"send": PIECE_BYTES, "through": "quic"}, "fetching": {"fetch": PIECE_BYTES}}
            fallback = {name: fall_back(network, homes, order) for name, order in orders.items()}
            return {"opened_s": opened, "rows": rows, "fallback": fallback}
        finally:
            for end in ends:
                end.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=20.0, help="rate of each line, both ways, Mbit/s")
    parser.add_argument("--round-trip", type=float, default=40.0, help="ms")
    parser.add_argument("--megabytes", type=float, default=8.0, help="of each upload")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not is_installed():
        raise PeerdError("the package iroh is not installed", "pip install 'peerd[nat]'")
    with tempfile.TemporaryDirectory(prefix="peerd-bench-") as folder:
        found = measure(args, Path(folder))
    table, passes = [], all(each["took_s"] <= MOST_FALLBACK_S for each in found["fallback"].values())
    for (way, kind), rates in found["rows"].items():
        rate, line = statistics.median(rates.found), args.mbit * (2 if kind.startswith("both") else 1)
        spent_ms = 1e3 * statistics.median(rates.spent_s)
        table.append({"kind": kind, "way": way, "mbit": rate, "share": rate / line, "processor_ms_per_mb": spent_ms})
        passes = passes and (way == "relay" or rate >= LEAST_SHARE * line)
    if args.json:
        print(json.dumps({"schema": 1, "opened_s": found["opened_s"], "fallback": found["fallback"], "rows": table, "passes": passes}))
    else:
        print(f"two homes behind routers, lines of {args.mbit:g} Mbit/s, {args.round_trip:g} ms")
        for row in table:
            spent = f"{row['processor_ms_per_mb']:.1f} ms of the sender's processor a MB"
            print(f"{row['kind']:<18} {row['way']:<6} {row['mbit']:6.1f} Mbit/s, {row['share']:.2f} of the line; {spent}")
        for name, each in found["fallback"].items():
            came = f"the next piece came through the relay after {each['took_s']:.1f} s, {each['failures']:.0f} begun anew"
            print(f"the hole closed while {name}: {came}")
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(run(main))

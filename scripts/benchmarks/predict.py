"""Does `peerd simulate run` foretell what real daemons do? Steps and bytes of a swarm over links, beside those of the simulation.

3 stages of 2 peers with raw boundaries of 262 KB train over links made of network namespaces and a switch in user space, which needs root.
A stand-in sleeps in place of work, 200 ms a microbatch. The simulation gets the same rates, delays and times. Cells: `free` without limits;
`fast` 100 Mbit/s and 50 ms there and back; `slow` 20 Mbit/s and 100 ms; in the others one peer of the first stage is at 5 Mbit/s, three
times slower, or 200 ms away.

A row has the median time of a step and what a peer sends in it, as measured and as foretold. It ends with 1 where a time is off by more
than 10 % in a cell or 5 % in the mean, or the bytes by more than 3 % in a cell. Of what is sent, the simulation knows tensors; the bytes
that frame them, and those that daemons tell one another, were measured once (`FRAMING`, `NEWS`). What TCP sends once more is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from peerd.cli.new_estimate import loads_of
from peerd.config.manifest import Manifest
from peerd.planner.cutting import stage_layers
from peerd.planner.network import PeerSpec, Topology
from peerd.planner.run_costs import run_cost
from peerd.sim.network import Pairs
from peerd.sim.run import simulate_run
from peerd.sim.step_run import RunSettings
from scripts.benchmarks._averaging import observed_in
from scripts.benchmarks._link import NUM_PEERS, NUM_STAGES, PER_STAGE, UNLIMITED, manifest_of, until_step
from scripts.benchmarks._namespaces import Network, require_root
from scripts.benchmarks._report import SCHEMA, progress, run
from scripts.benchmarks._swarms import median_step_s
from scripts.benchmarks._switch import Links, Rates, Way
from scripts.benchmarks._turns import Peers

STAND_IN_MS = 200.0
MICROBATCHES = 48
NOISE = 0.02
BYTES_PER_MBIT = 125e3
FRAMING, FRAMING_UNLIMITED = 1.046, 1.023
"""Bytes on the wire for a byte of tensors: headers of TCP, TLS and gRPC, and acknowledgements, of which links without limits need fewer."""
NEWS = 8e3
"""Bytes a second that a peer sends of news. All three are fitted to five cells of an earlier run (peerd/docs/simulate.md)."""
MOST_OFF, MOST_MEAN_OFF, MOST_BYTES_OFF = 0.10, 0.05, 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Links and speeds of the peers. The last peer of the first stage may be unlike the others."""

    name: str
    mbit: float = 0.0
    """Of each uplink and downlink; 0: unlimited."""
    round_trip_ms: float = 0.0
    odd_mbit: float = 0.0
    odd_round_trip_ms: float = 0.0
    odd_slower: float = 1.0
    stand_in_ms: float = STAND_IN_MS

    def stretched(self, times: float) -> Cell:
        """Links and peers that take so many times as long: a busy machine then has that much more time for what is not stood in for."""
        return replace(
            self,
            mbit=self.mbit / times,
            odd_mbit=self.odd_mbit / times,
            round_trip_ms=self.round_trip_ms * times,
            odd_round_trip_ms=self.odd_round_trip_ms * times,
            stand_in_ms=self.stand_in_ms * times,
        )

    def links(self, addresses: Sequence[str], odd: int) -> Links:
        rates = {addresses[odd]: Rates(up=self.odd_mbit, down=self.odd_mbit)} if self.odd_mbit else {}
        ways = [
            Way(origin=one, target=other, delay_ms=self._round_trip_ms(odd in (a, b)) / 2)
            for a, one in enumerate(addresses)
            for b, other in enumerate(addresses)
            if a != b
        ]
        return Links(mbit_per_s=self.mbit, round_trip_ms=self.round_trip_ms, rates=rates, ways=ways)

    def topology(self, stages: Sequence[int], odd: int) -> Topology:
        """The same for the planner, as bytes of tensors that lines carry; `stages`: that of each peer."""
        peers = []
        for number, stage in enumerate(stages):
            mbit = self.odd_mbit if number == odd and self.odd_mbit else self.mbit
            line = mbit * BYTES_PER_MBIT / FRAMING if mbit else math.inf
            rate = 1000 / self.stand_in_ms / (self.odd_slower if number == odd else 1.0)
            peers.append(PeerSpec(name=f"peer-{number}", up=line, down=line, stage=stage, microbatches_per_s=rate))
        count = range(len(stages))
        delays = tuple(tuple(self._round_trip_ms(odd in (a, b)) / 2000 if a != b else 0.0 for b in count) for a in count)
        return Topology(tuple(peers), delays, ((math.inf,) * len(stages),) * len(stages))

    def _round_trip_ms(self, is_odd: bool) -> float:
        return self.odd_round_trip_ms if is_odd and self.odd_round_trip_ms else self.round_trip_ms


CELLS = (
    Cell(name="free"),
    Cell(name="fast", mbit=100, round_trip_ms=50),
    Cell(name="slow", mbit=20, round_trip_ms=100),
    Cell(name="one-slow-line", mbit=100, round_trip_ms=50, odd_mbit=5),
    Cell(name="one-slow", mbit=100, round_trip_ms=50, odd_slower=3.0),
    Cell(name="one-far", mbit=100, round_trip_ms=20, odd_round_trip_ms=200),
)
SETTLING = 5
"""Steps that do not count: peers learn what their lines carry, which the simulation knows. At 6.7 Mbit/s and 300 ms the microbatches of a
step went to two equal peers as 42 and 6, 28 and 20, 26 and 22, 24 and 24."""
FORETOLD_STEPS = 100
"""Steps that are simulated. Those of one swarm differ: with one peer far away they take 22.7 to 27.4 s, and the median of five of them is
off by 5 %."""
ODD = NUM_STAGES
"""Peers take the stages in turn: the second of the first stage."""


@dataclass(slots=True, kw_only=True)
class Row:
    cell: str
    step_s: float
    foretold_s: float
    sent_mb: float
    """By a peer in a step, the mean of all; each byte once."""
    foretold_mb: float
    resent: float = 0.0
    """The share of bytes that TCP sent once more, of all that it sent."""

    @property
    def off(self) -> float:
        return self.foretold_s / self.step_s - 1

    @property
    def bytes_off(self) -> float:
        return self.foretold_mb / self.sent_mb - 1


def foretold(cell: Cell, manifest: Manifest) -> tuple[float, float]:
    """The median time of a step, s, and the tensor bytes that a peer sends in one."""
    loads = loads_of(manifest)
    cost = run_cost(manifest, loads, stage_layers(manifest, loads))
    stages = [number % NUM_STAGES for number in range(NUM_PEERS)]
    members = tuple(tuple(number for number, at in enumerate(stages) if at == stage) for stage in range(NUM_STAGES))
    steps = SETTLING + FORETOLD_STEPS
    settings = RunSettings(num_steps=steps, slots=manifest.slots, microbatch_size=manifest.train.microbatch_size, noise=NOISE)
    found = simulate_run(cost, Pairs(cell.topology(stages, ODD)), members, settings)
    return statistics.median(found.step_s[SETTLING:]), sum(found.sent_bytes) / NUM_PEERS / steps


def measured(cell: Cell, manifest: Manifest, num_steps: int) -> tuple[float, float, float]:
    """The same of real daemons; bytes with all that frames them, and which part of them TCP sends once more."""
    slow = {ODD: cell.odd_slower} if cell.odd_slower > 1 else {}
    with (
        Network(NUM_PEERS, UNLIMITED) as network,
        Peers(manifest, observed=False, per_stage=PER_STAGE, stand_in_ms=cell.stand_in_ms, place=observed_in(network), slow=slow) as team,
    ):
        network.change(cell.links([network.address(peer) for peer in range(NUM_PEERS)], ODD))
        team.start()
        first = len(team.steps()) + SETTLING
        until_step(team, first)
        began, began_again = (sum(map(count, range(NUM_PEERS))) for count in (network.sent_bytes, network.resent_bytes))
        until_step(team, first + num_steps)
        sent = sum(map(network.sent_bytes, range(NUM_PEERS))) - began
        resent = sum(map(network.resent_bytes, range(NUM_PEERS))) - began_again
        ends = [step.time_s for step in team.steps()][first - 1 : first + num_steps]
    return median_step_s(ends), (sent - resent) / NUM_PEERS / num_steps, resent / sent


def try_cell(cell: Cell, num_steps: int) -> Row:
    manifest = manifest_of("none", MICROBATCHES)
    step_s, sent, resent = measured(cell, manifest, num_steps)
    foretold_s, tensors = foretold(cell, manifest)
    whole = tensors * (FRAMING if cell.mbit else FRAMING_UNLIMITED) + NEWS * foretold_s
    row = Row(cell=cell.name, step_s=step_s, foretold_s=foretold_s, sent_mb=sent / 1e6, foretold_mb=whole / 1e6, resent=resent)
    progress(f"{row.cell}: {row.step_s:.2f} s a step, foretold {row.off:+.1%}; {row.sent_mb:.2f} MB, foretold {row.bytes_off:+.1%}")
    return row


def missed(rows: Sequence[Row]) -> list[str]:
    found = [f"{row.cell}: a step's time is off by {row.off:+.1%}" for row in rows if abs(row.off) > MOST_OFF]
    found += [f"{row.cell}: its bytes are off by {row.bytes_off:+.1%}" for row in rows if abs(row.bytes_off) > MOST_BYTES_OFF]
    mean = statistics.fmean(abs(row.off) for row in rows)
    return found + ([f"times are off by {mean:.1%} in the mean"] if mean > MOST_MEAN_OFF else [])


def report(rows: Sequence[Row], stretch: float, as_json: bool) -> int:
    load = [round(value, 2) for value in os.getloadavg()]
    if as_json:
        print(
            json.dumps(
                {"schema": SCHEMA, "rows": [{**asdict(row), "off": row.off, "bytes_off": row.bytes_off} for row in rows], "load": load}
            )
        )
    else:
        print(
            f"{NUM_STAGES} stages of {PER_STAGE} peers, {stretch * STAND_IN_MS:g} ms a microbatch, {MICROBATCHES} a step; load {load[0]:g}"
        )
        print("cell           step s  foretold    off  MB a peer  foretold    off  sent again")
        for row in rows:
            times = f"{row.step_s:>6.2f}  {row.foretold_s:>8.2f}  {row.off:>+5.1%}"
            print(f"{row.cell:<13}  {times}  {row.sent_mb:>9.2f}  {row.foretold_mb:>8.2f}  {row.bytes_off:>+5.1%}  {row.resent:>9.1%}")
    why = missed(rows)
    for reason in why:
        print(reason, file=sys.stderr)
    return 1 if why else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cell", action="append", choices=[cell.name for cell in CELLS], help="only these; all where none is given")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="steps of a cell that count (default 5)")
    parser.add_argument("--stretch", type=float, default=1.0, metavar="TIMES", help="let links and computing take so many times as long")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    given = parser.parse_args()
    if given.steps < 1 or not 0.1 <= given.stretch <= 100:
        parser.error("--steps must be at least 1, and --stretch 0.1 to 100")
    require_root()
    cells = [cell.stretched(given.stretch) for cell in CELLS if not given.cell or cell.name in given.cell]
    return report([try_cell(cell, given.steps) for cell in cells], given.stretch, given.json)


if __name__ == "__main__":
    sys.exit(run(main))

"""The cost of the table to a peer, by the number of peers: simulated swarms of any size, and real daemons on this machine.

The simulation uses the daemon's own rules for exchanging news (policy/swarm/spreading.py). The costs of a record and of a call are
measured here, the call without p2pd. The baseline sends every record to every peer once a period, which is the minimum for knowing all
peers. The real daemons are idle; their and p2pd's processor time is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import operator
import random
import secrets
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.cli.demo_daemons import DemoSwarm
from peerd.generated import swarm_pb2, swarm_pb2_grpc
from peerd.policy.swarm.spreading import TAG_BYTES
from peerd.swarm.identity import Identity
from peerd.swarm.membership import Membership
from peerd.swarm.signed import SignedRecord, sign_record
from peerd.table.record import AverageId, Lineage, PeerRecord, Phase, RunId
from peerd.wire import convert
from scripts.benchmarks._gossip import GossipScenario, GossipSimulation
from scripts.benchmarks._report import Row, print_json, print_table, progress, run
from scripts.benchmarks._usage import tiny_plan, wait_until_idle, watch

RUN = RunId("a" * 32)
MICROBATCHES, OWN_MICROBATCHES, GROUP_SIZE = 4096, 14, 32
"""Of 300 peers of a stage each computes 14 microbatches of a step of 4,096. Here they lie apart, as where trainers choose who gets them."""
SAMPLE = 500
CALLS = 300
CALL_BYTES = 250
"""Overhead of a call and its answer: HTTP/2 headers and framing, and libp2p's."""
RECORD_FRAMING_BYTES = 8
IDLE_S = 30.0
MOST_KB, MOST_SHARE = 20.0, 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    record_bytes: int
    record_s: float
    """Processor time to accept a record that is news."""
    call_s: float
    """Processor time to ask once and to answer once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    peers: int
    known: int
    announces_every_s: float
    kb_per_s: float
    """Mean per peer, sent and received together: each byte counts at both peers."""
    core_share: float
    delay_s: float
    """Median and 99th percentile, from an announcement until a peer has it."""
    delay_p99_s: float
    too_late: int
    whole_s: float | None
    """Median time from the last gradient of a step until a peer of the first stage knew all ledgers; None: no step ended."""
    whole_last_s: float | None
    """That of the peer that knew it last."""
    telling_all_kb_per_s: float


def measure_units(in_groups: bool = False) -> Units:
    """`in_groups`: each peer holds the sum of its group, and not its own ledger alone."""
    identities = [Identity(Ed25519PrivateKey.from_private_bytes(secrets.token_bytes(32))) for _ in range(SAMPLE)]
    draw = random.Random(0)
    ledgers = [sum(1 << index for index in draw.sample(range(MICROBATCHES), OWN_MICROBATCHES)) for _ in range(GROUP_SIZE)]
    records = [_typical(identity, ledgers[number % GROUP_SIZE]) for number, identity in enumerate(identities)]
    if in_groups:
        done = functools.reduce(operator.or_, ledgers)
        records = [replace(record, done=done, own_done=record.done, group=AverageId(bytes(16)), sections=1) for record in records]
    signed = [sign_record(record, identity, RUN) for record, identity in zip(records, identities, strict=True)]
    membership = Membership(identities[0], RUN, ttl_s=15.0)
    began_s = time.process_time()
    membership.absorb([each.raw for each in signed[1:]])
    record_s = (time.process_time() - began_s) / (SAMPLE - 1)
    return Units(record_bytes=len(signed[0].body) + len(signed[0].signature), record_s=record_s, call_s=asyncio.run(_time_calls(signed)))


def _typical(identity: Identity, done: int) -> PeerRecord:
    """A peer with a public and a private address and this ledger."""
    address = f"/tcp/31330/p2p/{identity.peer}"
    return PeerRecord(
        peer=identity.peer,
        incarnation=1,
        version=1000,
        addresses=(f"/ip4/84.120.33.200{address}", f"/ip4/192.168.178.20{address}"),
        stage=7,
        step=1200,
        phase=Phase.ACCUMULATING,
        done=done,
        lineage=Lineage(0, bytes(16)),
        trains=True,
        throughput=12.5,
        tokens=123_456_789,
        last_loss=3.21,
        software="0.1.0",
        device="NVIDIA GeForce RTX 3090",
        memory_bytes=24 << 30,
    )


async def _time_calls(signed: list[SignedRecord]) -> float:
    """Processor time at both ends of a request for news and its empty answer."""

    async def answer(request: swarm_pb2.GossipRequest, _context: Any) -> swarm_pb2.GossipReply:
        convert.tags_from(request.known)
        return swarm_pb2.GossipReply()

    handler = grpc.unary_unary_rpc_method_handler(
        answer, request_deserializer=swarm_pb2.GossipRequest.FromString, response_serializer=swarm_pb2.GossipReply.SerializeToString
    )

    known = convert.tags_to(each.signature[:TAG_BYTES] for each in signed[:100])
    with tempfile.TemporaryDirectory() as folder:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("peerd.Swarm", {"Gossip": handler}),))
        server.add_insecure_port(f"unix:{folder}/s")
        await server.start()
        async with grpc.aio.insecure_channel(f"unix:{folder}/s") as channel:
            stub: Any = swarm_pb2_grpc.SwarmStub(channel)
            for _ in range(10):
                await stub.Gossip(swarm_pb2.GossipRequest(run=RUN, want_news=True, known=known))
            began_s = time.process_time()
            for _ in range(CALLS):
                await stub.Gossip(swarm_pb2.GossipRequest(run=RUN, want_news=True, known=known))
            spent_s = time.process_time() - began_s
        await server.stop(0)
    return spent_s / CALLS


def simulate(scenario: GossipScenario, seconds: float, units: Units) -> Line:
    cost = GossipSimulation(scenario).run(seconds)
    per_s = 1 / (cost.seconds * cost.peers)
    calls = cost.asked + cost.told
    carried = cost.records * (units.record_bytes + RECORD_FRAMING_BYTES) + cost.tags * TAG_BYTES + calls * CALL_BYTES
    delays_s = sorted(cost.delays_s)
    return Line(
        peers=scenario.num_peers,
        known=cost.known,
        announces_every_s=cost.periods * scenario.period_s,
        kb_per_s=2 * carried * per_s / 1000,
        core_share=(cost.risen * units.record_s + calls * units.call_s) * per_s,
        delay_s=delays_s[len(delays_s) // 2],
        delay_p99_s=delays_s[len(delays_s) * 99 // 100],
        too_late=cost.too_late,
        whole_s=statistics.median(cost.whole_s) if cost.whole_s else None,
        whole_last_s=max(cost.whole_s, default=None),
        telling_all_kb_per_s=2 * scenario.num_peers * units.record_bytes / scenario.period_s / 1000,
    )


def print_lines(lines: list[Line], units: Units) -> None:
    print(f"a record has {units.record_bytes} bytes and takes {units.record_s * 1e6:.0f} us; a call {units.call_s * 1e6:.0f} us, both ends")
    head = f"{'peers':>6} {'known':>6} {'every':>7} {'KB/s':>7} {'core':>7} {'delay':>7} {'p99':>7} {'late':>5}"
    print(f"{head} {'whole':>12} {'telling all, KB/s':>18}")
    for line in lines:
        whole = f"{line.whole_s:.0f} to {line.whole_last_s:.0f} s" if line.whole_s is not None else "-"
        print(
            f"{line.peers:>6} {line.known:>6} {line.announces_every_s:>5.0f} s {line.kb_per_s:>7.2f} {100 * line.core_share:>5.2f} %"
            f" {line.delay_s:>5.1f} s {line.delay_p99_s:>5.1f} s {line.too_late:>5} {whole:>12} {line.telling_all_kb_per_s:>18.0f}"
        )


def rows_of(lines: list[Line]) -> list[Row]:
    rows = []
    for line in lines:
        baseline = f"{line.peers} peers, each told all"
        rows.append(
            Row(name=f"{line.peers} peers", median=line.kb_per_s, ratio=line.telling_all_kb_per_s / line.kb_per_s, baseline=baseline)
        )
        rows.append(Row(name=baseline, median=line.telling_all_kb_per_s))
    return rows


def real_daemons(how_many: int, turn_s: float, turns: int) -> list[Row]:
    """The costs of idle daemons: percent of a core of the median daemon and the busiest one, and of p2pd."""
    with DemoSwarm(tiny_plan(how_many, 4, 5.0), lambda _text: None) as swarm:
        swarm.start()
        loss = wait_until_idle(swarm)
        found = watch(swarm, turn_s, turns)
    shares = [100 * each.daemon_share for each in found]
    return [
        Row(name=f"{how_many} daemons, % of a core each", median=statistics.median(shares), loss=loss),
        Row(name="the busiest of them", median=max(shares), loss=loss),
        Row(name="their p2pds, % of a core each", median=statistics.median(100 * each.p2pd_share for each in found), loss=loss),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench scale", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument(
        "--peers", type=int, nargs="*", default=[100, 1000, 10_000], metavar="N", help="swarms to simulate (default 100 1000 10000)"
    )
    parser.add_argument("--stages", type=int, default=32, metavar="N", help="stages of those (default 32)")
    parser.add_argument("--step", type=float, default=0.0, metavar="S", help="they finish a step in so many seconds (default 0: idle)")
    parser.add_argument(
        "--groups", action="store_true", help=f"their records tell the sums of groups of {GROUP_SIZE} (default: own ledgers)"
    )
    parser.add_argument("--waits", type=float, default=0.0, metavar="S", help="nobody averages in so many seconds after the last gradient")
    parser.add_argument(
        "--middle",
        type=int,
        default=0,
        metavar="N",
        help="simulate all peers of so many stages in the middle (5 are enough) and of the others the speakers, and measure the one in the"
        " middle: in large swarms many times sooner (default 0: all peers of all stages)",
    )
    parser.add_argument("--seconds", type=float, metavar="S", help="simulated seconds after a warm-up of 15 (default: a step; 30 if idle)")
    parser.add_argument("--daemons", type=int, default=0, metavar="N", help="so many real daemons in four stages, too (default 0: none)")
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="turns in which those are watched (default 5)")
    parser.add_argument("--turn", type=float, default=10.0, metavar="S", help="seconds of a turn (default 10)")
    given = parser.parse_args()
    seconds = given.seconds if given.seconds is not None else given.step + given.waits if given.step else IDLE_S
    if min(given.stages, given.turns, *given.peers) < 1 or min(seconds, given.turn) <= 0 or (given.daemons and given.daemons < 4):
        parser.error("sizes and times must be positive, and --daemons at least 4")
    lines, real = [], []
    units = measure_units(given.groups)
    for num_peers in given.peers:
        progress(f"simulating {num_peers} peers")
        scenario = GossipScenario(
            num_peers=num_peers,
            num_stages=given.stages,
            step_s=given.step,
            waits_s=given.waits,
            in_groups=given.groups,
            num_whole=given.middle,
        )
        lines.append(simulate(scenario, seconds, units))
    real = real_daemons(given.daemons, given.turn, given.turns) if given.daemons else []
    if given.json:
        print_json([*rows_of(lines), *real], units=asdict(units), simulated=[asdict(line) for line in lines])
    else:
        print_lines(lines, units)
        if real:
            print_table(f"{given.daemons} idle daemons; medians of {given.turns} turns of {given.turn:g} s", "", real)
    dear = [line for line in lines if line.kb_per_s > MOST_KB or line.core_share > MOST_SHARE or line.too_late]
    return 1 if dear or (real and real[0].median > 100 * MOST_SHARE) else 0


if __name__ == "__main__":
    sys.exit(run(main))

"""Links and peers that change in the middle of a run: what the run loses. Needs root (network namespaces).

nat-rebind      the router of a peer that nobody can dial forgets all its flows, and gives those that go on new ports
address-change  a peer's address is taken away, and it gets another one, as with a new lease or a change from Wi-Fi to mobile
slow-join       a peer joins and downloads a stage of 20 MB; all links have 20 Mbit/s and 40 ms
busy-uplink     the kernel (tc) slows a peer's uplink, on which tensors wait, to 20 Mbit/s for a while; peerd knows of no cap, and nobody
                may suspect a peer for it

Two stages of --mates peers, on links of 100 Mbit/s and 10 ms where nothing else is said. With one peer a stage nobody can stand in for
the one that is struck, so the run makes no step until it is back; with two the others go on. It must come back by itself, and all steps
equal the reference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from peerd.config.manifest import ModelConfig
from scripts.benchmarks._disturbed import NUM_STAGES, TINY, Disturbed, Outcome, run_of
from scripts.benchmarks._swarms import nothing
from scripts.benchmarks._switch import Links

SLOW = Links(mbit_per_s=20, round_trip_ms=40)
LARGER = ModelConfig(num_layers=2 * NUM_STAGES, d_model=192, num_heads=2, d_ff=768)
"""1.2 million parameters for each stage: a state of 20 MB."""
MOST_PAUSE_S = 15.0
"""Measured with one peer a stage: 2 s without a step after an address change (6 beside other load), 7 s after a router forgot its flows,
6 s (a step) on a slow uplink. Without what peerd does about it an address change took 40 s, until the keepalives had failed, and behind a
router that forgot its flows no step was made in the 20 s that were watched.
"""
LEAST_AFTERWARDS = 0.7


class Changed(Disturbed):
    """A run in which something happens to one peer."""

    @property
    def victim(self) -> int:
        return self.mates * NUM_STAGES - 1 + self.more_machines

    def done(self) -> int:
        """Microbatches that the peer has done."""
        return self.swarm.daemons[self.victim].done[1]

    def judged(self, seconds: float, disturb: Callable[[], None], mend: Callable[[], None] = nothing) -> tuple[Outcome, list[str]]:
        """Return what happened, and what did not hold."""
        done: list[int] = []

        def mends() -> None:
            done.append(self.done())
            mend()

        found = self.run(seconds, disturb, mends)
        missed = found.missed
        if found.longest_s > MOST_PAUSE_S:
            missed.append(f"{found.name}: no step for {found.longest_s:.1f} s, not {MOST_PAUSE_S:g}")
        if found.afterwards < LEAST_AFTERWARDS * found.before:
            missed.append(f"{found.name}: {found.afterwards / found.before:.2f} of the speed before, not {LEAST_AFTERWARDS}")
        if self.done() <= done[0]:
            missed.append(f"{found.name}: the peer does no work afterwards")
        return found, missed


def nat_rebind(name: str, mates: int, seconds: float) -> tuple[Outcome, list[str]]:
    run = Changed(name=name, mates=mates, behind_routers=(NUM_STAGES * mates - 1,), host="0.0.0.0", settings={"relay": True})  # noqa: S104

    def is_relayed() -> bool:
        status = run.swarm.daemons[run.victim].status
        return status is not None and status["reach"]["state"] == "relayed"

    def disturb() -> None:
        run.until(is_relayed, "a relay serves the peer behind the router")
        run.network.rebind(run.victim)

    return run.judged(seconds, disturb)


def address_change(name: str, mates: int, seconds: float) -> tuple[Outcome, list[str]]:
    run = Changed(name=name, mates=mates, host="0.0.0.0")  # noqa: S104 - its address changes
    return run.judged(seconds, lambda: run.network.readdress(run.victim))


def slow_join(name: str, mates: int, seconds: float) -> tuple[Outcome, list[str]]:
    run = Changed(name=name, mates=mates, manifest=run_of(LARGER), stand_in_ms=150.0, links=SLOW, more_machines=1)

    def join() -> None:
        ready = run.swarm.daemons[0].ready
        assert ready is not None
        run.swarm.spawn_another(0, ready.join)

    return run.judged(seconds, join)


def busy_uplink(name: str, mates: int, seconds: float) -> tuple[Outcome, list[str]]:
    run = Changed(name=name, mates=mates, manifest=run_of(TINY, microbatch_size=128))

    def uplink(mbit_per_s: float) -> Callable[[], None]:
        return lambda: run.network.slow_down(run.victim, mbit_per_s)

    found, missed = run.judged(seconds, uplink(SLOW.mbit_per_s), uplink(run.links.mbit_per_s))
    if found.suspicions:
        missed.append(f"{found.name}: {found.suspicions} suspicions of peers that live")
    return found, missed


KINDS = {"nat-rebind": nat_rebind, "address-change": address_change, "slow-join": slow_join, "busy-uplink": busy_uplink}


def changed(kind: str, arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"scripts/bench chaos {kind}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mates", type=int, choices=(1, 2), nargs="+", default=[1, 2], help="peers a stage, a run each (default 1 2)")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="how long the run is watched afterwards (default 60)")
    given = parser.parse_args(arguments)
    problems = []
    for mates in given.mates:
        found, missed = KINDS[kind](f"{kind}, {mates} a stage", mates, given.seconds)
        found.print()
        problems += missed
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0

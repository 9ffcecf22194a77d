"""Texts that the swarm goes on with while it trains: what they cost training, and how fast their tokens come.

`--part cost`: two stages of two peers train in one swarm. In every other stretch of a few steps somebody chats without a pause; each
ratio is of one with the chat and of one without it. `--part far` (needs root): four stages that train, with 50 ms between any two machines.
The most that can be had is one token in the sum of the round trips to the stages that are elsewhere and of what the passes compute.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from peerd.config.manifest import ComputeConfig, DataConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from peerd.control.asking import ask_swarm
from peerd.control.client import ControlClient
from peerd.errors import PeerdError
from scripts.benchmarks._namespaces import Network, require_root
from scripts.benchmarks._report import Row, paired_interval, paired_ratio, print_json, print_table, progress, run
from scripts.benchmarks._switch import Links
from scripts.benchmarks._turns import Peers, Step, place_in

PROMPT = "def "
FEW, MANY = 2, 4
"""Stages of the two parts."""
ROUND_TRIP_MS, MBIT_PER_S = 50.0, 50.0
CHATTING, ALONE = "somebody chats", "nobody chats"
LEAST_SPEED = 0.97
LEAST_SHARE = 0.8
POLL_S = 0.2


def manifest(num_stages: int, *, width: int, steps: int) -> Manifest:
    """`steps`: how often the parameters that texts go on with are kept."""
    return Manifest(
        name="bench",
        model=ModelConfig(num_layers=num_stages, d_model=width, num_heads=4, d_ff=4 * width, vocab_size=256),
        data=DataConfig(evaluation_fraction=0.05),
        train=TrainConfig(
            num_stages=num_stages,
            microbatches_per_step=16,
            microbatch_size=4,
            sequence_length=128,
            learning_rate=3e-4,
            evaluate_every_steps=steps,
            evaluation_microbatches=1,
        ),
        compute=ComputeConfig(threads=1, recompute="never"),
        swarm=SwarmConfig(announce_period_s=5.0, checkpoint_every_steps=0, rebalance_period_s=0),
    )


class AskedPeers(Peers):
    """Peers that can be asked for texts."""

    @property
    def clients(self) -> list[ControlClient]:
        return [daemon.client for daemon in self._swarm.daemons]

    def busy_s(self) -> float:
        """Seconds that all of them have computed texts."""
        return math.fsum(client.request("status")["texts"]["busy_s"] for client in self.clients)


class Chat:
    """Somebody who asks without a pause, while `going` is set."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self.going, self._stopped = threading.Event(), threading.Event()
        self.tokens = self.failed = 0

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            self.going.set()
            thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.going.wait()
            try:
                ask_swarm(self._client, lambda _token, _text: self._count(), prompt=PROMPT, max_tokens=100)
            except _PauseError:
                continue
            except PeerdError as error:
                self.failed += 1
                progress(f"no answer: {error.message}")

    def _count(self) -> None:
        self.tokens += 1
        if not self.going.is_set() or self._stopped.is_set():
            raise _PauseError


class _PauseError(Exception):
    """The chat pauses in the middle of an answer."""


def until_steps(peers: Peers, count: int) -> Sequence[Step]:
    while len(steps := peers.steps()) < count:
        time.sleep(POLL_S)
    return steps


def measure_cost(given: argparse.Namespace) -> tuple[list[Row], Chat]:
    """Time per step with and without a chat, in turns."""
    seconds: dict[str, list[float]] = {CHATTING: [], ALONE: []}
    peers = AskedPeers(manifest(FEW, width=given.width, steps=10), per_stage=2)
    with peers:
        peers.start()
        until_steps(peers, given.warmup)
        chat = Chat(peers.clients[0])
        with chat.on():
            for number in range(2 * given.rounds):
                name = (CHATTING, ALONE)[(number + number // 2) % 2]
                (chat.going.set if name is CHATTING else chat.going.clear)()
                begun = len(peers.steps())
                steps = until_steps(peers, begun + 1 + given.steps)  # the step under way is of both kinds
                took_s = (steps[begun + given.steps].time_s - steps[begun].time_s) / given.steps
                seconds[name].append(took_s)
                progress(f"{name}: {took_s:.3f} s a step; {chat.tokens} tokens so far")
    rows = [Row(name=ALONE, median=statistics.median(seconds[ALONE]))]
    pairs = seconds[ALONE], seconds[CHATTING]
    median = statistics.median(seconds[CHATTING])
    rows.append(Row(name=CHATTING, median=median, ratio=paired_ratio(*pairs), interval=paired_interval(*pairs), baseline=ALONE))
    return rows, chat


def measure_far(given: argparse.Namespace) -> list[Row]:
    """Seconds a token over far stages, beside the least that there can be."""
    links, found, least = Links(mbit_per_s=MBIT_PER_S, round_trip_ms=ROUND_TRIP_MS), list[float](), list[float]()
    with Network(MANY, links) as network:
        peers = AskedPeers(manifest(MANY, width=given.width, steps=1000), place=place_in(network))
        with peers:
            peers.start()
            until_steps(peers, given.warmup)
            for _ in range(given.rounds):
                busy_s = peers.busy_s()
                found.append(token_s(peers.clients[0], given.tokens))
                least.append((MANY - 1) * ROUND_TRIP_MS / 1000 + (peers.busy_s() - busy_s) / given.tokens)
                progress(f"{found[-1]:.3f} s a token; least {least[-1]:.3f}")
    bound, ratio, interval = "round trips and passes", paired_ratio(least, found), paired_interval(least, found)
    ours = Row(name="a token", median=statistics.median(found), ratio=ratio, interval=interval, baseline=bound)
    return [Row(name=bound, median=statistics.median(least)), ours]


def token_s(client: ControlClient, count: int) -> float:
    """Seconds between two tokens of a text, but for the first."""
    times_s = list[float]()
    ask_swarm(client, lambda _token, _text: times_s.append(time.monotonic()), prompt=PROMPT, max_tokens=count)
    return (times_s[-1] - times_s[0]) / (len(times_s) - 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench texts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--part", choices=("cost", "far"), default="cost")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="stretches of each kind, or texts (default 8)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="steps of a stretch (default 4)")
    parser.add_argument("--warmup", type=int, default=4, metavar="N", help="steps before those (default 4)")
    parser.add_argument("--tokens", type=int, default=40, metavar="N", help="tokens of a text (default 40)")
    parser.add_argument("--width", type=int, default=128, metavar="N", help="of the model (default 128)")
    given = parser.parse_args()
    if min(given.rounds, given.steps, given.warmup, given.tokens - 1, given.width) < 1:
        parser.error("all numbers must be at least 1, and --tokens 2")
    if given.part == "far":
        require_root()
        rows, least = measure_far(given), LEAST_SHARE
        told, unit, more = f"{MANY} stages, {ROUND_TRIP_MS:g} ms between any two, while they train", "s a token", {}
    else:
        rows, chat = measure_cost(given)
        told, unit, least = f"{FEW} stages of 2 peers", "s a step", LEAST_SPEED
        more = {"tokens": chat.tokens, "failed": chat.failed}
    if given.json:
        print_json(rows, **more)
    else:
        print_table(told, unit, rows)
        print(", ".join(f"{count} {name}" for name, count in more.items()))
    ratio = rows[-1].ratio
    return 0 if ratio is not None and ratio >= least else 1


if __name__ == "__main__":
    sys.exit(run(main))

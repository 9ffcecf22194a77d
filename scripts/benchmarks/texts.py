"""Texts that the swarm goes on with while it trains: what they cost training, and how fast their tokens come.

`--part cost`: two stages of two peers train. In every other stretch of some steps somebody asks without a pause; each ratio is of the
speeds of training with that and without it. Nobody saves up time for texts in the other stretches, and what was saved up before is used up
in the first steps, which do not count. `--part far` (needs root): four stages train, with 50 ms between any two machines. The most
that can be had without guesses is one token in the sum of the round trips to the stages that are elsewhere and of what the passes compute;
a way through all stages that takes right guesses along gives more. The text is of the step after the first ones (`--warmup`), where a
model repeats itself: the likeliest token is easy to guess. With `--temperature` fewer guesses are right.
A stand-in sleeps in place of a microbatch's computing, so that daemons of one machine do not take each other's cores. Texts are computed.
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
from dataclasses import dataclass

from peerd.cli.ask import hop_line
from peerd.config.manifest import ComputeConfig, DataConfig, Manifest, ModelConfig, SwarmConfig, TrainConfig
from peerd.control.asking import ask_swarm
from peerd.control.client import ControlClient
from peerd.control.texts import TextHop, TextReply
from peerd.errors import PeerdError, TimedOutError
from peerd.policy.owner.governor import INFERENCE_SHARE
from scripts.benchmarks._namespaces import Network, require_root
from scripts.benchmarks._report import Row, paired_interval, paired_ratio, print_json, print_table, progress, run
from scripts.benchmarks._switch import Links
from scripts.benchmarks._turns import Peers, Step, place_in

PROMPT = "def "
FEW, MANY = 2, 4
"""Stages of the two parts."""
ROUND_TRIP_MS, MBIT_PER_S = 50.0, 50.0
CHATTING, ALONE = "somebody asks", "nobody asks"
LEAST_SPEED = 0.97
LEAST_SHARE = 0.8
TOKENS = 100
"""Of each answer in the part `cost`."""
POLL_S = 0.2
SILENCE_S = 300.0


def manifest(num_stages: int, width: int, evaluate_every_steps: int, steps: int = 0) -> Manifest:
    """Texts go on with the parameters of the last evaluated step. steps: 0: without end."""
    return Manifest(
        name="bench",
        model=ModelConfig(num_layers=num_stages, d_model=width, num_heads=4, d_ff=4 * width, vocab_size=256),
        data=DataConfig(evaluation_fraction=0.05),
        train=TrainConfig(
            num_stages=num_stages,
            steps=steps,
            microbatches_per_step=16,
            microbatch_size=1,
            sequence_length=128,
            evaluate_every_steps=evaluate_every_steps,
            evaluation_microbatches=1,
        ),
        compute=ComputeConfig(threads=1, recompute="never"),
        swarm=SwarmConfig(announce_period_s=5.0, checkpoint_every_steps=0, rebalance_period_s=0),
    )


class AskedPeers(Peers):
    """Peers that can be asked for texts."""

    def total(self, name: str) -> float:
        """A count of what all of them have computed for texts, as `status` tells it."""
        return math.fsum(client.request("status")["texts"][name] for client in self.clients)

    def allow(self, share: float) -> None:
        """Set the share of the time for which training waits for texts."""
        for client in self.clients:
            client.request("limits", change={"inference": share})

    def after(self, count: int) -> Sequence[Step]:
        """The finished steps, once there are so many."""
        began = time.monotonic()
        while len(steps := self.steps()) < count:
            if time.monotonic() - began > SILENCE_S:
                raise TimedOutError(f"not {count} steps within {SILENCE_S:.0f} s")
            time.sleep(POLL_S)
        return steps


class _PauseError(Exception):
    """Nobody asks any more, in the middle of an answer."""


class Asking:
    """Somebody who asks without a pause, between `go_on` and `pause`."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._going, self._resting = threading.Event(), threading.Event()
        self._stopped = False
        self.tokens = self.failed = 0

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped = True
            self._going.set()
            thread.join()

    def go_on(self) -> None:
        self._resting.clear()
        self._going.set()

    def pause(self) -> None:
        """Return once nothing is asked: the answer under way ends at its next token."""
        self._going.clear()
        if not self._resting.wait(SILENCE_S):
            raise TimedOutError(f"no token within {SILENCE_S:.0f} s")

    def _run(self) -> None:
        while True:
            if not self._going.is_set():
                self._resting.set()
            self._going.wait()
            if self._stopped:
                return
            try:
                ask_swarm(self._client, lambda _token, _text: self._count(), prompt=PROMPT, max_tokens=TOKENS)
            except _PauseError:
                continue
            except PeerdError as error:
                self.failed += 1
                progress(f"no answer: {error.message}")

    def _count(self) -> None:
        self.tokens += 1
        if self._stopped or not self._going.is_set():
            raise _PauseError


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    title: str
    unit: str
    rows: Sequence[Row]
    least: float
    """The ratio of the last row should be no less."""
    figures: dict[str, float]


def measure_cost(given: argparse.Namespace) -> Found:
    """Time per step while somebody asks and while nobody does, in turns."""
    seconds: dict[str, list[float]] = {CHATTING: [], ALONE: []}
    peers, asked_s = AskedPeers(manifest(FEW, given.width, 10), per_stage=2, stand_in_ms=given.stand_in or 100.0), 0.0
    with peers:
        peers.start()
        peers.after(1)
        asking = Asking(peers.clients[0])
        with asking.on():
            asking.go_on()
            peers.after(given.warmup or 30)
            before = asking.tokens, peers.total("held_up_s"), peers.total("busy_s")
            for number in range(2 * given.rounds):
                name = (CHATTING, ALONE)[(number + number // 2) % 2]
                if name is CHATTING:
                    peers.allow(INFERENCE_SHARE)
                    asking.go_on()
                else:
                    asking.pause()
                    peers.allow(0.0)
                begun = len(peers.steps())
                steps = peers.after(begun + 1 + given.steps)  # the step under way is of both kinds
                took_s = steps[begun + given.steps].time_s - steps[begun].time_s
                asked_s += took_s * (1 + 1 / given.steps) if name is CHATTING else 0.0
                seconds[name].append(took_s / given.steps)
                progress(f"{name}: {seconds[name][-1]:.3f} s a step; {asking.tokens} tokens so far")
        tokens, waited_s, busy_s = asking.tokens - before[0], peers.total("held_up_s") - before[1], peers.total("busy_s") - before[2]
        figures = {"tokens": tokens, "tokens_per_s": tokens / asked_s, "failed": asking.failed}
        figures |= {"training_waited_s": waited_s, "computed_s": busy_s, "asked_s": asked_s}
    pairs, medians = (seconds[ALONE], seconds[CHATTING]), {name: statistics.median(each) for name, each in seconds.items()}
    asked = Row(name=CHATTING, median=medians[CHATTING], ratio=paired_ratio(*pairs), interval=paired_interval(*pairs), baseline=ALONE)
    title = f"{FEW} stages of 2 peers that have work all the time"
    return Found(title=title, unit="s a step", rows=[Row(name=ALONE, median=medians[ALONE]), asked], least=LEAST_SPEED, figures=figures)


def measure_far(given: argparse.Namespace) -> Found:
    """Seconds a way through far stages and seconds a token, beside the least that a way can take."""
    ways, tokens, least, hops = list[float](), list[float](), list[float](), list[TextHop]()
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(MANY, Links(mbit_per_s=MBIT_PER_S, round_trip_ms=ROUND_TRIP_MS)))
        warmup = given.warmup or 20
        made = manifest(MANY, given.width, warmup, steps=warmup if given.at_rest else 0)
        peers = AskedPeers(made, stand_in_ms=given.stand_in or 20.0, place=place_in(network))
        stack.enter_context(peers)
        peers.start()
        peers.after(warmup if given.at_rest else warmup + 1)  # the evaluated step is kept from its end on
        for _ in range(given.rounds):
            busy_s = peers.total("busy_s")
            way_s, reply = one_text(peers.clients[0], given.tokens, given.temperature)
            ways.append(way_s)
            tokens.append(way_s * reply["ways"] / reply["tokens"])
            least.append((MANY - 1) * ROUND_TRIP_MS / 1000 + (peers.total("busy_s") - busy_s) / reply["ways"])
            hops += reply["hops"]
            progress(f"{ways[-1]:.3f} s a way, at least {least[-1]:.3f}; {tokens[-1]:.3f} s a token")
            progress("".join(f"  stage {stage}: {hop_line(hop)}\n" for stage, hop in enumerate(reply["hops"])).rstrip())
        figures = {"steps": float(len(peers.steps())), "tokens_a_way": statistics.median(ways) / statistics.median(tokens)}
    away = [hop for number, hop in enumerate(hops) if number % MANY]
    calls = sum(hop["calls"] for hop in away)
    figures["took_s_a_call"] = math.fsum(hop["took_s"] for hop in away) / calls
    figures["waited_s_a_call"] = math.fsum(hop["waited_s"] for hop in away) / calls
    figures["computed_s_a_call"] = math.fsum(hop["computed_s"] for hop in away) / calls
    bound = "round trips and passes"
    rows = [Row(name=bound, median=statistics.median(least)), _row("a way", least, ways, bound), _row("a token", least, tokens, bound)]
    title = f"{MANY} stages, {ROUND_TRIP_MS:g} ms between any two, {'after' if given.at_rest else 'while'} they train"
    return Found(title=title, unit="s", rows=rows, least=LEAST_SHARE, figures=figures)


def _row(name: str, least: list[float], found: list[float], bound: str) -> Row:
    ratio, interval = paired_ratio(least, found), paired_interval(least, found)
    return Row(name=name, median=statistics.median(found), ratio=ratio, interval=interval, baseline=bound)


def one_text(client: ControlClient, count: int, temperature: float) -> tuple[float, TextReply]:
    """Seconds a way through the stages, and the answer; the first way, which computes the prompt, does not count."""
    times_s = list[float]()
    asked = {"prompt": PROMPT, "max_tokens": count, "temperature": temperature}
    reply = ask_swarm(client, lambda _token, _text: times_s.append(time.monotonic()), **asked)
    return (times_s[-1] - times_s[0]) / (reply["ways"] - 1), reply


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench texts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--part", choices=("cost", "far"), default="cost")
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="stretches of each kind, or texts (default 6)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps of a stretch (default 10)")
    parser.add_argument("--warmup", type=int, default=0, metavar="N", help="steps before those (default 30 for cost, 20 for far)")
    parser.add_argument("--tokens", type=int, default=40, metavar="N", help="tokens of a text of the part far (default 40)")
    parser.add_argument("--width", type=int, default=128, metavar="N", help="of the model (default 128)")
    parser.add_argument("--stand-in", type=float, default=0.0, metavar="MS", help="of a microbatch (default 100 for cost, 20 for far)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="far: of the draws (default 0: the likeliest token)")
    parser.add_argument("--at-rest", action="store_true", help="far: ask once the run is over, so that nothing else is computed")
    given = parser.parse_args()
    if min(given.rounds, given.steps, given.tokens - 1, given.width) < 1:
        parser.error("all numbers must be at least 1, and --tokens 2")
    if given.part == "far":
        require_root()
    found = measure_far(given) if given.part == "far" else measure_cost(given)
    if given.json:
        print_json(found.rows, **found.figures)
    else:
        print_table(found.title, found.unit, found.rows)
        print(", ".join(f"{name.replace('_', ' ')} {figure:.3g}" for name, figure in found.figures.items()))
    ratio = found.rows[-1].ratio
    return 0 if ratio is not None and ratio >= found.least else 1


if __name__ == "__main__":
    sys.exit(run(main))

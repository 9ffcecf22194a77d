"""A record of what `peerd status` says at each daemon of a swarm, several times a second, and the sentences in it that are not so.

What is so is taken from the processes and from what each daemon says of itself alone. A daemon hears of others by gossip: a sentence about
others is untrue only if it was so at no look within the time that this may take.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from peerd.cli.render_short import print_short
from peerd.control.client import ControlClient
from peerd.control.protocol import PeersReply, StatusReply
from peerd.errors import PeerdError
from tests.beside import beside
from tests.swarm.daemons import Daemon, Swarm

LOOK_EVERY_S = 0.5
ENDS_WITHIN_S = 2.0
"""A daemon that is killed closes its socket some time before its process is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What one daemon said at one look, and what was so there. Without an answer `text` is the error."""

    text: str
    answers: bool = True
    paused: bool | None = False
    """Whether its owner has paused it; None: the word is under way."""
    stage: int = 0
    serves: bool = True
    trains: bool = True
    step: int = 0


@dataclass(frozen=True, slots=True)
class Look:
    time_s: float
    said: dict[str, Said]
    """By the daemon's name, of all that live."""


@dataclass
class Record:
    """Looks at all living daemons of a swarm while the block goes on."""

    swarm: Swarm
    looks: list[Look] = field(default_factory=list)
    pauses: dict[str, bool | None] = field(default_factory=dict)
    """By home: what the owner has said; None while it is under way."""

    def going_on(self) -> contextlib.AbstractContextManager[None]:
        return beside(self._look_on)

    def pause(self, daemon: Daemon, yes: bool) -> None:
        home = daemon.settings.home
        self.pauses[home] = None
        daemon.request("pause" if yes else "resume", silence_s=60.0)
        self.pauses[home] = yes

    def _look_on(self, ended: threading.Event) -> None:
        while not ended.wait(LOOK_EVERY_S):
            daemons = {f"{daemon.home.folder.name}/{daemon.process.pid}": daemon for daemon in self.swarm.living}
            said = {name: self._ask(daemon) for name, daemon in daemons.items()}
            self.looks.append(Look(time.monotonic(), {name: told for name, told in said.items() if told is not None}))

    def _ask(self, daemon: Daemon) -> Said | None:
        home = daemon.settings.home
        was_ready, paused, client = daemon.was_ready, self.pauses.get(home, False), ControlClient(daemon.home)
        try:
            status = cast(StatusReply, client.request("status"))
            table = cast(PeersReply, client.request("peers"))
        except PeerdError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.process.wait(ENDS_WITHIN_S)
            return Said(text=str(error), answers=False, serves=False) if was_ready and daemon.process.returncode is None else None
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            print_short(status, table)
        peer, resting = status["peer"], status["owner"]["resting"]
        return Said(
            text=" ".join(text.getvalue().split()),
            paused=paused if paused == self.pauses.get(home, False) else None,
            stage=peer["stage"],
            serves=peer["phase"] != "joining" and not resting,
            trains=peer["trains"],
            step=peer["step"],
        )


def untrue(looks: Sequence[Look], *, num_stages: int, steps: int, hears_s: float) -> list[str]:
    """Each sentence that was not so, with the time and the daemon. Word of others takes `hears_s` at most."""
    found = list[str]()
    for number, look in enumerate(looks):
        window = [each for each in looks[: number + 1] if look.time_s - each.time_s <= hears_s]
        for name, said in look.said.items():
            wrong = [*_wrong_of_itself(said, steps), *(_wrong_of_others(said, window, num_stages) if said.answers else [])]
            found += [f"{look.time_s - looks[0].time_s:.1f} s, {name}: {sentence}; it said: {said.text[:400]}" for sentence in wrong]
    return found


def _wrong_of_itself(said: Said, steps: int) -> Iterator[str]:
    if not said.answers:
        yield "it runs and does not answer"
        return
    now = _between(said.text, "now", "run")
    if said.paused is True and not now.startswith("paused: its owner paused it"):
        yield "its owner has paused it"
    if said.paused is False and now.startswith(("paused", "pausing")):
        yield "its owner has not paused it"
    if said.paused is True and re.search(r"\bleft you gave|you serve|loss", said.text):
        yield "a paused peer knows nothing new of the run"
    if "you serve" in said.text and not said.serves and said.paused is False:
        yield "it serves nothing yet"
    if ("the run is complete after" in said.text) != (0 < steps <= said.step and said.paused is False):
        yield f"it is at step {said.step} of {steps}"


def _wrong_of_others(said: Said, window: Sequence[Look], num_stages: int) -> Iterator[str]:
    """`window`: the looks of which word may not have come yet, the last of them now."""
    present = [[each for each in look.said.values() if each.answers] for look in window]
    served = [{each.stage for each in those if each.serves} for those in present]
    for stage in _empty_stages(said.text):
        if all(stage in stages for stages in served):
            yield f"stage {stage} was served all the time"
    if re.search(r"no peer (in sight )?has the run's data", said.text) and all(any(e.trains and e.serves for e in p) for p in present):
        yield "a peer with the data was there all the time"
    if "now working" in said.text and not any(len(stages) == num_stages for stages in served):
        yield "some stage had no peer, so nothing was worked on"
    if counted := re.search(r"peers (\d+) peers? in", said.text):
        names = [{name for name, each in look.said.items() if each.paused is False} for look in window]
        fewest, most = len(set.intersection(*names)), len(set.union(*(set(look.said) for look in window)))
        if not fewest <= int(counted[1]) <= most:
            yield f"there were {fewest} to {most} peers"
    steps = [each.step for those in present for each in those if each.serves]
    told = re.search(r": step ([\d,]+)", said.text)
    if told and steps and not min(steps) <= int(told[1].replace(",", "")) <= max(steps):
        yield f"the peers were at steps {min(steps)} to {max(steps)}"
    could_step = {len(stages) == num_stages for stages in served}  # both where it has just gone on
    if " left you gave" in said.text and len(window) > 1 and len(could_step) == 1 and len(set(steps)) < 2:
        yield "the run stood still all the time"


def _empty_stages(text: str) -> list[int]:
    found = re.findall(r"(?:nobody|no peer in sight) serves stages? ([\d, ]+)", text)
    return [int(number) for numbers in found for number in re.findall(r"\d+", numbers)]


def _between(text: str, first: str, last: str) -> str:
    """What the row named `first` says; `last` is the name of the next one."""
    return text.partition(f"{first} ")[2].partition(f" {last} ")[0]

"""The short form of `peerd status`: about six lines that need no knowledge of peerd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from peerd.cli.render import (
    amount,
    console,
    counted,
    duration,
    local_batch_at,
    loss_text,
    name_of,
    pause_line,
    plain,
    print_health,
    print_rows,
)
from peerd.cli.render_status import computing_row
from peerd.control.protocol import PeersReply, StatusReply
from peerd.control.states import PAUSED, state_of

Device = tuple[str, StatusReply | None]
"""A device's name and what its daemon says; None: it does not answer."""


def print_short(reply: Mapping[str, Any], swarm: PeersReply | None) -> None:
    """Print the status of this home's daemon, or of all its devices. `swarm` is the reply of `peers`; None: it is not known."""
    devices = devices_of(reply)
    answering = [status for _, status in devices if status is not None]
    several = len(devices) > 1
    out = console()
    now = [(device if several else "now", "does not answer" if status is None else now_line(status)) for device, status in devices]
    first = answering[0]
    rows = [*now, ("run", run_line(first, swarm)), ("you gave", gave_line(answering)), *_peers_rows(answering, swarm)]
    dashboard = f", or open {plain(first['dashboard'])}" if first.get("dashboard") else ""
    print_rows(out, [*rows, ("more", f"peerd status --long, peerd top{dashboard}")])
    for device, status in devices:
        if status is not None:
            told = [item for item in status["health"] if item["code"] != PAUSED]  # the first line says that already
            print_health(out, told, f"{device}: " if several else "")
    # One line without breaks, so that it can be copied.
    out.print(Text(f"others join with: peerd join {plain(first['join'], 400)}"), soft_wrap=True)


def devices_of(reply: Mapping[str, Any]) -> list[Device]:
    """The devices in a reply as `status_of_all` gives it. A daemon that is alone has no name."""
    if "devices" in reply:
        return [(each["device"], each["status"]) for each in reply["devices"]]
    return [("", reply)]  # type: ignore[list-item]  # without devices it is a StatusReply


def now_line(status: StatusReply) -> str:
    """What a daemon does now: why it pauses, when it will serve, or its last decision."""
    joining, peer = status.get("joining"), status["peer"]
    if pause := pause_line(status["owner"]):
        return pause
    if joining and joining["plan"]:
        return f"joining stage {peer['stage']}: {plain(joining['plan'], 300)}"
    if peer["leaving"] and peer["phase"] != "joining":  # else it has left, and takes a stage again
        return f"finishing what it holds, then it leaves stage {peer['stage']}"
    texts = status.get("texts")
    answers = ["answers those who ask the model"] if texts and texts["answering"] else []
    return "; ".join([plain(status["decision"]), *(f"computes {text}" for _, text in computing_row(status)), *answers])


def run_line(status: StatusReply, swarm: PeersReply | None) -> str:
    """The run's name and how far it is; with its loss, and the time left at the pace of its last steps, where this daemon knows them."""
    run, peer = status["run"], status["peer"]
    name, end = plain(run["name"], 64), f" of {run['steps']:,}" if run["steps"] else ""
    if status["owner"]["resting"]:
        return f"{name}: this peer paused at step {peer['step']:,}{end}"
    step = peer["step"] if peer["phase"] != "joining" else swarm["work_step"] if swarm else None
    if step is None:  # a joiner's own step is not the run's
        return f"{name}: how far it is shows once this peer has caught up"
    last_loss = peer["last_loss"] if peer["last_loss"] is not None or swarm is None else swarm["last_loss"]
    loss = loss_text(local_batch_at(run, step) > 0, last_loss, status.get("evaluation"))
    left_s = seconds_left(run["steps"] - step, run["tokens_per_step"], swarm["tokens_per_second"]) if swarm and _moves(status, swarm) else 0
    left = f", about {duration(left_s)} left" if left_s else ""
    return f"{name}: step {step:,}{end}, loss {loss}{left}"


def _moves(status: StatusReply, swarm: PeersReply) -> bool:
    """Whether the run makes steps, as far as this daemon knows."""
    stands = {"cut-off", "stage-empty", "no-trainer", "stalled", "diverged"} & {item["code"] for item in status["health"]}
    return not stands and swarm["work_step"] is not None


def seconds_left(steps: int, tokens_per_step: int, tokens_per_second: float) -> float:
    """How long so many steps take at this pace; 0: none are left, or the pace is not known."""
    return steps * tokens_per_step / tokens_per_second if steps > 0 and tokens_per_second > 0 else 0.0


def gave_line(found: Sequence[StatusReply]) -> str:
    """What the daemons of this home have computed and moved since they started."""
    done = sum(status["counters"]["accumulated_microbatches"] for status in found)
    sent, received = (sum(status["counters"][name] for status in found) for name in ("bytes_sent", "bytes_received"))
    up_s = max(status["uptime_s"] for status in found)
    name = name_of(found[0]["peer"])
    known = f", as {name}" if name else ""
    return f"{counted(done, 'microbatch', 'microbatches')} in {duration(up_s)}{known}; {amount(sent)}B sent, {amount(received)}B received"


def _peers_rows(found: Sequence[StatusReply], swarm: PeersReply | None) -> list[tuple[str, str]]:
    """A row about who takes part, as this home's daemon sees it, and which stages these daemons serve."""
    if swarm is None or swarm.get("outdated"):
        return []
    stages = [(stage["stage"], max(stage.get("num_peers", 0), len(stage["peers"]))) for stage in swarm["stages"]]
    states = Counter(state_of(peer) for stage in swarm["stages"] for peer in stage["peers"])
    apart = [f"{states[state]} {state}" for state in (PAUSED, "pausing", "leaving", "suspect") if states[state]]
    total = sum(number for _, number in stages)
    told = f"{counted(total, 'peer')} in {counted(len(stages), 'stage')}" + (f" ({', '.join(apart)})" if apart else "")
    mine = sorted({status["peer"]["stage"] for status in found})
    serves = f"; you serve stage{'s' * (len(mine) > 1)} {', '.join(map(str, mine))}"
    resting = all(status["owner"]["resting"] or status.get("joining") or status["peer"]["phase"] == "joining" for status in found)
    return [("peers", told + ("" if resting else serves))]

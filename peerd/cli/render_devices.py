"""Text output of the status of several devices' daemons: what they have in common, and a line for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any

from rich.text import Text

from peerd.cli.calling import pasteable
from peerd.cli.render import (
    amount,
    console,
    duration,
    exactness,
    held_by,
    line_in_words,
    local_batch_at,
    loss_rows,
    pause_line,
    phase_of,
    plain,
    print_health,
    print_rows,
    short_id,
)
from peerd.control.protocol import StatusReply


def print_devices(reply: Mapping[str, Any]) -> None:
    """Print the status of all devices, as `status_of_all` gives it."""
    found = [(each["device"], each["status"]) for each in reply["devices"] if each["status"] is not None]
    run, first = reply["run"], found[0][1]
    out = console()
    rows = [
        ("run", f"{plain(run['name'])} ({plain(run['id'])})"),
        *loss_rows(local_batch_at(run, reply["peer"]["step"]) > 0, reply["peer"]["last_loss"], first.get("evaluation")),
        *[(each["device"], _device_line(each)) for each in reply["devices"]],
        *_totals([status for _, status in found]),
        ("limits", pause_line(first["owner"]) or "work is allowed (`peerd limits`)"),
    ]
    print_rows(out, rows)
    for device, status in found:
        print_health(out, status["health"], f"{device}: ")
    alone = f"one device alone: peerd --home {quote(plain(reply['devices'][1]['home'], 400))} status"
    out.print(Text(pasteable(alone)), soft_wrap=True)
    out.print(Text(f"others join with: peerd join {plain(reply['join'], 400)}"), soft_wrap=True)


def _device_line(each: Mapping[str, Any]) -> str:
    """What the daemon of one device does, or why it says nothing."""
    status = each["status"]
    if status is None:
        return f"does not answer: {plain(each['error'])}"
    peer, run = status["peer"], status["run"]
    pause = pause_line(status["owner"])
    does = "paused" if pause and status["owner"]["resting"] else "pausing" if pause else phase_of(peer)
    work = f"{does} at step {peer['step']}, holds {held_by(peer)} of {run['microbatches_per_step']}"
    memory = f", {amount(status['memory']['held'])}B held of {amount(status['memory']['total'])}B" if "memory" in status else ""
    place = f"stage {peer['stage']} on {plain(peer['device'], 40)}"
    return f"{short_id(peer['id'])}, {place}, {work}, {amount(peer['throughput'])} samples/s{memory}, up {duration(status['uptime_s'])}"


def _totals(found: Sequence[StatusReply]) -> list[tuple[str, str]]:
    """Numbers of all daemons together."""
    names = ("accumulated_microbatches", "replayed_microbatches", "bytes_sent", "bytes_received")
    done, again, sent, received = (sum(int(dict(status["counters"])[name]) for status in found) for name in names)  # type: ignore[call-overload]
    exact = ("duplicate_microbatches", "lost_microbatches", "inexact_steps")
    counters = {name: sum(int(dict(status["counters"])[name]) for status in found) for name in exact}  # type: ignore[call-overload]
    up, down = sum(status["peer"].get("up", 0) for status in found), sum(status["peer"].get("down", 0) for status in found)
    line = [("line", f"{line_in_words(up, down)} together, as measured")] if up or down else []
    return [
        ("microbatches", f"{done} done, {again} launched again"),
        ("exactness", exactness(counters)),
        ("traffic", f"{amount(sent)}B sent, {amount(received)}B received"),
        *line,
    ]

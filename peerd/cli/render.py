"""Text output of replies, for a terminal of 80 columns. Text that a peer wrote is printed without its control characters."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from peerd import peer_names
from peerd.cli.calling import pasteable
from peerd.cli.options import USUAL_NICE
from peerd.control.protocol import AccessInfo, Counters, EvaluationInfo, HealthItem, PathInfo, PeerInfo, PeersReply, RunInfo, StageInfo
from peerd.control.states import state_of

WIDTH = 80
_SPARKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_UNITS = ("", "K", "M", "G", "T", "P")
_MARKS = {"*": "* means to stay", "+": "+ relays for others", "~": "~ behind a relay", "!": "! cannot be dialled"}
AT_WORK_FROM_S = 10.0
"""A peer that holds microbatches and has added none for this long is shown at work, with the time: else it would seem to stand still."""
_SEVERITY_STYLE = {"problem": "red", "warning": "yellow", "info": "dim"}


def console(*, to_stderr: bool = False) -> Console:
    """A console with the terminal's width, or 80 columns if the output is not a terminal."""
    stream = sys.stderr if to_stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else WIDTH, highlight=False, markup=False, emoji=False)


def plain(text: object, limit: int = 200) -> str:
    """Text from a peer, made safe to print."""
    return "".join(character if character.isprintable() else "?" for character in str(text)[:limit])


def short_id(peer: str) -> str:
    """The abbreviation of a peer id, safe to print."""
    return peer_names.short_id(plain(peer))


def name_of(peer: PeerInfo) -> str:
    """What a peer calls itself, safe to print; empty if it has told no name."""
    told = (peer.get("nickname", ""), peer.get("team", ""))  # absent from older daemons
    return peer_names.known_as(*(plain(name, peer_names.MAX_NAME_CHARACTERS) for name in told))


def amount(value: float) -> str:
    """A number in few digits: 999, 12.3K, 4.56M."""
    step = 0
    while abs(value) >= 999.5 and step < len(_UNITS) - 1:
        value /= 1000
        step += 1
    if step == 0:
        if 1e-4 <= abs(value) < 0.095:
            return f"{value:.2g}"
        return f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.1f}"
    return f"{value:.3g}{_UNITS[step]}"


def duration(seconds: float) -> str:
    """A time span in its two largest units."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def counted(number: int, one: str, several: str = "") -> str:
    """A number with its noun: `1 peer`, `2 peers`. `several` is a plural that is not formed by an s."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def sparkline(values: list[float], width: int = 30) -> str:
    """A series of values as one line of blocks. Longer series are thinned out."""
    if len(values) > width:
        values = [values[index * (len(values) - 1) // (width - 1)] for index in range(width)]
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0  # the quotient of two numbers however small is at most 1, and their scale may be infinite
    return "".join(_SPARKS[round((value - low) / span * (len(_SPARKS) - 1))] for value in values)


def phase_of(peer: PeerInfo) -> str:
    """The phase of a peer, or a state that matters more; or for how long it has worked at one microbatch."""
    if state := state_of(peer):
        return state
    still_s = peer.get("still_s", 0.0)  # absent from older daemons
    if peer["phase"] == "accumulating" and peer["queue"] and still_s >= AT_WORK_FROM_S:
        return f"works {duration(still_s)}"
    return plain(peer["phase"], 12)


def held_by(peer: PeerInfo, shown: Callable[[int], str] = str) -> str:
    """Number of microbatches that a peer holds of its step, and after a plus sign of the next one."""
    early = peer.get("next_done", 0)  # absent from older daemons
    return f"{shown(peer['done'])}+{shown(early)}" if early else shown(peer["done"])


def exactness(counters: Mapping[str, object]) -> str:
    """The three counters that stay 0 while every step equals that of a single machine."""
    twice, lost, inexact = (counters[name] for name in ("duplicate_microbatches", "lost_microbatches", "inexact_steps"))
    return f"{twice} counted twice, {lost} lost, {inexact} steps inexact"


def print_health(out: Console, items: Sequence[HealthItem], before: str = "") -> None:
    """Print a line for each condition, with `before` in front."""
    for item in items:
        remedy = f"; {pasteable(plain(item['remedy']))}" if item["remedy"] else ""
        text = f"{before}{plain(item['severity'])}: {plain(item['title'])}{remedy}"
        out.print(Text(text, style=_SEVERITY_STYLE.get(item["severity"], "")))


def print_rows(out: Console, rows: list[tuple[str, str]]) -> None:
    """Print names and values in two columns. Long values are wrapped within their column."""
    indent = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        first, *more = textwrap.wrap(pasteable(value), out.width - indent) or [""]
        out.print(Text.assemble((name.ljust(indent), "bold"), first))
        for line in more:
            out.print(Text(" " * indent + line))


def print_limits(reply: Mapping[str, Any]) -> None:
    """Print the owner's limits, for `peerd limits`."""
    limits, used = reply["limits"], f"{amount(reply['today'])}B today, {amount(reply['this_month'])}B this month"
    rows = [
        ("upload", _rate(limits["upload"])),
        ("download", _rate(limits["download"])),
        ("daily", _size(limits["daily"])),
        ("monthly", _size(limits["monthly"])),
        ("data used", used),
        ("memory", _size(limits["memory"])),
        ("disk", _size(limits["disk"])),
        ("duty", f"{limits['duty']:.0%} of the time"),
        ("inference", _inference(limits["inference"])),
        ("power", f"{limits['power']:g} W on average" if limits["power"] else "no limit"),
        ("priority", _priority(reply["nice"]) if "nice" in reply else f"{_priority(USUAL_NICE)}, once it is started"),
        ("hours", limits["hours"] or "all day"),
        ("max temperature", f"{limits['max_temperature']:g} degrees" if limits["max_temperature"] else "no limit"),
        ("while used", _run_or_pause(limits["while_used"])),
        ("on battery", _run_or_pause(limits["on_battery"])),
        ("metered", _run_or_pause(limits["on_metered"])),
        ("now", pause_line(reply) or "works"),
    ]
    print_rows(console(), rows)


def pause_line(owner: Mapping[str, Any]) -> str:
    """Reason and end of a pause; empty if the peer works."""
    if not owner["paused"]:
        return ""
    what = "paused" if owner["resting"] else "pausing, finishing what it holds"
    until = f"; it goes on {plain(owner['until'])}" if owner["until"] else ""
    return f"{what}: {plain(owner['paused'])}{until}"


def _rate(bytes_per_s: float) -> str:
    return f"{amount(8 * bytes_per_s)}bit/s" if bytes_per_s else "no limit"


def _size(num_bytes: int) -> str:
    return f"{amount(num_bytes)}B" if num_bytes else "no limit"


def _inference(share: float) -> str:
    return f"training waits up to {100 * share:.3g}% of the time for those who ask" if share else "answers nobody who asks the model"


def _priority(nice: int) -> str:
    return (
        f"nice {nice}, so that other programs go first" if nice > 0 else f"nice {nice}, as most programs" if nice == 0 else f"nice {nice}"
    )


def _run_or_pause(run: bool) -> str:
    return "run" if run else "pause"


def mbit(rate: float) -> str:
    """Bytes per second as Mbit/s in few digits; a dash if unknown."""
    megabits = 8e-6 * rate
    return f"{megabits:.2g}" if 0 < megabits < 99.5 else amount(round(megabits)) if rate else "-"


def line_of(peer: PeerInfo) -> str:
    """Up and down of a peer's line in Mbit/s; empty if nothing is known of either."""
    up, down = peer.get("up", 0), peer.get("down", 0)  # absent from older daemons
    return f"{mbit(up)}/{mbit(down)}" if up or down else ""


def line_in_words(up: float, down: float) -> str:
    """What a line carries, each way in the unit that suits it; `up` and `down` in bytes per second. Empty if nothing is known of either."""
    ways = [
        f"{mbit(rate)} Mbit/s {way}" if 8e-6 * rate < 999.5 else f"{amount(8e-9 * rate)} Gbit/s {way}"
        for rate, way in ((up, "up"), (down, "down"))
        if rate
    ]
    return ", ".join(ways)


def connections_of(path: PathInfo) -> str:
    """The number of connections that a direct path has, and what is lost on it, after a comma; empty for other paths."""
    number, resent = path.get("connections", 0), path.get("resent")
    lost = f"; {100 * resent:.1f} % of the segments to it were sent again" if resent is not None else ""
    return f", {number} connection{'s' * (number > 1)}{lost}" if number else ""


def lossy_paths(rows: Iterable[tuple[str, PathInfo]]) -> list[str]:
    """A line for each path that has several connections because packets are lost on it. `rows`: each with its peer's id."""
    return [f"to {short_id(peer)}{connections_of(path)}" for peer, path in rows if path.get("connections", 0) > 1]


def round_trip_of(peer: PeerInfo) -> str:
    """The round trip to a peer in milliseconds, in three characters, from a second on in seconds; empty if nothing is known."""
    milliseconds = 1e3 * (peer.get("round_trip_s") or 0.0)  # absent from older daemons
    if milliseconds >= 999.5:
        return f"{milliseconds / 1e3:.0f}s"
    return f"{milliseconds:.1f}" if 0 < milliseconds < 9.95 else f"{milliseconds:.0f}" if milliseconds else ""


def print_peers(reply: PeersReply) -> None:
    """Print the whole swarm."""
    out = console()
    if reply.get("outdated"):
        out.print(Text("this peer is paused, and hears nothing of the swarm: what follows is what it knew before", style="yellow"))
    out.print(Text(swarm_line(reply)))
    out.print(swarm_table(reply))
    if names := [f"{short_id(peer['id'])} {name}" for stage in reply["stages"] for peer in stage["peers"] if (name := name_of(peer))]:
        out.print(Text(f"names: {', '.join(names)}"))
    legend = [text for mark, text in _MARKS.items() if any(_mark(peer) == mark for stage in reply["stages"] for peer in stage["peers"])]
    if any(line_of(peer) for stage in reply["stages"] for peer in stage["peers"]):
        legend.append("up/dn in Mbit/s")
    if any(round_trip_of(peer) for stage in reply["stages"] for peer in stage["peers"]):
        legend.append("ms: round trip from here")
    if legend:
        out.print(Text(", ".join(legend), style="dim"))
    for line in lossy_paths((peer["id"], peer) for stage in reply["stages"] for peer in stage["peers"]):
        out.print(Text(line, style="dim"))
    print_banned(out, reply.get("access"))
    print_standing(out, reply)
    for stage in reply["stages"]:
        kinds = sorted({plain(peer["device"], 40) for peer in stage["peers"] if peer["device"]})
        if len(kinds) > 1:
            drift = max(peer.get("drift", 0.0) for peer in stage["peers"])
            apart = f"; parameters were up to {drift:.1e} off their mean when last averaged" if drift else ""
            out.print(Text(f"stage {stage['stage']} computes on unlike devices: {', '.join(kinds)}{apart}", style="dim"))


def print_banned(out: Console, access: AccessInfo | None) -> None:
    """A line for each peer that the organiser has banned."""
    for item in access["banned"] if access else ():
        reason = f": {plain(item['reason'])}" if item["reason"] else ""
        out.print(Text(f"banned by the organiser: {plain(item['peer'])}{reason}", style="dim"))


def print_standing(out: Console, reply: PeersReply) -> None:
    """A line for each peer that audits have cost its standing, and one that names mates whose word does not count yet."""
    found = reply.get("audits")
    if not found:
        return
    for peer in found["lost"]:
        out.print(Text(f"lost its standing by audits: {plain(peer)}", style="dim"))
    here = next((stage["peers"] for stage in reply["stages"] if set(found["standing"]) & {peer["id"] for peer in stage["peers"]}), [])
    if fresh := [short_id(plain(peer["id"])) for peer in here if peer["id"] not in found["standing"]]:
        out.print(Text(f"newcomers, of whose work audits look at a quarter: {', '.join(fresh)}", style="dim"))


def swarm_line(reply: PeersReply) -> str:
    """The swarm in one line."""
    run = reply["run"]
    step = "-" if reply["work_step"] is None else f"{reply['work_step']:,}"
    end = f" of {run['steps']:,}" if run["steps"] else ""
    loss = loss_text(local_batch_at(run, reply["work_step"]) > 0, reply["last_loss"], reply.get("evaluation"))
    return f"{plain(run['name'], 30)}: step {step}{end}, loss {loss}, {amount(reply['tokens_per_second'])} tokens/s"


def loss_text(is_local: bool, last_loss: float | None, evaluation: EvaluationInfo | None) -> str:
    """The loss in words. Where steps are local a step's is that of each peer's own parameters, and an evaluation's that of the average."""
    of_step, of_average = "-" if last_loss is None else f"{last_loss:.4f}", "-" if evaluation is None else f"{evaluation['loss']:.4f}"
    if is_local:
        return f"{of_average} averaged, {of_step} within steps"
    return of_step if evaluation is None else f"{of_step} (evaluation {of_average})"


def local_batch_at(run: RunInfo, step: int | None) -> int:
    """Microbatches behind each of a peer's own updates within this step; 0: the step is not local."""
    return run.get("local_batch", 0) if (step or 0) >= run.get("local_steps_after", 0) else 0


def own_updates(counters: Counters, local_batch: int) -> str:
    """What a peer has done to its own parameters within steps."""
    return f"{counters.get('own_updates', 0)} updates of its own, after {local_batch} microbatches each; a step averages them"


def loss_rows(is_local: bool, last_loss: float | None, evaluation: EvaluationInfo | None) -> list[tuple[str, str]]:
    """The same in rows, for `peerd status`."""
    of_step = "-" if last_loss is None else f"{last_loss:.4f}"
    of_average = f"{evaluation['loss']:.4f} at step {evaluation['step']}" if evaluation else ""
    if is_local:
        within = ("within steps", f"loss {of_step}, of each peer's own parameters")
        return [("loss", f"{of_average or '-'}, of the averaged parameters"), within]
    return [("loss", of_step), *([("evaluation", f"loss {of_average}")] if of_average else [])]


def swarm_table(reply: PeersReply, labels: Mapping[str, str] | None = None) -> Table:
    """A table of stages and their peers. `labels` are short names of peers, by id."""
    shows_path = any("path" in peer for stage in reply["stages"] for peer in stage["peers"])  # a visitor sends no tensors, so it has none
    shows_line = any(line_of(peer) for stage in reply["stages"] for peer in stage["peers"])
    shows_ms = any(round_trip_of(peer) for stage in reply["stages"] for peer in stage["peers"])
    table = empty_table(0 if shows_path or shows_line or shows_ms else 1)
    more = [*["ms"] * shows_ms, *["path"] * shows_path, "up/dn" if shows_line else "device"]  # 80 columns have room for one of the two
    speed = "smpl/s" if shows_path and shows_line else "samples/s"
    missing = "miss" if shows_ms and shows_path and shows_line else "missing"
    for heading in ("stage", missing, "peer", "step", "phase", "holds", "queue", speed, *more):
        justify: Literal["left", "right"] = "left" if heading in ("peer", "phase", "device", "path") else "right"
        table.add_column(heading, justify=justify, no_wrap=True, min_width={"step": 5, "phase": 12}.get(heading))
    for stage in reply["stages"]:
        _add_stage(table, stage, labels or {}, shows=(shows_ms, shows_path, shows_line))
    return table


def empty_table(gap: int) -> Table:
    """A table without rows, with `gap` columns of space between cells."""
    return Table(box=SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False)


def _mark(peer: PeerInfo) -> str:
    """A mark for a peer that relays, is behind a relay, cannot be dialled, or means to stay."""
    if peer.get("relays"):
        return "+"
    hidden = {"relayed": "~", "client": "!"}.get(peer.get("reach", ""), "")
    return hidden or ("*" if peer.get("stays_hours") else "")


def _add_stage(table: Table, stage: StageInfo, labels: Mapping[str, str], shows: tuple[bool, bool, bool]) -> None:
    """`shows`: whether there are columns for round trip, path and line."""
    shows_ms, shows_path, shows_line = shows
    number, missing = str(stage["stage"]), str(stage["missing"])
    if not stage["peers"]:
        table.add_row(number, missing, Text("nobody", style="red"))
    for row, peer in enumerate(stage["peers"]):
        table.add_row(
            number if row == 0 else "",
            missing if row == 0 else "",
            labels.get(peer["id"], short_id(peer["id"])) + _mark(peer),
            str(peer["step"]) if peer["step"] < 100_000 else amount(peer["step"]),
            Text(phase_of(peer), style="yellow" if state_of(peer) or peer["phase"] == "unaveraged" else ""),
            held_by(peer),
            str(peer["queue"]),
            amount(peer["throughput"]),
            *[round_trip_of(peer)] * shows_ms,
            *[plain(peer.get("path", ""), 6)] * shows_path,
            line_of(peer) if shows_line else plain(peer["device"], 6),
        )
    unknown = stage.get("num_peers", 0) - len(stage["peers"])
    if unknown > 0:
        table.add_row("", "", Text(f"and {amount(unknown)} more", style="dim"))

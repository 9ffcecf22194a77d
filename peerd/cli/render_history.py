"""Text output of steps, events and contributions, for a terminal of 80 columns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from peerd.cli.render import amount, console, empty_table, plain, short_id, sparkline
from peerd.control.protocol import ContributionsReply, EvaluationInfo, EventInfo, HistoryReply, StepInfo
from peerd.peer_names import MAX_NAME_CHARACTERS, known_as

DAY_S = 86400.0
SHOWN_CONTRIBUTORS = 30
SHOWN_EVENTS = 200
SHOWN_NAME = 16
NOT_NAMED = "(not named)"
_STYLES = {"suspect": "yellow", "gone": "red", "banned": "red", "raised": "yellow", "unaveraged": "yellow", "cleared": "green"}


@dataclass(frozen=True, slots=True)
class Share:
    """The contribution of one peer to the run, all stages together."""

    peer: str
    tokens: int
    microbatches: int
    steps: int
    stages: tuple[int, ...]
    own_word: bool
    """No other peer has a count of it."""
    part: float
    """Share of all counted tokens."""
    signed: int = 0
    """Tokens that members of its stages have signed."""
    week: int = 0
    """Of these those of the last week."""


def print_history(reply: HistoryReply, *, most_steps: int | None, with_events: bool) -> None:
    out = console()
    steps = reply["steps"]
    if not steps:
        out.print(Text("no step is finished yet"))
    else:
        losses = [step["loss"] for step in steps]
        first, last = steps[0], steps[-1]
        out.print(Text(f"steps {first['step']} to {last['step']}, loss {losses[0]:.4f} to {losses[-1]:.4f}  {sparkline(losses)}"))
        out.print(_steps_table(steps if most_steps is None else steps[-most_steps:], steps))
    if reply.get("evaluations"):
        _print_evaluations(out, reply["evaluations"], most_steps)
    if with_events:
        _print_events(out, reply["events"], reply.get("names", {}))


def _steps_table(shown: list[StepInfo], steps: list[StepInfo]) -> Table:
    shown_norms = [norm_of(step) for step in shown] if any(norm_of(step) for step in steps) else []
    columns = ("step", "loss", "tokens", "rate", *(["norm"] if shown_norms else []), "took", "finished")
    table = _table(columns, right=len(columns) - 1)
    before = {step["step"] + 1: step["time_s"] for step in steps}
    for place, step in enumerate(shown):
        began_s = before.get(step["step"], 0.0)
        took = f"{step['time_s'] - began_s:.1f}s" if began_s and step["time_s"] >= began_s else "-"
        rate = f"{step['learning_rate']:.2e}" if "learning_rate" in step else "-"
        norms = [shown_norms[place] or "-"] if shown_norms else []
        table.add_row(str(step["step"]), f"{step['loss']:.4f}", amount(step["tokens"]), rate, *norms, took, when(step["time_s"]))
    return table


def norm_of(step: StepInfo) -> str:
    """The gradient norm before clipping; empty if unknown."""
    norm = step.get("gradient_norm")
    if step.get("overflowed"):
        return "overflow"
    return "" if norm is None else f"{norm:.3g}"


def _print_evaluations(out: Console, evaluations: list[EvaluationInfo], most: int | None) -> None:
    losses = [each["loss"] for each in evaluations]
    out.print(Text(f"evaluation loss {losses[0]:.4f} to {losses[-1]:.4f}  {sparkline(losses)}"))
    table = _table(("step", "evaluation loss"), right=2)
    for each in evaluations if most is None else evaluations[-most:]:
        table.add_row(str(each["step"]), f"{each['loss']:.4f}")
    out.print(table)


def _print_events(out: Console, events: list[EventInfo], told: Mapping[str, str]) -> None:
    """`told`: what peers call themselves, as the daemon says it."""
    names = {peer: plain(name, 2 * MAX_NAME_CHARACTERS) for peer, name in told.items()}
    table = _table(("when", "what", "peer", "stage", ""), right=0)
    for event in events[-SHOWN_EVENTS:]:
        stage = "" if event["stage"] is None else str(event["stage"])
        kind = plain(event["kind"], 12)
        peer = f"{short_id(event['peer'])} {_short(names.get(event['peer'], ''))}".strip() if event["peer"] else "this daemon"
        table.add_row(when(event["time_s"]), Text(kind, style=_STYLES.get(kind, "")), peer, stage, plain(event["text"]))
    out.print(table if events else Text("no events yet"))


def when(time_s: float) -> str:
    """The time of day, or date and time for older times; a dash if unknown, as for steps before this daemon joined."""
    if not time_s:
        return "-"
    local = time.localtime(time_s)
    return time.strftime("%H:%M:%S" if time.time() - time_s < DAY_S / 2 else "%Y-%m-%d %H:%M", local)


def print_contributions(reply: ContributionsReply) -> None:
    out = console()
    shares = shares_of(reply)
    if not shares:
        out.print(Text("nothing is counted yet: the first average is still to come"))
        return
    table = _table(("peer", "tokens", "share", "this week", "signed", "averages", "stages"), right=6, first_right=1)
    for share in shares[:SHOWN_CONTRIBUTORS]:
        name = (
            (short_id(share.peer) if share.peer else NOT_NAMED)
            + (" (you)" if share.peer == reply["me"] else "")
            + (" *" if share.own_word else "")
        )
        name += f" {_short(known)}" if (known := _name_in(reply, share.peer)) else ""
        stages = ",".join(map(str, share.stages))
        week, signed = (amount(tokens) if share.signed else "-" for tokens in (share.week, share.signed))
        table.add_row(name, amount(share.tokens), f"{share.part:.1%}", week, signed, amount(share.steps), stages)
    out.print(table)
    if len(shares) > SHOWN_CONTRIBUTORS:
        out.print(Text(f"and {len(shares) - SHOWN_CONTRIBUTORS} more (--json has all)"))
    for team, part in teams_of(reply, shares)[:SHOWN_CONTRIBUTORS]:
        out.print(Text(f"team {team}: {part:.1%}"))
    for line in coverage(reply):
        out.print(Text(line))
    if any(share.own_word for share in shares):
        out.print(Text("* self-reported; not yet confirmed by other peers"))


def _name_in(reply: ContributionsReply, peer: str) -> str:
    """What a peer calls itself; empty if it has told no name, or is not there."""
    told = (reply.get("names", {}).get(peer, ""), reply.get("teams", {}).get(peer, ""))  # absent from older daemons
    return known_as(*(plain(name, MAX_NAME_CHARACTERS) for name in told))


def _short(name: str) -> str:
    return name if len(name) <= SHOWN_NAME else name[: SHOWN_NAME - 1] + "\u2026"


def teams_of(reply: ContributionsReply, shares: Sequence[Share]) -> list[tuple[str, float]]:
    """The share of each team's present peers in all counted tokens, the largest first."""
    parts: dict[str, float] = {}
    for share in shares:
        if team := plain(reply.get("teams", {}).get(share.peer, ""), MAX_NAME_CHARACTERS):
            parts[team] = parts.get(team, 0.0) + share.part
    return sorted(parts.items(), key=lambda each: (-each[1], each[0]))


def shares_of(reply: ContributionsReply) -> list[Share]:
    """The contribution of each peer, the largest first."""
    rows: dict[str, list[tuple[int, int, int, int, bool, int, int]]] = {}
    for stage in reply["stages"]:
        for row in stage["peers"]:
            own_word = row["reporter"] == row["peer"] not in (reply["me"], "") and not row.get("signed_tokens")
            signed = row.get("signed_tokens", 0), row.get("week_tokens", 0)
            rows.setdefault(row["peer"], []).append((stage["stage"], row["tokens"], row["microbatches"], row["steps"], own_word, *signed))
    total = sum(tokens for each in rows.values() for _, tokens, *_ in each)
    shares = [
        Share(
            peer=peer,
            tokens=(tokens := sum(row[1] for row in each)),
            microbatches=sum(row[2] for row in each),
            steps=sum(row[3] for row in each),
            stages=tuple(sorted({row[0] for row in each})),
            own_word=any(row[4] for row in each),
            part=tokens / total if total else 0.0,
            signed=sum(row[5] for row in each),
            week=sum(row[6] for row in each),
        )
        for peer, each in rows.items()
    ]
    return sorted(shares, key=lambda share: (-share.tokens, share.peer))


def coverage(reply: ContributionsReply) -> list[str]:
    """The range of steps that is counted, one line for all stages with the same range."""
    lines = []
    told = {stage["stage"] for stage in reply["stages"]}
    ranges = {(s["first_step"], s["last_step"], s["steps"]) for s in reply["stages"]}
    for first, last, steps in sorted(ranges):
        stages = [str(s["stage"]) for s in reply["stages"] if (s["first_step"], s["last_step"], s["steps"]) == (first, last, steps)]
        which = "all stages" if len(stages) == reply["num_stages"] else _stages(stages)
        lines.append(f"{which}: {steps} averages counted, of steps {first} to {last}")
    for stage in reply["stages"]:
        if (account := stage.get("account")) is not None:
            word = f"signed up to step {account['step'] - 1} by {account['signatures']} of {account['signers']} signers"
            lines.append(f"stage {stage['stage']}: {word}")
    unknown = [str(stage) for stage in range(reply["num_stages"]) if stage not in told]
    if unknown:
        lines.append(f"{_stages(unknown)}: nobody who knows could be asked")
    return lines


def _stages(stages: list[str]) -> str:
    return ("stage " if len(stages) == 1 else "stages ") + ", ".join(stages)


def shared_text(reply: ContributionsReply) -> str:
    """Text for a volunteer to paste elsewhere: own share and rank, no addresses."""
    shares = shares_of(reply)
    mine = next((share for share in shares if share.peer == reply["me"]), None)
    run = plain(reply["run"], 64)
    if mine is None:
        return f"My machine has joined the run **{run}** and will have its first share of it soon."
    rank = shares.index(mine) + 1
    stages = _stages([str(stage) for stage in mine.stages])
    others = {0: "on its own", 1: "together with 1 other"}.get(len(shares) - 1, f"together with {len(shares) - 1} others")
    lines = [
        f"My machine helps to train **{run}** {others}.",
        "",
        f"- {mine.tokens:,} tokens in {mine.microbatches:,} microbatches, {stages}",
        f"- {mine.part:.1%} of all the work that was counted (rank {rank} of {len(shares)})",
        f"- part of {mine.steps:,} averages",
        "",
        f"Counted by its peers with peerd; {'; '.join(coverage(reply))}.",
    ]
    return "\n".join(lines)


def _table(headings: tuple[str, ...], right: int, first_right: int = 0) -> Table:
    table = empty_table(1)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if first_right <= number < right else "left", no_wrap=number < len(headings) - 1)
    return table

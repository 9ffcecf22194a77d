"""Output of a trace: as a table for a terminal of 80 columns, as JSON for scripts, as a file for a viewer."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.table import Table
from rich.text import Text

from peerd.cli.render import console, empty_table, plain, short_id
from peerd.control.protocol import PeerTraceInfo, TraceReply
from peerd.timeline.chrome import chrome_trace
from peerd.timeline.critical import critical_shares
from peerd.timeline.shares import Shares, StageShares, by_stage, shares_of, window
from peerd.timeline.spans import PeerTimeline, Span, SpanKind


def timelines_of(reply: TraceReply) -> list[PeerTimeline]:
    return [
        PeerTimeline(
            peer=peer["peer"],
            stage=peer["stage"],
            spans=[_span(reply["others"], *row) for row in peer["spans"]],
            complete=peer["complete"],
            offset_s=peer["offset_ms"] / 1000,
            offset_error_s=peer["offset_error_ms"] / 1000,
        )
        for peer in reply["peers"]
    ]


def _span(others: list[str], kind: int, began_us: int, took_us: int, step: int, microbatch: int, other: int, num_bytes: int) -> Span:
    return Span(SpanKind(kind), began_us / 1e6, (began_us + took_us) / 1e6, step, microbatch, others[other], num_bytes)


def timeline_file(reply: TraceReply) -> dict[str, Any]:
    silent = [(peer["peer"], peer["stage"], peer["reason"]) for peer in reply["silent"]]
    about = {"run": reply["run"], "steps": f"{reply['first_step']} to {reply['last_step']}", "clocks": "; ".join(_clocks(reply))}
    return chrome_trace(timelines_of(reply), silent, {**about, "notes": "; ".join(_notes(reply))})


def summary(reply: TraceReply) -> dict[str, Any]:
    """Shares of the time by activity, for the critical path, each stage and each peer."""
    timelines = timelines_of(reply)
    within = window(timelines)
    return {
        "schema": reply["schema"],
        "first_step": reply["first_step"],
        "last_step": reply["last_step"],
        "wall_s": within[1] - within[0],
        "critical_path": dataclasses.asdict(critical_shares(timelines)),
        "stages": [
            {"stage": found.stage, "peers": found.num_peers, **dataclasses.asdict(found.shares)} for found in by_stage(timelines, within)
        ],
        "peers": [
            {
                **{name: value for name, value in peer.items() if name != "spans"},
                "num_spans": len(peer["spans"]),
                **dataclasses.asdict(shares_of(timeline.spans, within)),
            }
            for peer, timeline in zip(reply["peers"], timelines, strict=True)
        ],
        "silent": reply["silent"],
        "not_asked": reply["not_asked"],
    }


def print_trace(reply: TraceReply) -> None:
    out = console()
    timelines = timelines_of(reply)
    within = window(timelines)
    num_steps = reply["last_step"] - reply["first_step"] + 1
    which = f"step {reply['first_step']}" if num_steps == 1 else f"steps {reply['first_step']} to {reply['last_step']}"
    wall_s = within[1] - within[0]
    out.print(Text(f"{plain(reply['run'], 30)}: {which} in {wall_s:.2f} s ({wall_s / num_steps:.3f} s per step)"))
    out.print(_table(by_stage(timelines, within), critical_shares(timelines)))
    for line in (*_clocks(reply), *_notes(reply)):
        out.print(Text(line))


def _table(stages: list[StageShares], critical: Shares) -> Table:
    table = empty_table(2)
    table.add_column("stage", no_wrap=True)
    for heading in ("peers", "compute", "wait", "wire", "step end"):
        table.add_column(heading, justify="right", no_wrap=True)
    for found in stages:
        table.add_row(str(found.stage), str(found.num_peers), *_percents(found.shares))
    table.add_row("critical path", "", *_percents(critical))
    return table


def _percents(shares: Shares) -> list[str]:
    return [f"{part:.1%}" for part in (shares.compute, shares.wait, shares.wire, shares.step_end)]


def _clocks(reply: TraceReply) -> list[str]:
    """A line about the precision of the other peers' clocks, which are converted to the first peer's."""
    others = reply["peers"][1:]
    if not others:
        return []
    worst = max(peer["offset_error_ms"] for peer in others)
    return [f"clocks: {len(others)} other peers put on this one's, each to within {worst:.2f} ms"]


def _notes(reply: TraceReply) -> list[str]:
    """Lines about peers that are missing from the trace, in full or in part."""
    notes = [f"told nothing: {_who(peer['peer'], peer['stage'])}: {plain(peer['reason'])}" for peer in reply["silent"]]
    notes += [f"told only the end of it: {_who(peer['peer'], peer['stage'])}" for peer in _incomplete(reply)]
    if reply["not_asked"]:
        notes.append(f"not asked: {reply['not_asked']} more peers")
    return notes


def _incomplete(reply: TraceReply) -> list[PeerTraceInfo]:
    return [peer for peer in reply["peers"] if not peer["complete"]]


def _who(peer: str, stage: int) -> str:
    return f"{short_id(peer)} of stage {stage}"

"""`peerd simulate run`: what is simulated, its table, its JSON and its timeline."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from peerd import SCHEMA
from peerd.cli.new_estimate import loads_of
from peerd.cli.options import is_printed
from peerd.cli.organise import run_file_path
from peerd.cli.plan import network_of
from peerd.cli.render import amount, console, empty_table
from peerd.config import manifest
from peerd.config.manifest import Manifest
from peerd.errors import UsageError, disk_error
from peerd.planner.cutting import stage_layers
from peerd.planner.network import TYPICAL_FLOPS
from peerd.planner.run_costs import run_cost
from peerd.planner.run_plans import Planning
from peerd.sim.churn import Churn
from peerd.sim.network import Homes, Pairs, SimulatedLinks
from peerd.sim.run import simulate_run
from peerd.sim.step_run import RunResult, RunSettings, joined
from peerd.timeline.chrome import chrome_trace
from peerd.timeline.critical import critical_shares
from peerd.timeline.shares import by_stage, window

ALL = ("random", "joining", "greedy", "search")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be simulated, as the command line says it."""

    num_steps: int
    noise: float
    unreliable: float
    """The share of peers that come and go."""
    departures: float
    """The share of these that goes in each step."""
    seed: int


def run(run_file: str, network: Path | int, methods: Sequence[str], wanted: Wanted, as_json: bool, out: Path | None) -> None:
    """Simulate each method's placement and print what comes of it. `network`: its file, or how many homes are drawn."""
    described = manifest.load(run_file_path(run_file))
    period_s = described.swarm.announce_period_s
    churn = Churn(share=wanted.unreliable, rate=wanted.departures, noticed_s=period_s) if wanted.unreliable else None
    settings = RunSettings(
        num_steps=wanted.num_steps,
        slots=described.slots,
        microbatch_size=described.train.microbatch_size,
        noise=wanted.noise,
        announce_period_s=period_s,
        seed=wanted.seed,
        churn=churn,
    )
    if isinstance(network, int):
        drawn = Homes(network, TYPICAL_FLOPS, wanted.seed)
        results = [_joining(described, drawn, methods, settings, "--peers: drawn homes join one after another")]
    elif churn is not None:
        results = [_joining(described, Pairs(network_of(network)[0]), methods, settings, "--unreliable: peers that come and go join")]
    else:
        planning = Planning(described, loads_of(described), network_of(network)[0], wanted.seed)
        results = [found for method in dict.fromkeys(methods or ALL) if (found := _planned(planning, method, settings)) is not None]
    if not results:
        raise UsageError("no placement fits the devices' memory", "add devices, or cut the run into more stages")
    rows = [_row(*each) for each in results]
    if out is not None:
        _write(described, results[-1][2], out)
    if not is_printed({"schema": SCHEMA, "rows": rows}, as_json):
        _print(rows)
    if out is not None:
        click.echo(f"timeline: {out} (open it at https://ui.perfetto.dev)", err=True)


Simulated = tuple[str, float | None, RunResult]
"""A method, the tokens per second that the steady state foretells of its placement, and what the simulation says."""


def _joining(described: Manifest, links: SimulatedLinks, methods: Sequence[str], settings: RunSettings, why: str) -> Simulated:
    """Peers that join one after another. `why`: what excludes other placements, in words."""
    if set(methods) - {"joining"}:
        raise UsageError(why, "leave out --method")
    num_peers = len(links.peers)
    if num_peers < described.train.num_stages:
        raise UsageError(f"--peers {num_peers}: the run has {described.train.num_stages} stages", "give each stage a peer")
    loads = loads_of(described)
    cost = run_cost(described, loads, stage_layers(described, loads))
    unreliable = settings.churn.unreliable(num_peers, settings.seed) if settings.churn is not None else frozenset()
    if num_peers - len(unreliable) < described.train.num_stages:
        raise UsageError("each stage needs a peer that stays", "lower --unreliable, or give more peers")
    return "joining", None, simulate_run(cost, links, joined(cost, links, unreliable), settings)


def _planned(planning: Planning, method: str, settings: RunSettings) -> Simulated | None:
    found = planning.plan(method)
    if found is None:
        return None
    cost = run_cost(planning.manifest, planning.loads, found.cut)
    return method, found.state.tokens_per_s, simulate_run(cost, Pairs(planning.topology), found.members, settings)


def _row(method: str, expected: float | None, result: RunResult) -> dict[str, Any]:
    within = window(result.timelines)
    return {
        "method": method,
        "tokens_per_s": round(result.tokens_per_s, 3),
        "steady_tokens_per_s": None if expected is None else round(expected, 3),
        "step_s": [round(each, 4) for each in result.step_s],
        "averaging_s": round(result.averaging_s, 4),
        "refused": result.refused,
        "sent_gb": round(sum(result.sent_bytes) / 1e9, 6),
        "stages": [{"stage": each.stage, **dataclasses.asdict(each.shares)} for each in by_stage(result.timelines, within)],
        "critical_path": dataclasses.asdict(critical_shares(result.timelines)),
        "churn": dataclasses.asdict(result.churn),
    }


def _print(rows: Sequence[dict[str, Any]]) -> None:
    out = console()
    table = empty_table(1)
    for heading in ("method", "tokens/s", "expected", "step", "stage", "compute", "wait", "wire", "step end"):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for row in rows:
        expected = row["steady_tokens_per_s"]
        told = [row["method"], amount(row["tokens_per_s"]), "-" if expected is None else amount(expected)]
        told += [f"{row['step_s'][-1]:.4g} s"]
        for number, stage in enumerate((*row["stages"], {"stage": "path", **row["critical_path"]})):
            shares = [f"{stage[name]:.0%}" for name in ("compute", "wait", "wire", "step_end")]
            table.add_row(*(told if number == 0 else [""] * len(told)), str(stage["stage"]), *shares)
    out.print(table)
    for churn in (row["churn"] for row in rows if row["churn"]["departures"]):
        out.print(
            f"{churn['departures']} departures: {churn['relaunched']} microbatches computed again by a stage, {churn['rounds_failed']}"
            f" rounds failed, {churn['inexact']} averages inexact; at least {churn['least_reliable']} peers that stay in each stage"
        )
    out.print(Text("path: the critical path of the peers whose timelines are kept", style="dim"))


def _write(described: Manifest, result: RunResult, out: Path) -> None:
    about = {"run": described.name, "steps": f"0 to {len(result.step_s) - 1}", "clocks": "virtual time"}
    try:
        out.expanduser().write_text(json.dumps(chrome_trace(result.timelines, [], about), separators=(",", ":")), encoding="utf-8")
    except OSError as error:
        raise disk_error(out, error, "name a file you can write to") from None

"""The verb plan: which device serves which stage, before anybody is asked or in a running swarm."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peerd import SCHEMA
from peerd.cli.options import SEED, ask, daemon_command, is_printed
from peerd.errors import UsageError, disk_error

if TYPE_CHECKING:
    from peerd.planner.dtfm import PairCosts, PlacedStages, StudySizes
    from peerd.planner.network import Topology
    from peerd.planner.run_plans import Planning, RunPlan, Width

FILE = click.Path(path_type=Path)
OWN_DAEMON = "-"
"""The value of --swarm without an address."""
STUDY_METHODS = ("random", "greedy", "search", "genetic")
RUN_METHODS = ("joining", "greedy", "search", "op-fence", "hybrid")
METHODS = tuple(dict.fromkeys((*RUN_METHODS, *STUDY_METHODS)))
MOST_WIDTH = 1 << 20


class Widths(click.ParamType[tuple[int, int]]):
    """`d_model=768..12288`."""

    name = "widths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        field, _, values = str(value).partition("=")
        first, _, last = values.partition("..")
        if field != "d_model" or not all(each.isascii() and each.isdigit() and len(each) < 8 for each in (first, last)):
            self.fail(f"{value!r} is no range of widths like d_model=768..12288.", param, ctx)
        if not 8 <= int(first) <= int(last) <= MOST_WIDTH:
            self.fail(f"{value!r}: widths lie from 8 to {MOST_WIDTH}, the first no larger than the last.", param, ctx)
        return int(first), int(last)


@click.command()
@click.argument("run_file", metavar="[RUN.toml]", required=False)
@click.option("--network", "network_file", type=FILE, metavar="FILE", help="Devices and links: JSON or CSV.")
@click.option("--swarm", is_flag=False, flag_value=OWN_DAEMON, metavar="[ADDRESS]", help="The peers of a running swarm.")
@click.option("--dtfm", is_flag=True, help="Plan DT-FM's study by its own cost, instead of a run.")
@click.option("--method", "methods", multiple=True, type=click.Choice(METHODS), help="May be repeated.  [default: all]")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of everything that is chance.")
@click.option("--sweep", type=Widths(), metavar="d_model=A..B", help="Show speeds for widths from A, doubled, to B.")
@click.option("--write", "out", type=FILE, metavar="FILE", help="Write the best placement as JSON.")
@daemon_command
def plan(context: click.Context, /, run_file: str | None, methods: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Plan which device serves which stage: before anybody is asked, or in a running swarm.

    Each method's placement is scored by one model of the steady state: tokens per second, what binds each stage, and what each device
    sends a day. `peerd help plan` explains methods, formats and the model.

    \b
    Examples:
      peerd plan my-run --network devices.csv --write placement.json
      peerd plan my-run --swarm --method search
      peerd plan my-run --network devices.csv --sweep d_model=768..12288
      peerd plan --network cities.json --dtfm
    """
    network_file, swarm, sweep = flags["network_file"], flags["swarm"], flags["sweep"]
    if (network_file is None) == (swarm is None):
        raise UsageError("a plan is for one network", "give either --network FILE or --swarm [ADDRESS]")
    if flags["dtfm"]:
        _refuse(run_file or swarm or sweep or flags["out"], "--dtfm takes --network, --method and --seed only")
        _refuse([each for each in methods if each not in STUDY_METHODS], f"--dtfm knows the methods {', '.join(STUDY_METHODS)}")
        _plan_study(network_file, methods or STUDY_METHODS, flags["seed"], as_json)
        return
    if run_file is None:
        raise UsageError("nothing to plan", "name a RUN.toml, or give --dtfm for DT-FM's study")
    _refuse([each for each in methods if each not in RUN_METHODS], f"a run knows the methods {', '.join(RUN_METHODS)}")
    planning = _planning(context, run_file, network_file, swarm, flags["seed"])
    if sweep:
        _refuse(methods or flags["out"], "--sweep places by capacity and writes nothing: leave out --method and --write")
        _show_sweep(planning, sweep, as_json)
        return
    _plan_run(planning, methods or RUN_METHODS, flags["out"], as_json)


def _refuse(what: object, message: str) -> None:
    if what:
        raise UsageError(message, "see `peerd plan --help`")


def network_of(path: Path) -> tuple[Topology, StudySizes]:
    """The network that a file describes."""
    from peerd.planner.network_formats import read_network

    try:
        return read_network(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--network {path}: {error.strerror}", "name a file that describes devices and links") from None
    except ValueError as error:
        raise UsageError(f"--network {path}: {error}", "`peerd help plan` shows the formats") from None


def _planning(context: click.Context, run_file: str, network_file: Path | None, swarm: str | None, seed: int) -> Planning:
    from peerd.cli.new_estimate import loads_of
    from peerd.cli.organise import run_file_path
    from peerd.config import manifest
    from peerd.planner.network_formats import swarm_network
    from peerd.planner.run_plans import Planning

    run = manifest.load(run_file_path(run_file))
    if network_file is not None:
        topology = network_of(network_file)[0]
    else:
        try:
            topology = swarm_network(_peers(context, str(swarm)), run.train.microbatch_size)
        except ValueError as error:
            raise UsageError(f"--swarm: {error}", "plan with --network FILE, or wait until peers serve") from None
    return Planning(run, loads_of(run), topology, seed)


def _peers(context: click.Context, swarm: str) -> Mapping[str, Any]:
    """What `peerd peers` says of the swarm."""
    from peerd.cli.launch import run_child
    from peerd.cli.watch import VISIT_SILENCE_S

    if swarm == OWN_DAEMON:
        reply: Mapping[str, Any] = ask(context, "peers")
        return reply
    return run_child("peerd.daemon.visit", swarm, what="asking that peer", silence_s=VISIT_SILENCE_S)


def _plan_run(planning: Planning, methods: Sequence[str], out: Path | None, as_json: bool) -> None:
    found = {method: planning.plan(method) for method in dict.fromkeys(methods)}
    plans = [each for each in found.values() if each is not None]
    if not plans:
        remedy = "add devices, or cut the run into more stages"
        raise UsageError("no placement fits the devices' memory with a reliable device in each stage", remedy)
    best = max(plans, key=lambda each: each.state.tokens_per_s)
    rows = [_row(planning, method, each) for method, each in found.items()]
    if out is not None:
        _write(planning, best, out)
    if not is_printed({"schema": SCHEMA, "devices": len(planning.topology.peers), "best": best.method, "rows": rows}, as_json):
        from peerd.cli.render_plan import print_run

        print_run(rows, best.method)
    if out is not None:
        click.echo(f"wrote the placement by {best.method} to {out}", err=True)


def _row(planning: Planning, method: str, found: RunPlan | None) -> dict[str, Any]:
    """A method's placement as JSON; without stages where it found none that fits."""
    if found is None:
        return {"method": method, "tokens_per_s": 0.0, "stages": []}
    state, peers = found.state, planning.topology.peers
    samples = planning.manifest.train.microbatch_size
    stages = [
        {
            "layers": [layers.start, layers.stop],
            "peers": [peers[each].name for each in members],
            "samples_per_s": round(rate * samples, 4),
            "bound_by": bound_by,
        }
        for layers, members, rate, bound_by in zip(found.cut, found.members, state.stage_rates, state.bound_by, strict=True)
    ]
    return {
        "method": method,
        "tokens_per_s": round(state.tokens_per_s, 3),
        "step_s": round(state.step_s, 4),
        "fill_s": round(state.fill_s, 4),
        "waiting_s": round(state.waiting_s, 4),
        "averaging_s": round(state.averaging_s, 4),
        "exposed_averaging_s": round(state.exposed_s, 4),
        "stages": stages,
        "sent_gb_a_day": {peers[each].name: round(sent / 1e9, 3) for each, sent in sorted(state.sent_bytes_a_day.items())},
        "left_out": [peer.name for each, peer in enumerate(peers) if each not in state.sent_bytes_a_day],
    }


def _write(planning: Planning, best: RunPlan, out: Path) -> None:
    stages = [
        {"layers": [layers.start, layers.stop], "peers": [planning.topology.peers[each].name for each in members]}
        for layers, members in zip(best.cut, best.members, strict=True)
    ]
    placement = {"schema": SCHEMA, "run": planning.manifest.name, "method": best.method, "stages": stages}
    try:
        out.expanduser().write_text(json.dumps(placement, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise disk_error(out, error, "name a file in a folder that exists") from None


def _show_sweep(planning: Planning, widths: tuple[int, int], as_json: bool) -> None:
    from peerd.planner.run_plans import sweep

    if planning.manifest.model.kind != "decoder":
        raise UsageError("--sweep changes d_model, which only the built-in decoder has", "leave out --sweep")
    try:
        found: list[Width] = sweep(planning, *widths)
    except ValueError as error:
        raise UsageError(f"--sweep: {error}", "choose other widths") from None
    rows = [
        {
            "d_model": each.d_model,
            "tokens_per_s": round(each.tokens_per_s, 3),
            "utilisation": round(each.utilisation, 4),
            "bound_by": each.bound_by,
        }
        for each in found
    ]
    if not is_printed({"schema": SCHEMA, "rows": rows}, as_json):
        from peerd.cli.render_plan import print_sweep

        print_sweep(rows)


def _plan_study(network_file: Path, methods: Sequence[str], seed: int, as_json: bool) -> None:
    topology, sizes = network_of(network_file)
    rows = _study_rows(topology, sizes, methods, seed)
    if not is_printed({"schema": SCHEMA, "devices": len(topology.peers), "rows": rows}, as_json):
        from peerd.cli.render_plan import print_study

        print_study(rows, sizes)


def _study_rows(topology: Topology, sizes: StudySizes, methods: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """DT-FM's study: a row for each method, with the devices of each stage in the order of the pipeline."""
    from peerd.planner.dtfm import pair_costs
    from peerd.planner.genetic import genetic
    from peerd.planner.search import at_random, dealt, searched

    place: dict[str, Callable[[PairCosts, int], PlacedStages]] = {
        "random": at_random,
        "greedy": dealt,
        "search": searched,
        "genetic": genetic,
    }
    wanted = sizes.num_stages * sizes.num_replicas
    if len(topology.peers) != wanted:
        remedy = "say others in the file's d_pp and d_dp"
        raise UsageError(
            f"{len(topology.peers)} devices do not make {sizes.num_stages} stages of {sizes.num_replicas}, which takes {wanted}", remedy
        )
    topology = topology.part(topology.canonical_order())
    costs = pair_costs(topology, sizes)
    found = {method: place[method](costs, seed) for method in dict.fromkeys(methods)}
    return [
        {
            "method": method,
            "comm_cost_s": round(each.comm_cost_s, 6),
            "averaging_s": round(each.averaging_s, 6),
            "pipeline_s": round(each.pipeline_s, 6),
            "stages": [[topology.peers[device].name for device in group] for group in each.groups],
        }
        for method, each in found.items()
    ]

"""The verb plan: which device serves which stage, before anybody is asked or in a running swarm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peerd import SCHEMA
from peerd.cli.options import SEED, is_printed, reply_options
from peerd.errors import UsageError

if TYPE_CHECKING:
    from peerd.planner.dtfm import PairCosts, PlacedStages, StudySizes
    from peerd.planner.network import Topology

FILE = click.Path(path_type=Path)
STUDY_METHODS = ("random", "greedy", "search", "genetic")


@click.command()
@click.option(
    "--network", "network_file", type=click.Path(path_type=Path), metavar="FILE", required=True, help="Devices and links: JSON or CSV."
)
@click.option("--dtfm", is_flag=True, help="Plan DT-FM's study by its own cost, instead of a run.")
@click.option("--method", "methods", multiple=True, type=click.Choice(STUDY_METHODS), help="May be repeated.  [default: all]")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of everything that is chance.")
@reply_options
def plan(network_file: Path, dtfm: bool, methods: tuple[str, ...], seed: int, as_json: bool) -> None:
    """Plan which device serves which stage.

    \b
    Example:
      peerd plan --network cities.json --dtfm
    """
    if not dtfm:
        raise UsageError("nothing to plan", "name a RUN.toml, or give --dtfm for DT-FM's study")
    topology, sizes = network_of(network_file)
    rows = study_rows(topology, sizes, methods or STUDY_METHODS, seed)
    if is_printed({"schema": SCHEMA, "devices": len(topology.peers), "rows": rows}, as_json):
        return
    from peerd.cli.render_plan import print_study

    print_study(rows, sizes)


def network_of(path: Path) -> tuple[Topology, StudySizes]:
    """The network that a file describes."""
    from peerd.planner.network_formats import read_network

    try:
        return read_network(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--network {path}: {error.strerror}", "name a file that describes devices and links") from None
    except ValueError as error:
        raise UsageError(f"--network {path}: {error}", "`peerd help plan` shows the formats") from None


def study_rows(topology: Topology, sizes: StudySizes, methods: tuple[str, ...], seed: int) -> list[dict[str, Any]]:
    """DT-FM's study: a row for each method, with the devices of each stage in the order of the pipeline."""
    from peerd.planner.dtfm import pair_costs

    wanted = sizes.num_stages * sizes.num_replicas
    if len(topology.peers) != wanted:
        remedy = "say others in the file's d_pp and d_dp"
        raise UsageError(
            f"{len(topology.peers)} devices do not make {sizes.num_stages} stages of {sizes.num_replicas}, which takes {wanted}", remedy
        )
    topology = topology.part(topology.canonical_order())
    costs = pair_costs(topology, sizes)
    found = {method: _STUDY[method](costs, seed) for method in dict.fromkeys(methods)}
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


def _random(costs: PairCosts, seed: int) -> PlacedStages:
    from peerd.planner.search import at_random

    return at_random(costs, seed)


def _greedy(costs: PairCosts, _seed: int) -> PlacedStages:
    from peerd.planner.search import dealt

    return dealt(costs)


def _search(costs: PairCosts, seed: int) -> PlacedStages:
    from peerd.planner.search import searched

    return searched(costs, seed)


def _genetic(costs: PairCosts, seed: int) -> PlacedStages:
    from peerd.planner.genetic import genetic

    return genetic(costs, seed)


_STUDY: dict[str, Callable[[PairCosts, int], PlacedStages]] = {"random": _random, "greedy": _greedy, "search": _search, "genetic": _genetic}

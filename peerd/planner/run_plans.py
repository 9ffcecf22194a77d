"""Plans of a run: each method's placement, with the layers of its stages, scored by the steady state.

`joining`, `greedy` and `search` keep the run's cut, `op-fence` and `hybrid` choose their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from peerd.config.cut import cut_points
from peerd.config.manifest import Manifest
from peerd.planner import placing
from peerd.planner.cutting import stage_layers
from peerd.planner.decoder import decoder_loads
from peerd.planner.fusion import LayerCosts, op_fence
from peerd.planner.hybrid import HybridJob, best_plan
from peerd.planner.network import Topology
from peerd.planner.run_costs import run_cost, stage_cost
from peerd.planner.steady import Members, RunCost, StageDemand, SteadyModel, SteadyState
from peerd.planner.workload import ModelLoads

WIDTH_STEP = 2
"""Widths of a sweep double."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    method: str
    cut: tuple[range, ...]
    members: Members
    state: SteadyState


@dataclass(frozen=True, slots=True)
class Planning:
    """A run, what its parts cost, and who might serve it."""

    manifest: Manifest
    loads: ModelLoads
    topology: Topology
    seed: int

    def plan(self, method: str) -> RunPlan | None:
        """None where the method finds no placement that fits the devices' memory."""
        return _METHODS[method](self)

    def scored(self, method: str, cut: Sequence[range], members: Members) -> RunPlan | None:
        state = SteadyModel(run_cost(self.manifest, self.loads, cut), self.topology).state(members)
        return RunPlan(method, tuple(cut), members, state) if state.rate > 0 else None

    def blocks(self) -> list[range]:
        """The parts between which the model may be cut."""
        return [range(*ends) for ends in pairwise((0, *cut_points(self.manifest.model), self.manifest.model.num_layers))]


def _placed(planning: Planning, method: str, place: Callable[[SteadyModel], Members]) -> RunPlan | None:
    cut = stage_layers(planning.manifest, planning.loads)
    return planning.scored(method, cut, place(SteadyModel(run_cost(planning.manifest, planning.loads, cut), planning.topology)))


def _random(planning: Planning) -> RunPlan | None:
    return _placed(planning, "random", functools.partial(placing.at_random, seed=planning.seed))


def _joining(planning: Planning) -> RunPlan | None:
    return _placed(planning, "joining", placing.joining)


def _greedy(planning: Planning) -> RunPlan | None:
    return _placed(planning, "greedy", placing.dealt)


def _search(planning: Planning) -> RunPlan | None:
    return _placed(planning, "search", functools.partial(placing.searched, seed=planning.seed))


def _op_fence(planning: Planning) -> RunPlan | None:
    blocks = planning.blocks()

    @functools.cache
    def cost(start: int, end: int) -> StageDemand:
        return stage_cost(planning.manifest, planning.loads, range(blocks[start].start, blocks[end - 1].stop))

    def boundary(start: int) -> tuple[float, float]:
        before = cost(0, start)
        return before.forth_bytes, before.back_bytes

    layers = LayerCosts(
        num_layers=len(blocks),
        flops=lambda start, end: cost(start, end).flops,
        memory_bytes=lambda start, end: cost(start, end).memory_bytes,
        boundary_bytes=boundary,
        num_microbatches=planning.manifest.train.microbatches_per_step,
    )
    found = op_fence(planning.topology, layers)
    if found is None:
        return None
    cut = [range(blocks[start].start, blocks[end - 1].stop) for start, end in pairwise((*found.starts, len(blocks)))]
    return planning.scored("op-fence", cut, tuple((device,) for device in found.devices))


def _hybrid(planning: Planning) -> RunPlan | None:
    if not any(peer.is_reliable for peer in planning.topology.peers):
        return None
    blocks, last = planning.blocks(), planning.manifest.model.num_layers
    whole = stage_cost(planning.manifest, planning.loads, range(last))
    first = stage_cost(planning.manifest, planning.loads, blocks[0])
    job = HybridJob(
        num_layers=len(blocks),
        layer_flops=whole.flops / len(blocks),
        layer_bytes=whole.memory_bytes / len(blocks),
        boundary_bytes=max(first.forth_bytes, first.back_bytes),
        num_minibatches=planning.manifest.train.microbatches_per_step,
    )
    found = best_plan(planning.topology, job)
    if found is None:
        return None
    cut, start = [], 0
    for stage in found.stages:
        cut.append(range(blocks[start].start, blocks[start + stage.num_layers - 1].stop))
        start += stage.num_layers
    return planning.scored("hybrid", cut, tuple((*stage.servers, *stage.helpers) for stage in found.stages))


_METHODS = {"random": _random, "joining": _joining, "greedy": _greedy, "search": _search, "op-fence": _op_fence, "hybrid": _hybrid}


@dataclass(frozen=True, slots=True)
class Width:
    """The square-cube law at one width: work grows with its square, what crosses a boundary with the width."""

    d_model: int
    tokens_per_s: float
    utilisation: float
    """Share of what the same placement does with links that cost nothing."""
    bound_by: tuple[str, ...]


def sweep(planning: Planning, first: int, last: int) -> list[Width]:
    """The run at widths from the first, doubled, to the last; heads and the inner width grow along. For the built-in decoder."""
    manifest = planning.manifest
    model = manifest.decoder
    found = []
    width = first
    while width <= last:
        heads = max(1, round(width * model.num_heads / model.d_model))
        while width % heads:
            heads -= 1
        inner = max(1, round(width * model.d_ff / model.d_model))
        wide = replace(manifest, model=replace(model, d_model=width, num_heads=heads, d_ff=inner))
        train = manifest.train
        loads = decoder_loads(wide.decoder, train.microbatch_size, train.sequence_length, train.precision)
        cost = run_cost(wide, loads, stage_layers(wide, loads))
        steady = SteadyModel(_without_memory(cost), planning.topology)
        members = placing.dealt(steady)
        state = steady.state(members)
        free = sum(sum(planning.topology.peers[peer].flops for peer in peers) for peers in members)
        ideal = free / sum(stage.flops for stage in cost.stages) * cost.tokens_per_microbatch
        found.append(Width(width, state.tokens_per_s, state.tokens_per_s / ideal, state.bound_by))
        width *= WIDTH_STEP
    return found


def _without_memory(cost: RunCost) -> RunCost:
    """A sweep asks what links allow."""
    return replace(cost, stages=tuple(replace(stage, memory_bytes=0.0) for stage in cost.stages))

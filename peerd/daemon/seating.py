"""Takes a seat: chooses the stage to serve and builds the parts that serve it."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import structlog
import torch

from peerd.daemon.device import give_back_memory, memory_of, room_on
from peerd.daemon.link_needs import needs
from peerd.daemon.peer import Peer
from peerd.daemon.seat import Seat, Watcher
from peerd.daemon.thread_stacks import take_stacks
from peerd.errors import StageError
from peerd.models.stages import estimate_stage_memory, keeps_graphs, largest_state_bytes, placing_of_stage, stage_demands
from peerd.observe.archive import Archive
from peerd.planner.memory import Memory, Placing, Room
from peerd.policy.step.ledger import FEWEST, stage_step
from peerd.policy.step.recovery import Beginning
from peerd.policy.swarm.choosing import Joiner, choose_stage
from peerd.stage.checkpoints import Checkpoint, CheckpointStore
from peerd.stage.disk_room import DiskRoom
from peerd.stage.executor import Executor, Priority
from peerd.stage.precision import set_products
from peerd.stage.spool import Spools
from peerd.stage.state import StageState
from peerd.table.record import PeerRecord
from peerd.transfers import is_out_of_memory

MORE = 1.25
"""Where the memory did not suffice, this peer waits for so many times as much."""
ANY_STAGE = -1
"""Stands for the stage that needs help most, as in the settings."""
LOG = structlog.get_logger()


class NoRoomError(StageError):
    """This machine has no memory for the stage, or for any."""


async def take_seat(peer: Peer, wanted: int, watcher: Watcher) -> Seat:
    """Take the seat of the stage `wanted`, or of the one that needs help most. The table shows it from then on."""
    place, settings = peer.place, peer.settings
    room = room_on(peer.governor.device, peer.governor.limits.memory)
    home, run = peer.network.home, place.signed.run
    disk = DiskRoom(home.checkpoints(run), home.averages)
    store = CheckpointStore(home.checkpoints(run), place.manifest.train.num_stages, disk)
    checkpoints = await asyncio.to_thread(store.scan)
    await asyncio.to_thread(largest_state_bytes, place.manifest)  # it builds every stage on the meta device, and is asked again by the seat
    if wanted < 0:
        await peer.gossip.locate()
    stage = await asyncio.to_thread(_stage_to_serve, peer, wanted, room, checkpoints)
    steps = tuple(checkpoint.step for checkpoint in checkpoints if checkpoint.stage == stage)
    founds = bool(settings.run_file) and not peer.has_served
    reached = await reached_before(peer.archive) if founds and not steps else 0
    start = place.manifest.start
    beginning = Beginning(step=start.step, founder=founds, reached=reached, needs_state=bool(start.state))
    offers = PeerRecord(peer=peer.membership.me, stage=stage, checkpoints=steps, gives_start=place.start is not None)
    executor, state = await _built(peer, offers, room, Spools(home.copies, disk))
    seat = Seat(peer, executor, state, store, room, beginning, watcher)
    seat.keep_limits(peer.governor.in_force)
    peer.take(seat)
    return seat


async def _built(peer: Peer, record: PeerRecord, room: Room, spools: Spools) -> tuple[Executor, StageState]:
    """Build the stage on a torch thread of its own. Raises NoRoomError if the memory does not suffice, whatever the estimate says."""
    executor = Executor()
    try:
        return executor, await executor.run(Priority.CONTROL, lambda: _build_state(peer, record, room, spools))
    except BaseException as error:
        executor.close()
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the tensors that have found room
    await asyncio.to_thread(give_back_memory, peer.governor.device)
    peer.outgrown[record.stage] = int(MORE * room.device)
    told = f"stage {record.stage} needs more than {room.device / 1e9:.2f} GB of memory, which did not suffice"
    raise NoRoomError(told, "free some memory, or join from a machine with more")


async def reached_before(archive: Archive) -> int:
    """Return the step that the run had reached when this home was last in it. A founder without a checkpoint may begin it anew."""
    newest = await archive.read(lambda store: store.steps(most=1)) or ()
    return max((entry.step + 1 for entry in newest), default=0)


def _build_state(peer: Peer, record: PeerRecord, room: Room, spools: Spools) -> StageState:
    """Set torch's number of threads and the precision of products, and create the stage's first weights, on the torch thread."""
    manifest, device = peer.place.manifest, peer.governor.device
    if manifest.compute.threads:
        torch.set_num_threads(manifest.compute.threads)
    set_products(manifest.train)
    take_stacks(device)
    seen = peer.membership.find(peer.membership.me)
    highest = max(seen.incarnation if seen else 0, peer.membership.word.highest_seen)
    record = replace(record, incarnation=peer.local.raise_incarnation(highest))
    placing = placing_of_stage(manifest, record.stage, room)
    keep_graph = keeps_graphs(manifest, record.stage, manifest.slots + 1, room.device, placing)
    LOG.info("graphs kept" if keep_graph else "graphs recomputed", recompute=manifest.compute.recompute)
    _tell_placing(peer, record.stage, placing)
    state = StageState(manifest, record, device, peer.membership.live, keep_graph, peer.spans, placing is Placing.OFFLOADED, spools)
    if peer.settings.moves:
        state.keep_moves(Path(peer.settings.moves))
    return state


def _tell_placing(peer: Peer, stage: int, placing: Placing) -> None:
    manifest = peer.place.manifest
    needed = estimate_stage_memory(manifest, stage, manifest.slots, placing)
    sizes = {"device_gb": round(needed.device / 1e9, 2), "machine_gb": round(needed.host / 1e9, 2)}
    told = {
        Placing.TOGETHER: "one memory holds the stage",
        Placing.DEVICE: "the device holds the stage",
        Placing.OFFLOADED: "the machine's memory holds the optimizer's state and what is set aside",
    }
    LOG.info(told[placing], offload=manifest.compute.offload, **sizes)


def _stage_to_serve(peer: Peer, wanted: int, room: Room, checkpoints: list[Checkpoint]) -> int:
    """Return the stage to serve: `wanted` if it is not negative; that of the newest checkpoint if nobody serves it; or the weakest one.

    Raises StageError if it is unknown or does not fit.
    """
    manifest = peer.place.manifest
    num_stages = manifest.train.num_stages
    if wanted >= num_stages:
        raise StageError(f"there is no stage {wanted}", f"this run's stages are 0 to {num_stages - 1}; leave --stage out")
    if wanted >= 0:
        if lacks := lacks_for(peer, wanted, room):
            remedy = "leave --stage out, free some memory, or allow more with `peerd limits --memory`"
            raise NoRoomError(f"stage {wanted} needs {lacks}", remedy)
        return wanted
    live = peer.membership.live()
    newest = checkpoints[-1].stage if checkpoints else num_stages
    if newest < num_stages and stage_step(live, newest) is None and not lacks_for(peer, newest, room):
        return newest
    choice = choose_stage(live, _joiner(peer, [lacks_for(peer, stage, room) for stage in range(num_stages)]))
    if choice.stage is None:
        raise NoRoomError(f"no stage fits this machine: {choice.reason}", "join from a machine with more memory")
    LOG.info("stage chosen", stage=choice.stage, reason=choice.reason)
    return choice.stage


def _joiner(peer: Peer, lacking: Sequence[str]) -> Joiner:
    """What this peer knows of itself when it looks for a stage. `lacking`: by stage, what this machine has too little of for it."""
    manifest = peer.place.manifest
    up, down = peer.network.links.traffic.line.claims(peer.governor.limits)
    return Joiner(
        lacking=lacking,
        is_reliable=peer.stays_hours > 0,
        wished=manifest.swarm.wishes.get(peer.membership.me),
        up=up,
        down=down,
        coordinate=peer.gossip.position.coordinate,
        demands=stage_demands(manifest, are_alike=peer.settings.compute_stand_in_ms > 0),
        round_rates=[need.rounds for need in needs(manifest, peer.membership.live(), num_joining=1)],
        least_peers=FEWEST if manifest.swarm.certifies else 1,
    )


def lacks_for(peer: Peer, stage: int, room: Room) -> str:
    """Return what this room lacks for a stage, in words; empty if it is enough."""
    return room.lacks(_needed(peer, stage, room))


def _needed(peer: Peer, stage: int, room: Room) -> Memory:
    """What a stage takes, and more where that did not suffice."""
    manifest = peer.place.manifest
    needed = estimate_stage_memory(manifest, stage, manifest.slots, placing_of_stage(manifest, stage, room))
    return replace(needed, device=max(needed.device, peer.outgrown.get(stage, 0)))


def room_lacks(peer: Peer, wanted: int) -> str:
    """Return what this machine lacks now for the stage `wanted`, or for any; empty if it has enough."""
    room, num_stages = room_on(peer.governor.device, peer.governor.limits.memory), peer.place.manifest.train.num_stages
    stages = range(num_stages) if wanted < 0 else [wanted]
    if any(not lacks_for(peer, stage, room) for stage in stages):
        return ""
    least = min(stages, key=lambda stage: _needed(peer, stage, room).device)
    return f"stage {least} needs {lacks_for(peer, least, room)}"


def another_stage(peer: Peer) -> int | None:
    """Return the stage that needs help most of those that fit this machine once it has left its own; None if none does.

    For its own it will not try again before there is more memory than now, when all of it did not suffice.
    """
    device, limit = peer.governor.device, peer.governor.limits.memory
    memory = memory_of(device)
    had = memory.total - memory.used + memory.held
    room = replace(peer.seat.room, device=min(had, limit or had))
    peer.outgrown[peer.seat.stage] = int(MORE * room.device)
    lacking = [lacks_for(peer, stage, room) for stage in range(peer.place.manifest.train.num_stages)]
    return choose_stage(peer.membership.live(), _joiner(peer, lacking)).stage

"""The memory that serving a stage takes at most: of the device, and of the machine beside it.

Bytes a parameter with AdamW and sums in float32, on one memory: 4 each for the value, the previous value, two moments and the sum of
gradients are there all the time, and 4 more either for the gradient of a pass or for a round's copy of the sum: 24. With sums in float64 it
is 32: the sum takes 8 and so does the copy, without which a round that fails would lose the sum. With local steps it is 44 and 60: two
values, two sums and the outer momentum come on top.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from peerd.config.codec import parse_averaged
from peerd.config.manifest import Manifest, TrainConfig
from peerd.planner.load import FLOAT32_BYTES, Load
from peerd.policy.step.batches import MOST_EARLIER, MOST_OPEN
from peerd.policy.step.receipts import MEMORY_SHARE, wanted_kept_bytes

EASY_SHARE = 0.5
"""Share of free memory that "auto" fills with what is faster and not needed: other processes may count on the same free memory."""


class Placing(enum.Enum):
    """Where a stage's tensors lie."""

    TOGETHER = "together"
    """One memory holds all: a processor's, or that of a GPU without its own."""
    DEVICE = "device"
    """A device with its own memory holds all but what a round takes, which is summed by the processor."""
    OFFLOADED = "offloaded"
    """It holds the parameters, the gradients and their sums, and the machine's memory the rest."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes at the worst moment."""

    device: int
    host: int
    """0 where one memory holds all: it is the device's."""


def least_on_device(manifest: Manifest) -> Placing:
    """How a device with its own memory holds least, as the run allows."""
    return Placing.DEVICE if manifest.compute.offload == "none" else Placing.OFFLOADED


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that a stage may take here, in bytes."""

    device: int
    host: int | None = None
    """The machine's; None where one memory holds all."""

    def holds(self, memory: Memory) -> bool:
        return memory.device <= self.device and (self.host is None or memory.host <= self.host)

    def lacks(self, memory: Memory) -> str:
        """What is too little, in words; empty if it is enough."""
        if memory.device > self.device:
            return f"{memory.device / 1e9:.2f} GB of memory; {self.device / 1e9:.2f} GB may be had"
        if not self.holds(memory):
            return f"{memory.host / 1e9:.2f} GB of the machine's memory beside its device's; {(self.host or 0) / 1e9:.2f} GB may be had"
        return ""


def placing_in(room: Room, manifest: Manifest, load: Load, slots: int) -> Placing:
    """Where a stage's tensors lie on a peer with this room.

    With compute.offload "auto" a device holds all where that takes at most `EASY_SHARE` of it: the rest keeps graphs, and without them
    each forward pass is made twice, while offloading moves the parameters twice a step. Otherwise it offloads, if the machine has room.
    """
    if room.host is None:
        return Placing.TOGETHER
    if manifest.compute.offload != "auto":
        return least_on_device(manifest)
    whole, apart = (stage_memory(manifest, load, slots, placing) for placing in (Placing.DEVICE, Placing.OFFLOADED))
    is_easy = whole.device <= EASY_SHARE * room.device
    return Placing.DEVICE if room.holds(whole) and (is_easy or not room.holds(apart)) else Placing.OFFLOADED


def optimizer_bytes(train: TrainConfig, load: Load) -> int:
    """Bytes of the optimizer's state: both moments for AdamW and LAMB, one for SGD with momentum, for local steps, and for Muon's matrices.

    With a synchronous beginning of local steps there is room for its moments, too. The scales of packed moments are not counted, a
    five-hundredth of them; nor that vectors keep 32 bits.
    """
    if train.optimizer == "sgd":
        numbers = load.num_parameters * (train.momentum > 0)
    else:
        numbers = 2 * load.num_parameters - load.num_in_layers * (train.optimizer == "muon")
    if train.local_batch:
        numbers = max(load.num_parameters * (train.outer_momentum > 0), numbers if train.local_steps_after else 0)
    return numbers * train.optimizer_bits // 8


def sum_bytes(train: TrainConfig) -> int:
    """Bytes of one summed gradient."""
    return 8 if train.accumulate == "float64" else FLOAT32_BYTES


def stage_memory(manifest: Manifest, load: Load, slots: int, placing: Placing) -> Memory:
    """The memory that serving a stage takes with `slots` microbatches in hand.

    A pass and a round are at different moments, unless steps overlap. Torch itself, the allocator's slack, and on a GPU a copy of the
    previous parameters while a late microbatch is computed, come on top. So do a copy of the state for a joiner or an export, and sums of
    what another peer may hold as well (asides), where the disk has no room for them (stage/spool.py).
    """
    used, aside = _lasting(manifest, load)
    in_pass, in_round = _in_pass(manifest, load, slots, placing), _in_round(manifest, load)
    on_device = used + slots * 2 * manifest.boundary_bytes
    if placing is Placing.TOGETHER:
        passing = in_pass + in_round if manifest.train.overlaps_steps else max(in_pass, in_round)
        return Memory(_with_kept(manifest, on_device + aside + _residuals(manifest, load) + passing), 0)
    host = _residuals(manifest, load) + in_round
    if placing is Placing.DEVICE:
        return Memory(on_device + aside + in_pass, _with_kept(manifest, host))
    return Memory(on_device + in_pass, _with_kept(manifest, aside + host))


def _with_kept(manifest: Manifest, needed: int) -> int:
    """The machine's memory with the tensors that are kept for audits: as many as are wanted, or one part in MEMORY_SHARE of it all."""
    if not manifest.swarm.audits:
        return needed
    wanted = wanted_kept_bytes(manifest.train.microbatches_per_step, manifest.boundary_bytes)
    return needed + min(wanted, needed // (MEMORY_SHARE - 1))


def _lasting(manifest: Manifest, load: Load) -> tuple[int, int]:
    """What is there all the time: what is computed with, and what may be set aside.

    Computed with: the values, the sum of gradients, with overlapping steps that of the next step; with delayed updates the values before
    and after, which take turns; where peers audit each other the sum of a mate's part that is computed again. Set aside: the optimizer's
    state, the previous values unless they take turns, and with evaluation those of the evaluated step. With local steps also the moments
    of this peer's own updates; it computes with values of its own, of which it keeps earlier ones, and has open batches beside the sum.
    """
    train = manifest.train
    values = FLOAT32_BYTES * load.num_parameters
    num_values, num_sums = 3 if train.delayed_updates else 1, 1 + train.overlaps_steps + manifest.swarm.audits
    num_aside, moments = (not train.delayed_updates) + (train.evaluate_every_steps > 0), optimizer_bytes(train, load)
    if train.local_batch:
        num_values, num_sums, moments = num_values + 1 + MOST_EARLIER, num_sums + MOST_OPEN, moments + optimizer_bytes(train.inner, load)
    used = num_values * values + num_sums * sum_bytes(train) * load.num_parameters
    return used, moments + num_aside * values


def _in_pass(manifest: Manifest, load: Load, slots: int, placing: Placing) -> int:
    """The gradients of one microbatch, and graphs: one per slot if compute.recompute is "never", else one at a time.

    "auto" recomputes when memory is short. A backward pass frees its graph while it makes the gradients. A device uses such memory again;
    a processor's heap keeps it.
    """
    num_graphs = slots if manifest.compute.recompute == "never" else min(slots, 1)
    gradients, graphs = FLOAT32_BYTES * load.num_parameters, num_graphs * load.graph_bytes
    return gradients + graphs if placing is Placing.TOGETHER else graphs + max(0, gradients - load.graph_bytes * min(slots, 1))


def _in_round(manifest: Manifest, load: Load) -> int:
    """A copy of the sum; the few parameters that follow it count for nothing. With a lossy codec the new residuals.

    For a tied weight the other stage's gradients and the sum of both.
    """
    return sum_bytes(manifest.train) * (load.num_parameters + 2 * load.num_tied) + _residuals(manifest, load)


def _residuals(manifest: Manifest, load: Load) -> int:
    """What a lossy codec has left out: of this peer's parts, and of its sums, where two peers average: more have smaller slices."""
    is_lossy = parse_averaged(manifest.wire.weight_gradients).is_lossy
    return is_lossy * sum_bytes(manifest.train) * load.num_parameters * 3 // 2

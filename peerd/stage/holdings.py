"""The tensors that one peer holds of its stage, exported and loaded as named tensors. state.py decides when that is allowed.

A state's tensors are called `kind/name`. The kinds: the `parameters` of this step, those of the `previous` step, with delayed updates
those `ahead`, the `optimizer` state, the last steps' `norms`, float16's `loss_scale`, and the history of a `tied` weight's copy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.errors import BadMessageError
from peerd.models.stages import StageModule, build_stage
from peerd.stage.accumulator import all_finite
from peerd.stage.delayed import DelayedUpdate
from peerd.stage.leases import Lease, Leases
from peerd.stage.moments import forget_tables
from peerd.stage.optimizer import Optimizer
from peerd.stage.parameters import by_kind, check_parameters, checked_state, copy_parameters, set_parameters, take_drift_back
from peerd.stage.passes import Passes
from peerd.stage.places import Places
from peerd.stage.precision import norm_tensors, norms_from
from peerd.stage.sketches import KINDS, PREVIOUS, Sketch, sketch_of
from peerd.table.record import Lineage, PeerRecord, StepNorm
from peerd.transfers import fetch_later, has_own_memory

MAX_CHAIN_BYTES = 32
MAX_INEXACT = 1 << 24
"""float32 represents every integer up to this one."""


class Holdings:
    """The tensors of one stage at one peer. Every method is a job for the executor's thread."""

    def __init__(self, manifest: Manifest, stage: int, device: torch.device, offloads: bool = False) -> None:
        self._manifest = manifest
        self.device = device
        self.places = Places(device, offloads)
        self.module: StageModule = build_stage(manifest, stage, device)
        self.previous: StageModule | None = None
        self.delayed = DelayedUpdate(self.module) if manifest.train.delayed_updates else None
        self.optimizer = Optimizer(manifest, dict(self.module.named_parameters()), self.places.host)
        self.passes = Passes(manifest)
        self.tied_names = self.module.tied_names
        self._leases = Leases()
        self.drift: float | None = None
        """How far this peer's parameters were off their mean over its mates, as a share of its norm, at the last such average."""
        self._change: Callable[[], Tensor] | None = None
        """Gives what `drift` will be made of, which is on its way from the device."""
        self.generation = 0
        """Raised when another peer's parameters replace this peer's."""

    @property
    def newest(self) -> StageModule:
        """The parameters after all updates so far; with delayed updates those of the next step."""
        return self.module if self.delayed is None else self.delayed.wait()

    def of_step(self, steps_ahead: int) -> StageModule | None:
        """The parameters to compute the step with that is `steps_ahead` of this one (-1: the one before); None if they are not held."""
        match steps_ahead:
            case 0:
                return self.places.to_compute(self.module)
            case -1:
                return self.previous and self.places.to_compute(self.previous)
            case 1 if self.delayed is not None:
                return self.delayed.wait()
        return None

    def advance(self, update: Callable[[], None]) -> None:
        """Go on to the next step: this step's parameters become the previous ones, and `update` is applied.

        With delayed updates the next step uses the parameters that were updated during this one, and `update` runs meanwhile.
        """
        self._may_change()
        if self.delayed is None:
            self._keep_previous()
            update()
        else:
            spare = self.previous if self.previous is not None else copy.deepcopy(self.module)  # they take turns on the device
            self.delayed.wait()
            self.optimizer.move_to(dict(spare.named_parameters()))
            self.previous, self.module = self.module, self.delayed.advance(spare, update)

    def _keep_previous(self) -> None:
        if self.previous is None:
            self.previous = self.places.set_aside(self.module)
        else:
            copy_parameters(self.module, self.previous)

    def _may_change(self) -> None:
        """Wait for those who read the tensors."""
        self._leases.wait()
        self.places.leave()

    def average(self, means: Tensor, start: int, num_updates: int) -> None:
        """After an update, move the parameters from `start` on by what those before it were off their means over the stage's peers."""
        if self.previous is not None:  # else nothing was updated yet
            self._change = fetch_later(take_drift_back(self.module, self.previous, means, start, num_updates))

    def fetch_drift(self) -> None:
        if self._change is not None:
            apart, size = self._change().tolist()
            self.drift, self._change = math.sqrt(apart / size) if size else 0.0, None

    def release(self) -> None:
        """Drop all tensors, which frees their memory. An update that runs is waited for, because it holds some."""
        if self.delayed is not None:
            self.delayed.close()
        self.places.leave()
        forget_tables()
        self._change = None
        del self.module, self.previous, self.optimizer, self.delayed

    def tensors(self, record: PeerRecord) -> dict[str, Tensor]:
        """Copies of the tensors on the CPU, so that what is sent never changes (hole 10). `record` is this peer's present record."""
        return _copies(self._live(record))

    def lend(self, record: PeerRecord) -> Lease:
        """The tensors where they are. Whatever changes them waits until they are given back, or copied.

        The few small ones that a device's stage has in the machine's memory are copied now, so that the rest can be.
        """
        live = self._live(record)
        if not has_own_memory(self.places.host):
            return self._leases.lend(live)
        live = {name: value.clone() if value.device.type == "cpu" else value for name, value in live.items()}
        return self._leases.lend(live, changes_on_device_only=True)

    def sketch(self, record: PeerRecord, seed: bytes, previous: bool = False) -> Sketch:
        """The sketch under a seed of the tensors that `record`, this peer's present one, goes with, or of the previous parameters alone."""
        return sketch_of(self._live(record), seed, PREVIOUS if previous else KINDS)

    def _live(self, record: PeerRecord) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {f"parameters/{name}": value for name, value in self.module.named_parameters()}
        if self.previous is not None:
            found |= {f"previous/{name}": value for name, value in self.previous.named_parameters()}
        if self.delayed is not None:
            found |= {f"ahead/{name}": value for name, value in self.delayed.wait().named_parameters()}
        found |= {f"optimizer/{name}": value for name, value in self.optimizer.tensors().items()}
        found |= {f"norms/{name}": value for name, value in norm_tensors(record.norms).items()}
        found |= {f"loss_scale/{name}": value for name, value in self.passes.tensors().items()}
        if self.tied_names:
            found |= {f"tied/{name}": value for name, value in history_tensors(record.tied).items()}
        return {name: value.detach() for name, value in found.items()}

    def tied_tensors(self, record: PeerRecord) -> dict[str, Tensor]:
        """This peer's copy of a tied weight, with its optimizer state and its history."""
        parameters = {f"{kind}/{name}" for kind in ("parameters", "previous", "ahead") for name in self.tied_names}
        beginnings = ("tied/", *(f"optimizer/{name}." for name in self.tied_names))
        return _copies({name: value for name, value in self._live(record).items() if name in parameters or name.startswith(beginnings)})

    def take_over(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[StepNorm, ...], Lineage]:
        """Replace everything with another peer's state. Returns the norms and the tied weight's history in it.

        Raises BadMessageError, with nothing changed, if the state does not fit this stage.
        """
        kinds = ["parameters", "previous", "optimizer"] + ["norms"] * self._manifest.train.shares_norms
        kinds += ["loss_scale"] * self.passes.is_scaled + ["ahead"] * (self.delayed is not None) + ["tied"] * bool(self.tied_names)
        groups = checked_state(self.module, tensors, kinds)
        self._may_change()
        ahead = self.delayed.wait() if self.delayed is not None else None
        try:
            norms = norms_from(groups.get("norms", {}))
            tied = history_from(groups.get("tied", {}))
            passes = Passes(self._manifest)
            passes.load(groups.get("loss_scale", {}))
            self.optimizer.load(groups["optimizer"])
        except ValueError as error:
            raise BadMessageError(f"the state does not fit: {error}") from None
        set_parameters(self.module, groups["parameters"])
        if ahead is not None:
            set_parameters(ahead, groups["ahead"] or groups["parameters"])
        if groups["previous"]:
            self.previous = self._made_for_previous()
            set_parameters(self.previous, groups["previous"])
        else:
            self.previous = None
        self.passes = passes
        self.generation += 1
        return norms, tied

    def begin_anew(self) -> None:
        """Replace everything with what the run's first step has: the first weights, and an optimizer without moments."""
        self._may_change()
        first = dict(build_stage(self._manifest, self.module.stage, "cpu").named_parameters())
        for module in (self.module, self.delayed.wait() if self.delayed is not None else None):
            if module is not None:
                set_parameters(module, first)
        self.optimizer.begin_anew()
        self.passes, self.previous, self.drift, self._change = Passes(self._manifest), None, None, None
        self.generation += 1

    def take_previous(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the previous parameters of another peer at this step. Raises BadMessageError, with nothing changed, if they do not fit."""
        groups = by_kind(tensors, ["previous"])
        check_parameters(self.module, groups["previous"])
        if not all_finite(tensors.values()):
            raise BadMessageError("the previous parameters are not finite")
        self._leases.wait()
        self.previous = self._made_for_previous()
        set_parameters(self.previous, groups["previous"])

    def _made_for_previous(self) -> StageModule:
        """The module with the previous parameters: set aside, unless passes of the step before are still to come (delayed updates)."""
        return self.previous or (self.places.set_aside(self.module) if self.delayed is None else copy.deepcopy(self.module))

    def take_over_copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the other stage's `tied_tensors`. Raises BadMessageError, with nothing changed, if they do not fit."""
        groups = by_kind(tensors, ["parameters", "previous", "ahead", "optimizer", "tied"])
        if not all_finite(tensors.values()):
            raise BadMessageError("the copy of the tied weight is not finite")
        state = self.optimizer.tensors()
        own = {name: value for name, value in state.items() if name.rpartition(".")[0] in self.tied_names}
        pairs = [(value, groups["optimizer"].get(name)) for name, value in own.items()]
        modules = {"parameters": self.module, "previous": self.previous, "ahead": self.delayed.wait() if self.delayed else None}
        for kind, module in modules.items():
            given = groups[kind] or groups["parameters"]  # a peer that has just begun has no previous parameters
            if module is not None:
                pairs += [(module.get_parameter(name), given.get(name)) for name in self.tied_names]
        self._may_change()
        _copy_all(pairs)
        self.generation += 1


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to("cpu", copy=True) for name, value in tensors.items()}


def _copy_all(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    """Copy `theirs` into `mine` for each (mine, theirs). Raises BadMessageError, with nothing changed, if one is missing or misfits."""
    fitting = [(mine, theirs) for mine, theirs in pairs if theirs is not None and (theirs.shape, theirs.dtype) == (mine.shape, mine.dtype)]
    if len(fitting) < len(pairs):
        raise BadMessageError("the copy of the tied weight lacks a tensor, or one has another shape or dtype")
    with torch.no_grad():
        for mine, theirs in fitting:
            mine.copy_(theirs)


def history_tensors(history: Lineage) -> dict[str, Tensor]:
    """A history as float32 tensors, like everything in a state: the chain has one number for each byte."""
    inexact = torch.tensor(float(min(history.inexact, MAX_INEXACT)), dtype=torch.float32)
    return {"inexact": inexact, "chain": torch.tensor([*history.chain], dtype=torch.float32)}


def history_from(tensors: Mapping[str, Tensor]) -> Lineage:
    """The history from `history_tensors`; an empty one if there are no tensors. Raises ValueError if they cannot be a history."""
    if not tensors:
        return Lineage()
    shapes = {name: (value.dim(), value.dtype) for name, value in tensors.items()}
    if shapes != {"inexact": (0, torch.float32), "chain": (1, torch.float32)} or len(tensors["chain"]) > MAX_CHAIN_BYTES:
        raise ValueError("the tied weight's history is not two float32 tensors")
    inexact, chain = float(tensors["inexact"]), [*map(float, tensors["chain"])]
    if not (_is_count(inexact, MAX_INEXACT) and all(_is_count(number, 255) for number in chain)):
        raise ValueError("the tied weight's history is out of range")
    return Lineage(int(inexact), bytes(map(int, chain)))


def history_of(tensors: Mapping[str, Tensor]) -> Lineage:
    """The history of the copy of a tied weight in a state. Raises BadMessageError if the state has none."""
    found = {name.removeprefix("tied/"): value for name, value in tensors.items() if name.startswith("tied/")}
    try:
        if not found:
            raise ValueError("it has no history")
        return history_from(found)
    except ValueError as error:
        raise BadMessageError(f"the copy of the tied weight is refused: {error}") from None


def _is_count(number: float, most: int) -> bool:
    return number.is_integer() and 0 <= number <= most

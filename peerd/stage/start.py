"""The start state: a run that does not begin with initial weights begins from a whole model in one safetensors file.

Tensors are named by parameter, and the names do not depend on the number of stages (as in Universal Checkpointing): a model
that was trained in two stages can go on in four, each of which reads the names that it holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peerd.config.manifest import Manifest, StartConfig, TrainConfig
from peerd.errors import DiskError, ManifestError, disk_error
from peerd.models.stages import initial_parameter_spec
from peerd.stage.export import write_tensors
from peerd.stage.history import HistoryEntry, history_from, history_json
from peerd.stage.moments import packed_state, unpacked_state
from peerd.stage.optimizer import alike, optimizer_parts, optimizer_spec
from peerd.stage.snapshots import Downloaded
from peerd.table.record import Lineage

_REMEDY = "write it anew with `peerd new --from`"


def write_start(
    path: Path, step: int, parameters: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], history: Sequence[HistoryEntry]
) -> None:
    """Write a start state after `step` updates. If the optimizer state is empty, its moments begin at zero. Raises DiskError."""
    tensors = {f"parameters/{name}": tensor for name, tensor in parameters.items()}
    tensors |= {f"optimizer/{name}": tensor for name, tensor in optimizer.items()}
    write_tensors(path, tensors, {"format": "pt", "step": str(step), "history": history_json(history)})


class StartState:
    """An opened start state, whose tensors are read when a stage needs them."""

    def __init__(self, path: Path) -> None:
        """Raises ManifestError if the file is missing or is no start state, DiskError if it cannot be read."""
        self.path = path
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                self._shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
            self.step = int(metadata["step"])
            self._history = history_from(metadata["history"])
        except FileNotFoundError:
            raise ManifestError(f"{path}: no such file", f"correct start.state, or {_REMEDY}") from None
        except OSError as error:
            raise disk_error(path, error) from None
        except (SafetensorError, KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ManifestError(f"{path} is not a run's state: {error}", _REMEDY) from None

    def agree(self, manifest: Manifest) -> Manifest:
        """The manifest with the file's step and hash filled in. Raises ManifestError if the file does not fit the manifest."""
        for stage in range(manifest.train.num_stages):
            parameters = initial_parameter_spec(manifest, stage)
            self._require("parameters/", parameters)
            held = self._held_as(manifest.train)
            if held is not None:
                self._require("optimizer/", {name: tuple(value.shape) for name, value in optimizer_spec(held, parameters).items()})
        if 0 < manifest.train.steps <= self.step:
            raise ManifestError(f"the run ends at step {manifest.train.steps}, which its start state has reached", "raise train.steps")
        start = StartConfig(state=manifest.start.state, step=self.step, blake3=self.digest())
        if manifest.start.blake3 and manifest.start != start:
            raise ManifestError(f"{self.path} is not the state that the run begins from: its hash differs", _REMEDY)
        return dataclasses.replace(manifest, start=start)

    def of_stage(self, manifest: Manifest, stage: int) -> Downloaded:
        """The tensors of one stage, after `agree`, the optimizer's with as many bits as the run keeps. Raises DiskError."""
        parameters, train, held = initial_parameter_spec(manifest, stage), manifest.train, self._held_as(manifest.train)
        try:
            with safe_open(self.path, framework="pt") as file:
                tensors: dict[str, Tensor] = {f"parameters/{name}": file.get_tensor(f"parameters/{name}") for name in parameters}
                if held is None:
                    state = {name: torch.zeros_like(value, device="cpu") for name, value in optimizer_spec(train, parameters).items()}
                else:
                    state = {name: file.get_tensor(f"optimizer/{name}") for name in optimizer_spec(held, parameters)}
        except (OSError, SafetensorError) as error:
            raise DiskError(f"{self.path}: {error}") from None
        if held is not None and held.optimizer_bits != train.optimizer_bits:
            state = packed_state(state) if train.optimizer_bits == 8 else unpacked_state(state)
        tensors |= {f"optimizer/{name}": value for name, value in state.items()}
        return Downloaded(self.step, start_lineage(manifest), tensors, self._history)

    def digest(self) -> str:
        return blake3().update_mmap(self.path).hexdigest()

    def _held_as(self, train: TrainConfig) -> TrainConfig | None:
        """The settings with which the file's state was kept: the run's, perhaps with other bits. A state of another kind is ignored."""
        parts = {name.rpartition(".")[2] for name in self._shapes if name.startswith("optimizer/")}
        return next((each for each in alike(train) if optimizer_parts(each) == parts), None)

    def _require(self, prefix: str, wanted: Mapping[str, tuple[int, ...]]) -> None:
        for name, shape in wanted.items():
            if self._shapes.get(prefix + name) != shape:
                found = self._shapes.get(prefix + name)
                told = f"has the shape {list(found)}" if found is not None else "is missing"
                raise ManifestError(f"{self.path} holds another model than the run's: {name} {told}", "correct [model], or " + _REMEDY)


def start_lineage(manifest: Manifest) -> Lineage:
    """The lineage of the parameters that the run begins with, the same for every peer."""
    return Lineage(0, bytes.fromhex(manifest.start.blake3))

"""Models of any architecture as a list of named blocks, from a package that every peer of the run has installed.

A package offers it as an entry point of the group `peerd.blocks`: a function without arguments that returns a `BlockModel`. The
manifest only names the entry, so a volunteer runs only code that they have installed. Each boundary may have its own shape.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points

import torch
from torch import Tensor, nn

from peerd.config.manifest import Manifest
from peerd.config.model_kinds import BlocksConfig
from peerd.errors import ManifestError
from peerd.models.dropout import dropout_of
from peerd.models.measure import product_flops, saved_bytes
from peerd.models.module import StageModule
from peerd.models.weights import Uninitialised, give_memory, seeded

GROUP = "peerd.blocks"
EVALUATION_STEP = 1 << 62
"""The step that asks an entry for evaluation samples, the same at each evaluation; no training reaches such a step."""
SHIPPED = {"resnet": "peerd.models.resnet"}
"""Entries that are part of peerd: name -> module with a function of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockModel:
    """An architecture with its loss and its data.

    Contract: a block maps one float32 tensor [samples, ...] to another and keeps no state between calls (no running statistics; no
    dropout except `peerd.models.dropout.Dropout`); `samples` depends on its arguments alone; `loss` is a mean over the samples.
    """

    blocks: Mapping[str, Callable[[], nn.Module]]
    """Name -> the function that makes the block, in order. A block draws its first weights as torch does."""
    input_shape: tuple[int, ...]
    """Shape of one sample of the first block's input."""
    num_labels: int
    loss: Callable[[Tensor, Tensor], Tensor]
    """(the last block's output, int64 labels [samples]) -> the scalar loss."""
    samples: Callable[[int, int, int, int], tuple[Tensor, Tensor]]
    """(seed, step, index, count) -> the inputs, float32 [count, *input_shape], and labels, int64 [count], of one microbatch.

    For EVALUATION_STEP it returns samples that are never trained on.
    """


@functools.lru_cache(maxsize=8)
def load_entry(name: str) -> BlockModel:
    """The model that an entry point returns. ManifestError if no installed package has the entry."""
    if name in SHIPPED:
        made = getattr(importlib.import_module(SHIPPED[name]), name)()
    else:
        found = tuple(entry_points(group=GROUP, name=name))
        if not found:
            raise ManifestError(
                f"no installed package has the model {name!r}",
                f"install the package that the run's organiser names (its entry point is {name} in the group {GROUP})",
            )
        try:
            made = found[0].load()()
        except Exception as error:  # the package's code may fail in any way
            raise ManifestError(f"the entry point {name} of {found[0].value} fails: {type(error).__name__}: {error}") from None
    if not isinstance(made, BlockModel):
        raise ManifestError(f"the entry point {name} returns a {type(made).__name__}, not a BlockModel", "update its package")
    return made


def describe_entry(name: str) -> BlocksConfig:
    """The manifest's config for an entry. The shapes come from one sample that is passed through the blocks."""
    model = load_entry(name)
    hidden = torch.zeros(1, *model.input_shape)
    shapes = []
    with torch.no_grad(), seeded(0, name):
        for make in model.blocks.values():
            hidden = make()(hidden)
            shapes.append(tuple(hidden.shape[1:]))
    return BlocksConfig(entry=name, input_shape=tuple(model.input_shape), shapes=tuple(shapes), num_labels=model.num_labels)


class BlocksStage(StageModule):
    """The blocks `layers` of an entry, with the loss if last. Parameter names begin with the block's: they do not depend on the split."""

    def __init__(self, manifest: Manifest, stage: int, layers: range) -> None:
        super().__init__(stage, manifest.train.num_stages)
        config = self._config = manifest.model_as(BlocksConfig)
        model = self._model = load_entry(config.entry)
        if len(model.blocks) != config.num_layers:
            raise _other_version(config, f"{len(model.blocks)} blocks, not {config.num_layers}")
        self._makers = dict([*model.blocks.items()][layers.start : layers.stop])
        with torch.device("meta"), Uninitialised():
            self.blocks = nn.ModuleDict({name: make() for name, make in self._makers.items()})
        self._manifest, self._layers = manifest, layers

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = inputs
        for block in self.blocks.values():
            hidden = block(hidden)
        return self._model.loss(hidden, labels) if self.is_last and labels is not None else hidden

    def initialise(self, seed: int, device: torch.device) -> None:
        """Draw each block's weights by making it again, with torch's generator seeded by its name; one block at a time exists twice."""
        give_memory(self, device)
        with torch.no_grad(), torch.device("cpu"):
            for name, make in self._makers.items():
                with seeded(seed, name):
                    self.blocks[name].load_state_dict(make().state_dict())
        self._check_shape(device)

    def _check_shape(self, device: torch.device) -> None:
        """ManifestError if the blocks installed here are not those that the run was made with."""
        due = self._config.shapes[self._layers.stop - 1]
        with torch.no_grad():
            found = tuple(self(torch.zeros(1, *self._input_shape, device=device)).shape[1:])
        if found != due:
            raise _other_version(self._config, f"blocks that return {list(found)} instead of {list(due)}")

    @property
    def _input_shape(self) -> tuple[int, ...]:
        """Shape of one sample of this stage's input."""
        return self._config.shapes[self._layers.start - 1] if self._layers.start else self._config.input_shape

    def graph_bytes(self, num_tokens: int) -> int:
        count = self._manifest.train.microbatch_size
        fresh = self._fresh()
        with dropout_of(fresh, self._manifest, 0, 0):
            return saved_bytes(fresh, lambda: self._microbatch(count), self._manifest.train.precision) * num_tokens // count

    def forward_flops(self, microbatch: int, sequence: int) -> int:
        return product_flops(self._fresh(), lambda: self._microbatch(microbatch))

    def _fresh(self) -> BlocksStage:
        return BlocksStage(self._manifest, self.stage, self._layers)

    def _microbatch(self, count: int) -> tuple[Tensor, Tensor | None]:
        labels = torch.zeros(count, dtype=torch.int64) if self.is_last else None
        return torch.zeros(count, *self._input_shape, requires_grad=not self.is_first), labels


def _other_version(config: BlocksConfig, found: str) -> ManifestError:
    return ManifestError(f"the model {config.entry} installed here has {found}", "install the version that the run's organiser uses")

"""One stage of a transformers model: the whole model's forward pass, with pass-throughs in place of other stages' modules.

Hidden states enter at the stage's first block and leave after its last, whatever the model does before and after. Each stage
computes masks and rotary tables from the shape alone. Names are those of the whole model, so a stage's parameters are a part of the
model's checkpoint. The model is in evaluation mode: the only dropout is peerd's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from peerd.config.manifest import Manifest
from peerd.config.model_kinds import HuggingFaceConfig
from peerd.errors import ManifestError
from peerd.models.hf.cost import StageCost, cost_of
from peerd.models.hf.dropout import place_dropout
from peerd.models.hf.layout import Layout, blocks_of, hidden_in, layout_of, replaced_hidden
from peerd.models.hf.library import empty_model, library_config
from peerd.models.hf.subspace import Coordinates
from peerd.models.hf.weights import draw_weights
from peerd.models.module import StageModule
from peerd.models.prefix import Prefix
from peerd.models.subspace import NEEDS_TOKENS

NOTHING = torch.empty(0)


class PassThrough(nn.Module):
    """Replaces a module of another stage: returns the hidden states that it is given, or a zero if it is given none."""

    def __init__(self, tuple_length: int = 0) -> None:
        super().__init__()
        self.tuple_length = tuple_length

    def forward(self, *arguments: Any, **named: Any) -> Any:
        given = [value for value in (*arguments, *named.values()) if isinstance(value, Tensor)]
        hidden = next((value for value in given if value.is_floating_point() and value.dim() == 3), None)
        if hidden is None:
            hidden = torch.zeros((), device=given[0].device if given else None)
        return (hidden, *[None] * (self.tuple_length - 1)) if self.tuple_length else hidden


class Splice:
    """The hidden states that enter and leave a stage in one forward pass."""

    def __init__(self) -> None:
        self.received = self.sent = NOTHING

    def enter(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A hook before the first block: replaces the model's own hidden states by the received ones."""
        hidden_in(module, arguments, named)
        return replaced_hidden(arguments, named, self.received)

    def leave(self, _module: nn.Module, _arguments: Any, output: Any) -> None:
        self.sent = output[0] if isinstance(output, tuple) else output


class HuggingFaceStage(StageModule):
    """The blocks `layers`. The first stage also has what comes before the blocks, the last what comes after them."""

    whole: Any
    """The PreTrainedModel. It is not registered as a module; its children are, under their own names."""

    def __init__(self, manifest: Manifest, stage: int, layers: range) -> None:
        super().__init__(stage, manifest.train.num_stages)
        model = manifest.model_as(HuggingFaceConfig)
        layout = layout_of(model.plain)
        whole = empty_model(library_config(model), model.objective)
        if blocks_of(whole, model.num_layers) != layout.blocks:
            raise ManifestError(f"{type(whole).__name__} has its blocks elsewhere than a tiny copy of it: it cannot be split")
        self._keep(whole, layout, layers)
        if manifest.train.dropout:
            place_dropout(whole, layout, layers, is_first=self.is_first, probability=manifest.train.dropout)
        self._tied_names = layout.tied if self.is_first != self.is_last else ()
        object.__setattr__(self, "whole", whole)
        for name, child in whole.named_children():
            self.add_module(name, child)
        self.coordinates = Coordinates(model, manifest.seed) if model.tells_tokens else None
        if self.coordinates is not None:
            self.coordinates.take_over(whole)
        self._splice = Splice()
        blocks = whole.get_submodule(layout.blocks)
        if not self.is_first:
            blocks[layers[0] if layers else -1].register_forward_pre_hook(self._splice.enter, with_kwargs=True)
        if not self.is_last:
            blocks[layers[-1] if layers else 0].register_forward_hook(self._splice.leave)
        self._manifest, self._layers = manifest, layers
        self.eval()

    def _keep(self, whole: Any, layout: Layout, layers: range) -> None:
        """Replace what other stages hold by pass-throughs."""
        blocks = whole.get_submodule(layout.blocks)
        for layer in range(len(blocks)):
            if layer not in layers:
                blocks[layer] = PassThrough(layout.tuple_length)
        mine = layout.held(self.is_first, self.is_last)
        names = [name for name, _ in whole.named_parameters(remove_duplicate=False) if not name.startswith(layout.blocks + ".")]
        odd = sorted(set(names) - layout.before - layout.after - layout.unused)
        if odd:
            raise ManifestError(f"{odd[0]} is not in a tiny copy of this {type(whole).__name__}: it cannot be split")
        for name in names:
            if name not in mine:
                _drop(whole, name)

    @property
    def tied_names(self) -> tuple[str, ...]:
        return self._tied_names

    @property
    def needs_labels(self) -> bool:
        return self.is_last or self.coordinates is not None

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """With a subspace the labels are the whole windows, [microbatch, sequence + 1]."""
        told = None if self.coordinates is None or labels is None else labels[:, :-1]
        output = self.compute(inputs, told, use_cache=False)
        if not self.is_last or labels is None:
            return output
        following = labels if self.coordinates is None else labels[:, 1:]
        return functional.cross_entropy(output.flatten(0, 1).float(), following.flatten())

    def without_loss(self, inputs: Tensor, tokens: Tensor | None) -> Tensor:
        return self.compute(inputs, tokens, use_cache=False)

    def compute(self, inputs: Tensor, tokens: Tensor | None, **cache: Any) -> Tensor:
        """Activations, or from the last stage logits. `cache`: the library's arguments for a cache of keys and values.

        With a subspace the stages after the first need the tokens [microbatch, sequence].
        """
        if self.coordinates is None:
            if tokens is not None:
                raise ValueError("a stage without a subspace computes with no tokens but its inputs")
            return self._compute(inputs, cache)
        if not self.is_first and tokens is None:
            raise ValueError(NEEDS_TOKENS)
        with self.coordinates.of_tokens(inputs if tokens is None else tokens):
            return self._compute(inputs, cache)

    def _compute(self, inputs: Tensor, cache: dict[str, Any]) -> Tensor:
        self._splice.received = inputs
        given = {"input_ids": inputs} if self.is_first else {"inputs_embeds": inputs.detach()}
        if not self.is_last:
            self.whole.base_model(**given, **cache)
            sent, self._splice.sent, self._splice.received = self._splice.sent, NOTHING, NOTHING
            return sent
        logits: Tensor = self.whole(**given, **cache).logits
        self._splice.received = NOTHING
        return logits

    def prefix(self) -> Prefix:
        from peerd.models.hf.prefix import continues_from_cache, prefix_of_stage

        if continues_from_cache(self._manifest.model_as(HuggingFaceConfig).plain):
            return prefix_of_stage(self, self._layers)
        return super().prefix()

    def initialise(self, seed: int, device: torch.device) -> None:
        draw_weights(self.whole, seed, device)
        if self.coordinates is not None:
            self.coordinates.to(device).draw()

    def graph_bytes(self, num_tokens: int) -> int:
        return self._cost.graph_bytes * num_tokens // self._manifest.tokens_per_microbatch

    def forward_flops(self, microbatch: int, sequence: int) -> int:
        return self._cost.forward_flops * microbatch * sequence // self._manifest.tokens_per_microbatch

    @property
    def _cost(self) -> StageCost:
        return _cost_of(self._manifest, self.stage, self._layers)


@functools.lru_cache(maxsize=64)
def _cost_of(manifest: Manifest, stage: int, layers: range) -> StageCost:
    module = HuggingFaceStage(manifest, stage, layers)
    return cost_of(module, module.whole.config, manifest, len(layers))


def _drop(whole: nn.Module, name: str) -> None:
    """Remove a parameter, with its module if it was the last there; else leave an empty buffer that initializers may fill."""
    path, _, leaf = name.rpartition(".")
    owner = whole.get_submodule(path)
    delattr(owner, leaf)
    owner.register_buffer(leaf, torch.empty(0), persistent=False)
    if next(owner.children(), None) is None and next(owner.parameters(), None) is None:
        parent, _, last = path.rpartition(".")
        setattr(whole.get_submodule(parent), last, PassThrough())

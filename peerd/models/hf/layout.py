"""Finds where a model may be cut: its list of blocks, and which of its other parameters come before and after them.

This is found by computing with a tiny copy, not from names. Parameters on which the first block's input depends come before the
blocks; parameters on which the logits depend, with the last block's output held constant, come after. A model is refused if a
parameter is used on both sides, or by the blocks from outside; the error names it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from peerd.config.model_kinds import HuggingFaceConfig
from peerd.errors import ManifestError
from peerd.models.hf.library import empty_model, first_line, library_config, tied_parameters
from peerd.models.hf.tiny import tiny_copy
from peerd.models.hf.weights import draw_weights

PROBED_LAYERS = 4
PROBED_TOKENS = (2, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of a model. `before`, `after` and `unused` are parameter names of the whole model, outside the blocks."""

    blocks: str
    """Name of the list of blocks."""
    before: frozenset[str]
    after: frozenset[str]
    unused: frozenset[str]
    """Parameters on which nothing depends; no stage holds them."""
    tuple_length: int
    """Length of the tuple that a block returns; 0 if it returns a tensor."""
    dropouts: frozenset[str]
    """Dropout modules on hidden states, as `of_any_layer` names them."""
    ties: Mapping[str, str]
    """Pairs of the names above that are one parameter if embeddings are tied: name -> its name in a stage."""

    def of_any_layer(self, name: str) -> str:
        """A module's name with the layer's number replaced by *."""
        return re.sub(rf"^{re.escape(self.blocks)}\.\d+\.", f"{self.blocks}.*.", name)

    def held(self, is_first: bool, is_last: bool) -> frozenset[str]:
        """The parameter names that a stage holds; for a tied pair both names."""
        used = (self.before if is_first else frozenset()) | (self.after if is_last else frozenset())
        return used | {source for name, source in self.ties.items() if name in used}

    @property
    def tied(self) -> tuple[str, ...]:
        """Parameters that both the first and the last of several stages hold."""
        both = self.held(is_first=True, is_last=False) & self.held(is_first=False, is_last=True)
        return tuple(sorted(both))


@functools.lru_cache(maxsize=4)
def layout_of(model: HuggingFaceConfig) -> Layout:
    """The layout of a run's model. ManifestError, which names the module, if it cannot be cut between blocks."""
    tiny = tiny_copy(model, PROBED_LAYERS)
    ties = tied_parameters(empty_model(library_config(tiny), tiny.objective)) if model.tie_word_embeddings else {}
    untied = replace(tiny, tie_word_embeddings=False)
    whole = empty_model(library_config(untied), untied.objective)
    blocks = blocks_of(whole, tiny.num_layers)
    draw_weights(whole, 0, torch.device("cpu"))
    with torch.enable_grad():  # the caller may have disabled gradients, which show the dependencies
        layout = replace(_probe(whole, blocks, untied), ties=ties)
    if ties and not layout.tied:
        raise ManifestError(f"{type(whole).__name__} ties other parameters than its input and output embeddings", "leave them untied")
    return layout


def blocks_of(whole: nn.Module, num_layers: int) -> str:
    """The name of the longest list of modules that is not inside another list. ManifestError unless it has one entry per layer."""
    lists = {name: module for name, module in whole.named_modules() if isinstance(module, nn.ModuleList)}
    outer = {name: module for name, module in lists.items() if not any(name.startswith(other + ".") for other in lists)}
    name = max(outer, key=lambda each: len(outer[each]), default="")
    if not name or len(outer[name]) != num_layers:
        found = f"its longest list, {name}, has {len(outer[name])}" if name else "it has no list of modules"
        raise ManifestError(f"{type(whole).__name__} does not split: it has {num_layers} layers, and {found}")
    return name


class _Cut:
    """Detaches the first block's input and the last block's output from the rest of the graph."""

    def __init__(self) -> None:
        self.first: Tensor | None = None
        self.last: Tensor | None = None
        self.held: list[Tensor] = []
        self.tuple_length = 0

    def enter(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.first = hidden_in(module, arguments, named)
        return replaced_hidden(arguments, named, self._hold(self.first))

    def leave(self, _module: nn.Module, _arguments: Any, output: Any) -> Any:
        self.tuple_length = len(output) if isinstance(output, tuple) else 0
        self.last = output[0] if isinstance(output, tuple) else output
        held = self._hold(self.last)
        return (held, *output[1:]) if isinstance(output, tuple) else held

    def _hold(self, tensor: Tensor) -> Tensor:
        self.held.append(tensor.detach().requires_grad_())
        return self.held[-1]


def hidden_in(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """The hidden states with which a block is called."""
    found = arguments[0] if arguments else named.get("hidden_states")
    if not isinstance(found, Tensor) or not found.is_floating_point():
        raise ManifestError(f"{type(module).__name__} does not take its hidden states first: it cannot be split")
    return found


def replaced_hidden(arguments: tuple[Any, ...], named: dict[str, Any], hidden: Tensor) -> tuple[Any, dict[str, Any]]:
    return ((hidden, *arguments[1:]), named) if arguments else (arguments, {**named, "hidden_states": hidden})


def _probe(whole: Any, blocks: str, tiny: HuggingFaceConfig) -> Layout:
    """Run one forward pass through the tiny copy and see which parameters its parts depend on."""
    cut, listed = _Cut(), whole.get_submodule(blocks)
    listed[0].register_forward_pre_hook(cut.enter, with_kwargs=True)
    listed[-1].register_forward_hook(cut.leave)
    dropouts = _noted_dropouts(whole)
    tokens = torch.arange(PROBED_TOKENS[0] * PROBED_TOKENS[1]).view(PROBED_TOKENS) % tiny.vocab_size
    try:
        logits = whole(input_ids=tokens, use_cache=False).logits
    except ManifestError:
        raise
    except Exception as error:  # the library's models may fail in any way
        raise ManifestError(f"a tiny copy of {type(whole).__name__} does not compute: {first_line(error)}") from None
    if cut.first is None or cut.last is None:
        raise ManifestError(f"{type(whole).__name__} does not run its {blocks} one after the other: it cannot be split")
    outside = {name: parameter for name, parameter in whole.named_parameters() if not name.startswith(blocks + ".")}
    before, between, after = (_reached(each, outside) for each in (cut.first, cut.last, logits))
    if between:
        raise ManifestError(f"{min(between)} is used inside the blocks of {type(whole).__name__} from outside: it cannot be split")
    if before & after:
        raise ManifestError(f"{min(before & after)} of {type(whole).__name__} is used before and after the blocks: it cannot be split")
    unused = frozenset(outside) - before - after
    found = Layout(blocks=blocks, before=before, after=after, unused=unused, tuple_length=cut.tuple_length, dropouts=frozenset(), ties={})
    return replace(found, dropouts=frozenset(map(found.of_any_layer, dropouts)))


def _noted_dropouts(whole: nn.Module) -> set[str]:
    """A set that fills, as the model computes, with the names of dropouts on hidden states; attention's weights have four dimensions."""
    names: set[str] = set()

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        if arguments[0].dim() == 3:
            names.add(name)

    for name, module in whole.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_pre_hook(lambda _module, arguments, name=name: note(name, arguments))
    return names


def _reached(value: Tensor, parameters: dict[str, nn.Parameter]) -> frozenset[str]:
    """The names of the parameters on which a value depends."""
    if not value.requires_grad:
        return frozenset()
    gradients: Sequence[Tensor | None] = torch.autograd.grad(value.sum(), list(parameters.values()), allow_unused=True)
    return frozenset(name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None)

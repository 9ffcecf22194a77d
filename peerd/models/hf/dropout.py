"""Replaces the dropout of a transformers model by peerd's, whose masks every peer can reproduce.

If the architecture's layers have dropout on hidden states, peerd's takes its place. If they have none (Llama and similar), dropout is
added on the input of the first layer and on what each layer adds. There is none on attention's weights, as in the built-in decoder.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from peerd.models.dropout import Dropout
from peerd.models.hf.layout import Layout, hidden_in, replaced_hidden

NAME = "peerd_dropout"


class LayerDropout(Dropout):
    """Dropout at a layer's boundary: on the hidden states that enter it, or on what it adds to them."""

    def on_entry(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return replaced_hidden(arguments, named, self(hidden_in(module, arguments, named)))

    def on_what_it_adds(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        if not self.is_drawing:
            return output
        before: Tensor = hidden_in(module, arguments, named)
        after = output[0] if isinstance(output, tuple) else output
        left = before + self(after - before)
        return (left, *output[1:]) if isinstance(output, tuple) else left


def place_dropout(whole: nn.Module, layout: Layout, layers: range, *, is_first: bool, probability: float) -> None:
    """Place dropout in a model of which only `layers` remain. A module's name, and so its masks, does not depend on which these are."""
    for name, module in list(whole.named_modules()):
        if isinstance(module, nn.Dropout) and layout.of_any_layer(name) in layout.dropouts:
            path, _, leaf = name.rpartition(".")
            setattr(whole.get_submodule(path), leaf, Dropout(probability))
    if any(name.startswith(layout.blocks + ".") for name in layout.dropouts):
        return
    blocks: Any = whole.get_submodule(layout.blocks)
    if is_first:
        entry = LayerDropout(probability)
        blocks[0].add_module(f"{NAME}_before", entry)
        blocks[0].register_forward_pre_hook(entry.on_entry, with_kwargs=True)
    for layer in layers:
        added = LayerDropout(probability)
        blocks[layer].add_module(NAME, added)
        blocks[layer].register_forward_hook(added.on_what_it_adds, with_kwargs=True)

"""Builders for each kind of model. Everything else that depends on the kind is a property of its config (config/model_kinds.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import nn

from peerd.config.manifest import Manifest
from peerd.config.model_kinds import AnyModel, HuggingFaceConfig
from peerd.models.decoder import DecoderStage
from peerd.models.module import StageModule
from peerd.models.weights import Uninitialised


class Builder(ABC):
    """Builds models of one kind. The methods that are not abstract work for every kind; some kinds have a cheaper way."""

    @abstractmethod
    def stage(self, manifest: Manifest, stage: int, layers: range) -> StageModule:
        """The stage that holds `layers`, without memory for its parameters."""

    def whole(self, manifest: Manifest) -> nn.Module:
        """The whole model with the run's first weights."""
        alone = replace(manifest, train=replace(manifest.train, num_stages=1))
        module = self.stage(alone, 0, range(manifest.model.num_layers))
        module.initialise(manifest.seed, torch.device("cpu"))
        return module

    def small_copy(self, manifest: Manifest, _num_layers: int) -> AnyModel:
        """A model with few layers in which the same modules do the same things; the model itself if there is none."""
        return manifest.model

    def layer_kinds(self, manifest: Manifest) -> tuple[object, ...]:
        """One object for each layer; layers whose objects are equal cost the same."""
        return tuple(range(manifest.model.num_layers))


class _Decoder(Builder):
    def stage(self, manifest: Manifest, stage: int, layers: range) -> StageModule:
        with torch.device("meta"), Uninitialised():
            return DecoderStage(manifest, stage, layers)

    def layer_kinds(self, manifest: Manifest) -> tuple[object, ...]:
        return (0,) * manifest.model.num_layers


class _HuggingFace(Builder):
    """Imports transformers lazily: other runs need not have it installed."""

    def stage(self, manifest: Manifest, stage: int, layers: range) -> StageModule:
        from peerd.models.hf.stage import HuggingFaceStage

        return HuggingFaceStage(manifest, stage, layers)

    def whole(self, manifest: Manifest) -> nn.Module:
        """The module of transformers itself, so that the check does not compare peerd's stages with themselves.

        With a subspace there is none: the whole is one stage, and its export shows that it is transformers' model.
        """
        if manifest.model.tells_tokens:
            return super().whole(manifest)
        from peerd.models.hf.library import empty_model, library_config
        from peerd.models.hf.weights import draw_weights

        model = manifest.model_as(HuggingFaceConfig)
        whole: nn.Module = empty_model(library_config(model), model.objective)
        draw_weights(whole, manifest.seed, torch.device("cpu"))
        return whole

    def small_copy(self, manifest: Manifest, num_layers: int) -> AnyModel:
        from peerd.models.hf.tiny import tiny_copy

        return tiny_copy(manifest.model_as(HuggingFaceConfig), num_layers)

    def layer_kinds(self, manifest: Manifest) -> tuple[object, ...]:
        from peerd.models.hf.cost import kinds_of_layers

        return kinds_of_layers(manifest.model_as(HuggingFaceConfig))


class _Blocks(Builder):
    def stage(self, manifest: Manifest, stage: int, layers: range) -> StageModule:
        from peerd.models.blocks import BlocksStage

        return BlocksStage(manifest, stage, layers)


_BUILDERS: dict[str, Builder] = {"decoder": _Decoder(), "hf": _HuggingFace(), "blocks": _Blocks()}
"""The manifest's model.kind -> its builder."""


def builder_of(manifest: Manifest) -> Builder:
    return _BUILDERS[manifest.model.kind]

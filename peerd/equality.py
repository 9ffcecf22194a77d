"""Checks that a model may be cut: a chain of stages must have the losses and gradients of the whole model, bit for bit.

The check runs with a tiny copy of the model, in float32 on the CPU, when a run is written and again when it starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from peerd.config.manifest import Manifest, TrainConfig
from peerd.errors import ManifestError, PeerdError
from peerd.models.hf.stage import PassThrough
from peerd.models.kinds import builder_of
from peerd.models.stages import StageModule, build_stage
from peerd.reference import backpropagate
from peerd.train.samples import Samples

MAX_LAYERS = 4
MAX_STAGES = 3
ROWS = (2, 12)
NUM_MICROBATCHES = 2
_REMEDY = "this model cannot be trained in stages"


def check_split(manifest: Manifest) -> None:
    """Raise ManifestError, which names the module, unless the model splits exactly."""
    if not manifest.model.needs_split_check:
        return
    model = builder_of(manifest).small_copy(manifest, MAX_LAYERS)
    # No other settings of the run: its cut or its growing sequences may not fit so few layers and such short sequences.
    train = TrainConfig(num_stages=min(model.num_layers, MAX_STAGES), microbatch_size=ROWS[0], sequence_length=ROWS[1])
    compare(Manifest(seed=manifest.seed, model=model, train=train))


def compare(manifest: Manifest) -> None:
    """Compare a run's stages with its whole model, without making them small."""
    try:
        stages = [build_stage(manifest, stage, "cpu") for stage in range(manifest.train.num_stages)]
        whole = builder_of(manifest).whole(manifest)
        gradients: dict[str, Tensor | None] = {}
        for stage in stages:
            _check_first_weights(dict(stage.named_parameters()), dict(whole.named_parameters()))
        for number in range(NUM_MICROBATCHES):
            inputs, labels = _microbatch(manifest, number)
            chained_loss = backpropagate(stages, inputs, labels)
            _collect(stages, gradients)
            loss = _loss(whole, inputs, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            _check_gradients(gradients, dict(whole.named_parameters()))
            if chained_loss != float(loss.detach()):
                raise ManifestError(f"the loss of the stages is {chained_loss}, of the whole {float(loss.detach())}", _REMEDY)
    except PeerdError:
        raise
    except Exception as error:  # the model's code may fail in any way
        raise ManifestError(f"the model does not compute in stages: {_why(error)}", _REMEDY) from None


def _why(error: Exception) -> str:
    """What the model's code ran into. A stage has an empty module in place of each that another stage holds."""
    if isinstance(error, AttributeError) and isinstance(error.obj, PassThrough):
        return f"its code reads `{error.name}` of a module that another stage holds"
    said = str(error).strip().partition("\n")[0][:300]
    return f"its code fails where it is given a part of the model ({said or type(error).__name__})"


def _loss(whole: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    if isinstance(whole, StageModule):
        return whole(inputs, labels)  # type: ignore[no-any-return]
    logits: Tensor = whole(input_ids=inputs, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _microbatch(manifest: Manifest, number: int) -> tuple[Tensor, Tensor]:
    if manifest.model.makes_samples:
        return Samples(manifest).microbatch(0, number)
    chance = torch.Generator().manual_seed(number)
    rows = (manifest.train.microbatch_size, manifest.train.sequence_length)
    if manifest.model.tells_tokens:
        windows = torch.randint(0, manifest.model.vocab_size, (rows[0], rows[1] + 1), generator=chance)
        return windows[:, :-1], windows
    tokens, labels = torch.randint(0, manifest.model.vocab_size, (2, *rows), generator=chance).unbind(0)
    return tokens, labels


def _check_first_weights(trained: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
    for name, parameter in trained.items():
        if name not in whole or not torch.equal(parameter, whole[name]):
            raise ManifestError(f"{_module_of(name)} does not split: the first {name} of a stage is not the whole model's", _REMEDY)


def _collect(stages: Sequence[StageModule], gradients: dict[str, Tensor | None]) -> None:
    """Add a microbatch's gradients to the earlier ones; a tied weight's are first summed over both stages, as in the whole model."""
    found: dict[str, Tensor | None] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            found[name] = _sum(found.get(name), parameter.grad)
            parameter.grad = None
    for name, own in found.items():
        gradients[name] = _sum(gradients.get(name), own)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum, where None counts as nothing; adding zeros might change bits."""
    return one if other is None else other if one is None else one + other


def _check_gradients(trained: Mapping[str, Tensor | None], whole: Mapping[str, Tensor]) -> None:
    for name, parameter in whole.items():
        own = trained.get(name)
        if parameter.grad is None and name in trained:
            raise ManifestError(f"{_module_of(name)} does not split: nothing depends on its parameter {name}", _REMEDY)
        if parameter.grad is not None and (own is None or not torch.equal(own, parameter.grad)):
            apart = "is missing" if own is None else f"differs by up to {float((own - parameter.grad).abs().max()):.1e}"
            raise ManifestError(f"{_module_of(name)} does not split: the gradient of {name} {apart} in a chain of stages", _REMEDY)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0] or name

"""Trainings of built-in decoders in one process, with all copies of a stage in the same products.

`train_reference` computes one microbatch after another. Here the copies of a stage lie in one tensor a parameter, and each product is that
of all copies: the same training but for rounding (tests/sim/test_together.py), in less time. It is for plain runs: AdamW, no dropout, no
narrow boundaries, no tied or shared weights, local steps from the first step on or none.

Shapes: C copies of a stage, B sequences of S tokens for each copy, D d_model, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from peerd.config.codec import Codec, parse_allowed, parse_averaged
from peerd.config.manifest import Manifest
from peerd.models.decoder import DecoderStage, rotate
from peerd.models.stages import build_stage
from peerd.reference import evaluate
from peerd.replicas import Averages, copies_passed
from peerd.stage.optimizer import Optimizer
from peerd.stage.update import apply_sums
from peerd.table.record import Evaluation
from peerd.train.corpus import Corpus
from peerd.wire.codecs import through

SAVED_EVERY_S = 60
"""Seconds of the processor after which a training is written into its file."""


def train_together(manifest: Manifest, corpus: Corpus, num_copies: int, path: Path | None = None) -> list[Evaluation]:
    """The run's evaluations. What has been trained is kept in `path`: after a stop the same call goes on from there.

    A file of another training is written over. Raises ValueError unless the copies' own updates use up the microbatches of a step.
    """
    training, saved_s = _read(path, manifest, num_copies) or _Training(manifest, num_copies), time.process_time()
    while training.step <= manifest.train.steps:
        training.go_on(corpus)
        if path is not None and time.process_time() >= saved_s + SAVED_EVERY_S:
            draft = path.with_name(f"{path.name}.draft")
            torch.save(training, draft)
            draft.replace(path)
            saved_s = time.process_time()
    return training.evaluations


def _read(path: Path | None, manifest: Manifest, num_copies: int) -> _Training | None:
    if path is None or not path.exists():
        return None
    found = torch.load(path, weights_only=False)
    is_same = isinstance(found, _Training) and (found.manifest, found.num_copies) == (manifest, num_copies)
    return found if is_same else None


class _Training:
    """A run before step `step`.

    A synchronous run whose averages lose nothing has one copy of each stage, which computes all microbatches of a step at once.
    """

    def __init__(self, manifest: Manifest, num_copies: int) -> None:
        train = self._train = manifest.train
        self.manifest, self.num_copies = manifest, num_copies
        self.step, self.evaluations = 0, list[Evaluation]()
        self._in_update = num_copies * train.local_batch if train.local_batch else train.microbatches_per_step
        if train.microbatches_per_step % self._in_update or train.local_steps_after:
            raise ValueError(
                f"{train.microbatches_per_step} microbatches are no whole updates of {num_copies} copies, or begin synchronously"
            )
        is_whole = not train.local_batch and not parse_averaged(manifest.wire.weight_gradients).is_lossy
        self._copies = [_Copies(manifest, stage, 1 if is_whole else num_copies) for stage in range(train.num_stages)]

    def go_on(self, corpus: Corpus) -> None:
        """Evaluate before the step if it is due, and train the step unless the run ends with the one before."""
        if self._train.evaluates_at(self.step):
            self.evaluations.append(evaluate(self.manifest, corpus, [each.stage for each in self._copies], self.step))
        if self.step < self._train.steps:
            for each in self._copies:
                each.begin(self.step)
            for first in range(0, self._train.microbatches_per_step, self._in_update):
                _update(corpus, self.manifest, self._copies, self.step, range(first, first + self._in_update))
            for each in self._copies:
                each.end(self.step)
        self.step += 1


def _update(corpus: Corpus, manifest: Manifest, copies: Sequence[_Copies], step: int, indices: range) -> None:
    """An update of every copy, of these microbatches of the step."""
    forth, back = (parse_allowed(name).most_exact for name in (manifest.wire.activations, manifest.wire.activation_gradients))
    told = [corpus.microbatch(step, index) for index in indices]
    hidden, labels = torch.stack([tokens for tokens, _ in told]), torch.stack([of_each for _, of_each in told])
    loss = torch.zeros(())
    for each in copies:
        order = each.order(indices)
        in_turn = torch.argsort(order)
        passed = each.forward(*(given[order].view(each.num_copies, -1, *given.shape[1:]) for given in (hidden, labels)))
        if each.stage.is_last:
            loss = passed
        else:
            shared = len(indices) // each.num_copies
            hidden = _Boundary.apply(passed.flatten(0, 1)[in_turn], forth, back, shared)  # type: ignore[no-untyped-call]
    found = iter(torch.autograd.grad(loss, [value for each in copies for value in each.values.values()]))
    for each in copies:
        each.update(step, {name: next(found) for name in each.values})


class _Boundary(torch.autograd.Function):
    """Activations of microbatches [M, ...] as the next stage gets them, and their gradients as the stage before gets these."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, forth: Codec, back: Codec, num_shared: int) -> Tensor:
        """`num_shared`: microbatches whose mean loss is one copy's loss. Between peers each has the gradient of its own loss."""
        ctx.back, ctx.num_shared = back, num_shared
        return _each_through(forth, hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _each_through(ctx.back, gradient * ctx.num_shared) / ctx.num_shared, None, None, None


def _each_through(codec: Codec, values: Tensor) -> Tensor:
    return torch.stack([through(codec, each) for each in values])


class _Copies:
    """The copies of one stage. Without local steps they are alike, and make the update of a step together."""

    def __init__(self, manifest: Manifest, stage: int, num_copies: int) -> None:
        built = build_stage(manifest, stage, "cpu")
        if not isinstance(built, DecoderStage):
            raise ValueError(f"a {type(built).__name__} cannot be trained so")
        self.stage, self.num_copies = built, num_copies
        self._manifest = manifest
        self._shared = dict(built.named_parameters())
        self.values = {name: torch.stack([value.detach()] * num_copies).requires_grad_() for name, value in self._shared.items()}
        """The parameters of all copies, [C, *shape]."""
        own = [{name: nn.Parameter(value.detach()[copy]) for name, value in self.values.items()} for copy in range(num_copies)]
        self._inner = [Optimizer(manifest.inner, parameters) for parameters in own if manifest.train.local_batch]
        self._outer = Optimizer(manifest, self._shared)
        self._averages = Averages(manifest, [value.shape for value in self._shared.values()], num_copies)
        self._order: list[int] = []

    def begin(self, step: int) -> None:
        """Start from the stage's parameters."""
        self._order = copies_passed(self._manifest, self.stage.stage, step, self.num_copies)
        with torch.no_grad():
            for name, value in self.values.items():
                value.copy_(self._shared[name].expand_as(value))

    def order(self, indices: range) -> Tensor:
        """The places of these microbatches, those of the first copy first."""
        return torch.tensor(sorted(range(len(indices)), key=lambda place: self._order[indices[place]]))

    def update(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """An update of each copy, or of the stage. `gradients`: [C, *shape]."""
        for copy, inner in enumerate(self._inner):
            inner.update(step, {name: value[copy] for name, value in gradients.items()})
        if not self._inner:
            self._update_by_mean(step, gradients)

    def end(self, step: int) -> None:
        """Average the changes of the copies, and update the stage's parameters by the mean."""
        if self._inner:
            with torch.no_grad():
                self._update_by_mean(step, {name: self._shared[name] - value for name, value in self.values.items()})

    def _update_by_mean(self, step: int, of_copies: Mapping[str, Tensor]) -> None:
        share = self._manifest.train.microbatches_per_step / self.num_copies
        own = torch.cat([value.flatten(1) for value in of_copies.values()], 1).mul_(share)
        apply_sums(self._manifest.train, self._outer, step, self._averages.mean_of(step, [*own], self._shared), 1, None)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Tokens [C, M, B, S] or activations [C, M, B, S, D] of M microbatches for each copy -> activations, or the sum of mean losses."""
        stage, shape = self.stage, inputs.shape[:4]
        width = stage.config.d_model
        if stage.is_first:
            hidden = _embedded(inputs.flatten(1), self.values["embedding.weight"])
        else:
            hidden = inputs.reshape(self.num_copies, -1, width)
        for layer in stage.blocks:
            hidden = self._layer(f"blocks.{layer}.", hidden, shape[3])
        if not stage.is_last:
            return hidden.view(*shape, width)
        logits = self._product("head.", self._norm("final_norm.", hidden))
        total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / (labels.numel() // self.num_copies)

    def _layer(self, name: str, hidden: Tensor, sequence: int) -> Tensor:
        """[C, B S, D] -> the same."""
        heads, width = self.stage.config.num_heads, hidden.shape[-1]
        projected = self._product(name + "attention.query_key_value.", self._norm(name + "attention_norm.", hidden))
        query, key, value = projected.view(-1, sequence, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
        rotary = self.stage.rotary[:, :sequence]
        mixed = functional.scaled_dot_product_attention(rotate(query, rotary), rotate(key, rotary), value, is_causal=True)
        hidden = hidden + self._product(name + "attention.output.", mixed.transpose(1, 2).reshape(hidden.shape))
        both = self._product(name + "feed_forward.gate_and_value.", self._norm(name + "feed_forward_norm.", hidden))
        gate, value = both.chunk(2, dim=-1)
        return hidden + self._product(name + "feed_forward.output.", functional.gelu(gate) * value)

    def _product(self, name: str, hidden: Tensor) -> Tensor:
        weight = self.values[name + "weight"]
        return functional.linear(hidden, weight[0]) if self.num_copies == 1 else torch.bmm(hidden, weight.transpose(1, 2))

    def _norm(self, name: str, hidden: Tensor) -> Tensor:
        weight, bias = self.values[name + "weight"], self.values[name + "bias"]
        if self.num_copies == 1:
            return functional.layer_norm(hidden, hidden.shape[-1:], weight[0], bias[0])
        return torch.addcmul(bias[:, None], functional.layer_norm(hidden, hidden.shape[-1:]), weight[:, None])


def _embedded(tokens: Tensor, weight: Tensor) -> Tensor:
    """Tokens [C, N], weight [C, V, D] -> [C, N, D]."""
    first = torch.arange(len(weight))[:, None] * weight.shape[1]
    return functional.embedding(tokens + first, weight.flatten(0, 1))

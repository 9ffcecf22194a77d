"""Generates text from a prompt, for a quick look at what a model has learned.

It reads an export of either format, or peers' homes that together hold every stage. Keys and values of the text so far are kept where the
model can (`peerd/models/prefix.py`). A text longer than the model's context loses its beginning with each token, so that every position
changes: from there on each token takes a pass of the whole context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.config.paths import cache_folder
from peerd.daemon.device import choose_device
from peerd.data.tokenizer import coding_of
from peerd.errors import UsageError
from peerd.models.prefix import Prefix
from peerd.models.sampling import choose
from peerd.models.stages import build_stage
from peerd.policy.inference.sampling import Sampling
from peerd.repartition import gather, with_boundaries

MAX_CONTEXT = 1024
Logits = Callable[[list[int]], Tensor]
"""The tokens so far -> the logits of the next one, [vocabulary], in the machine's memory."""
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    sources: list[str]
    prompt: str
    max_tokens: int = 100
    temperature: float = 0.0
    """0: always the likeliest token."""
    top_p: float = 1.0
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """A model and its tokenizer."""

    begin: Callable[[], Logits]
    """Gives the logits of one text as it goes on."""
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    max_context: int
    ends: frozenset[int]
    """Tokens that end a text; generating goes on after them where nobody minds them."""

    @property
    def logits(self) -> Logits:
        return self.begin()


class Continued:
    """Gives the logits after a text. Where that goes on from the text before, only what is new is computed."""

    def __init__(self, begin: Callable[[], Sequence[Prefix]], device: torch.device) -> None:
        """`begin` returns an empty text in each part of the model, in their order."""
        self._begin = begin
        self._device = device
        self._prefixes: Sequence[Prefix] = ()
        self._tokens: list[int] = []

    def __call__(self, tokens: list[int]) -> Tensor:
        known = len(self._tokens)
        if not known or len(tokens) <= known or tokens[:known] != self._tokens:
            self._prefixes, known = self._begin(), 0
        self._tokens = []  # after an error nothing can be continued
        hidden = torch.tensor([tokens[known:]], device=self._device)
        for prefix in self._prefixes:
            hidden = prefix.extend(hidden)
        self._tokens = [*tokens]
        return hidden[0, -1].cpu()


def open_text_model(sources: Sequence[Path], device: torch.device = CPU) -> TextModel:
    """The model of the sources, which computes on `device`. Raises ManifestError or UsageError if it does not generate text."""
    if len(sources) == 1 and (sources[0] / "config.json").exists():
        return _exported_text_model(sources[0], device)
    reached = gather(sources)
    manifest = reached.manifest
    _check_goes_on(manifest)
    if manifest.model.tells_tokens:  # the same model in one stage, which knows the tokens
        manifest = with_boundaries(manifest)
        manifest = replace(manifest, train=replace(manifest.train, num_stages=1, cut="even"))
    stages = [build_stage(manifest, stage, device) for stage in range(manifest.train.num_stages)]
    with torch.no_grad():
        for stage in stages:
            for name, parameter in stage.named_parameters():
                parameter.copy_(reached.parameters[name])

    def begin() -> Logits:
        return Continued(lambda: [stage.prefix() for stage in stages], device)  # the run's own stages: a cut may be a narrow boundary

    encode, decode, ends = coding_of(manifest.data, cache_folder())
    return TextModel(begin=begin, encode=encode, decode=decode, max_context=manifest.train.sequence_length, ends=frozenset(ends))


def _check_goes_on(manifest: Manifest) -> None:
    if manifest.model.makes_samples:
        raise UsageError(f"a {manifest.model.title} is no language model", "only those go on from a prompt")
    _refuse_masked(manifest.model.objective == "masked")


def _refuse_masked(is_masked: bool) -> None:
    if is_masked:
        raise UsageError("a masked language model does not go on from a prompt", "look at its losses with `peerd history`")


def _exported_text_model(folder: Path, device: torch.device) -> TextModel:
    from peerd.models.hf.prefix import prefix_of_whole
    from peerd.models.hf.pretrained import load_pretrained

    model, tokenizer = load_pretrained(folder)
    _refuse_masked(any("ForMaskedLM" in name for name in model.config.architectures or ()))
    model.to(device)
    most = getattr(model.config, "max_position_embeddings", None) or MAX_CONTEXT
    return TextModel(
        begin=lambda: Continued(lambda: [prefix_of_whole(model)], device),
        encode=lambda text: [*tokenizer(text, add_special_tokens=False)["input_ids"]],
        decode=lambda tokens: str(tokenizer.decode(tokens)),
        max_context=min(most, MAX_CONTEXT),
        ends=frozenset(token for token in (tokenizer.eos_token_id,) if token is not None),
    )


def generate_tokens(model: TextModel, given: Sequence[int], max_tokens: int, sampling: Sampling) -> Iterator[int]:
    """The tokens that follow the given ones, each as soon as it is known."""
    tokens, logits = [*given], model.begin()
    for _ in range(max_tokens):
        tokens.append(choose(logits(tokens[-model.max_context :]), sampling, len(tokens)))
        yield tokens[-1]


def generate(model: TextModel, request: GenerationRequest) -> str:
    """The text that follows the prompt. On one device the same request always gives the same text."""
    given = model.encode(request.prompt)
    if not given:
        raise UsageError("the prompt is empty", "give at least one character with --prompt")
    sampling = Sampling(temperature=request.temperature, top_p=request.top_p, seed=request.seed)
    return model.decode([*generate_tokens(model, given, request.max_tokens, sampling)])


def run(request: GenerationRequest) -> dict[str, Any]:
    """The whole command. Returns the fields to print."""
    model = open_text_model([Path(source) for source in request.sources], choose_device(request.device))
    return {"prompt": request.prompt, "text": generate(model, request)}

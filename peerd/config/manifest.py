"""The run manifest: what the run is, the same for every peer.

A run.toml is what an organiser writes; `parse` turns it (or a manifest from the network) into frozen dataclasses and
refuses what breaks a rule, naming the field. `canonical_bytes` is what gets signed. Who signed it is swarm/'s business.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from peerd.config import cut
from peerd.config.bounds import between as _between
from peerd.config.codec import parse_codec
from peerd.config.model_kinds import BlocksConfig, HuggingFaceConfig
from peerd.errors import DiskError, ManifestError

MAX_MANIFEST_BYTES = 64 * 1024
MAX_MICROBATCHES_PER_STEP = 8192
MAX_BOUNDARY_BYTES = 256 * 1024 * 1024
MAX_NAME_PATTERNS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The built-in decoder (SWARM section 4.3): rotary embeddings and GeGLU."""

    kind: Literal["decoder"] = "decoder"
    num_layers: int = 4
    d_model: int = 128
    num_heads: int = 4
    d_ff: int = 512
    """Width of the gated hidden layer."""
    vocab_size: int = 256
    """256 for the byte tokenizer."""
    layers_per_group: int = 1
    """So many layers in a row share one set of weights (ALBERT, arXiv 1909.11942); 1: each has its own."""
    boundary: Literal["none", "bottleneck", "maxout"] = "none"
    """How hidden states are narrowed where the model is cut (SWARM appendix I)."""
    boundary_factor: int = 2
    """So many times narrower."""
    boundary_layers: tuple[int, ...] = ()
    """Layers before which the hidden states are narrowed; empty: wherever the run is cut into stages."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "d_model", "num_heads", "d_ff", "vocab_size"):
            _between(f"model.{name}", getattr(self, name), 1, 1_000_000)
        if self.d_model % (2 * self.num_heads):
            raise ValueError(f"model.d_model ({self.d_model}) must be a multiple of twice model.num_heads ({self.num_heads})")
        cut.check_model(self)

    @property
    def boundary_width(self) -> int:
        """Width of the hidden states that cross from one stage to the next."""
        return self.d_model if self.boundary == "none" else self.d_model // self.boundary_factor

    def boundary_shape(self, _layer: int, sequence_length: int) -> tuple[int, ...]:
        """What crosses into layer `layer` for one sample, float32."""
        return (sequence_length, self.boundary_width)

    def tokens_per_sample(self, sequence_length: int) -> int:
        return sequence_length


AnyModel = ModelConfig | HuggingFaceConfig | BlocksConfig
MODEL_KINDS: dict[str, type[AnyModel]] = {"decoder": ModelConfig, "hf": HuggingFaceConfig, "blocks": BlocksConfig}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which tokens the run trains on. Peers agree on the token file's hash, never on a path."""

    source: str = "stdlib"
    """`stdlib` (the Python standard library's sources), or in a run.toml a text file or folder of the organiser."""
    tokenizer: Literal["bytes"] = "bytes"
    blake3: str = ""
    """Hash of the token file, hex; filled in when the run is started."""
    num_tokens: int = 0
    """Length of the token file; filled in when the run is started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartConfig:
    """What the run begins from: first weights drawn by the seed, or the state that an earlier run reached."""

    state: str = ""
    """In a run.toml: the file that `peerd new --from` wrote. Empty: first weights."""
    step: int = 0
    """Steps that lie behind the state; filled in when the run is started."""
    blake3: str = ""
    """Hash of the file, hex; filled in when the run is started."""

    def __post_init__(self) -> None:
        _between("start.step", self.step, 0, 1 << 40)
        if self.blake3 and not (len(self.blake3) == 64 and all(c in "0123456789abcdef" for c in self.blake3)):
            raise ValueError("start.blake3 must be 64 hex digits")
        if not self.state and (self.step or self.blake3):
            raise ValueError("start.step and start.blake3 need start.state")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    num_stages: int = 2
    cut: Literal["even", "cost"] | tuple[int, ...] = "even"
    """Layers of each stage: evenly many, about equal work (filled in when the run is started), or so many for each."""
    microbatches_per_step: int = 16
    microbatch_size: int = 4
    """Sequences per microbatch."""
    sequence_length: int = 128
    """Tokens per sequence."""
    first_sequence_length: int = 0
    """Tokens per sequence of the first step, from where it rises linearly; 0: sequence_length from the start."""
    sequence_length_steps: int = 0
    """The step from which on sequences have sequence_length tokens."""
    steps: int = 0
    """The run ends after this many steps; 0 goes on for ever."""
    learning_rate: float = 3e-3
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from zero."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up: schedule.py."""
    final_learning_rate: float = 0.0
    """Where a linear or cosine schedule ends and stays."""
    decay_steps: int = 0
    """The step at which it gets there, warm-up included; 0: at `steps`."""
    optimizer: Literal["adamw", "lamb", "sgd"] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    momentum: float = 0.9
    """Of SGD."""
    weight_decay: float = 0.01
    no_decay: tuple[str, ...] = ()
    """Names of parameters without weight decay, `*` for any characters; vectors (norms and biases) never have it."""
    max_gradient_norm: float = 0.0
    """Gradients are scaled down where the whole model's norm, all stages together, is larger; 0: never."""
    dropout: float = 0.0
    """Share of activations left out, by masks that depend on seed, step, microbatch and module alone."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the forward and backward passes; parameters and sums of gradients stay as they are."""
    loss_scale: float = 65536.0
    """The first scale of float16's gradients, a power of two; halved when they overflow, which costs the step's update."""
    loss_scale_growth_steps: int = 2000
    """Doubled after so many steps without overflow."""
    delayed_updates: bool = False
    """A step's update is made while the next step is computed, which lacks it: every gradient is one update late."""
    average_parameters_every_steps: int = 0
    """Peers of a stage average their parameters, too, at every so many steps: unlike processors drift apart by rounding; 0: never."""
    accumulate: Literal["float32", "float64"] = "float32"
    """Precision of gradient accumulators and their all-reduce; float64 makes the sum independent of its order."""

    def __post_init__(self) -> None:
        _between("train.num_stages", self.num_stages, 1, 4096)
        _between("train.microbatches_per_step", self.microbatches_per_step, 1, MAX_MICROBATCHES_PER_STEP)
        _between("train.microbatch_size", self.microbatch_size, 1, 65536)
        _between("train.sequence_length", self.sequence_length, 2, 1 << 20)
        cut.check_ramp(self)
        _between("train.steps", self.steps, 0, 1 << 40)
        _between("train.warmup_steps", self.warmup_steps, 0, 1 << 40)
        _between("train.learning_rate", self.learning_rate, 0.0, 100.0)
        _between("train.beta1", self.beta1, 0.0, 0.999999)
        _between("train.beta2", self.beta2, 0.0, 0.999999)
        _between("train.epsilon", self.epsilon, 1e-16, 1.0)
        _between("train.weight_decay", self.weight_decay, 0.0, 10.0)
        _between("train.momentum", self.momentum, 0.0, 0.999999)
        if len(self.no_decay) > MAX_NAME_PATTERNS or not all(1 <= len(pattern) <= 256 for pattern in self.no_decay):
            raise ValueError(f"train.no_decay must be at most {MAX_NAME_PATTERNS} names of 1 to 256 characters")
        self._check_schedule()
        _between("train.max_gradient_norm", self.max_gradient_norm, 0.0, 1e9)
        _between("train.average_parameters_every_steps", self.average_parameters_every_steps, 0, 1 << 40)
        _between("train.dropout", self.dropout, 0.0, 0.99)
        _between("train.loss_scale", self.loss_scale, 1.0, 2.0**32)
        _between("train.loss_scale_growth_steps", self.loss_scale_growth_steps, 1, 1_000_000)
        if self.delayed_updates and self.average_parameters_every_steps:
            raise ValueError("train.average_parameters_every_steps cannot go with train.delayed_updates: set one of them only")
        if not math.log2(self.loss_scale).is_integer():
            raise ValueError(f"train.loss_scale is {self.loss_scale}; it must be a power of two")

    def _check_schedule(self) -> None:
        _between("train.final_learning_rate", self.final_learning_rate, 0.0, 100.0)
        _between("train.decay_steps", self.decay_steps, 0, 1 << 40)
        if self.schedule == "constant":
            if self.final_learning_rate or self.decay_steps:
                raise ValueError('train.final_learning_rate and train.decay_steps need train.schedule "linear" or "cosine"')
        elif self.last_decay_step <= self.warmup_steps:
            raise ValueError(
                f'train.schedule "{self.schedule}" comes down between train.warmup_steps ({self.warmup_steps}) and train.decay_steps, '
                f"or train.steps where that is 0 ({self.last_decay_step}): raise one of these"
            )

    @property
    def shares_norms(self) -> bool:
        """Whether an average is applied with the gradient norm of the whole model: to clip by it, or to leave an overflow out."""
        return self.max_gradient_norm > 0 or self.precision == "float16"

    @property
    def last_decay_step(self) -> int:
        """Updates after which a falling learning rate has come down; 0: no end is known."""
        return self.decay_steps or self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeConfig:
    threads: int = 0
    """Torch threads per peer; 0 takes the machine's. A fixed number makes gradients equal to the bit between peers."""
    recompute: Literal["auto", "always", "never"] = "auto"
    """Recompute a stage's forward pass in backward (saves memory) or keep the graph (faster)."""
    slots: int = 0
    """Microbatches a peer holds at once; 0 derives it from the number of stages."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in the machine's memory and update there, to spare a GPU's; the same on CPUs."""

    def __post_init__(self) -> None:
        _between("compute.threads", self.threads, 0, 1024)
        _between("compute.slots", self.slots, 0, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireConfig:
    """How tensors travel: "none", "bfloat16", "float16", "int8" (256 values share a scale) or "topk:RATIO"."""

    activations: str = "none"
    """Hidden states on their way to the next stage."""
    activation_gradients: str = "none"
    """Gradients on their way back."""
    weight_gradients: str = "none"
    """Gradients that mates of a stage average; what compression leaves out is added the next time (error feedback)."""

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            try:
                parse_codec(getattr(self, entry.name))
            except ValueError as error:
                raise ValueError(f"wire.{entry.name}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmConfig:
    announce_period_s: float = 5.0
    """How often a peer announces itself; three missed periods and it counts as gone."""

    rebalance_period_s: float = 60.0
    """How often peers consider moving to a weaker stage; 0: never."""
    checkpoint_every_steps: int = 5
    """Each peer keeps its stage on disk after every so many steps, so that a swarm that was switched off resumes; 0: never."""

    def __post_init__(self) -> None:
        _between("swarm.announce_period_s", self.announce_period_s, 0.2, 300.0)
        _between("swarm.rebalance_period_s", self.rebalance_period_s, 0.0, 86400.0)
        _between("swarm.checkpoint_every_steps", self.checkpoint_every_steps, 0, 1 << 40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole run. Two peers of one run hold equal manifests."""

    name: str = "run"
    seed: int = 0
    model: AnyModel = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    start: StartConfig = field(default_factory=StartConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    swarm: SwarmConfig = field(default_factory=SwarmConfig)

    def __post_init__(self) -> None:
        if not (1 <= len(self.name) <= 64 and all(c.isalnum() or c in "-_." for c in self.name)):
            raise ValueError("name must be 1 to 64 letters, digits, '-', '_' or '.'")
        _between("seed", self.seed, 0, 2**63 - 1)
        if self.train.num_stages > self.model.num_layers:
            raise ValueError(f"train.num_stages ({self.train.num_stages}) must not exceed model.num_layers ({self.model.num_layers})")
        cut.check_cut(self.model, self.train)
        exact = self.wire.weight_gradients == "none"
        if not exact and self.train.average_parameters_every_steps:
            raise ValueError('train.average_parameters_every_steps needs wire.weight_gradients "none": parameters must not lose digits')
        if not exact and self.train.precision == "float16":
            raise ValueError('train.precision "float16" needs wire.weight_gradients "none": what overflowed must be counted exactly')
        if self.boundary_bytes > MAX_BOUNDARY_BYTES:
            raise ValueError(
                f"a microbatch's activations take {self.boundary_bytes} bytes; the limit is {MAX_BOUNDARY_BYTES}: "
                "lower train.microbatch_size or train.sequence_length"
            )

    @property
    def decoder(self) -> ModelConfig:
        """The model of a run that trains the built-in one."""
        assert isinstance(self.model, ModelConfig)
        return self.model

    @property
    def boundary_bytes(self) -> int:
        """Bytes of one microbatch's activations (or their gradient) between two stages, uncompressed: at most, where cuts differ."""
        widest = max((math.prod(self.boundary_shape(layer)) for layer in range(1, self.model.num_layers)), default=0)
        return 4 * (widest or math.prod(self.boundary_shape(1)))

    def boundary_shape(self, layer: int, sequence_length: int = 0) -> tuple[int, ...]:
        """Shape of what a microbatch sends into layer `layer` from the stage before it; at full sequence length unless given."""
        return (self.train.microbatch_size, *self.model.boundary_shape(layer, sequence_length or self.train.sequence_length))

    @property
    def tokens_per_microbatch(self) -> int:
        """At full sequence length."""
        return self.train.microbatch_size * self.model.tokens_per_sample(self.train.sequence_length)

    @property
    def tokens_per_step(self) -> int:
        """At full sequence length."""
        return self.train.microbatches_per_step * self.tokens_per_microbatch

    def sequence_length_at(self, step: int) -> int:
        return cut.sequence_length_at(self.train, step)

    def tokens_per_microbatch_at(self, step: int) -> int:
        return self.train.microbatch_size * self.model.tokens_per_sample(self.sequence_length_at(step))

    def tokens_per_step_at(self, step: int) -> int:
        return self.train.microbatches_per_step * self.tokens_per_microbatch_at(step)

    @property
    def slots(self) -> int:
        """Microbatches a peer may hold: two per stage of the pipeline below it and two in hand keep everybody busy."""
        return self.compute.slots or 2 * self.train.num_stages + 2

    @property
    def layer_counts(self) -> tuple[int, ...] | None:
        """Layers of each stage, or None where their cost decides."""
        return cut.layer_counts(self.model, self.train)

    def canonical_bytes(self) -> bytes:
        """The bytes that are signed: JSON with sorted keys."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":")).encode()


def run_id(organiser_key: bytes, name: str) -> str:
    """A run's id: 32 hex digits of the hash of the organiser's raw Ed25519 public key and the run's name."""
    return hashlib.sha256(b"peerd run\0" + organiser_key + b"\0" + name.encode()).hexdigest()[:32]


def parse(document: dict[str, Any], origin: str) -> Manifest:
    """Validate a decoded TOML or JSON document; `origin` names it in the error."""
    from pydantic import TypeAdapter, ValidationError

    within: tuple[str, ...] = ()
    try:
        _refuse_unknown_fields(document)
        if isinstance(document.get("model"), dict):
            within = ("model",)
            document = document | {"model": TypeAdapter(_model_kind(document)).validate_python(document["model"])}
            within = ()
        return TypeAdapter(Manifest).validate_python(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in (*within, *first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise ManifestError(f"{origin}: {where + ': ' if where else ''}{message}", "correct that field") from None
    except ValueError as error:
        raise ManifestError(f"{origin}: {error}", "correct that field") from None


def parse_bytes(raw: bytes, origin: str) -> Manifest:
    """A manifest as `canonical_bytes` wrote it."""
    if len(raw) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"{origin}: {len(raw)} bytes; a manifest has at most {MAX_MANIFEST_BYTES}")
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{origin}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ManifestError(f"{origin}: not a manifest")
    return parse(document, origin)


def load(path: Path) -> Manifest:
    """Read a run.toml."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ManifestError(f"{path}: no such file", f"write one with `peerd new {path.parent}`") from None
    except OSError as error:
        raise DiskError(f"{path}: {error.strerror}") from None
    try:
        document = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{path}: not TOML: {error}", "correct the file") from None
    return parse(document, str(path))


def dump(manifest: Manifest) -> str:
    """The manifest as the text of a run.toml."""
    import tomli_w

    return tomli_w.dumps(dataclasses.asdict(manifest))


def _refuse_unknown_fields(document: dict[str, Any]) -> None:
    """A misspelt field must not pass silently as its default."""
    _refuse_unknown(document, Manifest, "")
    for section in dataclasses.fields(Manifest):
        value = document.get(section.name)
        kind = _model_kind(document) if section.name == "model" else type(getattr(_DEFAULT, section.name))
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):
            _refuse_unknown(value, kind, section.name + ".")


def _model_kind(document: dict[str, Any]) -> type[AnyModel]:
    """The class that [model] is of, by its field `kind`."""
    model = document.get("model")
    named = model.get("kind", "decoder") if isinstance(model, dict) else "decoder"
    kind = MODEL_KINDS.get(named) if isinstance(named, str) else None
    if kind is None:
        raise ValueError(f"model.kind is {named!r}; it must be one of {', '.join(MODEL_KINDS)}")
    return kind


def _refuse_unknown(document: dict[str, Any], kind: type, prefix: str) -> None:
    known = {entry.name for entry in dataclasses.fields(kind)}
    unknown = sorted(set(document) - known)
    if unknown:
        raise ValueError(f"unknown field {prefix}{unknown[0]}; known are {', '.join(sorted(known))}")


_DEFAULT = Manifest()

"""The run manifest: the definition of a run, equal for all peers.

The organiser writes a run.toml. `parse` turns it (or a manifest from the network) into frozen dataclasses and refuses one that breaks
a rule, naming the field. `canonical_bytes` is signed; swarm/ checks the signature.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal, TypeVar

from peerd.config import cut
from peerd.config.about import AboutConfig as AboutConfig
from peerd.config.about import check_name
from peerd.config.bounds import Between, NumSteps, check_bounds
from peerd.config.codec import parse_allowed, parse_averaged
from peerd.config.data_config import DataConfig as DataConfig
from peerd.config.data_config import check_hash
from peerd.config.model_kinds import MODEL_KINDS
from peerd.config.model_kinds import AnyModel as AnyModel
from peerd.config.model_kinds import ModelConfig as ModelConfig
from peerd.config.train_config import MAX_MICROBATCHES_PER_STEP as MAX_MICROBATCHES_PER_STEP
from peerd.config.train_config import TrainConfig as TrainConfig
from peerd.errors import ManifestError, disk_error

MAX_MANIFEST_BYTES = 64 * 1024
MANIFEST_DOMAIN = b"peerd manifest\0"
"""What every text begins with that an organiser signs of a manifest."""
MAX_BOUNDARY_BYTES = 256 * 1024 * 1024
MAX_WISHES = 512
_WISH = re.compile(r"[A-Za-z0-9]{1,64}=(0|[1-9][0-9]{0,3})", re.ASCII)
Kind = TypeVar("Kind", bound=AnyModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartConfig:
    """The state that the run starts from: random weights drawn with the seed, or the state of an earlier run."""

    state: str = ""
    """Empty: first weights. Or a file that `peerd new --from` wrote: the state that an earlier run reached."""
    step: NumSteps = 0
    """Number of steps that the state has been trained; filled in when the run is started."""
    blake3: str = ""
    """Hash of the file, hex; filled in when the run is started."""

    def __post_init__(self) -> None:
        check_bounds("start.", self)
        check_hash("start.blake3", self.blake3)
        if not self.state and (self.step or self.blake3):
            raise ValueError("start.step and start.blake3 need start.state")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeConfig:
    threads: Annotated[int, Between(0, 1024)] = 0
    """Torch threads per peer; 0 takes the machine's. A fixed number makes gradients equal to the bit between peers."""
    recompute: Literal["auto", "always", "never"] = "auto"
    """ "always" saves memory, "never" is faster, "auto" decides by the memory at hand.

    The forward pass of a stage is computed again during backward, or its graph is kept.
    """
    slots: Annotated[int, Between(0, 4096)] = 0
    """Microbatches a peer holds at once; 0: as the number of stages needs, up to four times as many over long links.

    More than the number of stages needs only as free memory allows.
    """
    offload: Literal["auto", "none", "all"] = "auto"
    """What a GPU leaves to the machine's memory: "all" but the parameters, the gradients and their sums, or "none" of it.

    "auto": each peer offloads where its GPU would not hold the rest as well. Changes nothing where a device has no memory of its own.
    """

    def __post_init__(self) -> None:
        check_bounds("compute.", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireConfig:
    """The codec of each kind of tensor: one of `CODECS` in codec.py, or "auto" to let each link choose."""

    activations: str = "none"
    """Hidden states on their way to the next stage. "auto": each link is compressed as far as it needs."""
    activation_gradients: str = "none"
    """Gradients on their way back."""
    weight_gradients: str = "none"
    """Gradients that the peers of a stage average, or "powersgd:4", or "sparse:64" for local steps. Replicas stay equal.

    The sum is not exact. The error of compression is added at the next step (error feedback).
    """

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            try:
                (parse_averaged if entry.name == "weight_gradients" else parse_allowed)(getattr(self, entry.name))
            except ValueError as error:
                raise ValueError(f"wire.{entry.name}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmConfig:
    announce_period_s: Annotated[float, Between(0.2, 300.0)] = 5.0
    """How often a peer announces itself; three missed periods and it counts as gone."""
    rebalance_period_s: Annotated[float, Between(0.0, 86400.0)] = 60.0
    """How often peers consider moving to a weaker stage; 0: never."""
    rebalance: Literal["queues", "improved", "none"] = "improved"
    """By what peers move: SWARM's algorithm 2, from the queues in the table; the weakest stage, from rates; or not at all."""
    checkpoint_every_steps: NumSteps = 5
    """Each peer keeps its stage on disk this often, so that a run that was switched off resumes; 0: never."""
    group_size: Annotated[int, Between(0, 1024)] = 32
    """The most peers of a stage that average in one round; those of a larger stage first make the sums of groups. 0: all in one round."""
    trust: Literal["off", "on", "audits"] = "off"
    """ "on": an average counts once most of its stage hold the same numbers, and a peer that signs two of one sum is shut out.

    "audits": also, peers compute some microbatches of their mates again, and shut out those that most of them find wrong.
    """
    access: Literal["open", "invited"] = "open"
    """ "invited": only peers that the organiser has invited (`peerd invite`) take part. Bans (`peerd ban`) hold in both kinds of run."""
    placement: tuple[str, ...] = ()
    """Wishes: "PEER=STAGE", the stage that a peer takes first, where it fits. `peerd start --placement` writes them."""

    def __post_init__(self) -> None:
        check_bounds("swarm.", self)
        if len(self.placement) > MAX_WISHES or not all(_WISH.fullmatch(wish) for wish in self.placement):
            raise ValueError(f'swarm.placement must be at most {MAX_WISHES} wishes such as "12D3KooW...=1"')
        if len(self.wishes) < len(self.placement):
            raise ValueError("swarm.placement names a peer twice")
        if self.group_size == 1:
            raise ValueError("swarm.group_size is 1: a group has at least 2 peers; 0 is for no groups")
        if self.group_size and self.audits:
            raise ValueError('swarm.trust "audits" needs swarm.group_size 0: members\' parts of the sums of groups are not audited')

    @property
    def wishes(self) -> dict[str, int]:
        """By peer, the stage that the organiser wishes it in."""
        parts = [wish.partition("=") for wish in self.placement]
        return {peer: int(stage) for peer, _, stage in parts}

    @property
    def certifies(self) -> bool:
        """Whether averages are certified: rule 18 (certify)."""
        return self.trust != "off"

    @property
    def audits(self) -> bool:
        """Whether peers sign what they get and give of each microbatch, and audit each other: rule 20 (audit)."""
        return self.trust == "audits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The definition of a whole run. All peers of a run hold equal manifests."""

    name: str = "run"
    """Letters, digits, '-', '_', '.'. With the organiser's key it makes the run's id."""
    seed: Annotated[int, Between(0, 2**63 - 1)] = 0
    """Decides the first weights and which text each microbatch holds."""
    model: AnyModel = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    start: StartConfig = field(default_factory=StartConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    swarm: SwarmConfig = field(default_factory=SwarmConfig)
    about: AboutConfig = field(default_factory=AboutConfig)

    def __post_init__(self) -> None:
        check_name(self.name)
        check_bounds("", self)
        if self.train.dropout and self.model.has_own_dropout:
            raise ValueError(f"train.dropout does not go with a {self.model.title}, which places its own dropout")
        if self.train.num_stages > self.model.num_layers:
            raise ValueError(f"train.num_stages ({self.train.num_stages}) must not exceed model.num_layers ({self.model.num_layers})")
        if self.train.evaluate_every_steps and not self.model.makes_samples and not self.data.evaluation_fraction:
            raise ValueError("train.evaluate_every_steps needs tokens to evaluate on: set data.evaluation_fraction, for example to 0.02")
        cut.check_cut(self.model, self.train)
        if any(stage >= self.train.num_stages for stage in self.swarm.wishes.values()):
            raise ValueError(f"swarm.placement: the run's stages are 0 to {self.train.num_stages - 1}")
        exact = self.wire.weight_gradients == "none"
        if self.ties_stages and self.train.average_parameters == "always":
            raise ValueError(
                'model.tie_word_embeddings cannot go with train.average_parameters = "always" in several stages: '
                "the first and the last stage would average their copies of one weight apart"
            )
        if not exact and self.train.average_parameters == "always":
            raise ValueError('train.average_parameters = "always" needs wire.weight_gradients "none": parameters must not lose digits')
        if not exact and self.train.precision == "float16":
            raise ValueError('train.precision "float16" needs wire.weight_gradients "none": overflows must be detected exactly')
        if self.ties_stages and self.train.local_batch:
            raise ValueError(
                "model.tie_word_embeddings cannot go with train.local_batch in several stages: "
                "the copies of one weight in the first and the last stage would be updated apart"
            )
        if parse_averaged(self.wire.weight_gradients).most_exact.is_sparse and not self.train.local_batch:
            raise ValueError('wire.weight_gradients "sparse" needs train.local_batch: of single updates it leaves out too much')
        if self.swarm.certifies and self.wire.weight_gradients.startswith("powersgd"):
            raise ValueError(
                f'swarm.trust "{self.swarm.trust}" does not go with powersgd: its sums are not the same to the bit on all machines'
            )
        if self.swarm.audits and (unfit := self._why_no_audits()):
            raise ValueError(f'swarm.trust "audits" does not go with {unfit}')
        if self.boundary_bytes > MAX_BOUNDARY_BYTES:
            raise ValueError(
                f"a microbatch's activations take {self.boundary_bytes} bytes; the limit is {MAX_BOUNDARY_BYTES}: "
                "lower train.microbatch_size or train.sequence_length"
            )

    def _why_no_audits(self) -> str:
        """The setting with which a microbatch cannot be computed again by a mate, and why; empty if there is none."""
        train = self.train
        if train.local_batch:
            return "train.local_batch: mates have other parameters within a step"
        if train.delayed_updates:
            return "train.delayed_updates: a record does not say which updates the parameters of the next step have"
        if self.model.tells_tokens:
            return 'model.boundary "subspace" or "token-residual": mates of middle stages get no tokens to compute with'
        if self.wire.weight_gradients != "none":
            return (
                f'wire.weight_gradients "{self.wire.weight_gradients}": what a codec leaves out of one part is in the next one, '
                "so no mate can tell what that must be"
            )
        return 'train.precision "float16": values that overflow are right there' if train.precision == "float16" else ""

    @property
    def may_average_parameters(self) -> bool:
        """Whether mates average parameters at all: always, or while their devices are unlike."""
        if self.train.average_parameters != "auto":
            return self.train.average_parameters == "always"
        is_simple = not self.train.delayed_updates and not self.train.local_batch and not self.ties_stages
        return is_simple and self.wire.weight_gradients == "none"

    @property
    def inner(self) -> Manifest:
        """Where steps are local, the run whose updates a peer makes by itself within a step."""
        return dataclasses.replace(self, train=self.train.inner, wire=WireConfig())

    def model_as(self, kind: type[Kind]) -> Kind:
        """The model, for code that belongs to this kind alone."""
        assert isinstance(self.model, kind)
        return self.model

    @property
    def decoder(self) -> ModelConfig:
        """The model of a run that trains the built-in one."""
        return self.model_as(ModelConfig)

    @property
    def ties_stages(self) -> bool:
        """True if the first and the last stage each hold a copy of one weight, and sum its gradients."""
        return self.model.tie_word_embeddings and self.train.num_stages > 1

    @property
    def boundary_bytes(self) -> int:
        """Uncompressed size of one microbatch's activations (or their gradient) between two stages; the largest if cuts differ."""
        widest = max((math.prod(self.boundary_shape(layer)) for layer in range(1, self.model.num_layers)), default=0)
        return 4 * (widest or math.prod(self.boundary_shape(1)))

    def boundary_shape(self, layer: int, sequence_length: int = 0) -> tuple[int, ...]:
        """Shape of a microbatch's activations as input of layer `layer`; at full sequence length unless given."""
        return (self.train.microbatch_size, *self.model.boundary_shape(layer, sequence_length or self.train.sequence_length))

    @property
    def tokens_per_microbatch(self) -> int:
        """Tokens of a microbatch at full sequence length."""
        return self.train.microbatch_size * self.model.tokens_per_sample(self.train.sequence_length)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step at full sequence length."""
        return self.train.microbatches_per_step * self.tokens_per_microbatch

    def sequence_length_at(self, step: int) -> int:
        return cut.sequence_length_at(self.train, step)

    def tokens_per_microbatch_at(self, step: int) -> int:
        return self.train.microbatch_size * self.model.tokens_per_sample(self.sequence_length_at(step))

    def tokens_per_step_at(self, step: int) -> int:
        return self.train.microbatches_per_step * self.tokens_per_microbatch_at(step)

    @property
    def slots(self) -> int:
        """Number of microbatches a peer may hold: two for each stage of the pipeline, plus four, because they arrive unevenly.

        With two instead of four, peers of a stage of four were idle for 0.4 s of a step of 5.5 s while others of their stage had two
        and three microbatches queued (`scripts/bench scaling --microbatches 64`).
        """
        return self.compute.slots or 2 * self.train.num_stages + 4

    @property
    def layer_counts(self) -> tuple[int, ...] | None:
        """Number of layers of each stage, or None if their cost decides."""
        return cut.layer_counts(self.model, self.train)

    def canonical_bytes(self) -> bytes:
        """The bytes to sign: JSON with sorted keys. An empty [about] is left out: older daemons do not know it."""
        document = dataclasses.asdict(self)
        if not self.about.told:
            del document["about"]
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def run_id(organiser_key: bytes, name: str) -> str:
    """A run's id: 32 hex digits of the hash of the organiser's raw Ed25519 public key and the run's name."""
    return hashlib.sha256(b"peerd run\0" + organiser_key + b"\0" + name.encode()).hexdigest()[:32]


def parse(document: dict[str, Any], origin: str) -> Manifest:
    """Validate a decoded TOML or JSON document. `origin` names it in error messages."""
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
    """Parse a manifest that `canonical_bytes` wrote."""
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
        raise ManifestError(f"{path}: no such file", f"write one with `peerd new {quote(str(path.parent))}`") from None
    except OSError as error:
        raise disk_error(path, error) from None
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
    """Refuse unknown fields, so that a misspelt one does not silently take its default."""
    _refuse_unknown(document, Manifest, "")
    for section in dataclasses.fields(Manifest):
        value = document.get(section.name)
        kind = _model_kind(document) if section.name == "model" else type(getattr(_DEFAULT, section.name))
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):
            _refuse_unknown(value, kind, section.name + ".")


def _model_kind(document: dict[str, Any]) -> type[AnyModel]:
    """The class of [model], named by its field `kind`."""
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

"""The kinds of models in a manifest, with the properties that the rest of peerd reads. models/ builds the models.

Code outside models/ reads properties and never the kind. `ModelConfig` explains them; mypy reports those that a new kind in `AnyModel`
lacks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from peerd.config import cut
from peerd.config.bounds import Between, check_bounds

REFUSED_CONFIG_KEYS = frozenset(
    {"auto_map", "trust_remote_code", "quantization_config", "attn_implementation", "_attn_implementation", "experts_implementation"}
    | {"_experts_implementation", "custom_pipelines", "kernel_config", "use_kernels"}
)
"""Keys that make transformers run code or kernels other than its own."""
MAX_CONFIG_DEPTH = 32
NOT_ASKED = -100
"""The label of a token that a masked model does not predict; torch leaves it out of the mean loss."""
MAX_BLOCKS = 4096
NarrowBoundary = Literal["subspace", "token-residual"]
SUBSPACE_FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""The transformers models whose layers only add to hidden states what two linear modules write, and read them through norms."""
Size = Annotated[int, Between(1, 1_000_000)]


class ReadsText:
    """A language model: a sample is a sequence of tokens, and each token has a label."""

    __slots__ = ()
    makes_samples: ClassVar = False
    """True if an installed package makes the microbatches; otherwise they are windows of the run's text."""
    has_own_dropout: ClassVar = False
    """True if an installed package places the dropout; otherwise train.dropout does."""
    input_dtype: ClassVar = "int32"
    """Element type of the first stage's input, as it travels."""

    @property
    def tells_tokens(self) -> bool:
        """True if every stage computes with the tokens: labels are then whole windows, a token longer than the sequence."""
        return False

    def sample_shape(self, sequence_length: int) -> tuple[int, ...]:
        """Shape of one sample of the first stage's input."""
        return (sequence_length,)

    def labels_shape(self, sequence_length: int) -> tuple[int, ...]:
        """Shape of one sample's labels."""
        return (sequence_length + self.tells_tokens,)

    def tokens_per_sample(self, sequence_length: int) -> int:
        return sequence_length


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ReadsText):
    """The built-in decoder (SWARM section 4.3): rotary embeddings and GeGLU."""

    title: ClassVar = "decoder"
    """Its name in messages, after "a"."""
    objective: ClassVar = "causal"
    """Only a causal model can continue a prompt."""
    masked_share: ClassVar = 0.0
    mask_token: ClassVar = 0
    publishes_as: ClassVar = "stablelm"
    """The architecture of transformers that computes the same: "stablelm", "itself", or "" for none."""
    needs_split_check: ClassVar = False
    """False if peerd's own tests prove that it splits exactly; otherwise every run checks this before it starts."""

    kind: Literal["decoder"] = "decoder"
    """ "decoder": the built-in one; "hf": a transformers model by its config; "blocks": an installed entry point."""
    num_layers: Size = 4
    d_model: Size = 128
    num_heads: Size = 4
    """2 x num_heads must divide d_model."""
    d_ff: Size = 512
    """Width of the gated hidden layer."""
    vocab_size: Size = 256
    """256 for the byte tokenizer, else at least what the tokenizer has."""
    layers_per_group: int = 1
    """So many layers in a row share one set of weights; 1: each has its own.

    ALBERT, arXiv 1909.11942.
    """
    boundary: Literal["none", "bottleneck", "maxout", "subspace", "token-residual"] = "none"
    """Between stages: "none", or narrowed by "bottleneck", "maxout", "subspace" or "token-residual".

    Each costs some quality. "bottleneck", "maxout": SWARM appendix I. "subspace": hidden states of a few coordinates, wherever the
    run is cut (arXiv 2506.01260). "token-residual": between stages a few coordinates beside the token, within them all.
    """
    boundary_rank: Annotated[int, Between(0, 1_000_000)] = 0
    """Coordinates of "subspace" and "token-residual", at most d_model: so much narrower is the boundary, both ways."""
    boundary_factor: int = 2
    """So many times narrower."""
    boundary_layers: tuple[int, ...] = ()
    """Layers before which it is narrowed; []: wherever the run is cut into stages."""
    tie_word_embeddings: bool = False
    """Input and output embeddings are one weight; in several stages the first and the last each hold it.

    Press and Wolf 2017, arXiv 1608.05859.
    """

    def __post_init__(self) -> None:
        check_bounds("model.", self)
        if self.d_model % (2 * self.num_heads):
            raise ValueError(f"model.d_model ({self.d_model}) must be a multiple of twice model.num_heads ({self.num_heads})")
        cut.check_model(self)

    @property
    def boundary_width(self) -> int:
        """Width of the hidden states that cross from one stage to the next."""
        if self.boundary in ("none", "subspace"):
            return self.stream_width
        return self.boundary_rank or self.d_model // self.boundary_factor

    @property
    def stream_width(self) -> int:
        """Width of what layers add up: of hidden states, or of their coordinates."""
        return self.boundary_rank if self.boundary == "subspace" else self.d_model

    @property
    def tells_tokens(self) -> bool:
        return self.boundary in ("subspace", "token-residual")

    def narrowed(self, boundary: NarrowBoundary, times: int) -> ModelConfig:
        """The model with a boundary of so many times fewer coordinates. Raises ValueError where there is none such."""
        return replace(self, boundary=boundary, boundary_rank=max(1, self.d_model // times))

    def boundary_shape(self, _layer: int, sequence_length: int) -> tuple[int, ...]:
        """Shape of one sample's activations as input of layer `layer`, float32."""
        return (sequence_length, self.boundary_width)

    @property
    def narrows_at_cuts(self) -> bool:
        """True if hidden states are narrowed at every cut, wherever it is."""
        return self.boundary not in ("none", "subspace") and not self.boundary_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceConfig(ReadsText):
    """A language model of the package transformers, defined by its config alone; a run never brings code."""

    title: ClassVar = "transformers model"
    publishes_as: ClassVar = "itself"
    needs_split_check: ClassVar = True
    layers_per_group: ClassVar = 1
    boundary_layers: ClassVar[tuple[int, ...]] = ()
    narrows_at_cuts: ClassVar = False

    kind: Literal["hf"] = "hf"
    """ "decoder": the built-in one; "hf": a transformers model by its config; "blocks": an installed entry point."""
    config: str
    """The content of its config.json. `peerd new` has checked that it splits exactly; `peerd start` checks again."""
    num_layers: Size
    # Width of its hidden states.
    d_model: Size
    vocab_size: Size
    """256 for the byte tokenizer, else at least what the tokenizer has."""
    objective: Literal["causal", "masked"] = "causal"
    """ "causal" or "masked": which of its language models."""
    masked_share: Annotated[float, Between(0.0, 0.9)] = 0.0
    """Of each sequence's tokens a masked model learns so many, hidden from it; 0: it learns the token that follows."""
    mask_token: int = 0
    """The number of the token that hides another."""
    tie_word_embeddings: bool = False
    """Input and output embeddings are one weight; in several stages the first and the last each hold it.

    This field overrides the config's own of the same name.
    """
    boundary: Literal["none", "subspace"] = "none"
    """Between stages: "none", or hidden states of a few coordinates, wherever the run is cut (arXiv 2506.01260).

    For llama, mistral, qwen2 and qwen3.
    """
    boundary_rank: Annotated[int, Between(0, 1_000_000)] = 0
    """Coordinates of "subspace", at most d_model: so much narrower is the boundary, both ways."""

    def __post_init__(self) -> None:
        check_bounds("model.", self)
        Between(0, self.vocab_size - 1).check("model.mask_token", self.mask_token)
        if self.masked_share and self.objective != "masked":
            raise ValueError('model.masked_share needs model.objective "masked": a causal model predicts the following tokens')
        kind = self.fields.get("model_type")
        if not (isinstance(kind, str) and kind):
            raise ValueError("model.config names no model_type")
        refused = sorted(REFUSED_CONFIG_KEYS & _keys_in(self.fields))
        if refused:
            raise ValueError(f"model.config has {refused[0]}, which no run may have: it names code that is not transformers' own")
        cut.check_subspace(self)
        if self.boundary == "subspace" and kind not in SUBSPACE_FAMILY:
            raise ValueError(f'model.boundary "subspace" is made for {", ".join(SUBSPACE_FAMILY)}; model.config is of a {kind}')

    def narrowed(self, boundary: NarrowBoundary, times: int) -> HuggingFaceConfig:
        if boundary != "subspace":
            raise ValueError(f'a model of transformers has no boundary "{boundary}"')
        return replace(self, boundary=boundary, boundary_rank=max(1, self.d_model // times))

    @property
    def plain(self) -> HuggingFaceConfig:
        """The model without a subspace: transformers' own."""
        return replace(self, boundary="none", boundary_rank=0)

    @property
    def stream_width(self) -> int:
        """Width of what layers add up: of hidden states, or of their coordinates."""
        return self.boundary_rank if self.boundary == "subspace" else self.d_model

    @property
    def tells_tokens(self) -> bool:
        return self.boundary == "subspace"

    @property
    def fields(self) -> dict[str, Any]:
        """The parsed config."""
        try:
            found = json.loads(self.config)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"model.config is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError("model.config is not a JSON object")
        return found

    def boundary_shape(self, _layer: int, sequence_length: int) -> tuple[int, ...]:
        """Shape of one sample's activations as input of layer `layer`, float32."""
        return (sequence_length, self.stream_width)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksConfig:
    """A list of named blocks from a package that every peer has installed. The run names the package and never brings it."""

    title: ClassVar = "list of blocks"
    makes_samples: ClassVar = True
    tells_tokens: ClassVar = False
    has_own_dropout: ClassVar = True
    objective: ClassVar = "labels"
    masked_share: ClassVar = 0.0
    mask_token: ClassVar = 0
    publishes_as: ClassVar = ""
    needs_split_check: ClassVar = True
    input_dtype: ClassVar = "float32"
    tie_word_embeddings: ClassVar = False
    layers_per_group: ClassVar = 1
    boundary_layers: ClassVar[tuple[int, ...]] = ()
    narrows_at_cuts: ClassVar = False

    kind: Literal["blocks"] = "blocks"
    """ "decoder": the built-in one; "hf": a transformers model by its config; "blocks": an installed entry point."""
    entry: str
    """Name in the entry-point group peerd.blocks; each peer must have its package installed."""
    input_shape: tuple[int, ...]
    """One sample for the first block. This and what follows is the entry's; `peerd new` has filled it in.

    float32, without the microbatch.
    """
    shapes: tuple[tuple[int, ...], ...]
    """What each block gives for one sample.

    float32, without the microbatch.
    """
    # Number of labels; a label is a number below it.
    num_labels: Annotated[int, Between(1, 1 << 31)]

    def __post_init__(self) -> None:
        if not (1 <= len(self.entry) <= 64 and all(c.isalnum() or c in "-_." for c in self.entry)):
            raise ValueError("model.entry must be 1 to 64 letters, digits, '-', '_' or '.'")
        check_bounds("model.", self)
        if not 1 <= len(self.shapes) <= MAX_BLOCKS:
            raise ValueError(f"model.shapes has {len(self.shapes)} blocks; it must have between 1 and {MAX_BLOCKS}")
        for shape in (self.input_shape, *self.shapes):
            if not (1 <= len(shape) <= 6 and all(1 <= size <= 1 << 24 for size in shape)):
                raise ValueError(f"{list(shape)} in model.input_shape or model.shapes is not a valid shape of a sample")

    @property
    def num_layers(self) -> int:
        return len(self.shapes)

    @property
    def vocab_size(self) -> int:
        return self.num_labels

    def narrowed(self, boundary: NarrowBoundary, _times: int) -> BlocksConfig:
        raise ValueError(f'a list of blocks has no boundary "{boundary}"')

    def boundary_shape(self, layer: int, _sequence_length: int) -> tuple[int, ...]:
        """Shape of one sample's activations as input of block `layer`, float32."""
        return self.shapes[layer - 1]

    def sample_shape(self, _sequence_length: int) -> tuple[int, ...]:
        return self.input_shape

    def labels_shape(self, _sequence_length: int) -> tuple[int, ...]:
        return ()

    def tokens_per_sample(self, _sequence_length: int) -> int:
        """A sample counts as one token."""
        return 1


AnyModel = ModelConfig | HuggingFaceConfig | BlocksConfig
MODEL_KINDS: dict[str, type[AnyModel]] = {"decoder": ModelConfig, "hf": HuggingFaceConfig, "blocks": BlocksConfig}


def _keys_in(value: object, depth: int = 0) -> set[str]:
    """All keys of a JSON value, at any depth. ValueError if it is nested deeper than any config."""
    if depth > MAX_CONFIG_DEPTH:
        raise ValueError("model.config is nested too deep")
    if isinstance(value, dict):
        return set(value).union(*(_keys_in(each, depth + 1) for each in value.values()))
    return set().union(*(_keys_in(each, depth + 1) for each in value)) if isinstance(value, list) else set()

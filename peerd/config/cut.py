"""Values derived from a manifest's [model] and [train]: the cut of the model into stages, and the sequence length of each step."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peerd.config.model_kinds import AnyModel, HuggingFaceConfig, ModelConfig
    from peerd.config.train_config import TrainConfig

MAX_POINTS_TO_CHOOSE_FROM = 256


def group_starts(model: AnyModel) -> tuple[int, ...]:
    """First layer of each group of layers that share weights, except the first group."""
    return tuple(range(model.layers_per_group, model.num_layers, model.layers_per_group))


def cut_points(model: AnyModel) -> tuple[int, ...]:
    """Layers before which the model may be cut: the first of each group, or the narrow boundaries if the manifest names them."""
    return model.boundary_layers or group_starts(model)


def layer_counts(model: AnyModel, train: TrainConfig) -> tuple[int, ...] | None:
    """Number of layers of each stage, or None if their cost decides. An even cut gives the remainder to earlier stages."""
    if train.cut == "cost":
        return None
    if train.cut != "even":
        return train.cut
    share, remainder = divmod(model.num_layers // model.layers_per_group, train.num_stages)
    return tuple(model.layers_per_group * (share + (stage < remainder)) for stage in range(train.num_stages))


def check_model(model: ModelConfig) -> None:
    """Check groups and narrow boundaries. ValueError names the field."""
    size, factor = model.layers_per_group, model.boundary_factor
    if not 1 <= size <= model.num_layers or model.num_layers % size:
        raise ValueError(f"model.num_layers ({model.num_layers}) must be a multiple of model.layers_per_group ({size})")
    is_squeezed = model.boundary in ("bottleneck", "maxout")
    if not 2 <= factor <= 1024 or (is_squeezed and model.d_model % factor):
        raise ValueError(f"model.boundary_factor is {factor}; it must be 2 to 1024 and divide model.d_model ({model.d_model})")
    check_subspace(model)
    if model.boundary_layers and model.boundary in ("none", "subspace"):
        raise ValueError('model.boundary_layers needs model.boundary = "bottleneck", "maxout" or "token-residual"')
    starts = group_starts(model) if model.boundary_layers else ()
    if list(model.boundary_layers) != sorted(set(model.boundary_layers) & set(starts)):
        raise ValueError(f"model.boundary_layers must be some of {_listed(starts)}, in rising order: first layers of groups")


def check_subspace(model: ModelConfig | HuggingFaceConfig) -> None:
    """Check the rank of a boundary beside the tokens, and that nothing contradicts it. ValueError names the field."""
    name, rank = model.boundary, model.boundary_rank
    if model.tells_tokens and not 1 <= rank <= model.d_model:
        raise ValueError(f'model.boundary_rank is {rank}; with the boundary "{name}" it must be 1 to model.d_model ({model.d_model})')
    if rank and not model.tells_tokens:
        raise ValueError('model.boundary_rank needs model.boundary = "subspace" or "token-residual"')
    if model.tells_tokens and model.tie_word_embeddings:
        raise ValueError(f'model.tie_word_embeddings cannot go with model.boundary = "{name}", whose embedding is half a fixed table')


def check_cut(model: AnyModel, train: TrainConfig) -> None:
    """Check that the model can be cut as [train] says. ValueError names the field."""
    counts, num_stages, points = layer_counts(model, train), train.num_stages, cut_points(model)
    told = f"the model can be cut before layers {_listed(points)} only"
    if num_stages > len(points) + 1:
        raise ValueError(f"train.num_stages is {num_stages}; {told}, so into at most {len(points) + 1} stages")
    if counts is None:
        if len(points) > MAX_POINTS_TO_CHOOSE_FROM:
            raise ValueError(f'train.cut = "cost" chooses from at most {MAX_POINTS_TO_CHOOSE_FROM} places; give the numbers of layers')
        return
    if len(counts) != num_stages or min(counts) < 1 or sum(counts) != model.num_layers:
        raise ValueError(f"train.cut must be {num_stages} numbers of layers, at least 1 each, {model.num_layers} in all")
    odd = sorted(set(accumulate(counts[:-1])) - set(points))
    if odd:
        raise ValueError(f'train.cut cuts before layer {odd[0]}; {told}: "cost" keeps to those')


def check_ramp(train: TrainConfig) -> None:
    """Check the growth of sequences. ValueError names the field."""
    first, steps = train.first_sequence_length, train.sequence_length_steps
    if bool(first) != bool(steps):
        raise ValueError("train.first_sequence_length and train.sequence_length_steps go together: set both or neither")
    if first and not 2 <= first <= train.sequence_length:
        raise ValueError(f"train.first_sequence_length is {first}; it must be 2 to train.sequence_length ({train.sequence_length})")
    if not 0 <= steps <= 1 << 40:
        raise ValueError(f"train.sequence_length_steps is {steps}; it must be between 0 and {1 << 40}")


def sequence_length_at(train: TrainConfig, step: int) -> int:
    """Tokens per sequence at a step: a linear ramp in multiples of 8 (Li et al., arXiv 2108.06084), equal for all peers."""
    if step >= train.sequence_length_steps:
        return train.sequence_length
    risen = (train.sequence_length - train.first_sequence_length) * step // train.sequence_length_steps
    return train.first_sequence_length + risen // 8 * 8


def _listed(numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:12]))
    return f"{shown}, ..." if len(numbers) > 12 else shown or "none"

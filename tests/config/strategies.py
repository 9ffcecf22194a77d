"""Strategies for valid configurations."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from peerd.config.codec import EXAMPLES, FOR_AVERAGING
from peerd.config.manifest import ComputeConfig, DataConfig, Manifest, ModelConfig, StartConfig, SwarmConfig, TrainConfig, WireConfig
from peerd.config.model_kinds import REFUSED_CONFIG_KEYS, SUBSPACE_FAMILY, BlocksConfig, HuggingFaceConfig

SPARSE = "sparse:64"
"""It needs local steps."""
codecs = st.sampled_from([*EXAMPLES, "topk:1", "auto", "auto:int8"])
averaged_codecs = codecs | st.sampled_from([*(name for name in FOR_AVERAGING if name != SPARSE), "powersgd:1", "powersgd:64"])
names = st.text("abcdefghijklmnopqrstuvwxyzABCXYZ0123456789-_.", min_size=1, max_size=64)
sources = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    boundary: Any = draw(st.sampled_from(["none", "bottleneck", "maxout", "subspace", "token-residual"]))
    tells_tokens = boundary in ("subspace", "token-residual")
    d_model = 2 * heads * draw(st.integers(1, 32))
    return ModelConfig(
        num_layers=group * draw(st.integers(1, 16)),
        d_model=d_model,
        num_heads=heads,
        d_ff=draw(st.integers(1, 4096)),
        vocab_size=draw(st.integers(1, 70000)),
        layers_per_group=group,
        boundary=boundary,
        boundary_rank=draw(st.integers(1, d_model)) if tells_tokens else 0,
        tie_word_embeddings=not tells_tokens and draw(st.booleans()),
    )


@st.composite
def hugging_face_models(draw: st.DrawFn) -> HuggingFaceConfig:
    keys = names.filter(lambda name: name not in REFUSED_CONFIG_KEYS)  # which hypothesis finds in the source
    told = draw(
        st.dictionaries(keys, st.none() | st.booleans() | st.integers() | sources | st.lists(st.integers(), max_size=3), max_size=4)
    )
    sizes, is_masked = st.integers(1, 64), draw(st.booleans())
    rank, width = draw(st.just(0) | sizes), draw(sizes)
    if is_narrow := 0 < rank <= width:
        is_masked = False
    kinds = st.sampled_from(SUBSPACE_FAMILY) if is_narrow else names
    return HuggingFaceConfig(
        config=json.dumps(told | {"model_type": draw(kinds)}, indent=draw(st.none() | st.just(1))),
        num_layers=draw(sizes),
        d_model=width,
        vocab_size=draw(sizes),
        objective="masked" if is_masked else "causal",
        masked_share=draw(st.floats(0, 0.9)) if is_masked else 0.0,
        tie_word_embeddings=not is_narrow and draw(st.booleans()),
        boundary="subspace" if is_narrow else "none",
        boundary_rank=rank if is_narrow else 0,
    )


@st.composite
def blocks_models(draw: st.DrawFn) -> BlocksConfig:
    shapes = st.lists(st.integers(1, 8), min_size=1, max_size=4).map(tuple)
    several = st.lists(shapes, min_size=1, max_size=8).map(tuple)
    return BlocksConfig(entry=draw(names), input_shape=draw(shapes), shapes=draw(several), num_labels=draw(st.integers(1, 1000)))


def wishes(num_stages: int) -> st.SearchStrategy[tuple[str, ...]]:
    """For two peers at most, the stage that each is wished in."""
    found = st.dictionaries(st.sampled_from(["a", "B3"]), st.integers(0, num_stages - 1))
    return found.map(lambda stages: tuple(f"{peer}={stage}" for peer, stage in stages.items()))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    model = draw(models() | hugging_face_models() | blocks_models())
    steps, warmup_steps = draw(st.integers(0, 1 << 40)), draw(st.integers(0, 1000))
    schedule: Any = draw(st.sampled_from(["constant", "linear", "cosine"]))
    optimizer: Any = draw(st.sampled_from(["adamw", "muon", "lamb", "sgd"]))
    local = not model.tie_word_embeddings and draw(st.booleans())
    delayed = not local and draw(st.booleans())
    falling, lossy = schedule != "constant", draw(st.booleans())
    tied, num_microbatches = model.tie_word_embeddings, draw(st.integers(1, 8192))
    allowed = averaged_codecs | st.just(SPARSE) if local else averaged_codecs
    num_stages, length = draw(st.integers(1, model.num_layers // model.layers_per_group)), draw(st.integers(2, 512))
    in_groups = (model.layers_per_group,) * (num_stages - 1)
    first_length = draw(st.just(0) | st.integers(2, length))
    train = TrainConfig(
        num_stages=num_stages,
        cut=draw(st.sampled_from(["even", "cost", (*in_groups, model.num_layers - sum(in_groups))])),
        first_sequence_length=first_length,
        sequence_length_steps=draw(st.integers(1, 1 << 40)) if first_length else 0,
        microbatches_per_step=num_microbatches,
        microbatch_size=draw(st.integers(1, 16)),
        sequence_length=length,
        steps=steps,
        learning_rate=draw(st.floats(0, 100)),
        warmup_steps=warmup_steps,
        schedule=schedule,
        final_learning_rate=draw(st.floats(0, 100)) if falling else 0.0,
        decay_steps=warmup_steps + draw(st.integers(1, 1000)) if falling else 0,
        optimizer=optimizer,
        optimizer_bits=32 if optimizer in ("lamb", "muon") else draw(st.sampled_from([32, 8])),
        max_gradient_norm=0.0 if local else draw(st.floats(0, 1e9)),
        dropout=0.0 if model.has_own_dropout else draw(st.floats(0, 0.99)),
        average_parameters=draw(st.sampled_from(["auto", "never"] if delayed or local or lossy or tied else ["auto", "always", "never"])),
        average_parameters_every_steps=draw(st.integers(1, 1_000_000)),
        delayed_updates=delayed,
        local_batch=draw(st.integers(1, num_microbatches)) if local else 0,
        local_steps_after=draw(st.integers(0, 1000)) if local else 0,
        outer_learning_rate=draw(st.floats(0, 100)),
        outer_momentum=draw(st.floats(0, 0.99)),
        precision=draw(st.sampled_from(["float32", "tf32", "bfloat16"] if lossy or local else ["float32", "tf32", "bfloat16", "float16"])),
        loss_scale=2.0 ** draw(st.integers(0, 32)),
        no_decay=tuple(draw(st.lists(sources, max_size=3))),
        epsilon=draw(st.floats(1e-16, 1)),
        accumulate=draw(st.sampled_from(["float32", "float64"])),
    )
    return Manifest(
        name=draw(names),
        seed=draw(st.integers(0, 2**63 - 1)),
        model=model,
        data=DataConfig(source=draw(sources)),
        start=StartConfig(state=draw(st.just("") | sources)),
        train=train,
        compute=ComputeConfig(threads=draw(st.integers(0, 1024)), recompute=draw(st.sampled_from(["auto", "always", "never"]))),
        wire=WireConfig(activations=draw(codecs), activation_gradients=draw(codecs), weight_gradients=draw(allowed) if lossy else "none"),
        swarm=SwarmConfig(
            announce_period_s=draw(st.floats(0.2, 300)),
            group_size=draw(st.just(0) | st.integers(2, 1024)),
            rebalance=draw(st.sampled_from(["queues", "improved", "none"])),
            placement=draw(wishes(num_stages)),
        ),
    )

"""The costs of the built-in decoder's parts, counted by hand; tests compare them with what torch counts and saves.

D d_model, F d_ff, V vocabulary, C boundary width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from peerd.config.manifest import ModelConfig
from peerd.planner.workload import FLOAT32_BYTES, Load, ModelLoads


def decoder_loads(config: ModelConfig, microbatch: int, sequence: int) -> ModelLoads:
    """The loads for one microbatch of [microbatch, sequence] tokens."""
    tokens = microbatch * sequence
    width, narrow = config.d_model, config.boundary_width

    def load(matrices: Sequence[tuple[int, int]], num_in_vectors: int, products: int, floats: int) -> Load:
        """`products` are multiplications per token, `floats` the numbers kept per token from forward to backward."""
        return Load(
            num_parameters=sum(rows * columns for rows, columns in matrices) + num_in_vectors,
            num_sides=sum(map(sum, matrices)),
            num_in_vectors=num_in_vectors,
            forward_flops=2 * tokens * products,
            graph_bytes=FLOAT32_BYTES * tokens * floats,
        )

    # Projections of 4 D^2 + 3 D F, and attention's two products over the whole sequence. What is kept: both norms' inputs and outputs
    # (4 D), projected and rotated query, key, value (5 D), attention's result and its copy for the projection (2 D), gate and value
    # (2 F), GELU's result (F), their product (F), and per-row statistics.
    weights = 4 * width**2 + 3 * width * config.d_ff
    matrices = [(3 * width, width), (width, width), (2 * config.d_ff, width), (width, config.d_ff)]
    layer = load(matrices, 4 * width, weights + 2 * sequence * width, 11 * width + 4 * config.d_ff + config.num_heads + 4)
    group = replace(
        layer,
        forward_flops=config.layers_per_group * layer.forward_flops,
        graph_bytes=config.layers_per_group * layer.graph_bytes,
    )
    words = (config.vocab_size, width)
    vocabulary, projection = width * config.vocab_size, width * narrow
    tied = vocabulary if config.tie_word_embeddings else 0
    narrowing = widening = Load()
    if config.boundary == "bottleneck":
        narrowing = load([(narrow, width)], 2 * width, projection, 2 * width + 2)
    elif config.boundary == "maxout":
        narrowing = load([], 2 * width, 0, 2 * width + narrow + 2)
    if config.boundary != "none":
        widening = load([(width, narrow)], 2 * narrow, projection, 2 * narrow + 2)
    return ModelLoads(
        first=replace(load([words], 0, 0, 0), num_tied=tied),
        groups=(group,) * (config.num_layers // config.layers_per_group),
        # logits, their log-softmax, their gradient
        last=replace(load([words], 2 * width, vocabulary, 2 * width + 3 * config.vocab_size), num_tied=tied),
        shared=Load(num_parameters=tied, num_tied=2 * tied, num_sides=sum(words) if tied else 0),
        narrowing=narrowing,
        widening=widening,
    )

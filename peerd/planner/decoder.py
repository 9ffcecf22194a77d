"""The costs of the built-in decoder's parts, counted by hand; tests compare them with what torch counts and saves.

D d_model, F d_ff, V vocabulary, C boundary width. A subspace's fixed matrix, D x C once a stage, is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from peerd.config.manifest import ModelConfig
from peerd.planner.load import number_bytes
from peerd.planner.workload import FLOAT32_BYTES, Load, ModelLoads


def decoder_loads(config: ModelConfig, microbatch: int, sequence: int, precision: str = "float32") -> ModelLoads:
    """The loads for one microbatch of [microbatch, sequence] tokens in the run's `train.precision`."""
    lowered_bytes = number_bytes(precision)
    tokens = microbatch * sequence
    width, narrow, stream = config.d_model, config.boundary_width, config.stream_width

    def load(matrices: Sequence[tuple[int, int]], num_in_vectors: int, products: int, floats: int, lowered: int = 0) -> Load:
        """`products` are multiplications per token; `floats` and `lowered` the numbers kept per token from forward to backward.

        Those that are lowered are in the passes' precision. Where that is not float32, the matrices are kept in it as well.
        """
        num_in_matrices = sum(rows * columns for rows, columns in matrices)
        copies = lowered_bytes * num_in_matrices if products and lowered_bytes < FLOAT32_BYTES else 0
        return Load(
            num_parameters=num_in_matrices + num_in_vectors,
            num_sides=sum(map(sum, matrices)),
            num_in_vectors=num_in_vectors,
            num_in_layers=num_in_matrices,
            forward_flops=2 * tokens * products,
            graph_bytes=tokens * (FLOAT32_BYTES * floats + lowered_bytes * lowered) + copies,
        )

    # Projections of 4 D^2 + 3 D F, and attention's two products over the whole sequence. What is kept: both norms' inputs (2 D) and
    # per-row statistics; lowered, the norms' outputs (2 D), projected and rotated query, key, value (5 D), attention's result and its
    # copy for the projection (2 D), gate and value (2 F), GELU's result (F), their product (F).
    # With a subspace the stream is narrower than the layers, and each norm's input is made of it.
    matrices = [(3 * width, width), (stream, width), (2 * config.d_ff, width), (stream, config.d_ff)]
    widened = width * stream if config.boundary == "subspace" else 0
    products = sum(rows * columns for rows, columns in matrices) + 2 * sequence * width + 2 * widened
    layer = load(matrices, 4 * width, products, 2 * width + config.num_heads + 4, 9 * width + 4 * config.d_ff)
    group = replace(
        layer,
        forward_flops=config.layers_per_group * layer.forward_flops,
        graph_bytes=config.layers_per_group * layer.graph_bytes,
    )
    # What follows is outside of the layers: the embedding and the head are matrices for which Muon is not made.
    words, head = (config.vocab_size, stream), (config.vocab_size, width)
    vocabulary, projection = width * config.vocab_size, width * narrow
    tied = vocabulary if config.tie_word_embeddings else 0
    narrowing = widening = Load()
    if config.boundary == "bottleneck":
        narrowing = load([(narrow, width)], 2 * width, projection, width + 2, width)
    elif config.boundary == "maxout":
        narrowing = load([], 2 * width, 0, 2 * width + narrow + 2)
    elif config.boundary == "token-residual":
        narrowing = load([(narrow, width)], 0, projection, 0, width)
        widening = load([(width, narrow)], 0, projection, 0, narrow)
    if config.boundary in ("bottleneck", "maxout"):
        widening = load([(width, narrow)], 2 * narrow, projection, narrow + 2, narrow)
    return ModelLoads(
        first=replace(load([words], 0, 0, 0), num_in_layers=0, num_tied=tied),
        groups=(group,) * (config.num_layers // config.layers_per_group),
        # logits, their log-softmax, their gradient; lowered, what the logits are made of
        last=replace(load([head], 2 * width, vocabulary + widened, width + 3 * config.vocab_size, width), num_in_layers=0, num_tied=tied),
        shared=Load(num_parameters=tied, num_tied=2 * tied, num_sides=sum(words) if tied else 0),
        narrowing=narrowing,
        widening=widening,
    )

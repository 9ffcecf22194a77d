"""Which parameters Muon updates. The rule needs the name and the shape alone, so it does not depend on how a model is cut into stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def is_layer_matrix(name: str, shape: Sequence[int]) -> bool:
    """True for a matrix of a numbered layer, such as `blocks.3.attention.output.weight`.

    Embeddings and heads are matrices outside of the layers. Vectors, and tensors of three dimensions and more, are no matrices.
    """
    return len(shape) == 2 and any(part.isdigit() for part in name.split("."))


def layer_matrices_in(shapes: Mapping[str, Sequence[int]]) -> int:
    """The number of parameters in matrices of layers, among these."""
    return sum(rows * columns for rows, columns in (shape for name, shape in shapes.items() if is_layer_matrix(name, shape)))

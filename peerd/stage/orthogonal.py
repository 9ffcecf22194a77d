"""The nearest matrix to a given one whose singular values are all about one, by Newton-Schulz iterations.

Muon's update (Keller Jordan et al. 2024) is such a matrix. A quintic polynomial of the matrix drives each singular value towards one, and
needs matrix products alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

LINEAR, CUBIC, QUINTIC = 3.4445, -4.7750, 2.0315
"""Coefficients of Muon's polynomial: the steepest at zero under which values from 0 to 1 end between 0.7 and 1.2."""
ITERATIONS = 5
_LEAST_LENGTH = 1e-12


def orthogonalised(matrix: Tensor) -> Tensor:
    """A new matrix of the same shape [rows, columns], type and device; of a matrix of zeros it is zeros.

    Products are of the matrix's own type, float32 in a run: peers whose devices round bfloat16 differently would drift apart.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.mT if is_tall else matrix
    wide = wide / torch.linalg.vector_norm(wide).clamp_min(_LEAST_LENGTH)
    for _ in range(ITERATIONS):
        square = wide @ wide.mT
        wide = torch.addmm(wide, torch.addmm(square, square, square, beta=CUBIC, alpha=QUINTIC), wide, beta=LINEAR)
    return (wide.mT if is_tall else wide).contiguous()

"""A residual stream of a few coordinates: the boundary "subspace" (Protocol Models, arXiv 2506.01260).

Hidden states are x = c U^T + T[token]. U has orthonormal columns and T is a table with a row for each token; both follow from the run's
seed, are never trained, and are the same in all stages. The embedding and the last matrix of each sub-layer give coordinates c alone. So c
and the tokens are all that a stage needs of the one before it, and the gradient of c is all that it gives back: nothing is lost.

With the boundary "token-residual" x - T[token] has D numbers within a stage, and models/boundary.py narrows it at each cut.

Shapes: B sequences, S tokens, D d_model, K boundary_rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from peerd.config.model_kinds import HuggingFaceConfig, ModelConfig
from peerd.models.dropout import WORD, mix
from peerd.models.weights import generator_of

TABLE_STD = 0.02
_COLUMN_STEP = 0x1E3779B1
"""An odd number below 2**31: the columns of a row begin far apart."""
_DIGITS = 24
"""As many as float32 holds exactly."""
EMBEDDINGS = ("embedding.weight", "model.embed_tokens.weight")
"""Of the built-in decoder, and of transformers' Llama."""
WRITERS = ("output", "o_proj", "down_proj")
"""The linear modules that give coordinates, of both."""
NEEDS_TOKENS = "a stage of a subspace needs the tokens: give it the windows as labels"
Widening = Callable[[Tensor], Tensor]


class Subspace(nn.Module):
    """Turns coordinates into hidden states. It has no parameters."""

    basis: Tensor

    def __init__(self, config: ModelConfig | HuggingFaceConfig, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self._is_at_cuts_alone = config.boundary == "token-residual"
        self.register_buffer("basis", torch.empty(config.d_model, config.boundary_rank), persistent=False)

    @torch.no_grad()
    def draw(self) -> None:
        """Give U its values, in float32.

        They are computed in float64: rounding hides the last-bit differences between mathematical libraries.
        """
        drawn = torch.rand(self.basis.shape, generator=generator_of(self.seed, "subspace.basis"), dtype=torch.float64) - 0.5
        columns, triangle = torch.linalg.qr(drawn)
        self.basis.copy_(columns * triangle.diagonal().sign())

    def of(self, tokens: Tensor) -> Widening:
        """For these tokens [B, S], the map from coordinates [B, S, K] to hidden states [B, S, D].

        With the boundary "token-residual" the map is from what layers have added to T's rows, [B, S, D].
        """
        fixed = self.rows(tokens)
        if self._is_at_cuts_alone:
            return fixed.add

        def widened(coordinates: Tensor) -> Tensor:
            with torch.autocast(coordinates.device.type, enabled=False):  # as a residual stream is float32
                return coordinates.to(self.basis.dtype) @ self.basis.T + fixed

        return widened

    @torch.no_grad()
    def rows(self, tokens: Tensor) -> Tensor:
        """The rows of T for tokens of any shape, with D numbers each. Integer arithmetic makes them, alike on every processor."""
        digest = hashlib.blake2b(str(self.seed).encode(), digest_size=8, person=b"peerd table").digest()
        first, second = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
        row = mix((tokens.long() + first).bitwise_and_(WORD)).bitwise_xor_(second)
        column = torch.arange(self.basis.shape[0], dtype=torch.int64, device=tokens.device) * _COLUMN_STEP
        word = mix((row[..., None] + column).bitwise_and_(WORD)) >> (32 - _DIGITS)
        uniform = word.float().mul_(2.0 ** (1 - _DIGITS)).sub_(1)
        return uniform.mul_(TABLE_STD * 3**0.5).to(self.basis.dtype)


class Unfolded(Mapping[str, Tensor]):
    """The parameters of the plain model that computes the same: each matrix that gives coordinates gives hidden states."""

    def __init__(self, config: ModelConfig | HuggingFaceConfig, seed: int, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._subspace = Subspace(config, seed)
        self._subspace.draw()

    @property
    def basis(self) -> Tensor:
        """U, [D, K]."""
        return self._subspace.basis

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        found, basis = self._parameters[name], self.basis
        if name in EMBEDDINGS:  # [V, K] -> [V, D]
            return (found.double() @ basis.double().T + self._subspace.rows(torch.arange(len(found))).double()).to(found.dtype)
        if name.split(".")[-2] in WRITERS:  # [K, N] -> [D, N], or a bias [K] -> [D]
            return (basis.double() @ found.double()).to(found.dtype)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

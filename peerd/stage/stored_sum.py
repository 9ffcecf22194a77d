"""A sum of gradients in a file: what may be given up again takes no memory beside a stage's own sums (`Sums`)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from peerd.errors import WrongStateError
from peerd.stage.accumulator import Accumulator
from peerd.stage.state_file import READ_BYTES, OpenFile
from peerd.wire.tensors import memory_of


class StoredSum:
    """The same sum to the bit as an accumulator's, which begins at zero as the file does. Every method is a job of the executor's."""

    def __init__(self, like: Accumulator, file: OpenFile) -> None:
        self._like = like
        self._file = file
        self._dtype = like.flat.dtype
        self._exact = torch.zeros(like.num_exact, dtype=self._dtype)
        self.is_void = False

    def add(self, gradients: Sequence[Tensor], loss: float | None, overflowed: bool = False) -> None:
        """As `Accumulator.add`. Raises WrongStateError, too, if the disk fails."""
        overflowed = self._like.checked(gradients, overflowed)
        self.is_void = True
        if overflowed:
            self._exact[-2] += 1
        else:
            self._add_all(gradients)
        if loss is not None:
            self._exact[-1 if math.isfinite(loss) else -3] += loss if math.isfinite(loss) else 1
        self.is_void = False

    def _add_all(self, gradients: Sequence[Tensor]) -> None:
        start = 0
        with _disk():
            for gradient in gradients:
                for part in torch.split(gradient.detach().reshape(-1), READ_BYTES // self._dtype.itemsize):
                    piece = self._read(start, part.numel())
                    piece += part.to("cpu", self._dtype)
                    self._file.write(start * self._dtype.itemsize, memory_of(piece))
                    start += part.numel()

    def add_to(self, main: Accumulator) -> None:
        """Add all of it to the main sum. Raises WrongStateError if the disk fails."""
        border = main.flat.numel() - main.num_exact
        with main.changing(), _disk():
            for start in range(0, border, READ_BYTES // self._dtype.itemsize):
                place = main.flat[start : min(border, start + READ_BYTES // self._dtype.itemsize)]
                place += self._read(start, place.numel()).to(place.device)
            main.flat[border:] += self._exact.to(main.flat.device)

    def _read(self, start: int, count: int) -> Tensor:
        piece = torch.empty(count, dtype=self._dtype)
        self._file.read_into(start * self._dtype.itemsize, memory_of(piece))
        return piece


@contextlib.contextmanager
def _disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WrongStateError(f"this peer's disk fails: {error}") from None

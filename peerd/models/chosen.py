"""Tensors of states under other names. Each is read when it is asked for, so an export has few in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor


class Chosen(Mapping[str, Tensor]):
    """Tensors of several states, or equal parts of these."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[Mapping[str, Tensor], str, int, int]] = {}

    def add(self, name: str, tensors: Mapping[str, Tensor], theirs: str, part: int = 0, parts: int = 1) -> None:
        """Add the tensor `theirs`, or one of its parts along the first dimension. Of two of one name the later one counts."""
        self._places[name] = tensors, theirs, part, parts

    def only(self, names: Iterable[str]) -> Chosen:
        """Those of these names."""
        found = Chosen()
        found._places = {name: self._places[name] for name in names}
        return found

    def __getitem__(self, name: str) -> Tensor:
        tensors, theirs, part, parts = self._places[name]
        return tensors[theirs].chunk(parts)[part] if parts > 1 else tensors[theirs]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

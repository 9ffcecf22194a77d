"""Only the first few microbatches are read ahead, once and off the event loop; `take` raises what went wrong."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch
from torch import Tensor

from peerd.errors import DiskError
from peerd.train.prefetch import MOST_PREPARED, Prefetcher
from peerd.train.samples import Microbatches
from peerd.wire.tensors import decode

CPU = torch.device("cpu")


@dataclass
class Corpus:
    read: list[tuple[int, int]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    is_broken: bool = False

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        self.read.append((step, index))
        self.threads.add(threading.get_ident())
        if self.is_broken:
            raise DiskError("the file is gone")
        return torch.full((2, 3), step), torch.full((2, 3), index)


def prepared_of(corpus: Corpus) -> Prefetcher:
    return Prefetcher(cast(Microbatches, corpus))


async def read(prepared: Prefetcher) -> None:
    assert prepared._reading is not None
    await prepared._reading


async def test_what_was_read_ahead_is_not_read_again() -> None:
    corpus = Corpus()
    prepared = prepared_of(corpus)
    prepared.read_ahead([(7, index) for index in range(4)])
    await read(prepared)
    assert corpus.read == [(7, index) for index in range(4)]
    for step, index in ((7, 2), (7, 0), (8, 1)):
        inputs, labels = await prepared.take(step, index)
        assert torch.equal(decode(inputs, CPU), torch.full((2, 3), step, dtype=torch.int32))
        assert torch.equal(decode(labels, CPU), torch.full((2, 3), index, dtype=torch.int32))
    assert corpus.read[4:] == [(8, 1)]
    assert threading.get_ident() not in corpus.threads


async def test_only_the_first_few_are_held_and_those_of_a_step_that_is_over_no_longer() -> None:
    corpus = Corpus()
    prepared = prepared_of(corpus)
    for step in (1, 2):
        prepared.read_ahead([(step, index) for index in range(MOST_PREPARED + 5)])
        prepared.read_ahead([(step, 1000)])  # while others are being read
        await read(prepared)
    assert len(corpus.read) == 2 * MOST_PREPARED
    await prepared.take(1, 0)
    assert corpus.read[-1] == (1, 0)


async def test_what_cannot_be_read_is_told_to_who_takes_it() -> None:
    corpus = Corpus(is_broken=True)
    prepared = prepared_of(corpus)
    prepared.read_ahead([(1, 0)])
    await read(prepared)
    with pytest.raises(DiskError):
        await prepared.take(1, 0)
    corpus.is_broken = False
    await prepared.take(1, 0)


async def test_closing_ends_what_is_being_read() -> None:
    prepared = prepared_of(Corpus())
    prepared.close()
    prepared.read_ahead([(1, 0)])
    prepared.close()
    with pytest.raises(asyncio.CancelledError):
        await read(prepared)

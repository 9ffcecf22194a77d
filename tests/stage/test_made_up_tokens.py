"""Hole 73 (made-up tokens): where the run's data is here, a microbatch that is not in it is added by nobody."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from peerd.daemon.training import HeldData
from peerd.errors import BadMessageError, BusyError, ChangedLabelsError
from peerd.link.traffic import Traffic
from peerd.stage.calls import StageService
from peerd.stage.executor import Pace
from peerd.table.record import PeerId
from peerd.train.corpus import Corpus
from peerd.wire.clients import StageClient
from peerd.wire.door import Door
from peerd.wire.messages import Call, CallResult, TensorBytes
from peerd.wire.services import StageServicer
from peerd.wire.tensors import decode, encode, encode_microbatch
from tests.life import Life
from tests.link.local_peers import serving
from tests.paper_host import PaperHost
from tests.tiny_run import corpus_of, tiny_manifest
from tests.wire.callee import RUN

CPU = torch.device("cpu")
PATIENCE_S, MOST_CALLS = 20.0, 8
EVALUATED = {"evaluate_every_steps": 1, "evaluation_fraction": 0.1}


@dataclass
class Data:
    """The run's data at one peer."""

    tokens: Corpus | None


def other(tensor: TensorBytes) -> TensorBytes:
    """Tokens of somebody's own choice, which the model knows."""
    return encode((decode(tensor, CPU) + 1) % 256)


def launched(life: Life, corpus: Corpus, step: int = 0, index: int = 0) -> Call:
    inputs, labels = encode_microbatch(*corpus.microbatch(step, index))
    return replace(life.call(step, index), inputs=inputs, labels=labels)


def holds(life: Life, stage: int, corpus: Corpus | None) -> None:
    """Let the peer of a stage hold the run's data."""
    state, executor = life.states[stage], life.executors[stage]
    life.services[stage] = StageService(life.manifest, state, executor, life, Pace(), PaperHost(), data=Data(corpus))


async def sent(life: Life, call: Call) -> None:
    await life.send(call, lambda _stage, _peer: None)


def added(life: Life) -> list[int]:
    return [state.record.done for state in life.states]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return corpus_of(tiny_manifest(2, **EVALUATED), tmp_path)


@pytest.fixture
async def life() -> AsyncIterator[Life]:
    begun = Life(tiny_manifest(2, **EVALUATED), CPU)
    yield begun
    await begun.close()


@pytest.mark.parametrize("what", ["inputs", "labels"])
async def test_hole_73_what_a_trainer_made_up_is_computed_by_nobody_that_has_the_data(life: Life, corpus: Corpus, what: str) -> None:
    holds(life, 0, corpus)
    call = launched(life, corpus)
    with pytest.raises(BadMessageError, match="is not that of the run's data"):
        await sent(life, replace(call, inputs=other(call.inputs)) if what == "inputs" else replace(call, labels=other(call.labels)))
    with pytest.raises(BadMessageError, match="is not that of the run's data"):  # of another microbatch, of another step
        await sent(life, replace(call, inputs=launched(life, corpus, 0, 1).inputs, labels=launched(life, corpus, 0, 1).labels))
    assert added(life) == [0, 0]
    await sent(life, call)
    assert added(life) == [1, 1]


async def test_hole_73_labels_that_were_changed_on_the_way_blame_nobody_and_nothing_is_added(life: Life, corpus: Corpus) -> None:
    """The caller may have got them like that. The refusal goes back to the trainer, which tries another way."""
    holds(life, 1, corpus)
    call = launched(life, corpus)
    with pytest.raises(ChangedLabelsError, match="the labels of microbatch 0 of step 0"):
        await sent(life, replace(call, labels=other(call.labels)))
    assert added(life) == [0, 0]
    await sent(life, call)
    assert added(life) == [1, 1]


@contextlib.asynccontextmanager
async def called_by(*names: str, life: Life) -> AsyncIterator[list[StageClient]]:
    """The first stage behind its real service, and clients of these peers."""
    door = Door(RUN, PATIENCE_S, Traffic(), slots=lambda: MOST_CALLS)
    async with serving([StageServicer(door, life.services[0])]) as served:
        yield [StageClient(served.links_of(name), RUN) for name in names]


async def launch_over_the_wire(client: StageClient, call: Call) -> CallResult:
    return await client.backpropagate(PeerId("p0"), replace(call, call_id=os.urandom(16)), (), PATIENCE_S, lambda _stage, _peer: None)


async def test_hole_73_over_the_wire_a_peer_that_launches_made_up_tokens_is_banned_and_the_right_microbatch_is_added(
    life: Life, corpus: Corpus
) -> None:
    holds(life, 0, corpus)
    call = launched(life, corpus)
    async with called_by("liar", "honest", life=life) as (liar, honest):
        with pytest.raises(BadMessageError, match="is not that of the run's data"):
            await launch_over_the_wire(liar, replace(call, inputs=other(call.inputs)))
        with pytest.raises(BusyError, match="broken message"):
            await launch_over_the_wire(liar, call)
        assert added(life) == [0, 0]
        await launch_over_the_wire(honest, call)
        assert added(life) == [1, 1]


async def test_hole_73_over_the_wire_changed_labels_come_back_as_such_and_ban_nobody(life: Life, corpus: Corpus) -> None:
    """A later stage finds them, and the first one passes its word on."""
    holds(life, 1, corpus)
    call = launched(life, corpus)
    async with called_by("trainer", life=life) as (trainer,):
        with pytest.raises(ChangedLabelsError, match="the labels of microbatch 0 of step 0"):
            await launch_over_the_wire(trainer, replace(call, labels=other(call.labels)))
        assert added(life) == [0, 0]
        await launch_over_the_wire(trainer, call)
        assert added(life) == [1, 1]


async def test_without_the_data_and_for_an_evaluation_nothing_is_compared(life: Life, corpus: Corpus) -> None:
    holds(life, 0, None)
    await sent(life, life.call(0, 0))
    assert added(life) == [1, 1]
    holds(life, 0, corpus)
    await life.microbatch(0, 0, evaluation=True)


def test_only_text_is_compared_as_samples_may_be_rounded_in_another_way_elsewhere(corpus: Corpus) -> None:
    class Nobody:
        """What a model makes itself."""

        def microbatch(self, step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            raise AssertionError(f"not asked for ({step}, {index})")

        def evaluation_microbatch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            raise AssertionError(f"not asked for ({index})")

    class Giver:
        has_tokens = False

    manifest = tiny_manifest(2)
    assert HeldData(manifest, corpus, None, Giver()).tokens is corpus  # type: ignore[arg-type]
    assert HeldData(manifest, Nobody(), None, Giver()).tokens is None  # type: ignore[arg-type]
    assert HeldData(manifest, None, None, Giver()).tokens is None  # type: ignore[arg-type]

"""The largest state that a stage can have is known from the manifest: no honest state is larger, and none that is larger is read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from peerd.config.manifest import Manifest
from peerd.models.stages import initial_parameter_spec
from peerd.policy.step.norms import TOLD_STEPS
from peerd.stage.optimizer import optimizer_spec
from peerd.stage.snapshots import Downloaded, _as_snapshot
from peerd.stage.start import start_lineage
from peerd.stage.state import StageState
from peerd.stage.state_bytes import most_state_bytes
from peerd.table.record import Lineage, PeerId, PeerRecord, StepNorm
from tests.strategies import view_of
from tests.tiny_run import tiny_manifest

TIED = tiny_manifest(3, max_gradient_norm=0.5)
RUNS = {
    "adamw": tiny_manifest(2),
    "8 bits": tiny_manifest(2, optimizer_bits=8),
    "plain sgd": tiny_manifest(2, optimizer="sgd", momentum=0.0),
    "delayed": tiny_manifest(2, delayed_updates=True),
    "float16": tiny_manifest(2, precision="float16"),
    "tied": replace(TIED, model=replace(TIED.decoder, tie_word_embeddings=True)),
}
ROOM = 1024
"""Bytes of the header that some runs do not need: the names of norms, of a loss scale and of a tied weight's history."""


def full_state(manifest: Manifest, stage: int) -> StageState:
    """A state with everything that it may ever give."""
    norms = tuple(StepNorm(10**17 + step, 1.0) for step in range(TOLD_STEPS)) if manifest.train.shares_norms else ()
    record = PeerRecord(peer=PeerId("me"), stage=stage, norms=norms, tied=Lineage(1, bytes(32)))
    state = StageState(manifest, record, torch.device("cpu"), lambda: view_of(record))
    state.serve()
    state.skip_step()
    state.record = replace(state.record, norms=norms, tied=Lineage(1, bytes(32)))
    return state


@pytest.mark.parametrize("run", sorted(RUNS))
def test_the_state_of_a_stage_is_as_large_as_the_manifest_says_and_no_larger(run: str) -> None:
    manifest = RUNS[run]
    for stage in range(manifest.train.num_stages):
        state = full_state(manifest, stage)
        copies = {False: state.holdings.tensors(state.record), True: state.holdings.tied_tensors(state.record)}
        for tied_only, tensors in copies.items():
            if tied_only and not state.holdings.tied_names:
                continue
            header, _ = _as_snapshot(Downloaded(1, Lineage(), tensors, ()), tied_only)
            assert header.num_bytes <= most_state_bytes(manifest, stage, tied_only) <= header.num_bytes + ROOM


def test_the_state_that_a_run_begins_from_is_no_larger() -> None:
    manifest = RUNS["adamw"]
    parameters = initial_parameter_spec(manifest, 1)
    tensors = {f"parameters/{name}": torch.zeros(shape) for name, shape in parameters.items()}
    state = optimizer_spec(manifest.train, parameters)
    tensors |= {f"optimizer/{name}": torch.zeros_like(value, device="cpu") for name, value in state.items()}
    header, _ = _as_snapshot(Downloaded(0, start_lineage(manifest), tensors, ()), tied_only=False)
    assert header.num_bytes <= most_state_bytes(manifest, 1)

"""An export for transformers while the swarm trains on: it hardly waits, and what is exported is what one machine would have."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from peerd.config.manifest import Manifest
from peerd.data.tokens import prepare_tokens
from peerd.models.stages import build_stage
from peerd.reference import train_reference
from peerd.train.corpus import Corpus
from tests.swarm.daemons import Swarm
from tests.swarm.machine import slowdown
from tests.swarm.runs import swarm_manifest

pytestmark = [pytest.mark.slow, pytest.mark.swarm, pytest.mark.timeout(600)]

PACE_MS = 60.0
STEPS_BEFORE, STEPS_AFTER = 5, 2


def llama_manifest() -> Manifest:
    """Two layers of width 32 in two stages."""
    from tests.models.hf_models import hf_model

    return replace(swarm_manifest(num_stages=2), model=hf_model("llama", num_hidden_layers=2))


def test_an_export_in_mid_training_stalls_no_step_and_loads_elsewhere() -> None:
    transformers = pytest.importorskip("transformers")
    with Swarm(llama_manifest()) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        for _ in range(2):
            swarm.join(1, compute_stand_in_ms=PACE_MS)
        swarm.wait_for_step(STEPS_BEFORE, timeout_s=200)
        folder, began_s = swarm.folder / "exported", time.time()
        reply = first.request("export", folder=str(folder), format="hf", silence_s=120.0)
        ended_s = time.time()
        swarm.wait_for_step(reply["step"] + STEPS_AFTER, timeout_s=100)
        ends = [step["time_s"] for step in swarm.daemons[-1].history if step["time_s"]]
        swarm.assert_exact()
        assert_no_stall(ends, began_s, ended_s)
        loaded, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(told.values())
        assert reply["num_parameters"] == sum(parameter.numel() for parameter in loaded.parameters())
        tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
        expected = logits_of_one_machine(swarm.manifest, reply["step"], tokens, swarm.folder / "cache" / "peerd")
        with torch.no_grad():
            assert float((loaded(input_ids=tokens).logits - expected).abs().max()) < 1e-5


def assert_no_stall(ends: Sequence[float], began_s: float, ended_s: float) -> None:
    """No step that the export ran through took a whole step longer than the longest before it."""
    steps = list(pairwise(ends))[1:]  # in the first, peers find together
    before = [end - start for start, end in steps if end <= began_s]
    during = [end - start for start, end in steps if end > began_s and start < ended_s]
    assert before
    assert during
    assert max(during) <= 2 * max(before) * slowdown(), (before, during)


def logits_of_one_machine(manifest: Manifest, steps: int, tokens: Tensor, cache: Path) -> Tensor:
    """What the run's stages compute after so many steps: [rows, columns, vocabulary]."""
    corpus = Corpus(prepare_tokens(manifest.data.source, cache, manifest.data), manifest)
    parameters, hidden = train_reference(manifest, corpus, steps).parameters, tokens
    for stage in range(manifest.train.num_stages):
        module = build_stage(manifest, stage, "cpu")
        with torch.no_grad():
            for name, value in module.named_parameters():
                value.copy_(parameters[name])
            hidden = module(hidden)
    return hidden

"""A donor gives a newcomer a made-up state: it finds that, takes another one, and trains as one machine would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from peerd.data.tokens import prepare_tokens
from peerd.reference import ReferenceResult, train_reference
from peerd.train.corpus import Corpus
from tests.swarm.daemons import Swarm
from tests.swarm.runs import assert_close, certified, exported_steps, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(300)]

PACE_MS = 40
REFUSED = b"the downloaded state is refused"
LIAR = "scripts.benchmarks._liars.misgives"
AVERAGES_KEPT = 4
"""Before that a newcomer comes to its stage's state from the first weights, by averages alone."""
ROUNDING = 2e-7


def expected_of(swarm: Swarm, exported: Path) -> ReferenceResult:
    """What one machine has after as many steps as an export."""
    corpus = Corpus(prepare_tokens(swarm.manifest.data.source, swarm.folder / "cache" / "peerd", swarm.manifest.data), swarm.manifest)
    return train_reference(swarm.manifest, corpus, exported_steps(exported))


def test_a_newcomer_whose_donor_makes_its_state_up_ends_with_that_of_its_stage() -> None:
    """The honest donors are busy at first, so the liar's state is taken. One of them rounds a little differently, as other devices do."""
    with Swarm(certified(swarm_manifest(num_stages=2))) as swarm:
        swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        honest, unlike, liar = (swarm.join(1, compute_stand_in_ms=PACE_MS, allow_faults=True) for _ in range(3))
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        swarm.wait_for_step(AVERAGES_KEPT + 2)
        honest.request("lie", module=LIAR, factor=1.0, busy=True)
        unlike.request("lie", module=LIAR, factor=1.0 + ROUNDING, busy=True)
        liar.request("lie", module=LIAR)
        newcomer = swarm.join(1, compute_stand_in_ms=PACE_MS)
        newcomer.wait_until_serving(120)
        assert newcomer.log_file.read_bytes().count(REFUSED) == 1
        newcomer.wait_for_step(newcomer.status["peer"]["step"] + 3)
        swarm.assert_exact()

        exported = swarm.export(newcomer)
        expected = expected_of(swarm, exported)
        assert_close(load_file(exported / "model.safetensors"), expected.parameters, share=10 * ROUNDING)
        losses = [json.loads(line)["loss"] for line in (exported / "history.jsonl").read_text().splitlines()]
        assert losses == pytest.approx([entry.loss for entry in expected.history], rel=10 * ROUNDING)


def test_an_export_of_another_stage_is_not_what_a_lying_donor_gives_or_says_that_it_is_not_proven() -> None:
    with Swarm(certified(swarm_manifest(num_stages=2))) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        honest, unlike, liar = (swarm.join(1, compute_stand_in_ms=PACE_MS, allow_faults=True) for _ in range(3))
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        swarm.wait_for_step(2)
        honest.request("lie", module=LIAR, factor=1.0, busy=True)
        unlike.request("lie", module=LIAR, factor=1.0 + ROUNDING, busy=True)
        liar.request("lie", module=LIAR)
        exported = swarm.folder / "exported"
        unproven = first.request("export", folder=str(exported))["unproven"]
        swarm.assert_exact()
        if not unproven:
            assert_close(load_file(exported / "model.safetensors"), expected_of(swarm, exported).parameters, share=10 * ROUNDING)

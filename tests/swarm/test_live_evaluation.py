"""Evaluation while training: the swarm's own loss on text that it never trains on, at exact steps, while peers die."""

from __future__ import annotations

import pytest

from peerd.data.tokens import prepare_tokens
from peerd.reference import train_reference
from peerd.train.corpus import Corpus
from tests.swarm.daemons import Swarm, until
from tests.swarm.runs import assert_equals_reference, exported_steps, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(300)]

PACE_MS = 40
EVERY = 3


def test_evaluations_are_those_of_one_machine_though_a_peer_dies_in_mid_step() -> None:
    manifest = swarm_manifest(num_stages=2, evaluation_fraction=0.1, evaluate_every_steps=EVERY, evaluation_microbatches=5)
    with Swarm(manifest) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        _, victim, survivor = (swarm.join(stage, compute_stand_in_ms=PACE_MS) for stage in (0, 1, 1))
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        victim.wait_until_mid_step(EVERY)
        victim.kill()
        last = until(lambda: [step for step in survivor.evaluations if step >= 3 * EVERY])[0]

        swarm.assert_exact()
        exported = swarm.export(survivor)
        steps = exported_steps(exported)
        cache = swarm.folder / "cache" / "peerd"
        assert_equals_reference(exported, manifest, steps, cache)
        assert (exported / "evaluations.jsonl").exists()
        corpus = Corpus(prepare_tokens(manifest.data.source, cache), manifest)
        expected = {each.step: each.loss for each in train_reference(manifest, corpus, steps).evaluations}
        found = {step: loss for step, loss in first.evaluations.items() if step <= steps}
        assert last in found
        assert {step for step in expected if step <= last} <= set(found)
        assert found == pytest.approx({step: expected[step] for step in found}, abs=1e-6)
        told = first.status["evaluation"]
        assert told is not None
        assert told["step"] >= last

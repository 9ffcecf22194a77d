"""In each stage one peer tells false losses, norms, evaluations and contributions: what is shown is what one machine would show."""

from __future__ import annotations

from typing import Any

import pytest

from peerd.data.tokens import prepare_tokens
from peerd.reference import ReferenceResult, train_reference
from peerd.train.corpus import Corpus
from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import assert_equals_reference, certified, exported_steps, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(300)]

PACE_MS = 40
EVERY, LASTS = 3, 10
NUM_STAGES = 2


def test_what_honest_peers_show_is_what_one_machine_would_show_though_one_of_each_stage_lies_about_everything() -> None:
    options: dict[str, Any] = {"evaluate_every_steps": EVERY, "evaluation_microbatches": 2, "max_gradient_norm": 1.0}
    manifest = certified(swarm_manifest(num_stages=NUM_STAGES, steps=LASTS, evaluation_fraction=0.1, **options))
    with Swarm(manifest) as swarm:
        start = {"compute_stand_in_ms": PACE_MS, "allow_faults": True}
        stages = [[swarm.start(stage=0, **start), *(swarm.join(0, **start) for _ in range(2))]]
        stages.append([swarm.join(1, **start) for _ in range(3)])
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        liars, honest = [peers[-1] for peers in stages], [daemon for peers in stages for daemon in peers[:-1]]
        for liar in liars:
            liar.request("lie", module="scripts.benchmarks._liars.boasts")
        for daemon in honest:
            daemon.wait_for_step(LASTS, 120)

        cache = swarm.folder / "cache" / "peerd"
        corpus = Corpus(prepare_tokens(manifest.data.source, cache), manifest)
        expected = train_reference(manifest, corpus, LASTS)
        for daemon in honest:
            until(lambda daemon=daemon: shows(daemon, expected))  # type: ignore[misc]
            assert_shows_the_work_of_all(daemon, stages, manifest.train.microbatches_per_step)
        swarm.assert_exact()
        exported = swarm.export(honest[0])
        assert_equals_reference(exported, manifest, exported_steps(exported), cache)


def shows(daemon: Daemon, expected: ReferenceResult) -> bool:
    """Whether a daemon shows the last step's numbers. At no time it shows any that are not true."""
    losses = {step: entry.loss for step, entry in enumerate(expected.history)}
    evaluations = {each.step: each.loss for each in expected.evaluations}
    for entry in daemon.history:
        assert entry["loss"] == pytest.approx(losses[entry["step"]], rel=1e-6)
        norm = entry.get("gradient_norm")
        assert norm is None or norm == pytest.approx(expected.norms[entry["step"]], rel=1e-6)
    assert daemon.evaluations == pytest.approx({step: evaluations[step] for step in daemon.evaluations}, abs=1e-6)
    status, table = daemon.status, daemon.table
    told = status["evaluation"]
    if told is not None:
        assert told["loss"] == pytest.approx(evaluations[told["step"]], abs=1e-6)
    assert table["last_loss"] is None or any(table["last_loss"] == pytest.approx(loss, rel=1e-6) for loss in losses.values())
    newest = max((entry["step"] for entry in daemon.history), default=-1)
    return newest == LASTS - 1 and told is not None and told["step"] == max(evaluations) and table["last_loss"] is not None


def assert_shows_the_work_of_all(daemon: Daemon, stages: list[list[Daemon]], per_step: int) -> None:
    """No row is larger than what that peer has computed, and the rows make up the run. Liars count truly for themselves."""
    told = daemon.request("contributions")["stages"]
    assert [stage["stage"] for stage in told] == [*range(NUM_STAGES)]
    for stage, peers in zip(told, stages, strict=True):
        rows = {row["peer"]: row["microbatches"] for row in stage["peers"]}
        held = {peer.ready.peer: peer.counters["accumulated_microbatches"] for peer in peers}
        assert rows.keys() <= held.keys()
        assert {name: number for name, number in rows.items() if number > held[name]} == {}
        assert sum(rows.values()) == per_step * LASTS

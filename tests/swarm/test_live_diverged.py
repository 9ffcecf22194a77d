"""A run that diverges stands still at one step, and every daemon says the same; nobody is banned, and nothing is thrown away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peerd.config.paths import cache_folder
from peerd.data.tokens import prepare_tokens
from peerd.errors import DivergedError
from peerd.reference import train_reference
from peerd.train.corpus import Corpus
from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import assert_equals_reference, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(200)]

FAR: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 100.0, "weight_decay": 1.0}
"""Each update makes the parameters some hundred times as large."""
RUNS: dict[str, tuple[dict[str, Any], int]] = {
    "float32": (FAR, 2),
    "float16": ({**FAR, "precision": "float16", "loss_scale": 4.0}, 3),
}
"""What is trained, and the step at which it stands: in float16 two are left out first, for the scale falls from 4 to 1."""


def diverged(daemon: Daemon) -> str:
    return next((item["title"] for item in daemon.status["health"] if item["code"] == "diverged"), "")


@pytest.mark.parametrize("precision", [pytest.param("float32"), pytest.param("float16", marks=pytest.mark.slow)])
def test_a_run_that_diverges_stands_still_everywhere_and_harms_nobody(precision: str) -> None:
    options, step = RUNS[precision]
    with Swarm(swarm_manifest(num_stages=2, **options)) as swarm:
        first = swarm.start(stage=0)
        for stage in (0, 1, 1):
            swarm.join(stage)
        for daemon in swarm.daemons:
            said = until(lambda daemon=daemon: diverged(daemon), 90)  # type: ignore[misc]
            assert said == f"diverged at step {step}: the loss or its gradients are not finite"
        assert [daemon.status["peer"]["step"] for daemon in swarm.daemons] == [step] * 4
        swarm.assert_exact()
        for name in ("messages_refused", "faults_seen", "ledger_resets"):
            assert (name, swarm.total(name)) == (name, 0)
        assert swarm.total("rounds_failed") <= 3  # each that joined may have proposed a round to a mate that was done without it
        assert swarm.total("reloads") <= 3  # one for each that joined after the first step
        assert swarm.total("replayed_microbatches") <= 60
        with pytest.raises(DivergedError, match=f"diverged at step {step}"):
            first.request("wait", step=step + 1, timeout_s=60)
        assert_equals_reference(swarm.export(first), swarm.manifest, step, swarm.folder / "cache" / "peerd")
        corpus = corpus_of(swarm, swarm.folder / "cache" / "peerd")
        with pytest.raises(DivergedError, match=f"diverged at step {step}"):
            train_reference(swarm.manifest, corpus, step + 1)


def corpus_of(swarm: Swarm, cache: Path | None = None) -> Corpus:
    return Corpus(prepare_tokens(swarm.manifest.data.source, cache or cache_folder(), swarm.manifest.data), swarm.manifest)

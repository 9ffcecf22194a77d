"""The swarm goes on with a text while it trains: what it says is what the model of that step says, though a peer dies in mid-sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peerd.config.manifest import Manifest
from peerd.control.asking import ask_swarm
from peerd.control.client import ControlClient
from peerd.data.tokens import prepare_tokens
from peerd.errors import UsageError
from peerd.generate import CPU, Continued
from peerd.models.sampling import choose
from peerd.models.stages import build_stage
from peerd.policy.inference.sampling import GREEDY, Sampling
from peerd.reference import train_reference
from peerd.train.corpus import Corpus
from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(300)]

PACE_MS, EVERY, TOKENS, PROMPT = 100, 12, 12, "def "
"""A step takes a second or so, so that the parameters of an evaluated step stay for more than ten."""


def due_text(manifest: Manifest, step: int, cache: Path, sampling: Sampling) -> str:
    """What one machine says that has trained as far."""
    corpus = Corpus(prepare_tokens(manifest.data.source, cache, manifest.data), manifest)
    parameters = train_reference(manifest, corpus, step).parameters
    stages = [build_stage(manifest, stage, "cpu") for stage in range(manifest.train.num_stages)]
    with torch.no_grad():
        for name, parameter in (each for stage in stages for each in stage.named_parameters()):
            parameter.copy_(parameters[name])
    logits, tokens = Continued(lambda: [stage.prefix() for stage in stages], CPU), [*PROMPT.encode()]
    for _ in range(TOKENS):
        tokens.append(choose(logits(tokens), sampling, len(tokens)))
    return bytes(tokens[len(PROMPT) :]).decode("utf-8", "replace")


def asked(daemon: Daemon, on_token: Callable[[int], None] = lambda _number: None, **request: Any) -> dict[str, Any]:
    numbers = iter(range(TOKENS))
    reply = ask_swarm(
        ControlClient(daemon.home), lambda _token, _text: on_token(next(numbers)), prompt=PROMPT, max_tokens=TOKENS, **request
    )
    return dict(reply)


def kept_step(daemons: list[Daemon]) -> int:
    """The evaluated step that all of them hold and have left; 0: none yet."""
    statuses = [daemon.status for daemon in daemons]
    held = set.intersection(*({*status["texts"]["steps"]} - {status["peer"]["step"]} for status in statuses))
    return max(held, default=0)


def test_a_text_goes_on_while_the_swarm_trains_and_a_peer_dies() -> None:
    manifest = swarm_manifest(num_stages=2, evaluation_fraction=0.1, evaluate_every_steps=EVERY, evaluation_microbatches=1)
    manifest = replace(manifest, compute=replace(manifest.compute, slots=1))  # a peer with more has hardly a moment without training
    with Swarm(manifest) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        others = [swarm.join(stage, compute_stand_in_ms=PACE_MS) for stage in (0, 1, 1)]
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        step = until(lambda: kept_step(swarm.daemons))
        cache = swarm.folder / "cache" / "peerd"
        killed: list[Daemon] = []

        def kill_who_answers(number: int) -> None:
            if number == 5:
                killed.append(next(each for each in others[1:] if each.status["texts"]["texts"]))
                killed[0].kill()

        before = first.status["peer"]["step"]
        whole = asked(first, kill_who_answers)
        assert whole["steps"] == [step]
        assert whole["rerouted"] >= 1
        assert [len(peers) for peers in whole["peers"]] == [1, 2]
        assert whole["text"] == due_text(manifest, step, cache, GREEDY)
        first.wait_for_step(before + 2)
        swarm.assert_exact()

        drawn = asked(first, temperature=0.9, top_p=0.8, seed=3)
        sampling = Sampling(temperature=0.9, top_p=0.8, seed=3)
        if len(drawn["steps"]) == 1:
            assert drawn["text"] == due_text(manifest, drawn["steps"][0], cache, sampling)
        first.request("limits", change={"inference": 0.0})
        until(lambda: not first.status["texts"]["steps"])
        assert asked(first)["peers"][0] == [others[0].status["peer"]["id"]]
        with pytest.raises(UsageError, match="context 32"):
            first.request("ask", prompt="x" * 40)

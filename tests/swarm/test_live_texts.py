"""The swarm goes on with a text while it trains: what it says is what the model of that step says, though a peer dies in mid-sentence."""

from __future__ import annotations

from collections.abc import Callable
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
from peerd.policy.inference.sampling import Sampling
from peerd.reference import train_reference
from peerd.train.corpus import Corpus
from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(300)]

PACE_MS, EVERY, TOKENS, FEW, PROMPT = 300, 12, 16, 3, "def "
"""A step takes a second or more; a text's pass waits for the microbatch that is computed."""
KILLED_AT = 2
"""When so many tokens have come, at least one way through the stages is left: the first three bring at most 1, 5 and 9 tokens."""


def due_text(manifest: Manifest, step: int, cache: Path, sampling: Sampling, count: int) -> str:
    """What one machine says that has trained as far."""
    corpus = Corpus(prepare_tokens(manifest.data.source, cache, manifest.data), manifest)
    parameters = train_reference(manifest, corpus, step).parameters if step else {}
    stages = [build_stage(manifest, stage, "cpu") for stage in range(manifest.train.num_stages)]
    with torch.no_grad():
        for name, parameter in (each for stage in stages for each in stage.named_parameters()):
            parameter.copy_(parameters.get(name, parameter))
    logits, tokens = Continued(lambda: [stage.prefix() for stage in stages], CPU), [*PROMPT.encode()]
    for _ in range(count):
        tokens.append(choose(logits(tokens), sampling, len(tokens)))
    return bytes(tokens[len(PROMPT) :]).decode("utf-8", "replace")


def asked(daemon: Daemon, count: int, on_token: Callable[[int], None] = lambda _number: None, **request: Any) -> dict[str, Any]:
    numbers = iter(range(count))
    client = ControlClient(daemon.home)
    return dict(ask_swarm(client, lambda _token, _text: on_token(next(numbers)), prompt=PROMPT, max_tokens=count, **request))


def kept_steps(daemons: list[Daemon]) -> set[int]:
    """Evaluated steps that all of them hold and have left."""
    statuses = [daemon.status for daemon in daemons]
    return set.intersection(*({*status["texts"]["steps"]} - {status["peer"]["step"]} for status in statuses))


def test_a_text_goes_on_while_the_swarm_trains_and_a_peer_dies() -> None:
    manifest = swarm_manifest(num_stages=2, evaluation_fraction=0.1, evaluate_every_steps=EVERY, evaluation_microbatches=1)
    with Swarm(manifest) as swarm:
        first = swarm.start(stage=0, compute_stand_in_ms=PACE_MS)
        others = [swarm.join(stage, compute_stand_in_ms=PACE_MS) for stage in (0, 1, 1)]
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        [step] = until(lambda: kept_steps(swarm.daemons))
        cache = swarm.folder / "cache" / "peerd"
        killed: list[Daemon] = []

        def kill_who_answers(number: int) -> None:
            if number == KILLED_AT:
                killed.append(next(each for each in others[1:] if each.status["texts"]["texts"]))
                killed[0].kill()

        before = first.status["peer"]["step"]
        whole = asked(first, TOKENS, kill_who_answers)
        assert whole["steps"] == [step]
        assert whole["rerouted"] >= 1
        assert [len(peers) for peers in whole["peers"]] == [1, 2]
        assert whole["text"] == due_text(manifest, step, cache, Sampling(), TOKENS)
        first.wait_for_step(before + 2)
        swarm.assert_exact()

        drawn = asked(first, FEW, temperature=0.9, top_p=0.8, seed=3)
        sampling = Sampling(temperature=0.9, top_p=0.8, seed=3)
        if len(drawn["steps"]) == 1:
            assert drawn["text"] == due_text(manifest, drawn["steps"][0], cache, sampling, FEW)
        first.request("limits", change={"inference": 0.0})
        until(lambda: not first.status["texts"]["steps"])
        assert asked(first, FEW)["peers"][0] == [others[0].status["peer"]["id"]]
        with pytest.raises(UsageError, match="context 32"):
            first.request("ask", prompt="x" * 40)


def test_greedy_text_of_the_swarm_is_that_of_transformers_on_the_export_of_its_step() -> None:
    transformers = pytest.importorskip("transformers")
    manifest = swarm_manifest(num_stages=2, steps=3)
    with Swarm(manifest) as swarm:
        first = swarm.start(stage=0)
        swarm.join(1)
        swarm.wait_for_step(manifest.train.steps)
        given = [*PROMPT.encode()]
        count = manifest.train.sequence_length - len(given)
        said = asked(first, count)
        assert said["steps"] == [manifest.train.steps]
        first.request("export", folder=str(swarm.folder / "exported"), format="hf")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(swarm.folder / "exported")
        due = loaded.generate(torch.tensor([given]), max_new_tokens=count, do_sample=False, eos_token_id=None)[0].tolist()
        assert said["text"] == bytes(due[len(given) :]).decode("utf-8", "replace")

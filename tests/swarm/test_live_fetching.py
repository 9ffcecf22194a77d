"""Peers without the data fetch it from one that has it, and train on when that one dies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peerd.config.manifest import DataConfig
from tests.swarm.daemons import Swarm, until
from tests.swarm.runs import assert_equals_reference, exported_steps, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_peer_fetches_tokens_and_tokenizer_and_trains_on_alone() -> None:
    manifest = swarm_manifest(num_stages=2)
    data = DataConfig(source=manifest.data.source, tokenizer="bpe:400")
    manifest = replace(manifest, data=data, model=replace(manifest.decoder, vocab_size=400))
    with Swarm(manifest) as swarm:
        first = swarm.start(stage=0)
        elsewhere = swarm.folder / "elsewhere"
        heir = swarm.join(0, data="swarm", cache=elsewhere)
        without = swarm.join(1, data="", cache=elsewhere)
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        until(lambda: heir.status["data"].startswith("here"))
        assert without.status["data"].startswith("not here")
        fetched = {path.suffix for path in (elsewhere / "peerd").iterdir()}
        assert fetched == {".bin", ".json"}, "tokens and tokenizer, and nothing unfinished"
        first.kill()
        heir.wait_for_step(heir.status["peer"]["step"] + 3)
        trains = {peer["id"]: peer["trains"] for stage in heir.table["stages"] for peer in stage["peers"] if not peer["suspect"]}
        assert trains == {heir.status["peer"]["id"]: True, without.status["peer"]["id"]: False}
        swarm.assert_exact()
        exported = swarm.export(heir)
        assert_equals_reference(exported, manifest, exported_steps(exported), swarm.folder / "cache" / "peerd")

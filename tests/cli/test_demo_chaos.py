"""The schedule of chaos: the flag, the draws of the seed, and the peers that it spares."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.cli.demo_chaos import PLAIN, Candidate, Chaos, FaultKind, may_come_back, may_fall, may_sleep, parse_chaos, schedule
from peerd.cli.demo_daemons import DemoSwarm
from peerd.cli.demo_process import DemoDaemon
from peerd.config import manifest
from peerd.config.manifest import Manifest, SwarmConfig
from peerd.errors import UsageError
from tests.cli.conftest import Command


def test_the_flag_names_a_kind_and_how_often() -> None:
    assert parse_chaos("kill:every=4s,respawn=yes") == Chaos(kind=FaultKind.KILL, every_s=4, respawn=True)
    assert parse_chaos("slow:every=2.5,for=7s,factor=9") == Chaos(kind=FaultKind.SLOW, every_s=2.5, for_s=7, factor=9)


@pytest.mark.parametrize(
    "text",
    ["", "kill", "kill:", "maim:every=4s", "kill:every=0", "kill:every=nan", "kill:every=4s,when=now", "kill:every=4s,respawn=perhaps"],
)
def test_a_flag_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--chaos"):
        parse_chaos(text)


def test_a_seed_draws_the_same_faults_again_and_another_draws_others() -> None:
    def first(seed: int) -> list[Any]:
        return list(itertools.islice(schedule(PLAIN, 2, seed), 3 * len(PLAIN)))

    assert first(1) == first(1) != first(2)
    for begin in range(0, 3 * len(PLAIN), len(PLAIN)):
        assert {strike.kind for strike in first(1)[begin : begin + len(PLAIN)]} == set(PLAIN), "each kind once in each turn"
    assert [strike.at_s for strike in first(1)][:3] == [2, 4, 6]


def test_a_stage_is_wiped_only_where_it_can_come_back() -> None:
    mixed, wipes = Chaos(kind=FaultKind.MIXED, every_s=2), Chaos(kind=FaultKind.STAGE_WIPED, every_s=2)
    assert set(mixed.kinds(can_wipe=True)) - set(mixed.kinds(can_wipe=False)) == {FaultKind.STAGE_WIPED}
    assert wipes.kinds(can_wipe=True) == (FaultKind.STAGE_WIPED,)
    assert wipes.kinds(can_wipe=False) == ()


def test_a_run_without_checkpoints_cannot_have_its_stages_wiped(peerd: Command, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(manifest.dump(Manifest(swarm=SwarmConfig(checkpoint_every_steps=0))))
    done = peerd("demo", "--run", path, "--chaos", "stage-wiped:every=4s")
    assert done.code == 2
    assert "keeps no checkpoints; set swarm.checkpoint_every_steps" in done.err


def candidate(peer: int, stage: int, step: int = 5, *, serving: bool = True, sound: bool = True, on_disk: Sequence[int] = ()) -> Candidate:
    return Candidate(peer=peer, stage=stage, step=step, serving=serving, sound=sound, on_disk=frozenset(on_disk))


def test_the_last_sound_peer_with_its_stages_newest_step_is_spared() -> None:
    assert may_fall([candidate(0, 0), candidate(1, 0), candidate(2, 1)]) == [0, 1]
    assert may_fall([candidate(0, 0), candidate(1, 0, step=4)]) == [1]
    assert may_fall([candidate(0, 0), candidate(1, 0, serving=False)]) == [1]
    assert may_fall([candidate(0, 0), candidate(1, 0, sound=False)]) == []


def test_nobody_falls_while_only_a_disturbed_peer_has_the_newest_step() -> None:
    assert may_fall([candidate(0, 0, step=6, sound=False), candidate(1, 0), candidate(2, 0)]) == []


def test_a_stage_comes_back_with_a_peer_that_has_the_newest_step_which_all_stages_have_on_disk() -> None:
    stages = [candidate(0, 0, on_disk=(5, 10)), candidate(1, 0, on_disk=(5,)), candidate(2, 1, on_disk=(10, 15))]
    assert may_come_back(stages, 5) == [0, 2]
    assert may_come_back(stages, 10) == [], "the run has not gone on since it last went back to step 10"
    assert may_come_back([*stages, candidate(3, 1, on_disk=(10,), sound=False)], 5) == [0, 2]
    assert may_come_back([candidate(0, 0, on_disk=(5,)), candidate(1, 1, on_disk=(10,))], 0) == []
    assert may_come_back([candidate(0, 0)], 0) == []


def test_a_peer_sleeps_only_where_its_mates_can_train_on() -> None:
    assert may_sleep([candidate(0, 0), candidate(1, 0), candidate(2, 1)]) == [0, 1]
    assert may_sleep([candidate(0, 0), candidate(1, 0, sound=False), candidate(2, 1), candidate(3, 1, serving=False)]) == []


@given(st.lists(st.builds(Candidate, peer=st.integers(0, 99), stage=st.integers(0, 2), step=st.integers(0, 3), serving=..., sound=...)))
def test_whoever_falls_a_sound_peer_of_its_stage_keeps_the_newest_step(drawn: list[Candidate]) -> None:
    peers = list({peer.peer: peer for peer in drawn}.values())
    for victim in may_fall(peers):
        stage = next(peer.stage for peer in peers if peer.peer == victim)
        newest = max((peer.step for peer in peers if peer.stage == stage and peer.serving), default=0)
        left = [peer for peer in peers if peer.stage == stage and peer.peer != victim]
        assert any(peer.serving and peer.sound and peer.step == newest for peer in left)


def test_the_killed_are_replaced_until_ten_have_fallen(peerd: Command, paper: Callable[[str], None]) -> None:
    paper("")
    done = peerd("demo", "--peers", 4, "--steps", 3, "--chaos", "kill:every=0.2s,respawn=yes", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert [fault["kind"] for fault in found["faults"]] == ["kill"] * 10
    assert len(found["stage_of_peer"]) == len(found["microbatches_by_peer"]) >= 13
    assert found["steps"] == 3


def test_without_replacements_chaos_ends_when_nobody_more_may_fall(peerd: Command, paper: Callable[[str], None]) -> None:
    paper("")
    done = peerd("demo", "--peers", 4, "--steps", 3, "--chaos", "kill:every=0.2s", "--json")
    assert done.code == 0, done.err
    assert sorted(fault["stage"] for fault in json.loads(done.out)["faults"]) == [0, 1]


def test_a_wiped_stage_is_killed_and_one_of_it_comes_back_with_its_disk(
    peerd: Command, paper: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    paper("saves")
    found: list[int] = []
    spawn_again = DemoSwarm.spawn_again

    def counted(swarm: DemoSwarm, dead: DemoDaemon, address: str) -> DemoDaemon:
        again = spawn_again(swarm, dead, address)
        (saved,) = (again.home.folder / "checkpoints" / "run").glob("*.safetensors")
        found.append(len(saved.read_text().splitlines()))
        return again

    monkeypatch.setattr(DemoSwarm, "spawn_again", counted)
    done = peerd("demo", "--peers", 4, "--steps", 40, "--chaos", "stage-wiped:every=0.2s", "--json")
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    wiped, died = sorted(summary["faults"], key=lambda fault: str(fault["kind"]) != "stage-wiped")
    assert (wiped["kind"], died["kind"]) == ("stage-wiped", "kill"), "once: the run has no newer checkpoint afterwards"
    assert wiped["stage"] == died["stage"] == summary["stage_of_peer"][4]
    assert "which served again from disk" in wiped["detail"]
    assert wiped["lasted_s"] > 0
    assert found == [1], "the checkpoint of the killed one is in the home of the new one"


def test_stopped_peers_are_woken_before_the_demo_ends(peerd: Command, paper: Callable[[str], None]) -> None:
    paper("")
    done = peerd("demo", "--peers", 4, "--steps", 3, "--chaos", "stop:every=0.2s,for=1s", "--json")
    assert done.code == 0, done.err
    assert {fault["kind"] for fault in json.loads(done.out)["faults"]} == {"stop"}

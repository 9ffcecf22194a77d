"""The schedule of chaos: the flag, the draws of the seed, and the peers that it spares."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.cli.demo_chaos import PLAIN, Candidate, Chaos, FaultKind, may_fall, parse_chaos, schedule
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
        return list(itertools.islice(schedule(Chaos(kind=FaultKind.MIXED, every_s=2), seed), 50))

    assert first(1) == first(1) != first(2)
    assert {strike.kind for strike in first(1)} == set(PLAIN)
    assert [strike.at_s for strike in first(1)][:3] == [2, 4, 6]


def candidate(peer: int, stage: int, step: int = 5, *, serving: bool = True, sound: bool = True) -> Candidate:
    return Candidate(peer=peer, stage=stage, step=step, serving=serving, sound=sound)


def test_the_last_sound_peer_with_its_stages_newest_step_is_spared() -> None:
    assert may_fall([candidate(0, 0), candidate(1, 0), candidate(2, 1)]) == [0, 1]
    assert may_fall([candidate(0, 0), candidate(1, 0, step=4)]) == [1]
    assert may_fall([candidate(0, 0), candidate(1, 0, serving=False)]) == [1]
    assert may_fall([candidate(0, 0), candidate(1, 0, sound=False)]) == []


def test_nobody_falls_while_only_a_disturbed_peer_has_the_newest_step() -> None:
    assert may_fall([candidate(0, 0, step=6, sound=False), candidate(1, 0), candidate(2, 0)]) == []


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


def test_stopped_peers_are_woken_before_the_demo_ends(peerd: Command, paper: Callable[[str], None]) -> None:
    paper("")
    done = peerd("demo", "--peers", 4, "--steps", 3, "--chaos", "stop:every=0.2s,for=1s", "--json")
    assert done.code == 0, done.err
    assert {fault["kind"] for fault in json.loads(done.out)["faults"]} == {"stop"}

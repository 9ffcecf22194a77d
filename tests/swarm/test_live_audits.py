"""Real daemons audit each other: who falsifies its work is out everywhere and is told so, and an honest swarm accuses nobody."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from peerd.config.manifest import Manifest
from peerd.data.tokens import prepare_tokens
from peerd.reference import train_reference
from peerd.train.corpus import Corpus
from tests.swarm.daemons import Daemon, Swarm, run_peerd, until
from tests.swarm.runs import assert_equals_reference, exported_steps, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(300)]

LIAR = {"module": "scripts.benchmarks._liars.falsifies"}
CONCEALS = {"module": "scripts.benchmarks._liars.own_part", "factor": 1000.0, "conceals": True}
STAND_IN_MS = 40
OUT_WITHIN_S = 120.0
"""A quarter of a newcomer's work is looked at, in its first ten steps: most liars are out within five."""
LEFT_OUT_WITHIN_STEPS = 6
"""Two with false parts, the step in which the second one is looked at, the one in which mates hear of that, and two as daemons differ."""


def audited() -> Manifest:
    manifest = swarm_manifest(num_stages=2)
    return replace(manifest, swarm=replace(manifest.swarm, trust="audits", group_size=0))


def swarm_of_six(swarm: Swarm) -> tuple[list[Daemon], list[Daemon]]:
    """Two daemons of the first stage, and four of the last."""
    first = [swarm.start(stage=0, compute_stand_in_ms=STAND_IN_MS), swarm.join(0, compute_stand_in_ms=STAND_IN_MS)]
    last = [swarm.join(1, compute_stand_in_ms=STAND_IN_MS, allow_faults=True) for _ in range(4)]
    for daemon in swarm.daemons:
        daemon.wait_until_serving()
    return first, last


def audits_of(daemon: Daemon) -> dict[str, Any]:
    return dict(daemon.request("audit"))


def test_an_honest_swarm_audits_and_accuses_nobody_and_equals_the_reference() -> None:
    with Swarm(audited()) as swarm:
        first, last = swarm_of_six(swarm)
        until(lambda: all(audits_of(daemon)["audits"]["counts"].get("right", 0) >= 1 for daemon in last), 120)
        swarm.wait_for_step(8)
        for daemon in swarm.daemons:
            told = audits_of(daemon)
            counts = told["audits"]["counts"]
            assert {name: counts.get(name, 0) for name in ("differs", "accused", "convicted", "disputed")} == dict.fromkeys(
                ("differs", "accused", "convicted", "disputed"), 0
            )
            assert (told["cases"], told["audits"]["lost"], told["audits"]["own_fault"]) == ([], [], "")
            assert told["audits"]["kept"] == told["audits"]["offered"] > 0
        assert "audits" in run_peerd(swarm.environment, "status", "--long", "--home", first[0].home.folder).stdout
        assert "right" in run_peerd(swarm.environment, "audit", "--home", last[0].home.folder).stdout
        swarm.assert_exact()
        exported = swarm.export(first[0])
        assert_equals_reference(exported, swarm.manifest, exported_steps(exported), swarm.folder / "cache" / "peerd")


def test_a_peer_that_falsifies_its_work_is_out_everywhere_and_told_and_costs_little() -> None:
    with Swarm(audited()) as swarm:
        first, last = swarm_of_six(swarm)
        *honest, liar = last
        swarm.wait_for_step(2)
        began = first[0].status["peer"]["step"]
        liar.request("lie", **LIAR)
        everybody = [*first, *honest]
        name = liar.ready.peer
        until(lambda: all(audits_of(daemon)["audits"]["lost"] == [name] for daemon in everybody), OUT_WITHIN_S)
        out = max(daemon.status["peer"]["step"] for daemon in everybody)
        until(lambda: all(name not in peers_of(daemon) for daemon in everybody), 20)
        for daemon in everybody:
            told = audits_of(daemon)
            [case] = [each for each in told["cases"] if each["losers"]]
            assert (case["peer"], case["ruling"], case["losers"]) == (name, "convicted", [name])
            assert sum(judge["differs"] for judge in case["judges"]) == 3
            assert [item["severity"] for item in daemon.status["health"] if item["code"] == "convicted"] == ["warning"]
        until(lambda: [item["severity"] for item in liar.status["health"] if item["code"] == "convicted"] == ["problem"], 20)
        for daemon in everybody:
            daemon.wait_for_step(out + 5)
            assert [daemon.counters[each] for each in ("duplicate_microbatches", "lost_microbatches", "inexact_steps")] == [0, 0, 0]
        exported = swarm.export(honest[0])
        share = distance(exported, swarm.manifest, swarm.folder / "cache" / "peerd")
        print(f"falsified from step {began} to {out}; {share:.2%} of all progress away from the reference")
        assert share < 0.5


def test_a_peer_that_hides_what_its_part_is_made_of_is_left_out_by_its_mates_and_the_run_goes_on() -> None:
    with Swarm(audited()) as swarm:
        first, last = swarm_of_six(swarm)
        *honest, liar = last
        swarm.wait_for_step(2)
        began = max(daemon.status["peer"]["step"] for daemon in honest)
        liar.request("lie", **CONCEALS)
        name = liar.ready.peer
        until(lambda: all(phase_of(name, daemon) == "sidelined" for daemon in honest), OUT_WITHIN_S)
        out = max(daemon.status["peer"]["step"] for daemon in honest)
        assert out - began <= LEFT_OUT_WITHIN_STEPS
        for daemon in (*first, *honest):
            daemon.wait_for_step(out + 4)
            told = audits_of(daemon)
            assert (told["cases"], told["audits"]["lost"]) == ([], [])
            assert told["audits"]["counts"].get("withheld", 0) >= (2 if daemon in honest else 0)
            assert [daemon.counters[each] for each in ("duplicate_microbatches", "lost_microbatches", "inexact_steps")] == [0, 0, 0]
        until(lambda: "sidelined" in {item["code"] for item in liar.status["health"]}, 20)


def test_a_peer_that_makes_up_what_it_sends_on_is_out_everywhere() -> None:
    """Nobody has given it these microbatches, so no caller has a receipt of them. The next stage shows them."""
    with Swarm(audited()) as swarm:
        first = [swarm.start(stage=0, compute_stand_in_ms=STAND_IN_MS)]
        first += [swarm.join(0, compute_stand_in_ms=STAND_IN_MS, allow_faults=True) for _ in range(2)]
        last = [swarm.join(1, compute_stand_in_ms=STAND_IN_MS) for _ in range(3)]
        for daemon in swarm.daemons:
            daemon.wait_until_serving()
        swarm.wait_for_step(2)
        *honest, liar = first
        liar.request("lie", module="scripts.benchmarks._liars.injects")
        everybody, name = [*honest, *last], liar.ready.peer
        until(lambda: all(audits_of(daemon)["audits"]["lost"] == [name] for daemon in everybody), OUT_WITHIN_S)
        out = max(daemon.status["peer"]["step"] for daemon in everybody)
        for daemon in everybody:
            daemon.wait_for_step(out + 5)
            assert [daemon.counters[each] for each in ("duplicate_microbatches", "lost_microbatches", "inexact_steps")] == [0, 0, 0]


def phase_of(name: str, daemon: Daemon) -> str:
    return next((peer["phase"] for stage in daemon.table["stages"] for peer in stage["peers"] if peer["id"] == name), "")


def peers_of(daemon: Daemon) -> set[str]:
    return {peer["id"] for stage in daemon.table["stages"] for peer in stage["peers"]}


def distance(exported: Path, manifest: Manifest, cache: Path) -> float:
    """How far the exported parameters are from the reference's, as a share of how far these have come from the first weights."""
    corpus = Corpus(prepare_tokens(manifest.data.source, cache, manifest.data), manifest)
    steps, found = exported_steps(exported), load_file(exported / "model.safetensors")
    expected, first = (train_reference(manifest, corpus, each).parameters for each in (steps, 0))
    apart = sum(float((found[name] - expected[name]).double().norm() ** 2) for name in expected)
    come = sum(float((first[name] - expected[name]).double().norm() ** 2) for name in expected)
    return float((apart / come) ** 0.5)

"""The numbers of the step rules that follow from the run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from peerd.models.stages import initial_parameter_spec, largest_state_bytes
from peerd.policy.step.following import num_kept
from peerd.step.rules import rules_in, rules_of
from tests.strategies import member, view_of
from tests.tiny_run import replace_train, tiny_manifest


def test_peers_that_hold_what_is_missing_have_time_to_load_their_state_before_a_step_is_given_up() -> None:
    manifest = tiny_manifest(3)
    assert rules_of(manifest, 15.0, 9.0, state_bytes=0).lost_wait_s == 45.0
    assert rules_of(manifest, 15.0, 9.0, state_bytes=8 * 10**9).lost_wait_s == 40.0 + 160.0


def test_where_a_microbatch_takes_minutes_no_step_is_given_up_between_two_of_its_gradients() -> None:
    """Two stages, 100 and 200 s: the stage that is one step behind adds a gradient every five minutes, and its step is not lost."""
    rules = rules_of(tiny_manifest(2), 15.0, 9.0, state_bytes=0)
    alone = view_of(member("a", step=3), member("b", stage=1, step=4))
    assert rules_in(alone, rules, microbatch_size=2) == rules
    slow = view_of(member("a", step=3, throughput=0.02), member("b", stage=1, step=4, throughput=0.01))
    assert rules_in(slow, rules, microbatch_size=2).lost_wait_s == 3 * 300.0


def test_the_largest_stage_counts() -> None:
    manifest = tiny_manifest(3)
    stages = [sum(math.prod(shape) for shape in initial_parameter_spec(manifest, stage).values()) for stage in range(3)]
    assert largest_state_bytes(manifest) == 16 * max(stages) > 16 * min(stages)


@pytest.mark.parametrize(
    ("train", "kept"),
    [
        ({}, 4),
        ({"optimizer_bits": 8}, 2),
        ({"optimizer": "sgd", "momentum": 0.9}, 3),
        ({"optimizer": "sgd"}, 2),
        ({"optimizer": "muon"}, 3),
        ({"accumulate": "float64"}, 2),
    ],
)
def test_a_mate_that_missed_steps_gets_averages_as_long_as_they_are_fewer_bytes_than_the_state(train: dict[str, Any], kept: int) -> None:
    manifest = replace_train(tiny_manifest(2), **({"accumulate": "float32", "momentum": 0.0} | train))
    rules = rules_of(manifest, 15.0, 9.0, state_bytes=0)
    assert num_kept(rules) == kept
    assert num_kept(replace(rules, ties_stages=True)) == 4

"""Fuzz: no record, whatever it says within its forms, makes a policy fail or take long."""

from __future__ import annotations

import itertools
from random import Random
from typing import get_type_hints

import msgpack
import pytest

from peerd.table.record import PeerRecord
from tests.policy.fuzz_calls import MOST_S, calls, slowest
from tests.policy.fuzz_records import DRAWS, World


def test_what_liars_say_is_what_a_record_may_say_in_every_field() -> None:
    forms = {name: hint.__metadata__[1] for name, hint in get_type_hints(PeerRecord, include_extras=True).items()}
    assert set(DRAWS) == set(forms) - {"peer"}
    for liar in itertools.chain.from_iterable(World(seed).liars for seed in range(40)):
        for name, form in forms.items():
            value = getattr(liar, name)
            sent = msgpack.packb(form.write(value) if form.write else value)
            assert form.read(msgpack.unpackb(sent)) == value, name


def test_every_policy_that_takes_what_peers_say_is_called() -> None:
    names = {call.name for call in calls()}
    assert {"policy.step.stepping.decide", "policy.route.launching.on_the_way", "policy.swarm.rebalance.plan"} <= names
    assert {"policy.swarm.spreading.News.note", "policy.step.roster.compose", "policy.step.recovery.plan"} <= names


def fuzz(world: World) -> None:
    """Call every policy in this world."""
    for call in calls():
        ready = call.draw(world)
        try:
            took_s = slowest(ready)
        except Exception as error:
            error.add_note(f"{call.name}, world {world.seed}")
            raise
        size = f"{len(world.records)} live records, {world.num_microbatches} microbatches"
        assert took_s <= MOST_S, f"{call.name} took {took_s:.3f} s in world {world.seed}: {size}"


def fuzz_many(num_records: int, seed: int) -> None:
    """Worlds that have so many liars in all."""
    seeds, told = Random(seed), 0
    while told < num_records:
        world = World(seeds.getrandbits(48))
        told += len(world.liars)
        fuzz(world)


def test_no_record_makes_a_policy_fail_or_take_long() -> None:
    fuzz_many(1_500, seed=0)


@pytest.mark.parametrize("seed", [5, 7])
def test_a_crowd_makes_no_policy_take_long(seed: int) -> None:
    fuzz(World(seed, is_crowd=True))


@pytest.mark.slow
@pytest.mark.timeout(0)  # none
def test_of_a_million_records_none_makes_a_policy_fail_or_take_long() -> None:
    fuzz_many(1_000_000, seed=1)

"""Parameters that drift apart on unlike devices are averaged with the gradients, a few in each step, and nobody can move them far."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from peerd.config.manifest import Manifest, WireConfig
from peerd.policy.step.roster import Roster
from peerd.stage.executor import Priority
from peerd.table.record import Phase
from tests.averaging.rounds_group import MANIFEST, MICROBATCHES, Group, fill
from tests.averaging.test_rounds import MakeGroup
from tests.tiny_run import replace_train

ALWAYS: dict[str, Any] = {"average_parameters": "always", "learning_rate": 0.01, "weight_decay": 0.0}


def named(group: Group, name: str) -> list[Tensor]:
    return [member.state.holdings.module.get_parameter(name) for member in group.members.values()]


async def step_of(group: Group, step: int = 0) -> Roster:
    """All average and commit this step. Returns the roster as they agreed on it."""
    if step:
        for number, member in enumerate(group.members.values()):
            fill(member.state, range(number, MICROBATCHES, len(group.members)))
    roster = replace(group.roster(), step=step)
    assert await group.leader(roster).rounds.lead(roster) == ""
    await group.settled(Phase.AVERAGED)
    *_, late, holder = group.members.values()
    assert holder.state.average is not None
    agreed = holder.state.average.roster
    fetched = await late.rounds.fetcher.fetch(holder.peer, step)
    assert torch.equal(fetched.flat_sum, holder.average), "a mate that missed the round gets the parameters too"
    for member in group.members.values():
        member.rounds.applied(await member.executor.run(Priority.CONTROL, member.state.commit))
        await asyncio.sleep(0)  # until its job is queued
        await member.executor.run(Priority.IDLE, member.state.holdings.fetch_drift)
    return agreed


@pytest.mark.parametrize("num_members", [2, 3])
@pytest.mark.parametrize("every", [1, 3])
async def test_parameters_that_drifted_apart_come_together_and_equal_ones_stay_equal(
    make_group: MakeGroup, num_members: int, every: int
) -> None:
    group = make_group(num_members, replace_train(MANIFEST, **ALWAYS, average_parameters_every_steps=every))
    heads, embeddings = named(group, "head.weight"), named(group, "embedding.weight")
    with torch.no_grad():
        for number, head in enumerate(heads):
            head.add_(1e-4 * number)
    drifts = []
    for step in range(every):
        assert (await step_of(group, step)).averages_parameters
        drifts.append(max(member.state.holdings.drift or 0.0 for member in group.members.values()))
    assert max(drifts) > 1e-5, "its owner is shown how far off it was"
    assert apart(heads) < 1e-7
    assert apart(embeddings) == 0


def apart(values: Sequence[Tensor]) -> float:
    return max(float((each - values[0]).detach().abs().max()) for each in values)


async def test_a_member_that_says_false_parameters_moves_nobody(make_group: MakeGroup) -> None:
    group = make_group(3, replace_train(MANIFEST, **ALWAYS, average_parameters_every_steps=1))
    without = make_group(3, replace_train(MANIFEST, **ALWAYS | {"average_parameters": "never"}))
    with torch.no_grad():
        named(group, "head.weight")[-1].fill_(2.0)
    await step_of(group)
    await step_of(without)
    for name in ("head.weight", "embedding.weight"):
        assert torch.equal(named(group, name)[0], named(without, name)[0])
    first = next(iter(group.members.values()))
    assert (first.state.holdings.drift or 0.0) > 0.1, "each is shown how far off the mean was"


NEVER = (
    replace_train(MANIFEST, average_parameters="never"),
    replace(MANIFEST, wire=WireConfig(weight_gradients="int8")),
)


@pytest.mark.parametrize(("devices", "is_averaged"), [(("CPU", "RTX 3060"), True), (("CPU", "CPU"), False), (("CPU", ""), False)])
async def test_it_is_the_default_where_devices_are_unlike(make_group: MakeGroup, devices: Sequence[str], is_averaged: bool) -> None:
    group = make_group(2)
    name_devices(group, devices)
    assert (await step_of(group)).averages_parameters is is_averaged


@pytest.mark.parametrize("manifest", NEVER, ids=["never", "codec"])
async def test_a_run_whose_settings_leave_no_room_for_it_does_not_do_it(make_group: MakeGroup, manifest: Manifest) -> None:
    group = make_group(2, manifest)
    name_devices(group, ("CPU", "RTX 3060"))
    roster = replace(group.roster(), averages_parameters=True)
    other = next(member for member in group.members.values() if member.peer != roster.leader)
    answer = await other.rounds.propose(roster.leader, roster)
    assert (answer.joined, answer.reason) == (False, "this run does not average parameters there")
    assert not (await step_of(group)).averages_parameters


def name_devices(group: Group, devices: Sequence[str]) -> None:
    for member, device in zip(group.members.values(), devices, strict=True):
        member.state.record = replace(member.state.record, device=device)

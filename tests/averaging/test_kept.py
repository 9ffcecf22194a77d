"""Finished averages are in memory until they are on disk, and on disk as long as a mate may need them."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from peerd.errors import WrongStateError
from peerd.link.links import CHUNK_BYTES
from peerd.stage.executor import Priority
from peerd.table.record import Phase
from peerd.wire.chunks import CutFile
from peerd.wire.tensors import views_of_flat
from tests.averaging.rounds_group import Group

MakeGroup = Callable[..., Group]


async def test_an_average_that_cannot_be_logged_is_not_held_for_ever(make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group(2)
    roster = group.roster()
    assert await group.leader(roster).rounds.lead(roster) == ""
    await group.settled(Phase.AVERAGED)
    for member in group.members.values():

        def fail(*_arguments: object, **_named: object) -> bool:
            raise MemoryError

        monkeypatch.setattr(member.rounds.kept._log, "put", fail)
        average = member.state.average
        assert average is not None
        member.rounds.applied(average)
        assert member.rounds.kept._unlogged == {0: average}
        with pytest.raises(MemoryError):
            await asyncio.gather(*member.rounds._tasks.running)
        assert member.rounds.kept._unlogged == {}


async def test_the_event_loop_never_frees_the_memory_of_an_average(make_group: MakeGroup) -> None:
    """For 220 MB that takes 20 ms, and on a busy machine up to 300."""
    group = make_group(1)
    (member,) = group.members.values()
    assert await member.rounds.lead(group.roster()) == ""
    await group.settled(Phase.AVERAGED)
    freed_by = list[str]()
    first = member.state.average
    assert first is not None
    values = torch.zeros_like(first.flat_sum)
    weakref.finalize(values, lambda: freed_by.append(threading.current_thread().name))
    member.rounds.applied(replace(first, flat_sum=values))
    del values
    await asyncio.gather(*member.rounds._tasks.running)
    assert [name.split("_")[0] for name in freed_by] == ["averages"]


async def test_who_averaged_alone_can_give_its_last_average_to_one_that_has_just_come(make_group: MakeGroup) -> None:
    group = make_group(1)
    (member,) = group.members.values()
    assert await member.rounds.lead(group.roster()) == ""
    await group.settled(Phase.AVERAGED)
    first = member.state.average
    assert first is not None
    member.rounds.applied(first)
    second = replace(first, roster=replace(first.roster, step=1))
    assert (await member.rounds.kept.get_average(0, 0))[0].roster == first.roster
    member.rounds.applied(second)
    await asyncio.gather(*member.rounds._tasks.running)
    assert member.rounds.kept._unlogged == {}, "it would be in memory beside the gradients of the next step"
    assert (await member.rounds.kept.get_average(0, 1))[0].roster == second.roster


async def test_where_the_disk_is_slower_than_the_steps_one_average_alone_waits_for_it(make_group: MakeGroup) -> None:
    """Each is as large as the gradients."""
    group = make_group(1)
    (member,) = group.members.values()
    assert await member.rounds.lead(group.roster()) == ""
    await group.settled(Phase.AVERAGED)
    first, disk_goes_on = member.state.average, threading.Event()
    assert first is not None
    slow = asyncio.create_task(member.rounds.kept._disk.run(Priority.CONTROL, lambda: disk_goes_on.wait(10)))
    await asyncio.sleep(0)
    for step in range(4):
        member.rounds.applied(replace(first, roster=replace(first.roster, step=step)))
    assert list(member.rounds.kept._unlogged) == [3]
    disk_goes_on.set()
    assert await slow
    await asyncio.gather(*member.rounds._tasks.running)
    assert member.rounds.kept._log.steps == {3}


async def test_an_average_can_be_given_from_the_moment_of_its_commit(make_group: MakeGroup) -> None:
    """The stepper keeps it a moment later; a joiner that reads this peer's record meanwhile would download the state again."""
    group = make_group(1)
    (member,) = group.members.values()
    assert await member.rounds.lead(group.roster()) == ""
    await group.settled(Phase.AVERAGED)
    held = member.state.commit()
    assert member.rounds.kept.num_kept == 1
    assert (await member.rounds.kept.get_average(0, 0))[0].roster == held.roster
    member.rounds.applied(held)
    assert member.rounds.kept.num_kept == 1
    assert member.state.applied is None


async def test_who_averages_alone_keeps_its_averages_as_long_as_somebody_is_on_its_way_into_the_stage(make_group: MakeGroup) -> None:
    """A joiner's download may take some steps; what it missed meanwhile comes from the log."""
    group = make_group(1)
    (member,) = group.members.values()
    member.host.needed_from = lambda: 0
    assert await member.rounds.lead(group.roster()) == ""
    await group.settled(Phase.AVERAGED)
    first = member.state.average
    assert first is not None
    for step in range(3):
        member.rounds.applied(replace(first, roster=replace(first.roster, step=step)))
        await asyncio.gather(*member.rounds._tasks.running)
    for step in range(3):
        assert (await member.rounds.kept.get_average(0, step))[0].roster.step == step


async def test_who_averages_alone_keeps_its_last_average_alone_once_no_joiner_needs_one(make_group: MakeGroup) -> None:
    """However many steps a joiner takes; its record says how many averages it can give."""
    group = make_group(1)
    (member,) = group.members.values()
    assert await member.rounds.lead(group.roster()) == ""
    await group.settled(Phase.AVERAGED)
    first = member.state.average
    assert first is not None

    async def apply(steps: range) -> None:
        for step in steps:
            member.state.record = replace(member.state.record, step=step + 1)
            member.rounds.applied(replace(first, roster=replace(first.roster, step=step)))
            await asyncio.gather(*member.rounds._tasks.running)

    member.host.needed_from = lambda: 1
    await apply(range(9))
    assert member.rounds.kept.num_kept == 8
    member.host.needed_from = lambda: None
    await apply(range(9, 10))
    assert member.rounds.kept.num_kept == 1
    with pytest.raises(WrongStateError):
        await member.rounds.kept.get_average(0, 8)


async def test_an_average_is_hashed_once_however_often_it_is_asked_for(make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing takes the thread of the sums: a gigabyte holds it for a second."""
    group = make_group(1)
    (member,) = group.members.values()
    assert await member.rounds.lead(group.roster()) == ""
    await group.settled(Phase.AVERAGED)
    hashed, true = [], CutFile.hashes

    def counted(file: CutFile) -> tuple[bytes, ...]:
        hashed.append(file)
        return true(file)

    monkeypatch.setattr(CutFile, "hashes", counted)
    given = [(await member.rounds.kept.get_average(0, 0))[0].chunk_hashes for _ in range(3)]
    assert given == 3 * [true(CutFile(views_of_flat(member.average), chunk_bytes=CHUNK_BYTES))]
    assert len(hashed) == 1


async def test_a_round_that_is_over_holds_no_tensors(make_group: MakeGroup) -> None:
    """Its objects refer to each other: until the interpreter found that, each round took as much as the gradients."""
    group = make_group(2)
    roster = group.roster()
    assert await group.leader(roster).rounds.lead(roster) == ""
    await group.settled(Phase.AVERAGED)
    for member in group.members.values():
        last = member.rounds.last
        assert last is not None
        held = member.state.commit()
        before = held.flat_sum.clone()
        member.rounds.applied(held)
        await asyncio.gather(*member.rounds._tasks.running)
        assert last.exchange.accumulator.numel() == 0
        assert torch.equal(held.flat_sum, before), "the average itself stays, for mates that missed it"
        with pytest.raises(WrongStateError, match="this round is closed"):
            await last.exchange.frame(0, 0, 0, 1)


async def test_hole_81_readers_that_take_nothing_keep_no_average_of_a_step_that_is_over_in_memory_or_on_disk(make_group: MakeGroup) -> None:
    """One that reads ever more slowly is never late by its own rate. Each step it may ask for another average."""
    group = make_group(1)
    (member,) = group.members.values()
    member.host.needed_from = lambda: None
    assert await member.rounds.lead(group.roster()) == ""
    await group.settled(Phase.AVERAGED)
    first = member.state.average
    assert first is not None
    bare, values, freed, read = replace(first, flat_sum=torch.zeros(0)), first.flat_sum, list[int](), list[CutFile]()
    for step in range(4):
        own = values.clone()
        weakref.finalize(own, freed.append, step)
        held = replace(bare, roster=replace(first.roster, step=step), flat_sum=own)
        member.state.record = replace(member.state.record, step=step)
        member.state.average = held
        header, file, _ = await member.rounds.kept.get_average(0, step)
        assert b"".join(views_of_flat(own)).startswith(file.chunk(0))
        read.append(file)
        member.state.record, member.state.average = replace(member.state.record, step=step + 1), None
        member.rounds.applied(held)
        del own, held, header
        await asyncio.gather(*member.rounds._tasks.running)
        assert freed == list(range(step + 1))
    assert read[3].chunk(0) == b"".join(views_of_flat(values))[: len(read[3].chunk(0))], "a mate that is late reads on, now from the disk"
    for file in read[:3]:
        with pytest.raises(OSError, match="not kept"):
            file.chunk(0)


async def test_hole_81_what_the_disk_has_no_room_for_is_read_until_the_next_step_ends(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group(2)
    roster = group.roster()
    assert await group.leader(roster).rounds.lead(roster) == ""
    await group.settled(Phase.AVERAGED)
    member = next(iter(group.members.values()))
    monkeypatch.setattr(member.rounds.kept._log, "put", lambda *_given, **_named: False)
    first = member.state.average
    assert first is not None
    _, file, _ = await member.rounds.kept.get_average(0, 0)
    for step in (0, 1):
        assert file.chunk(0)
        member.state.record = replace(member.state.record, step=step + 1)
        member.rounds.applied(replace(first, roster=replace(first.roster, step=step)))
        await asyncio.gather(*member.rounds._tasks.running)
    with pytest.raises(OSError, match="not kept"):
        file.chunk(0)

"""A swarm that trains on: who watches it, who joins it, who must be refused, and what strangers may not do to it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file

from peerd.data.tokens import prepare_tokens
from peerd.errors import BadMessageError, BusyError, ExitCode, UsageError, WrongStateError
from peerd.link.links import Links
from peerd.reference import train_reference
from peerd.table.record import PeerId, RunId
from peerd.train.corpus import Corpus
from peerd.wire.messages import TensorBytes
from peerd.wire.tensors import encode
from tests.swarm.daemons import Daemon, Swarm, run_peerd, until
from tests.swarm.machine import slowdown
from tests.swarm.runs import assert_close, swarm_manifest
from tests.swarm.visitor import visiting
from tests.wire.lent import files_of

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(300),
    # hivemind leaves its streams to p2pd for the garbage collector to close
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"),
]

PACE_MS = 80
NOBODY = "12D3KooWEXTUXiqjRrCJRZ1AJuwYtJ7E1hENCwDBAFpVVjKpVHJd"


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    """Two stages with a peer each, training without end at a leisurely pace."""
    with Swarm(swarm_manifest(num_stages=2)) as running:
        running.start(stage=0, compute_stand_in_ms=PACE_MS)
        running.join(1, compute_stand_in_ms=PACE_MS)
        running.wait_for_step(1)
        yield running


@pytest.fixture
def trains_on(swarm: Swarm) -> Iterator[None]:
    """Whatever the test does, the two finish another step afterwards and none was inexact."""
    yield
    swarm.daemons[0].wait_for_step(swarm.daemons[0].status["peer"]["step"] + 1, 30)
    swarm.assert_exact()


# Watching


def test_status_of_a_live_daemon_takes_less_than_a_third_of_a_second(swarm: Swarm) -> None:
    took_s = []
    for _ in range(5):
        began_s = time.monotonic()
        done = run_peerd(swarm.environment, "status", "--json", "--home", swarm.daemons[0].home.folder)
        took_s.append(time.monotonic() - began_s)
        status = json.loads(done.stdout)
        assert status["peer"]["phase"] in ("accumulating", "averaging", "averaged")
        assert status["counters"]["duplicate_microbatches"] == 0
    assert min(took_s) < 0.3 * slowdown()


def test_the_doctor_finds_members_and_passers_by_well(swarm: Swarm) -> None:
    """A passer-by is dialled back by both peers; a member by its own daemon's, at the ports and under the key that it has."""
    member = swarm.daemons[1].home.folder
    for arguments, dialled in ((("doctor", swarm.address), "2 of 2 peers"), (("doctor", "--home", member), "1 of 1 peers")):
        done = run_peerd(swarm.environment, *arguments, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        checks = {check["code"]: check for check in json.loads(done.stdout)["checks"]}
        names = ["reach", "clock", "run", "dial-back", "direct", "dht"]
        if "--home" not in arguments:  # a second measurement within a minute is refused
            names += ["upload", "download"]
        assert {name: checks[name]["verdict"] for name in names} == dict.fromkeys(names, "ok"), checks
        assert checks["dial-back"]["title"].startswith(dialled)
        assert checks["direct"]["title"].startswith(dialled)


def test_status_and_peers_are_readable_on_a_narrow_terminal(swarm: Swarm) -> None:
    for verb in ("status", "peers"):
        done = run_peerd({**swarm.environment, "COLUMNS": "80"}, verb, "--home", swarm.daemons[1].home.folder)
        assert done.returncode == 0, done.stderr
        assert max(len(line) for line in done.stdout.splitlines() if "/p2p/" not in line) <= 80  # an address is pasted whole
        assert "stage" in done.stdout


def test_peers_shows_the_same_swarm_to_a_member_and_to_a_passer_by(swarm: Swarm) -> None:
    member = json.loads(run_peerd(swarm.environment, "peers", "--json", "--home", swarm.daemons[1].home.folder).stdout)
    by = run_peerd(swarm.environment, "peers", swarm.address, "--json")
    assert (by.returncode, by.stderr) == (0, "")
    passer_by = json.loads(by.stdout)
    for table in (member, passer_by):
        assert table["run"]["name"] == "tiny"
        assert table["work_step"] >= 1
        assert [[peer["id"] for peer in stage["peers"]] for stage in table["stages"]] == [[d.ready.peer] for d in swarm.daemons[:2]]


def test_wait_returns_when_the_step_is_reached_and_not_before(swarm: Swarm) -> None:
    home = swarm.daemons[0].home.folder
    step = swarm.daemons[0].status["peer"]["step"] + 2
    done = run_peerd(swarm.environment, "wait", "--step", step, "--timeout", 30, "--json", "--home", home)
    assert json.loads(done.stdout)["step"] == step
    late = run_peerd(swarm.environment, "wait", "--step", 10**6, "--timeout", 0.2, "--home", home)
    assert late.returncode == ExitCode.TIMED_OUT
    assert late.stderr.count("\n") == 1


def test_an_export_of_a_running_swarm_is_one_steps_model(swarm: Swarm) -> None:
    out = swarm.folder / "E"
    done = run_peerd(swarm.environment, "export", out, "--json", "--home", swarm.daemons[1].home.folder)
    assert done.returncode == 0, done.stderr
    step = json.loads(done.stdout)["step"]
    corpus = Corpus(prepare_tokens(swarm.manifest.data.source, swarm.folder / "cache" / "peerd"), swarm.manifest)
    expected = train_reference(swarm.manifest, corpus, step)
    assert_close(load_file(out / "model.safetensors"), expected.parameters)
    losses = [json.loads(line)["loss"] for line in (out / "history.jsonl").read_text().splitlines()]
    assert losses == [entry.loss for entry in expected.history]


@pytest.mark.parametrize("verb", ["fault", "lie"])
def test_a_daemon_that_allows_no_faults_obeys_neither_fault_nor_lie(swarm: Swarm, trains_on: None, tmp_path: Path, verb: str) -> None:
    module, loaded = tmp_path / "mine.py", tmp_path / "loaded"
    module.write_text(f"open({str(loaded)!r}, 'w')", encoding="utf-8")
    with pytest.raises(UsageError, match=f"this daemon does not obey the verb {verb}"):
        swarm.daemons[0].request(verb, module=str(module), kind="kill", at="forward")
    assert not loaded.exists()
    assert "Traceback" not in swarm.daemons[0].log


# Joining


def test_a_fresh_peer_that_knows_only_the_address_serves_within_15_s_and_equals_its_neighbour(
    swarm: Swarm, trains_on: None, record_property: Callable[[str, object], None]
) -> None:
    slower = slowdown()
    newcomer = swarm.spawn(join=f"/ip4/127.0.0.1/tcp/9/p2p/{NOBODY} {swarm.address.partition('#')[0]}", compute_stand_in_ms=PACE_MS)
    serves_after_s = newcomer.wait_until_serving(60)
    record_property("serves_after_s", serves_after_s)
    record_property("slowdown", slower)
    assert serves_after_s < 15 * max(slower, slowdown())
    assert "organiser pinned" in newcomer.log
    until(lambda: newcomer.counters["accumulated_microbatches"] > 0)
    neighbour = swarm.daemons[newcomer.status["peer"]["stage"]]
    asyncio.run(assert_equal_bits(swarm, newcomer, neighbour))
    newcomer.request("leave")
    assert newcomer.exit_code() == ExitCode.OK


async def assert_equal_bits(swarm: Swarm, newcomer: Daemon, neighbour: Daemon) -> None:
    """Parameters and optimizer of both at one step."""
    stage = newcomer.status["peer"]["stage"]
    async with visiting(neighbour.ready.join, newcomer.ready.join) as visitor:
        for _ in range(20):
            (left, left_data), (right, right_data) = await asyncio.gather(
                *(visitor.snapshot(PeerId(daemon.ready.peer), stage) for daemon in (newcomer, neighbour))
            )
            if left.step == right.step:
                break
        assert left.step == right.step
        assert left.lineage == right.lineage
        assert left_data == right_data
        assert all(load(file) for file in files_of(left, left_data))


# Being refused


@pytest.fixture(scope="module")
def refused(swarm: Swarm) -> dict[str, Daemon]:
    """Joiners that cannot be, all started at once."""
    address, _, run = swarm.address.partition("#")

    def pinned_to_another() -> Daemon:
        home = swarm.new_home()
        home.folder.mkdir(parents=True)
        home.state.write_text(json.dumps({"incarnation": 3, "organisers": {run: "00" * 32}}))
        return swarm.spawn(join=swarm.address)

    def with_a_file_limit() -> Daemon:
        """Its identity is just short enough to be written."""
        settings = replace(swarm.daemons[1].settings, home=str(swarm.new_home().folder), data="")
        return swarm.spawn_with(settings, most_file_bytes=100)

    def with_its_clock_off() -> Daemon:
        return swarm.spawn_with(replace(swarm.daemons[1].settings, home=str(swarm.new_home().folder)), clock_off_s=3 * 3600.0)

    return {
        "unreachable": swarm.spawn(join=f"/ip4/127.0.0.1/tcp/9/p2p/{NOBODY}"),
        "impostor": swarm.spawn(join=f"{address.partition('/p2p/')[0]}/p2p/{NOBODY}"),
        "other run": swarm.spawn(join=f"{address}#{'0' * 32}"),
        "other organiser": pinned_to_another(),
        "unknown stage": swarm.spawn(join=swarm.address, stage=7),
        "other data": swarm.spawn(join=swarm.address, data="/etc/hostname"),
        "file limit": with_a_file_limit(),
        "clock off": with_its_clock_off(),
    }


@pytest.mark.parametrize(
    ("who", "code", "words"),
    [
        ("unreachable", ExitCode.UNREACHABLE, "nobody answers"),
        ("impostor", ExitCode.UNREACHABLE, "nobody answers"),
        ("other run", ExitCode.ADDRESS, "does not serve run 000"),
        ("other organiser", ExitCode.SIGNATURE, "another organiser"),
        ("unknown stage", ExitCode.STAGE, "stages are 0 to 1"),
        ("other data", ExitCode.MANIFEST, "organiser's own text"),
        ("file limit", ExitCode.DISK, "raise `ulimit -f`"),
        ("clock off", ExitCode.CLOCK, "clock is 3.0 hours ahead of"),
    ],
)
def test_who_cannot_join_is_told_why_in_one_line_and_leaves_nothing(
    swarm: Swarm, refused: dict[str, Daemon], who: str, code: ExitCode, words: str
) -> None:
    daemon = refused[who]
    assert daemon.exit_code(60) == code, daemon.log
    assert len(daemon.error_lines) == 1, daemon.log
    assert words in daemon.error_lines[0]
    assert "Traceback" not in daemon.log
    until(lambda: not daemon.home.folder.exists(), 10)


def test_a_second_daemon_of_one_home_is_refused_and_the_first_keeps_its_home(swarm: Swarm, trains_on: None) -> None:
    second = swarm.spawn(join=swarm.address, home=swarm.daemons[1].settings.home)
    assert second.exit_code(60) == ExitCode.IDENTITY_IN_USE
    assert len(second.error_lines) == 1
    assert swarm.daemons[1].home.identity.exists()


# Strangers


async def test_broken_calls_are_refused_and_counted_and_the_daemon_serves_on(swarm: Swarm, trains_on: None) -> None:
    target = swarm.daemons[0]
    peer, before = PeerId(target.ready.peer), target.counters["messages_refused"]
    async with visiting(target.ready.join) as visitor:
        step = (await visitor.snapshot(peer, 0))[0].step
        call = visitor.call(0, step)
        wrong = TensorBytes("float32", call.inputs.shape, call.inputs.chunks)
        with pytest.raises((BadMessageError, BusyError), match=r"int32|before it had all"):
            await visitor.send(peer, replace(call, inputs=wrong))
        with pytest.raises(BusyError, match=r"broken message|before it had all"):
            await visitor.send(peer, call)
    assert target.counters["messages_refused"] == before + 1


async def test_hole_85_a_later_stage_takes_no_microbatch_of_a_peer_that_serves_no_stage(swarm: Swarm, trains_on: None) -> None:
    target = swarm.daemons[1]
    async with visiting(target.ready.join) as visitor:
        step = (await visitor.snapshot(PeerId(target.ready.peer), 1))[0].step
        with pytest.raises(WrongStateError, match="not known here as a peer that serves stage 0"):
            await visitor.send(PeerId(target.ready.peer), visitor.call(1, step))


async def test_hole_73_a_daemon_that_has_the_text_refuses_made_up_tokens(swarm: Swarm, trains_on: None) -> None:
    peer = PeerId(swarm.daemons[0].ready.peer)
    async with visiting(swarm.address) as visitor:
        for _ in range(20):
            call = visitor.call(0, (await visitor.snapshot(peer, 0))[0].step)
            made_up = replace(call, inputs=encode(torch.zeros(call.labels.shape, dtype=torch.int32)))
            try:
                await visitor.send(peer, made_up)
            except WrongStateError:  # the swarm has moved on
                continue
            except (BadMessageError, BusyError) as error:
                assert "is not that of the run's data" in error.message or "before it had all" in error.message
                return
            pytest.fail("it was computed")
    pytest.fail("it was never asked for the step that it was at")


async def test_a_stranger_may_look_but_not_for_another_run(swarm: Swarm, trains_on: None) -> None:
    async with visiting(swarm.address) as visitor:
        assert isinstance(visitor.network.links, Links)
        with pytest.raises(WrongStateError, match="this peer serves run"):
            await replace(visitor, run=RunId("0" * 32)).snapshot(PeerId(swarm.daemons[0].ready.peer), 0)

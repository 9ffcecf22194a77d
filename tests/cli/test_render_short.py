"""The short form of `peerd status` fits a small terminal, and says nothing that is not so."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.cli.render import counted, print_peers
from peerd.cli.render_short import print_short, run_line, seconds_left
from peerd.config.paths import Home
from peerd.control.protocol import HealthItem, PeersReply
from tests.cli.conftest import Command
from tests.cli.replies import counters, owner_info, peer_info, peers_reply, run_info, status_reply
from tests.control.fake_daemon import serving

PAUSED: dict[str, Any] = {"leaving": True, "paused": True, "phase": "joining"}


def told_by(capsys: pytest.CaptureFixture[str], swarm: PeersReply | None = None, **changes: Any) -> str:
    print_short(status_reply(**changes), swarm)
    return " ".join(capsys.readouterr().out.split())


def test_about_six_lines_say_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    print_short(status_reply(decision="working: 7 of 16 microbatches done"), peers_reply())
    *lines, join = capsys.readouterr().out.splitlines()
    assert join.startswith("others join with: peerd join /ip4/")  # unbroken, to be copied
    assert lines == [
        "now       working: 7 of 16 microbatches done",
        "run       demo: step 3 of 30, loss 3.2100 (evaluation 3.4000), about 43s left",
        "you gave  55 microbatches in 1h02m; 123MB sent, 0B received",
        "peers     4 peers in 2 stages; you serve stage 0",
        "more      peerd status --long, peerd top, or open http://127.0.0.1:8642/",
    ]
    assert max(map(len, lines)) <= 80


def test_a_problem_comes_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    item = HealthItem(code="clock", title="this clock is 9 s off", severity="problem", remedy="turn on time synchronisation")
    assert "problem: this clock is 9 s off; turn on time synchronisation" in told_by(capsys, health=[item])


def test_a_paused_peer_serves_nothing_and_says_when_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    swarm = peers_reply()
    swarm["stages"][0]["peers"][0] |= PAUSED  # type: ignore[typeddict-item]
    item = HealthItem(code="paused", title="paused: its owner paused it", severity="info", remedy="goes on after `peerd resume`")
    told = told_by(capsys, swarm, owner=owner_info(paused="its owner paused it", until="after `peerd resume`", resting=True), health=[item])
    assert told.count("its owner paused it") == 1
    assert "now paused: its owner paused it; it goes on after `peerd resume` run" in told
    assert "peers 4 peers in 2 stages (1 paused) more" in told


@given(
    facts=st.fixed_dictionaries(
        {
            "resting": st.booleans(),
            "phase": st.sampled_from(["joining", "accumulating", "averaged"]),
            "steps": st.sampled_from([0, 30]),
            "step": st.integers(0, 30),
            "work_step": st.none() | st.integers(0, 30),
            "speed": st.sampled_from([0.0, 5120.0]),
            "code": st.sampled_from(["", "stalled", "stage-empty", "no-trainer", "cut-off", "diverged", "clock"]),
            "knows_swarm": st.booleans(),
        }
    )
)
def test_the_line_of_the_run_says_only_what_its_daemon_knows(facts: dict[str, Any]) -> None:
    item = HealthItem(code=facts["code"], title="x", severity="problem", remedy="")
    status = status_reply(
        owner=owner_info(paused="x", resting=True) if facts["resting"] else owner_info(),
        peer=peer_info(phase=facts["phase"], step=facts["step"]),
        run=run_info(steps=facts["steps"]),
        health=[item] if facts["code"] else [],
    )
    swarm = peers_reply()
    swarm |= {"work_step": facts["work_step"], "tokens_per_second": facts["speed"]}
    told = run_line(status, swarm if facts["knows_swarm"] else None)
    joins, serves = facts["phase"] == "joining", not facts["resting"] and facts["phase"] != "joining"
    if facts["resting"]:
        assert told == f"demo: this peer paused at step {facts['step']}" + (" of 30" if facts["steps"] else "")
    assert (f"step {facts['step']}" in told) >= serves
    known = facts["work_step"] if facts["knows_swarm"] else None
    if joins and not facts["resting"]:
        assert told.startswith("demo: how far it is shows" if known is None else f"demo: step {known}")
    shown = facts["step"] if serves else known
    goes_on = known is not None and facts["speed"] and facts["code"] in ("", "clock") and shown is not None and shown < facts["steps"]
    assert (" left" in told) == (not facts["resting"] and bool(goes_on))


def test_a_peer_that_leaves_says_so_and_not_its_last_decision(capsys: pytest.CaptureFixture[str]) -> None:
    told = told_by(capsys, peer=peer_info(leaving=True), decision="working: 7 of 16 microbatches done")
    assert "now finishing what it holds, then it leaves stage 0 run" in told


def test_a_peer_that_comes_back_from_a_pause_neither_leaves_nor_serves(capsys: pytest.CaptureFixture[str]) -> None:
    told = told_by(capsys, peers_reply(), peer=peer_info(leaving=True, phase="joining"), decision="taking a stage", joining=None)
    assert "now taking a stage run" in told
    assert "you serve" not in told


def test_what_a_resting_peer_knew_of_the_swarm_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    swarm = peers_reply()
    swarm["outdated"] = True
    told = told_by(capsys, swarm, owner=owner_info(paused="its owner paused it", until="after `peerd resume`", resting=True))
    assert "peers " not in told.partition("more")[0].replace("peer paused", "")
    print_peers(swarm)
    assert "hears nothing of the swarm" in capsys.readouterr().out


def test_a_peer_that_joins_says_how_far_it_is_and_serves_nothing_yet(capsys: pytest.CaptureFixture[str]) -> None:
    joining = {"bytes": 12 * 10**8, "bytes_left": 9 * 10**8, "steps_behind": 0, "ready_s": 98.0, "can_catch_up": True}
    told = told_by(capsys, peers_reply(), joining={**joining, "plan": "downloads 1200 MB; ready in about 98 s"})
    assert "now joining stage 0: downloads 1200 MB; ready in about 98 s" in told
    assert "you serve" not in told


def test_a_long_microbatch_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    computing = {"step": 3, "index": 12, "for_s": 100.4, "usual_s": 130.0}
    assert "; computes microbatch 12 of step 3 for 1m40s; one takes 2m10s here" in told_by(capsys, computing=computing)


def test_a_peers_own_name_stands_beside_what_it_gave(capsys: pytest.CaptureFixture[str]) -> None:
    assert "in 1h02m, as anna (rust); 123MB sent" in told_by(capsys, peer=peer_info(nickname="anna", team="rust"))


def test_numbers_agree_with_their_nouns(capsys: pytest.CaptureFixture[str]) -> None:
    assert [counted(number, "peer") for number in (0, 1, 2, 1200)] == ["0 peers", "1 peer", "2 peers", "1,200 peers"]
    one = peers_reply(num_stages=1, peers_per_stage=1)
    told = told_by(capsys, one, counters=counters(accumulated_microbatches=1))
    assert "1 microbatch in" in told
    assert "1 peer in 1 stage; you serve stage 0" in told


def test_the_time_left_is_told_only_where_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert seconds_left(27, 8192, 5120.0) == pytest.approx(43.2)
    assert (seconds_left(0, 8192, 5120.0), seconds_left(-3, 8192, 5120.0), seconds_left(27, 8192, 0.0)) == (0, 0, 0)
    for without in ({"run": run_info(steps=0)}, {"peer": peer_info(step=30)}):
        assert "left" not in told_by(capsys, peers_reply(), **without)
    assert "left" not in told_by(capsys, None)


def test_several_devices_have_a_line_each_and_their_gifts_are_added_up(capsys: pytest.CaptureFixture[str]) -> None:
    other = status_reply(peer=peer_info(stage=1), decision="working: 1 of 16 microbatches done")
    rows = [("cuda:0", status_reply()), ("cuda:1", other), ("cuda:2", None)]
    devices = [{"device": name, "home": "/h", "status": status, "error": "" if status else "no daemon"} for name, status in rows]
    print_short({**status_reply(), "devices": devices}, peers_reply())
    told = " ".join(capsys.readouterr().out.split())
    assert "cuda:1 working: 1 of 16 microbatches done cuda:2 does not answer run demo" in told
    assert "110 microbatches" in told
    assert "you serve stages 0, 1" in told


def test_control_characters_of_a_peer_never_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_info(name="\x1b[2Jx")
    assert "\x1b" not in told_by(capsys, peers_reply(), decision="\x1b[31m", run=run, dashboard="\x1b]0;", join="\x1b")


def test_the_verb_prints_the_short_form_the_long_one_on_request_and_does_without_the_swarm(peerd: Command, short_home: Any) -> None:
    replies: dict[str, Any] = {"status": status_reply(), "peers": peers_reply()}
    refusal = {"error": {"exit_code": 2, "message": "unknown verb", "remedy": ""}}
    with serving(Home(short_home), lambda request: {"ok": replies[request["verb"]]} if request["verb"] in replies else refusal):
        assert "\npeers     4 peers in 2 stages" in peerd("status").out
        assert "rebalancing" not in peerd("status").out
        assert "\nrebalancing   all stages" in peerd("status", "--long").out
        del replies["peers"]
        done = peerd("status")
    assert (done.code, done.err) == (0, "")
    assert "\npeers" not in done.out

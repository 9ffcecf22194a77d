"""Output fits 80 columns and is safe for a terminal."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from peerd.cli.demo_view import summary_rows
from peerd.cli.render import amount, duration, plain, print_peers, short_id, sparkline
from peerd.cli.render_short import now_line
from peerd.cli.render_status import print_status, texts_rows
from peerd.control.protocol import DirectInfo, EvaluationInfo, HealthItem, LineInfo, UpdateInfo
from peerd.control.states import state_of
from tests.cli.replies import counters, owner_info, peer_info, peers_reply, run_info, status_reply, texts_info

HUGE = 10**15


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_status_fits_and_tells_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    print_status(status_reply())
    lines = lines_of(capsys)
    assert lines.pop().startswith("others join with: peerd join /ip4/")  # unbroken, to be copied
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for word in (
        "demo",
        "step",
        "3 of 30, accumulating, holds 7 of 16",
        "3.2100",
        "up 1h02m",
        "0 counted twice",
        "9 microbatches of step 3",
        "all stages have 2 queued",
        "as int8: 20.0 Mbit/s, the link is busy 80% of the time",
    ):
        assert word in text


def test_status_names_every_problem_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    item = HealthItem(code="clock", title="this clock is 9 s off", severity="problem", remedy="turn on time synchronisation")
    print_status(status_reply(health=[item]))
    assert "problem: this clock is 9 s off; turn on time synchronisation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("direct", "row"),
    [
        ({"port": 31338, "peers": 3, "local": 1, "why": ""}, "TLS to 2 peers, a local socket to 1; takes connections at port 31338"),
        ({"port": 31338, "peers": 3, "local": 0, "why": ""}, "TLS to 3 peers; takes connections at port 31338"),
        (
            {"port": 31338, "peers": 3, "local": 1, "quic": 1, "why": ""},
            "TLS to 1 peer, a local socket to 1, QUIC through routers to 1; takes connections at port 31338",
        ),
        ({"port": 0, "peers": 1, "local": 1, "why": "a cap is set"}, "none: a cap is set, a local socket to 1"),
        ({"port": 0, "peers": 0, "local": 0, "why": ""}, "none: no port was free"),
    ],
)
def test_status_says_how_tensors_go_past_the_tunnel(direct: DirectInfo, row: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_status(status_reply(direct=direct))
    assert row in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("state", "is_told"), [("direct", False), ("relayed", True), ("client", True)])
def test_status_says_to_a_machine_that_nobody_can_dial_why_it_makes_no_connections_through_routers(
    state: str, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    direct = DirectInfo(port=31338, peers=3, local=0, why="", quic=0, quic_why="it is not installed", seen_at="")
    print_status(status_reply(direct=direct, reach={"state": state, "reason": "so it is", "relays": []}))
    assert ("no QUIC through routers: it is not installed" in " ".join(capsys.readouterr().out.split())) == is_told


@pytest.mark.parametrize("made", [0, 12])
def test_status_says_that_a_stage_averages_in_groups_once_it_does(made: int, capsys: pytest.CaptureFixture[str]) -> None:
    print_status(status_reply(run=run_info(group_size=32), counters=counters(group_sums=made, average_sections=5)))
    assert ("in groups of about 32 peers; 12 sums of groups and 5 sections" in capsys.readouterr().out) == bool(made)


def test_status_says_that_moments_are_packed(capsys: pytest.CaptureFixture[str]) -> None:
    update = UpdateInfo(learning_rate=0.003, gradient_norm=None, max_gradient_norm=0.0, loss_scale=None, optimizer_bits=8, drift=2e-7)
    print_status(status_reply(update=update))
    assert "parameters 2.0e-07 off the mates' mean when last averaged, moments in 8 bits" in " ".join(capsys.readouterr().out.split())


def test_status_names_the_optimizer_unless_the_daemon_is_an_older_one(capsys: pytest.CaptureFixture[str]) -> None:
    update = UpdateInfo(learning_rate=0.003, gradient_norm=None, max_gradient_norm=0.0, loss_scale=None)
    print_status(status_reply(update=update))
    assert "update learning rate 0.003 " in " ".join(capsys.readouterr().out.split())
    print_status(status_reply(update=update | {"optimizer": "muon"}))
    assert "update learning rate 0.003, by muon " in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("local_batch", [0, 8])
def test_status_tells_a_peers_own_updates_from_steps(local_batch: int, capsys: pytest.CaptureFixture[str]) -> None:
    update = UpdateInfo(learning_rate=0.003, gradient_norm=None, max_gradient_norm=0.0, loss_scale=None, local_batch=local_batch)
    print_status(status_reply(run=run_info(local_batch=local_batch), update=update, counters=counters(own_updates=31)))
    told = " ".join(capsys.readouterr().out.split())
    assert ("loss 3.4000 at step 2, of the averaged parameters within steps loss 3.2100, of each" in told) == bool(local_batch)
    assert ("loss 3.2100 evaluation loss 3.4000 at step 2" in told) == (not local_batch)
    assert ("local steps 31 updates of its own, after 8 microbatches each; a step averages them" in told) == bool(local_batch)


@pytest.mark.parametrize(("evaluation", "told"), [({"step": 2, "loss": 3.4}, "3.4000"), (None, "-")])
def test_the_loss_of_local_steps_is_that_of_the_averaged_parameters(
    evaluation: EvaluationInfo | None, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = peers_reply()
    reply["run"], reply["evaluation"] = run_info(local_batch=8), evaluation
    print_peers(reply)
    assert f"demo: step 3 of 30, loss {told} averaged, 3.2100 within steps, 5.12K tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("offloads", [False, True])
def test_status_says_whether_a_device_leaves_the_optimizer_to_its_machine(offloads: bool, capsys: pytest.CaptureFixture[str]) -> None:
    memory = {**status_reply()["memory"], "offloads": offloads}
    print_status(status_reply(memory=memory))
    told = " ".join(" ".join(lines_of(capsys)).split())
    assert ("9GB in use by all; the optimizer's state is in the machine's memory" in told) == offloads


def test_status_says_that_a_stand_ins_speed_is_not_real(capsys: pytest.CaptureFixture[str]) -> None:
    print_status(status_reply(compute_stand_in_ms=50.0, slow_factor=3.0))
    assert "50 ms per microbatch, 3x slow: speeds are not real" in capsys.readouterr().out


def test_status_says_why_a_peer_pauses_and_when_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    print_status(status_reply(owner=owner_info(paused="the machine runs on battery", until="when it is plugged in", resting=True)))
    assert "paused: the machine runs on battery; it goes on when it is plugged in" in " ".join(capsys.readouterr().out.split())


def test_peers_shows_every_stage_and_who_is_in_doubt(capsys: pytest.CaptureFixture[str]) -> None:
    reply = peers_reply(num_stages=3, peers_per_stage=2)
    reply["stages"][1]["peers"][0]["suspect"] = True
    reply["stages"][1]["peers"][1]["leaving"] = True
    reply["stages"][2]["peers"] = []
    print_peers(reply)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for word in ("demo: step 3 of 30, loss 3.2100 (evaluation 3.4000), 5.12K tokens/s", "suspect", "leaving", "nobody", "..xxxx11"):
        assert word in text


def test_a_paused_peer_is_called_paused_once_it_has_handed_on_its_work(capsys: pytest.CaptureFixture[str]) -> None:
    leaves: dict[str, Any] = {"leaving": True, "paused": True}
    assert state_of(peer_info(**leaves)) == "pausing"
    assert state_of(peer_info(**leaves, phase="joining")) == "paused"
    assert state_of(peer_info(**leaves, phase="joining", suspect=True)) == "paused", "it has said that it will not answer"
    assert state_of(peer_info(**leaves, suspect=True)) == "suspect"
    assert (state_of(peer_info(leaving=True)), state_of(peer_info())) == ("leaving", ""), "as an older daemon tells it"
    reply = peers_reply()
    reply["stages"][1]["peers"][0] |= cast("Any", {**leaves, "phase": "joining"})
    print_peers(reply)
    print_status(status_reply(peer=peer_info(**leaves, phase="joining")))
    shown = capsys.readouterr().out
    assert shown.count("paused") == 2
    assert "leaving" not in shown


def test_peers_and_status_show_what_peers_call_themselves_beside_their_ids(capsys: pytest.CaptureFixture[str]) -> None:
    reply = peers_reply()
    print_peers(reply)
    assert "names" not in capsys.readouterr().out
    (anna, bob), (third, _) = (stage["peers"] for stage in reply["stages"])
    anna["nickname"], anna["team"], bob["nickname"], third["team"] = "anna", "rust", "b\x1bob", "rust"
    print_peers(reply)
    told = " ".join(lines_of(capsys)[-2:])
    assert f"names: {short_id(anna['id'])} anna (rust), {short_id(bob['id'])} b?ob, {short_id(third['id'])} (rust)" in told
    print_status(status_reply(peer=peer_info(nickname="anna" * 20)))
    assert f"name {('anna' * 6)} peer" in " ".join(" ".join(lines_of(capsys)).split())


def test_peers_names_unlike_devices_of_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    reply = peers_reply()
    print_peers(reply)
    assert "unlike" not in capsys.readouterr().out
    reply["stages"][1]["peers"][0]["device"] = "Pretend GPU 1"
    print_peers(reply)
    assert "stage 1 computes on unlike devices: Pretend GPU 1, cpu" in " ".join(capsys.readouterr().out.split())
    reply["stages"][1]["peers"][0]["drift"] = 2.5e-4
    print_peers(reply)
    assert "parameters were up to 2.5e-04 off their mean when last averaged" in " ".join(capsys.readouterr().out.split())


def test_peers_says_how_many_more_serve_a_stage_of_a_large_swarm(capsys: pytest.CaptureFixture[str]) -> None:
    reply = peers_reply()
    reply["stages"][0]["num_peers"], reply["stages"][1]["num_peers"] = 2, 125
    print_peers(reply)
    assert [line.strip() for line in lines_of(capsys) if "more" in line] == ["and 123 more"]


def test_peers_marks_those_behind_relays_and_the_relays(capsys: pytest.CaptureFixture[str]) -> None:
    reply = peers_reply()
    print_peers(reply)
    assert "relay" not in capsys.readouterr().out
    one, other = reply["stages"][1]["peers"]
    one["reach"], other["relays"] = "relayed", True
    print_peers(reply)
    lines = lines_of(capsys)
    assert max(map(len, lines)) <= 80
    assert [line.count("~") for line in lines].count(1) == 2
    assert lines[-1] == "+ relays for others, ~ behind a relay"


def test_peers_says_by_which_path_tensors_go_to_each_where_that_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    reply = peers_reply(num_stages=1, peers_per_stage=4)
    print_peers(reply)
    assert "path" not in capsys.readouterr().out
    peers = reply["stages"][0]["peers"]
    for peer, path in zip(peers[1:], ("local", "tunnel", "relay"), strict=True):
        peer["path"], peer["done"], peer["throughput"] = path, 8192, 99999.0
    print_peers(reply)
    lines = lines_of(capsys)
    assert max(map(len, lines)) <= 80
    assert [line.split()[-1] for line in lines[-5:] if not set(line) <= set("\u2500 ")][-4:] == ["cpu"] * 4
    assert [line.split()[-2] for line in lines[-3:]] == ["local", "tunnel", "relay"]


def test_peers_and_status_name_the_paths_that_have_several_connections(capsys: pytest.CaptureFixture[str]) -> None:
    reply = peers_reply(num_stages=1, peers_per_stage=3)
    _, one, lossy = reply["stages"][0]["peers"]
    one["connections"], lossy["connections"], lossy["resent"] = 1, 31, 0.03
    print_peers(reply)
    told = f"to {short_id(lossy['id'])}, 31 connections; 3.0 % of the segments to it were sent again"
    assert [line for line in lines_of(capsys) if "connection" in line] == [told]
    unknown = LineInfo(peer=one["id"], sends=None, receives=None, up=None, down=None)
    lines: list[LineInfo] = [{**unknown, "connections": 1}, {**unknown, "peer": lossy["id"], "connections": 31, "resent": 0.03}]
    print_status(status_reply(lines=lines, direct={"port": 7, "peers": 2, "why": ""}))
    assert f"TLS to 2 peers; takes connections at port 7; {told}" in " ".join(" ".join(lines_of(capsys)).split())


def test_peers_and_status_show_what_lines_carry_where_that_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    reply = peers_reply(num_stages=1, peers_per_stage=3)
    print_peers(reply)
    assert "up/dn" not in capsys.readouterr().out
    for peer, (up, down) in zip(reply["stages"][0]["peers"], ((640_000, 12_500_000), (0, 2_500_000), (1 << 40, 1 << 40)), strict=True):
        peer["up"], peer["down"], peer["path"], peer["done"], peer["throughput"] = up, down, "tunnel", 8192, 99999.0
    print_peers(reply)
    lines = lines_of(capsys)
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "up/dn in Mbit/s"
    assert [line.split()[-1] for line in lines[-4:-1]] == ["5.1/100", "-/20", "8.8M/8.8M"]
    print_status(status_reply(peer=peer_info(up=2_500_000, down=11_000_000)))
    assert "20 Mbit/s up, 88 Mbit/s down, as measured" in capsys.readouterr().out
    print_status(status_reply(peer=peer_info(up=563_000_000, down=0)))
    assert "4.5 Gbit/s up, as measured" in capsys.readouterr().out


def test_peers_shows_round_trips_where_they_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    reply = peers_reply(num_stages=1, peers_per_stage=4)
    for peer, took_s in zip(reply["stages"][0]["peers"], (None, 0.0004, 0.0123, 9.9), strict=True):
        peer["round_trip_s"] = took_s
        peer["up"], peer["down"], peer["path"], peer["done"], peer["throughput"] = 1 << 40, 1 << 40, "tunnel", 8192, 99999.0
    print_peers(reply)
    lines = lines_of(capsys)
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "up/dn in Mbit/s, ms: round trip from here"
    assert [line.split()[-3] for line in lines[-4:-1]] == ["0.4", "12", "10s"]
    print_peers(peers_reply(num_stages=1, peers_per_stage=1))
    assert " ms" not in capsys.readouterr().out


def test_status_says_how_others_reach_this_machine_and_what_it_relays(capsys: pytest.CaptureFixture[str]) -> None:
    print_status(status_reply())
    out = capsys.readouterr().out
    assert "direct: 2 of 2 peers reached port 31337" in out
    assert "circuits" not in out
    relay = {"volunteers": True, "off": "", "reservations": 3, "circuits": 2, "bytes": 5 * 10**9}
    print_status(status_reply(relay=relay))
    assert "3 peers behind it, 2 circuits, 5GB carried" in capsys.readouterr().out
    print_status(status_reply(relay={**relay, "off": "a data quota is set"}))
    assert "off: a data quota is set" in capsys.readouterr().out


def test_huge_numbers_and_long_names_still_fit(capsys: pytest.CaptureFixture[str]) -> None:
    reply = peers_reply(num_stages=1, peers_per_stage=1)
    reply["run"] = run_info(name="n" * 64, steps=0)
    reply["stages"][0]["missing"] = 8192
    reply["stages"][0]["peers"] = [
        peer_info(step=HUGE, done=8192, queue=999, throughput=1e12, age_s=1e9, device="cuda:123456789", stage=4095)
    ]
    print_peers(reply)
    assert max(map(len, lines_of(capsys))) <= 80


def test_control_characters_of_a_peer_never_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    reply = peers_reply(num_stages=1, peers_per_stage=1)
    reply["run"]["name"] = "\x1b[2Jx"
    reply["stages"][0]["peers"] = [peer_info(device="\x1b]0;\x07", phase="a\nb", id="[red]\x1b" * 20)]
    print_peers(reply)
    print_status(status_reply(decision="\x1b[31m", peer=peer_info(device="\r\n\x1b")))
    assert "\x1b" not in capsys.readouterr().out


@given(st.floats(min_value=0, max_value=1e17))
def test_amounts_stay_short(value: float) -> None:
    assert 1 <= len(amount(value)) <= 7


@given(st.floats(min_value=0, max_value=1e9))
def test_durations_stay_short(value: float) -> None:
    assert 2 <= len(duration(value)) <= 9


@example([0.0, -2.225073858507203e-309])
@given(st.lists(st.floats(min_value=-1e9, max_value=1e9), max_size=200))
def test_sparklines_are_as_long_as_their_series_up_to_the_width(values: list[float]) -> None:
    assert len(sparkline(values, 30)) == min(len(values), 30)


@given(st.text())
def test_plain_text_is_printable(text: str) -> None:
    assert plain(text).isprintable() or plain(text) == ""


def test_the_demos_summary_shows_faults() -> None:
    summary: dict[str, Any] = {
        "peers": 2,
        "stages": 1,
        "steps": 1,
        "duration_s": 1.0,
        "loss_first": 2.0,
        "loss_last": 1.0,
        "losses": [2.0, 1.0],
        "tokens_per_second": None,
        "stage_of_peer": [0, 0],
        "microbatches_by_peer": [1, 2],
        "replayed_microbatches": 0,
        "duplicate_microbatches": 0,
        "lost_microbatches": 0,
        "inexact_steps": 0,
        "suppressed_microbatches": 0,
        "transfers_per_boundary": None,
        "faults": [{"t_s": 1.0, "peer": 1, "stage": 0, "phase": "averaging", "kind": "kill", "detail": "was ended by SIGKILL"}],
    }
    rows = dict(summary_rows(summary))
    assert rows["fault"] == "1.0 s: peer 1 (stage 0, averaging) was ended by SIGKILL"


def test_a_peer_that_computes_one_microbatch_for_minutes_is_not_shown_as_if_it_stood_still(capsys: pytest.CaptureFixture[str]) -> None:
    print_status(status_reply(computing={"step": 3, "index": 12, "for_s": 100.4, "usual_s": 130.0}))
    assert "microbatch 12 of step 3 for 1m40s; one takes 2m10s here" in capsys.readouterr().out
    print_status(status_reply(computing={"step": 3, "index": 12, "for_s": 11.0, "usual_s": 0.0}))
    assert "microbatch 12 of step 3 for 11s\n" in capsys.readouterr().out
    for brief in ({"step": 3, "index": 12, "for_s": 0.4, "usual_s": 0.5}, None):
        print_status(status_reply(computing=brief))
        assert "computes" not in capsys.readouterr().out
    reply = peers_reply(num_stages=1, peers_per_stage=3)
    works, waits, new = reply["stages"][0]["peers"]
    works["still_s"] = waits["still_s"] = 100.0
    waits["queue"], works["throughput"], new["still_s"] = 0, 0.0067, 9.0
    print_peers(reply)
    lines = [line.split() for line in lines_of(capsys) if "..x" in line]
    assert max(map(len, map(" ".join, lines))) <= 80
    assert [("works" in line, "1m40s" in line, "0.0067" in line) for line in lines] == [(True,) * 3, (False,) * 3, (False,) * 3]
    assert ["accumulating" in line for line in lines] == [False, True, True]


def test_status_says_when_a_joiner_will_serve(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"bytes": 12 * 10**8, "bytes_left": 9 * 10**8, "steps_behind": 0, "ready_s": 98.0, "can_catch_up": True}
    print_status(status_reply(joining={**found, "plan": "downloads 1200 MB; ready in about 98 s"}))
    assert "ready in about 98 s" in capsys.readouterr().out
    for nothing in (None, {**found, "plan": ""}):
        print_status(status_reply(joining=nothing))
        assert "joins " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "not asked now: 1.2K tokens in 7s; 1 text kept in 40KB of 2MB; with the parameters of step 3"),
        ({"answering": True, "waiting": 2}, "answers now, 2 wait: "),
        (
            {"steps": [3, 9], "copy_bytes": 5_000_000},
            "not asked now: 1.2K tokens in 7s; 1 text kept in 40KB of 2MB; with the parameters of step 3, 9, a second copy of 5MB",
        ),
        ({"held_up_s": 2.0}, "not asked now: 1.2K tokens in 7s (training waited 2s); "),
        ({"share": 0.0}, "nobody who asks the model; `peerd limits --inference 2%` changes that"),
    ],
)
def test_status_says_what_is_computed_for_those_who_ask(changes: dict[str, Any], told: str) -> None:
    status = status_reply(texts=texts_info(**changes))
    [(name, row)] = texts_rows(status)
    assert name == "answers"
    assert row.startswith(told)
    assert ("answers those who ask" in now_line(status)) == changes.get("answering", False)

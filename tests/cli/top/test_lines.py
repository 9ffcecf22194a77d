"""The lines of `peerd top` fit their columns for any answer of the daemon, and are safe for a terminal."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from peerd.cli.top import rows as table_rows
from peerd.cli.top.curve import drawn, levels, resampled
from peerd.cli.top.ink import Ink, Line, bar, fitted, line_fitted, width_of
from peerd.cli.top.notes import entry, heading, loss_title, notes, speed_title
from peerd.cli.top.picture import StageRow, details_of, picture_of
from peerd.cli.top.recall import Poll, Recall
from peerd.control.protocol import EvaluationInfo, PeersReply
from tests.cli.replies import counters, event_info, history_reply, peer_info, peers_reply, run_info, status_reply, texts_info
from tests.cli.top.strategies import polls

WIDTHS = st.integers(0, 220)
INKS = st.sampled_from(Ink)


def text_of(line: Line) -> str:
    return "".join(text for text, _ in line)


def assert_fits(line: Line, width: int) -> None:
    assert width_of(line) == width
    assert text_of(line).isprintable()


@settings(max_examples=25)
@given(st.lists(polls(), min_size=1, max_size=3), st.integers(40, 220), st.integers(0, 40))
def test_every_line_fits_and_is_printable_for_any_replies(seen: list[Poll], width: int, height: int) -> None:
    recall = Recall()
    for poll in seen:
        recall = recall.after(poll)
        picture = picture_of(poll, recall)
    for line in (*heading(picture, "live", width), loss_title(picture, width), speed_title(picture, width), table_rows.head_line(width)):
        assert_fits(line, width)
    found = notes(picture, width, height)
    assert len(found) <= height
    for line in found:
        assert_fits(line, width)
    rows = table_rows.rows_of(picture, frozenset())
    for row in (*rows[:40], *rows[-10:]):
        assert_fits(table_rows.row_line(row, picture, width), width)
    for part in picture.stages:
        for peer in part.peers[:3]:
            for name, value in details_of(peer.peer, picture.num_microbatches):
                for line in entry(name, value, width, most=3):
                    assert_fits(line, width)


def test_a_peers_details_tell_by_which_path_tensors_go_to_it() -> None:
    told = [dict(details_of(peer_info(**path), 16)).get("path") for path in ({}, {"path": "direct"}, {"path": "relay"}, {"path": "pigeon"})]
    assert told == [None, "direct: tensors go to it by TLS", "relay: another peer carries tensors to it", "pigeon"]
    details = dict(details_of(peer_info(path="direct", connections=9, resent=0.012), 16))
    assert details["path"] == "direct: tensors go to it by TLS, 9 connections; 1.2 % of the segments to it were sent again"


@given(st.text(), WIDTHS, st.booleans())
def test_a_fitted_text_has_the_width_asked_for(text: str, width: int, right: bool) -> None:
    assert cell_len(fitted(text, width, right=right)) == width


@given(st.lists(st.tuples(st.text(max_size=20), INKS), max_size=6), WIDTHS)
def test_a_fitted_line_has_the_width_asked_for(spans: list[tuple[str, Ink]], width: int) -> None:
    assert width_of(line_fitted(spans, width)) == width


@given(st.floats(allow_nan=True, allow_infinity=True), st.integers(0, 50))
def test_a_bar_stays_within_its_width_and_shows_anything_above_nothing(share: float, width: int) -> None:
    assert len(bar(share, width)) <= width
    assert (bar(share, width) != "") == (share > 0 and width > 0)


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_longer_bar_means_more(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert len(bar(low, 20)) <= len(bar(high, 20))


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300), st.integers(0, 90), st.integers(0, 12), st.booleans())
def test_a_curve_has_its_size_and_nothing_but_dots(values: list[float], width: int, height: int, from_zero: bool) -> None:
    rows = drawn(values, width, height, from_zero=from_zero)
    assert [len(row) for row in rows] == [width] * height
    assert all(character == " " or 0x2800 < ord(character) <= 0x28FF for row in rows for character in row)


def test_a_falling_series_is_drawn_from_the_top_left_to_the_bottom_right() -> None:
    assert drawn([3.0, 2.0, 1.0, 0.0], 2, 1) == ("\u2811\u2884",)
    rows = drawn([5.0, 4.0, 3.0, 2.0, 1.0], 10, 5)
    assert rows[0][0] != " "
    assert rows[0][-1] == " "
    assert rows[-1][-1] != " "
    assert rows[-1][0] == " "


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(2, 200))
def test_a_resampled_series_keeps_within_its_bounds(values: list[float], count: int) -> None:
    found = resampled(values, count)
    assert len(found) == count
    assert min(values) - 1e-6 <= min(found)
    assert max(found) <= max(values) + 1e-6
    if len(values) <= count and len(values) > 1:
        assert found[0] == values[0]
        assert found[-1] == pytest.approx(values[-1])


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=50), st.integers(2, 60))
def test_levels_keep_the_order_of_the_values(values: list[float], count: int) -> None:
    found = levels(values, count)
    assert all(0 <= level < count for level in found)
    pairs = sorted(zip(values, found, strict=True))
    assert [level for _, level in pairs] == sorted(found)


def test_speeds_are_drawn_from_zero_so_that_a_steady_one_looks_steady() -> None:
    assert levels([90.0, 100.0], 20, from_zero=True) == [17, 19]
    assert levels([90.0, 100.0], 20) == [0, 19]


@given(st.floats(-1e9, 1e9), st.integers(1, 300))
def test_equal_values_are_one_level_line(value: float, count: int) -> None:
    rows = drawn([value] * count, 30, 4)
    assert sorted(len(set(row)) for row in rows if row.strip()) == [1]


def picture_from(**fields: object) -> tuple[Poll, Recall]:
    poll = Poll(at_s=1.0, **{"status": status_reply(), "peers": peers_reply(), "steps": (), **fields})  # type: ignore[arg-type]
    return poll, Recall().after(poll)


def with_values(reply: PeersReply, **values: object) -> PeersReply:
    return cast("PeersReply", {**reply, **values})


def test_doubtful_peers_and_empty_stages_are_told_in_words_not_by_colour_alone() -> None:
    reply = peers_reply(num_stages=3)
    reply["stages"][0]["peers"][0]["suspect"] = True
    reply["stages"][1]["peers"][0]["leaving"] = True
    reply["stages"][2]["peers"] = []
    picture = picture_of(*picture_from(peers=reply))
    shown = [text_of(table_rows.row_line(row, picture, 77)) for row in table_rows.rows_of(picture, frozenset())]
    assert any("! suspect" in line for line in shown)
    assert any("! leaving" in line for line in shown)
    assert any("stage 2 (0)" in line and "! nobody" in line for line in shown)
    stage = next(row for row in table_rows.rows_of(picture, frozenset({0})) if isinstance(row, StageRow))
    assert "! 1 in doubt" in text_of(table_rows.row_line(stage, picture, 77, folded=True))


def test_where_a_stage_has_nobody_the_last_loss_and_my_own_step_stay() -> None:
    poll, recall = picture_from(peers=with_values(peers_reply(), work_step=4, last_loss=2.5))
    empty = Poll(at_s=2.0, status=poll.status, peers=with_values(peers_reply(), work_step=None, last_loss=None), steps=())
    picture = picture_of(empty, recall.after(empty))
    assert (picture.step, picture.loss) == (poll.status["peer"]["step"], 2.5)


def test_with_local_steps_the_loss_is_that_of_the_averaged_parameters() -> None:
    of_run = with_values(peers_reply(), run=run_info(local_batch=8))
    status = status_reply(run=run_info(local_batch=8), counters=counters(own_updates=31))
    steps = tuple(history_reply(4)["steps"])
    earlier = (EvaluationInfo(step=0, loss=5.5),)
    picture = picture_of(*picture_from(peers=of_run, status=status, steps=steps, evaluations=earlier))
    assert (picture.loss, picture.losses) == (3.4, (5.5, 3.4))
    assert text_of(loss_title(picture, 90)).startswith("loss 3.4000  averaged parameters at step 2; within steps 5.3500 to 5.5000")
    assert dict(picture.own)["local"] == "31 updates of its own, after 8 microbatches each; a step averages them"
    unknown = picture_of(*picture_from(peers=with_values(of_run, evaluation=None), status=status, steps=steps))
    assert (unknown.loss, unknown.losses) == (None, ())
    assert "not evaluated" in text_of(loss_title(unknown, 75))


def test_a_narrow_terminal_leaves_out_a_part_of_what_is_told_of_the_loss_and_cuts_none() -> None:
    picture = picture_of(*picture_from(steps=tuple(history_reply(30)["steps"])))
    whole = text_of(loss_title(picture, 90)).rstrip()
    assert whole == "loss 3.2100  evaluation 3.4000 at 2; 4.0500 to 5.5000, steps 0-29"
    assert text_of(loss_title(picture, 46)).rstrip() == "loss 3.2100  evaluation 3.4000 at 2"


def test_a_speed_that_nobody_knows_yet_is_not_called_zero() -> None:
    picture = picture_of(*picture_from(peers=with_values(peers_reply(), tokens_per_second=0.0)))
    assert text_of(speed_title(picture, 30)).startswith("tokens/s - ")


def test_my_own_row_comes_first_in_its_stage_and_is_marked() -> None:
    reply = peers_reply()
    me = reply["stages"][1]["peers"][1]
    picture = picture_of(*picture_from(peers=reply, status=status_reply(peer=me)))
    row = table_rows.rows_of(picture, frozenset())[4]
    assert "you" in text_of(table_rows.row_line(row, picture, 77))


def test_longer_queues_have_longer_bars_on_a_scale_that_does_not_jump() -> None:
    reply = peers_reply(num_stages=1, peers_per_stage=3)
    for peer, queue in zip(reply["stages"][0]["peers"], (0, 3, 6), strict=True):
        peer["queue"] = queue
    picture = picture_of(*picture_from(peers=reply))
    lines = [text_of(table_rows.row_line(row, picture, 100)) for row in table_rows.rows_of(picture, frozenset())[1:]]
    lengths = [line.count("\u2588") for line in lines]
    assert lengths[0] == 0 < lengths[1] < lengths[2]
    reply["stages"][0]["peers"][2]["queue"] = 7
    again = picture_of(*picture_from(peers=reply))
    assert text_of(table_rows.row_line(table_rows.rows_of(again, frozenset())[2], again, 100)) == lines[1]


def test_eighty_columns_show_every_column_that_matters() -> None:
    head = text_of(table_rows.head_line(77))
    assert [title for title in ("stage / peer", "step", "phase", "done", "queue", "samples/s") if title not in head] == []
    wide = text_of(table_rows.head_line(180))
    assert [column.title for column in table_rows.COLUMNS if column.title not in wide] == []


def test_a_name_stands_beside_the_id_where_a_peer_has_one() -> None:
    reply = peers_reply(num_stages=1, peers_per_stage=2)
    reply["stages"][0]["peers"][0] |= {"nickname": "anna", "team": "rust"}
    picture = picture_of(*picture_from(peers=reply))
    rows = table_rows.rows_of(picture, frozenset())
    for width in (80, 120, 200):
        lines = [text_of(table_rows.row_line(row, picture, width)) for row in rows]
        assert any("..xxxx00 anna" in line for line in lines)
        assert len(text_of(table_rows.head_line(width, has_names=True))) == width
    assert dict(details_of(reply["stages"][0]["peers"][0], 16))["name"] == "anna (rust)"
    assert "name" not in dict(details_of(reply["stages"][0]["peers"][1], 16))


def test_problems_come_before_everything_and_events_keep_their_room() -> None:
    status = status_reply(health=[{"code": "x", "title": "nobody serves stage 1", "severity": "problem", "remedy": "more peers"}])
    poll, recall = picture_from(status=status)
    recall = recall.after(Poll(at_s=2.0, status=status, peers=peers_reply(num_stages=1), steps=(), events=(event_info(1, "gone"),)))
    lines = [text_of(line) for line in notes(picture_of(poll, recall), 78, 8)]
    assert lines[0].startswith("problem:   nobody serves stage 1; more peers")
    assert "vanished from stage 1" in lines[-1]
    assert len(lines) == 8


def test_a_share_tells_what_part_of_the_swarms_tokens_is_mine() -> None:
    reply = peers_reply(num_stages=1, peers_per_stage=4)
    me = reply["stages"][0]["peers"][0]
    picture = picture_of(*picture_from(peers=reply, status=status_reply(peer=me)))
    assert "41K tokens (25% of those here)" in dict(picture.own)["gave"]


@pytest.mark.parametrize("answering", [True, False])
def test_while_this_machine_answers_those_who_ask_the_model_the_screen_says_so(answering: bool) -> None:
    picture = picture_of(*picture_from(status=status_reply(texts=texts_info(answering=answering))))
    assert dict(picture.own).get("answers", "").startswith("answers now: 1.2K tokens") == answering


@pytest.mark.parametrize(("num_peers", "folded", "num_rows"), [(15, set(), 64), (20, {0, 1, 3}, 24), (50, {0, 1, 2, 3}, 4)])
def test_a_large_swarm_is_folded_at_first_but_for_a_small_own_stage(num_peers: int, folded: set[int], num_rows: int) -> None:
    reply = peers_reply(num_stages=4, peers_per_stage=num_peers)
    picture = picture_of(*picture_from(peers=reply, status=status_reply(peer=peer_info(stage=2), run=run_info(num_stages=4))))
    assert picture.folded_at_first() == folded
    assert len(table_rows.rows_of(picture, picture.folded_at_first())) == num_rows


def test_the_peers_of_several_devices_are_all_mine_and_count_together() -> None:
    reply = peers_reply(num_stages=2, peers_per_stage=2)
    one, other = reply["stages"][0]["peers"][0], reply["stages"][1]["peers"][1]
    beside = status_reply(peer=other, health=[{"code": "x", "title": "too hot", "severity": "problem", "remedy": "open the window"}])
    poll = Poll(at_s=1.0, status=status_reply(peer=one), peers=reply, steps=(), further={"cuda:1": beside, "cuda:2": None})
    picture = picture_of(poll, Recall().after(poll))
    assert [row.peer["id"] for part in picture.stages for row in part.peers if row.mine] == [one["id"], other["id"]]
    own = dict(picture.own)
    assert "stage 1" in own["cuda:1"]
    assert own["cuda:2"] == "does not answer"
    assert "81.9K tokens (50% of those here)" in own["gave"]
    assert [item["title"] for item in picture.health if item["code"] == "x"] == ["cuda:1: too hot"]

"""Output of history and contributions: 80 columns, no control characters, and correct sums."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.cli.render import short_id
from peerd.cli.render_history import coverage, print_contributions, print_history, shared_text, shares_of
from peerd.control.protocol import ContributionsReply
from tests.cli.replies import ME, OTHER, contributions_reply, history_reply


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_history_shows_the_last_steps_and_their_times(capsys: pytest.CaptureFixture[str]) -> None:
    print_history(history_reply(30), most_steps=5, with_events=True)
    lines = lines_of(capsys)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("steps 0 to 29, loss 5.5000 to 4.0500")
    shown = [line.split()[0] for line in lines if line.lstrip()[:1].isdigit() and "8.19K" in line]
    assert shown == ["25", "26", "27", "28", "29"]
    assert "2.0s" in "\n".join(lines)
    assert "nobody serves stage 0" in "\n".join(lines)


def test_events_have_the_names_of_their_peers(capsys: pytest.CaptureFixture[str]) -> None:
    print_history({**history_reply(1), "names": {OTHER: "anna\x1b (rust)"}}, most_steps=1, with_events=True)
    assert any(f"..{OTHER[-6:]} anna? (rust)" in line for line in lines_of(capsys))


def test_history_shows_rates_and_norms_where_they_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    reply = history_reply(3)
    reply["steps"][1] |= {"learning_rate": 0.0025, "gradient_norm": 1.234, "overflowed": False}
    reply["steps"][2] |= {"learning_rate": 0.002, "gradient_norm": None, "overflowed": True}
    print_history(reply, most_steps=3, with_events=False)
    lines = lines_of(capsys)
    assert [line.split()[3:5] for line in lines if "8.19K" in line] == [["-", "-"], ["2.50e-03", "1.23"], ["2.00e-03", "overflow"]]
    print_history(history_reply(3), most_steps=3, with_events=False)
    assert "norm" not in capsys.readouterr().out


def test_an_empty_history_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    print_history({"schema": 1, "steps": [], "evaluations": [], "events": []}, most_steps=5, with_events=True)
    assert lines_of(capsys) == ["no step is finished yet", "no events yet"]


def test_contributions_add_up_over_stages() -> None:
    other, mine = shares_of(contributions_reply())
    assert (mine.peer, mine.microbatches, mine.stages, mine.own_word) == (ME, 100, (0,), False)
    assert (other.peer, other.microbatches, other.stages, other.own_word) == (OTHER, 188, (0, 1), True)
    assert mine.part + other.part == pytest.approx(1)


def test_contributions_say_of_which_steps_they_are_and_what_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    print_contributions(contributions_reply())
    lines = lines_of(capsys)
    assert max(map(len, lines)) <= 80
    assert "stage 2: nobody who knows could be asked" in lines
    assert coverage(contributions_reply())[0] == "stage 0: 10 averages counted, of steps 0 to 9"


def test_contributions_show_names_beside_ids_and_add_up_teams(capsys: pytest.CaptureFixture[str]) -> None:
    print_contributions(contributions_reply(names={ME: "anna", OTHER: "b\x1b" * 12}, teams={ME: "rust", OTHER: "rust"}))
    lines = lines_of(capsys)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert f"{short_id(ME)} (you) anna (rust)" in text
    assert f"{short_id(OTHER)} * b?b?b?b?b?b?b?b\u2026" in text
    assert "team rust: 100.0%" in lines
    assert "team" not in shared_text(contributions_reply(names={}, teams={}))


def test_the_text_to_share_names_no_peer() -> None:
    text = shared_text(contributions_reply())
    assert "51,200 tokens in 100 microbatches" in text
    assert "rank 2 of 2" in text
    assert ME not in text
    assert OTHER not in text
    assert "first share" in shared_text(contributions_reply(stages=[]))


@given(st.text(min_size=1), st.integers(0, 2**62))
def test_whatever_peers_call_themselves_the_terminal_stays_whole(name: str, count: int) -> None:
    reply: ContributionsReply = contributions_reply(run=name)
    reply["stages"][0]["peers"][0] = {"peer": name, "steps": count, "microbatches": count, "tokens": count, "reporter": name}
    text = shared_text({**reply, "me": name})
    assert all(character.isprintable() or character == "\n" for character in text)

"""The verb trace: its table, its JSON, its file, and its notes about peers that did not answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peerd.config.paths import Home
from peerd.daemon.watching.tracing import trace_reply
from tests.cli.conftest import Command
from tests.cli.replies import OTHER
from tests.control.fake_daemon import answering, line
from tests.timeline.pipelines import one_step


def reply(**changes: Any) -> dict[str, Any]:
    silent = [(OTHER, 1, "no answer within 5 s")]
    told = trace_reply(first=3, last=3, timelines=one_step(), silent=silent, num_not_asked=0, run="paper")
    return {**told, **changes}


def test_the_table_tells_what_each_stage_and_the_critical_path_spent_their_time_on(peerd: Command, short_home: Path) -> None:
    with answering(Home(short_home), line({"ok": reply()})) as requests:
        done = peerd("trace", "--steps", 3)
    assert done.code == 0, done.err
    assert requests[0] | {"timeout_s": 0} == {"verb": "trace", "steps": 3, "timeout_s": 0}
    rows = [" ".join(row.split()) for row in done.out.splitlines()]
    assert rows[0] == "paper: step 3 in 10.00 s (10.000 s per step)"
    assert "0 1 30.0% 30.0% 20.0% 20.0%" in rows
    assert "critical path 60.0% 0.0% 20.0% 20.0%" in rows
    assert "clocks: 1 other peers put on this one's, each to within 0.00 ms" in rows
    assert f"told nothing: ..{OTHER[-6:]} of stage 1: no answer within 5 s" in rows
    assert all(len(row) <= 80 for row in done.out.splitlines())


def test_the_file_holds_the_timeline_and_names_who_told_nothing(peerd: Command, short_home: Path, tmp_path: Path) -> None:
    with answering(Home(short_home), line({"ok": reply()})):
        assert peerd("trace", "-o", tmp_path / "t.json").code == 0
    told = json.loads((tmp_path / "t.json").read_text())
    assert {"forward 0", "optimizer", "averaged"} <= {event["name"] for event in told["traceEvents"]}
    assert "no answer within 5 s" in told["otherData"]["notes"]


def test_json_has_the_shares_and_not_the_spans(peerd: Command, short_home: Path) -> None:
    with answering(Home(short_home), line({"ok": reply(not_asked=7)})):
        done = peerd("trace", "--json")
    told = json.loads(done.out)
    assert set(told) == {"schema", "first_step", "last_step", "wall_s", "critical_path", "stages", "peers", "silent", "not_asked"}
    assert told["critical_path"]["compute"] == pytest.approx(0.6)
    assert [stage["stage"] for stage in told["stages"]] == [0, 1]
    assert told["peers"][0]["num_spans"] == 9
    assert "spans" not in told["peers"][0]
    assert told["not_asked"] == 7


def test_a_file_that_cannot_be_written_is_said_before_anybody_waits(peerd: Command, tmp_path: Path) -> None:
    for name in (tmp_path, tmp_path / "missing" / "t.json"):
        done = peerd("trace", "-o", name)
        assert done.code == 2
        assert done.err.count("\n") == 1


def test_a_peer_that_had_forgotten_some_is_named(peerd: Command, short_home: Path) -> None:
    told = reply()
    told["peers"][1]["complete"] = False
    with answering(Home(short_home), line({"ok": told})):
        assert "told only the end of it: b of stage 1" in peerd("trace").out

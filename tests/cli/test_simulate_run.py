"""The verb simulate run: its table, its JSON, its timeline, and one clear line for every error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.cli.test_bad_input import assert_one_clear_line

DEVICES = "name,up_mbit,down_mbit,tflops\n" + "".join(f"home-{n},{20 + n},100,{0.01 * (1 + n % 3)}\n" for n in range(6))


@pytest.fixture
def run_folder(peerd: Command, tmp_path: Path) -> Path:
    made = peerd("new", tmp_path / "run", "--stages", 2, "--microbatches", 24)
    assert made.code == 0, made.err
    (tmp_path / "devices.csv").write_text(DEVICES)
    return tmp_path


def test_the_json_has_a_row_for_each_placement_and_the_timeline_goes_to_a_file(peerd: Command, run_folder: Path) -> None:
    out = run_folder / "timeline.json"
    done = peerd("simulate", "run", run_folder / "run", "--network", run_folder / "devices.csv", "--steps", 2, "-o", out, "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert [row["method"] for row in rows] == ["random", "joining", "greedy", "search"]
    for row in rows:
        assert len(row["step_s"]) == 2
        assert row["tokens_per_s"] > 0
        assert row["steady_tokens_per_s"] > 0
        assert [stage["stage"] for stage in row["stages"]] == [0, 1]
        assert sum(row["critical_path"].values()) == pytest.approx(1.0)
    assert json.loads(out.read_text())["traceEvents"]


def test_drawn_homes_join_and_the_table_shows_where_the_time_goes(peerd: Command, run_folder: Path) -> None:
    done = peerd("simulate", "run", run_folder / "run", "--peers", 20, "--steps", 2)
    assert done.code == 0, done.err
    assert "joining" in done.out
    assert "path" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_peers_that_come_and_go_cost_microbatches_and_no_average_is_inexact(peerd: Command, run_folder: Path) -> None:
    flags = ("--peers", 16, "--steps", 4, "--unreliable", 0.5, "--departures", 0.6)
    done = peerd("simulate", "run", run_folder / "run", *flags, "--json")
    assert done.code == 0, done.err
    churn = json.loads(done.out)["rows"][0]["churn"]
    assert churn["departures"] > 4
    assert churn["relaunched"] > 0
    assert churn["inexact"] == 0
    assert churn["least_reliable"] >= 1
    assert "departures: " in peerd("simulate", "run", run_folder / "run", *flags).out


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--peers", 9, "--network", "x.csv"],
        ["--peers", 9, "--method", "search"],
        ["--peers", 1],
        ["--network", "no.csv"],
        ["--peers", 9, "--unreliable", 0.9],
    ],
)
def test_a_network_that_cannot_be_simulated_is_one_clear_line(peerd: Command, run_folder: Path, flags: list[object]) -> None:
    done = peerd("simulate", "run", run_folder / "run", *flags)
    assert_one_clear_line(done, 2)

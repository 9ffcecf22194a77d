"""The verb plan: its tables, its JSON, the files that it reads, and one clear line for every error."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Command
from tests.cli.test_bad_input import assert_one_clear_line
from tests.planner.networks import irregular

METHODS = ["random", "greedy", "search", "genetic"]


def study_file(path: Path, **changes: Any) -> Path:
    """Three stages of two devices, at two places."""
    network = irregular(6, seed=3)
    document = {
        "delay_ms": [[1e3 * value for value in row] for row in network.delay_s],
        "bandwidth_gbps": [[8e-9 * value for value in row] for row in network.rate],
        "regions": ["here"] * 3 + ["there"] * 3,
        "d_pp": 3,
        "d_dp": 2,
        **changes,
    }
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))
    return path


def test_the_study_has_a_row_for_each_method(peerd: Command, tmp_path: Path) -> None:
    arguments = ("plan", "--network", study_file(tmp_path / "network.json"), "--dtfm", "--json")
    done = peerd(*arguments)
    assert (done.code, done.err) == (0, "")
    reply = json.loads(done.out)
    assert (reply["schema"], reply["devices"], [row["method"] for row in reply["rows"]]) == (1, 6, METHODS)
    for row in reply["rows"]:
        assert row["comm_cost_s"] == pytest.approx(row["averaging_s"] + row["pipeline_s"], abs=1e-5)
        assert [len(names) for names in row["stages"]] == [2, 2, 2]
        assert {name.partition("/")[0] for names in row["stages"] for name in names} == {"here", "there"}
    costs = {row["method"]: row["comm_cost_s"] for row in reply["rows"]}
    assert costs["search"] <= min(costs.values())
    assert peerd(*arguments).out == done.out


def test_the_study_prints_a_table_and_the_cheapest_stages(peerd: Command, tmp_path: Path) -> None:
    done = peerd("plan", "--network", study_file(tmp_path / "network.json"), "--dtfm", "--method", "greedy", "--method", "search")
    assert done.code == 0
    assert "3 stages of 2" in done.out
    assert [line.split()[0] for line in done.out.splitlines() if "." in line and line[0].isalpha()] == ["greedy", "search"]
    assert len(re.findall(r"\bt?here/\d", done.out)) == 6


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["neither JSON", "CSV"]),
        ("{", ["not JSON"]),
        ("[1]", ["an object"]),
        ("{}", ["delay_ms must be rows"]),
        ('{"delay_ms": [[0]], "bandwidth_gbps": [["x"]]}', ["bandwidth_gbps must be a number", "'x'"]),
        ('{"delay_ms": [[0, 1], [1, 0]], "bandwidth_gbps": [[1, 0], [1, 1]]}', ["rates from device/0", "above 0"]),
        ('{"delay_ms": [[0, NaN], [1, 0]], "bandwidth_gbps": [[1, 1], [1, 1]]}', ["delays from device/0", "0 or more"]),
        ('{"delay_ms": [[0, 1], [1]], "bandwidth_gbps": [[1, 1], [1, 1]]}', ["2 rows of 2"]),
        ('{"delay_ms": [], "bandwidth_gbps": []}', ["no devices"]),
        ('{"delay_ms": [[0]], "bandwidth_gbps": [[1]], "d_pp": 0}', ["d_pp must be a whole number"]),
        ('{"delay_ms": [[0]], "bandwidth_gbps": [[1]], "c_dp_gbyte": -1}', ["c_dp_gbyte must be above 0"]),
        ('{"delay_ms": [[0]], "bandwidth_gbps": [[1]], "names": ["a", "b"]}', ["a list of 1 names"]),
        ("from,to,delay_ms,mbit\na,b,1,100\na,c,1,100\n", ["from b to c is missing"]),
        ("from,to,delay_ms,mbit\na,b,1,100\na,b,2,100\n", ["a to b is given twice"]),
        ("from,to,delay_ms,mbit\na,b,1,fast\n", ["mbit must be a number"]),
        ("from,to,delay_ms,mbit\na,,1,10\n", ["names no device"]),
        ("name,up_mbit\na,0\n", ["line 2", "up_mbit must be above 0"]),
        ("name,upload\na,0\n", ["unknown column upload", "up_mbit"]),
        ("name,reliable\na,perhaps\n", ["yes or no"]),
        ("name,latitude,longitude\na,100,0\n", ["no place on Earth"]),
        ("name\na\na\n", ["the same name"]),
        ("name\na\nb\n", ["2 devices do not make 8 stages of 8"]),
    ],
)
def test_what_is_wrong_with_a_network_is_said_in_a_line(peerd: Command, tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "network"
    path.write_text(text)
    assert_one_clear_line(peerd("plan", "--network", path, "--dtfm"), 2, *words)


def test_a_network_that_cannot_be_read_is_said_so(peerd: Command, tmp_path: Path) -> None:
    assert_one_clear_line(peerd("plan", "--network", tmp_path / "none", "--dtfm"), 2, "No such file", "devices and links")
    assert_one_clear_line(peerd("plan", "--network", tmp_path, "--dtfm"), 2, "directory")
    (tmp_path / "image").write_bytes(b"\xff\xfe\x00")
    assert_one_clear_line(peerd("plan", "--network", tmp_path / "image", "--dtfm"), 2, "--network")

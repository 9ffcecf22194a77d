"""The verb plan: its tables, its JSON, the files that it reads, and one clear line for every error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peerd.cli.placing import note_placement
from peerd.config import manifest
from peerd.config.paths import Home
from tests.cli.conftest import Command
from tests.cli.replies import peers_reply
from tests.cli.test_bad_input import assert_one_clear_line
from tests.control.fake_daemon import answering, line
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


DEVICES = """name,up_mbit,down_mbit,tflops,memory_gb,reliable,latitude,longitude
lab-0,1000,1000,2,24,yes,52.5,13.4
lab-1,1000,1000,2,24,yes,52.5,13.4
home-1,20,100,1,8,yes,48.1,11.6
home-2,40,250,1,8,yes,48.8,2.3
home-3,50,50,1,12,no,51.5,0
home-4,50,500,1,12,yes,,
"""


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    path = tmp_path / "devices.csv"
    path.write_text(DEVICES)
    return path


@pytest.fixture
def run_file(peerd: Command, tmp_path: Path) -> Path:
    assert peerd("new", tmp_path / "run", "--stages", 2, "--layers", 4).code == 0
    return tmp_path / "run"


def test_a_run_has_a_row_for_each_method_and_the_best_is_written(peerd: Command, run_file: Path, devices: Path, tmp_path: Path) -> None:
    out = tmp_path / "placement.json"
    done = peerd("plan", run_file, "--network", devices, "--write", out, "--json")
    assert done.code == 0, done.err
    reply = json.loads(done.out)
    assert [row["method"] for row in reply["rows"]] == ["joining", "greedy", "search", "op-fence", "hybrid"]
    speeds = {row["method"]: row["tokens_per_s"] for row in reply["rows"]}
    assert speeds["search"] >= max(speeds["joining"], speeds["greedy"]) > 0
    assert reply["best"] == max(speeds, key=lambda method: speeds[method])
    for row in reply["rows"]:
        placed = [name for stage in row["stages"] for name in stage["peers"]]
        assert sorted([*placed, *row["left_out"]]) == sorted(line.partition(",")[0] for line in DEVICES.splitlines()[1:])
        assert [stage["layers"][0] for stage in row["stages"]] == [0, *(stage["layers"][1] for stage in row["stages"][:-1])]
        assert row["stages"][-1]["layers"][1] == 4
        assert set(row["sent_gb_a_day"]) == set(placed)
        assert all(stage["bound_by"] for stage in row["stages"])
    written = json.loads(out.read_text())
    best = next(row for row in reply["rows"] if row["method"] == reply["best"])
    assert [stage["peers"] for stage in written["stages"]] == [stage["peers"] for stage in best["stages"]]
    assert (written["schema"], written["method"]) == (1, reply["best"])


PEERS = [f"12D3KooW{letter * 44}" for letter in "ABCD"]


@pytest.fixture
def placement(peerd: Command, run_file: Path, tmp_path: Path) -> Path:
    """A plan for four peers that are known."""
    devices, out = tmp_path / "peers.csv", tmp_path / "placement.json"
    devices.write_text("name,tflops\n" + "".join(f"{peer},{number + 1}\n" for number, peer in enumerate(PEERS)))
    assert peerd("plan", run_file, "--network", devices, "--method", "search", "--write", out).code == 0
    return out


@pytest.mark.parametrize("before", ["as new", "another", "no line", "no section"])
def test_a_placement_is_noted_in_the_runs_file(run_file: Path, placement: Path, before: str) -> None:
    path = run_file / "run.toml"
    changed = {"as new": "placement = []", "another": f'placement = ["{PEERS[0]}=0"]', "no line": "", "no section": ""}[before]
    text = path.read_text().replace("placement = []", changed)
    path.write_text(text.partition("[swarm]")[0] if before == "no section" else text)
    usual = manifest.load(path)
    note_placement(path, placement)
    noted = manifest.load(path)
    stages = [stage["peers"] for stage in json.loads(placement.read_text())["stages"]]
    assert noted.swarm.wishes == {peer: number for number, peers in enumerate(stages) for peer in peers}
    assert len(noted.swarm.wishes) >= 2
    assert replace(noted, swarm=replace(noted.swarm, placement=())) == replace(usual, swarm=replace(usual.swarm, placement=()))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (lambda found: found["stages"][0].update(layers=[0, 1]), "train.cut = [1, 2]"),
        (lambda found: found["stages"][0].update(peers=["home-1"]), "'home-1' is no peer's id"),
        (lambda found: found.pop("stages"), "no such placement"),
        (lambda found: found.update(stages=7), "no such placement"),
    ],
)
def test_a_placement_that_does_not_go_with_the_run_is_refused(
    peerd: Command, run_file: Path, placement: Path, changes: Callable[[dict[str, Any]], None], word: str
) -> None:
    found, before = json.loads(placement.read_text()), (run_file / "run.toml").read_text()
    changes(found)
    placement.write_text(json.dumps(found))
    assert_one_clear_line(peerd("start", run_file, "--placement", placement), 2, word)
    assert (run_file / "run.toml").read_text() == before


def test_a_plan_prints_speeds_what_binds_and_what_is_sent(peerd: Command, run_file: Path, devices: Path) -> None:
    done = peerd("plan", run_file, "--network", devices, "--method", "search", "--method", "joining")
    assert done.code == 0, done.err
    assert [line.split()[0] for line in done.out.splitlines()[1:3]] == ["search", "joining"]
    assert "stages by search" in done.out
    assert "bound by" in done.out
    assert "sent a day" in done.out


def test_a_sweep_shows_the_square_cube_law(peerd: Command, run_file: Path, devices: Path) -> None:
    done = peerd("plan", run_file, "--network", devices, "--sweep", "d_model=64..1024", "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert [row["d_model"] for row in rows] == [64, 128, 256, 512, 1024]
    assert rows[0]["tokens_per_s"] > rows[-1]["tokens_per_s"]
    assert rows[0]["utilisation"] < rows[-1]["utilisation"] <= 1
    assert "utilisation" in peerd("plan", run_file, "--network", devices, "--sweep", "d_model=64..128").out


def test_a_running_swarm_is_planned_from_what_its_peers_say(peerd: Command, run_file: Path, short_home: Path) -> None:
    with answering(Home(short_home), line({"ok": peers_reply(num_stages=2, peers_per_stage=2)})):
        done = peerd("plan", run_file, "--swarm", "--method", "search", "--json")
    assert done.code == 0, done.err
    reply = json.loads(done.out)
    assert reply["devices"] == 4
    assert reply["rows"][0]["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["one network", "--network FILE or --swarm"]),
        (["--network", "N", "--swarm", "a"], ["one network"]),
        (["--network", "N"], ["nothing to plan", "--dtfm"]),
        (["--network", "N", "--dtfm", "--method", "hybrid"], ["--dtfm knows the methods random"]),
        (["--network", "N", "--dtfm", "--sweep", "d_model=8..9"], ["--dtfm takes"]),
        (["RUN", "--network", "N", "--method", "genetic"], ["a run knows the methods joining"]),
        (["RUN", "--network", "N", "--sweep", "d_ff=1..2"], ["no range of widths", "d_model=768..12288"]),
        (["RUN", "--network", "N", "--sweep", "d_model=512..64"], ["the first no larger"]),
        (["RUN", "--network", "N", "--sweep", "d_model=64..64", "--method", "search"], ["leave out --method"]),
        (["RUN", "--network", "N", "--method", "joining", "--write", "/nowhere/at/all"], ["/nowhere/at/all"]),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(
    peerd: Command, run_file: Path, devices: Path, arguments: list[str], words: list[str]
) -> None:
    done = peerd("plan", *({"N": str(devices), "RUN": str(run_file)}.get(each, each) for each in arguments))
    assert_one_clear_line(done, 10 if "--write" in arguments else 2, *words)


def test_devices_that_hold_no_stage_make_no_plan(peerd: Command, run_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.csv"
    path.write_text("name,memory_gb\na,0.0001\nb,0.0001\n")
    assert_one_clear_line(peerd("plan", run_file, "--network", path), 2, "no placement fits", "more stages")
    path.write_text("name,reliable\na,no\nb,no\n")
    assert_one_clear_line(peerd("plan", run_file, "--network", path, "--method", "hybrid"), 2, "no placement fits", "reliable")

"""The verb simulate: its table, its JSON, its pictures, and one clear line for every error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from peerd.sim.comparison import CONTENDERS
from tests.cli.conftest import Command
from tests.cli.test_startup import SPY

FIELDS = {"rule", "period_s", "stages", "download_s", "overall", "first", "last", "moves"}
RULES = [(str(rule), period_s) for rule, period_s in CONTENDERS]


@pytest.fixture
def churn(tmp_path: Path) -> Path:
    """A trace of two hours: eight peers, of which two leave, and one that joins."""
    path = tmp_path / "churn.csv"
    path.write_text("time_s,change\n0,8\n900,-2\n3000,1\n7200,0\n")
    return path


def test_the_json_has_one_row_per_rule_and_number_of_stages(peerd: Command, churn: Path) -> None:
    done = peerd("simulate", "rebalance", "--json", "--trace", churn, "--stages", 2, "--stages", "1,4", "--download", 60, "--seed", 7)
    assert done.code == 0, done.err
    assert done.err == ""
    assert done.out.count("\n") == 1
    reply = json.loads(done.out)
    assert reply["schema"] == 1
    assert [(row["rule"], row["period_s"], row["stages"]) for row in reply["rows"]] == [(*rule, s) for s in (2, 1, 4) for rule in RULES]
    for row in reply["rows"]:
        assert set(row) == FIELDS
        assert row["download_s"] == 60
        assert 0 < row["overall"] <= 100
        assert row["rule"] != "none" or row["moves"] == 0


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(peerd: Command) -> None:
    arguments = ("simulate", "rebalance", "--json", "--stages", 2, "--peers", 12)
    one, two, other = (peerd(*arguments, "--seed", seed).out for seed in (1, 1, 2))
    assert one == two != other


def test_runs_give_means_over_seeds(peerd: Command) -> None:
    def overall(seed: int, runs: int) -> float:
        done = peerd("simulate", "rebalance", "--json", "--stages", 2, "--peers", 12, "--seed", seed, "--runs", runs)
        return float(json.loads(done.out)["rows"][0]["overall"])

    assert overall(4, 2) == pytest.approx((overall(4, 1) + overall(5, 1)) / 2, abs=0.02)


@pytest.mark.parametrize("flags", [["--unlike"], ["--view-delay", "30"], ["--noise", "0.2"]])
def test_what_makes_a_swarm_harder_changes_the_rows(peerd: Command, churn: Path, flags: list[str]) -> None:
    arguments = ("simulate", "rebalance", "--json", "--trace", churn, "--stages", 2, "--download", 120)
    plain, harder = peerd(*arguments), peerd(*arguments, *flags)
    assert harder.code == 0
    assert json.loads(harder.out)["rows"][1:] != json.loads(plain.out)["rows"][1:]


def test_the_table_fits_a_terminal_and_names_what_it_shows(peerd: Command, churn: Path) -> None:
    done = peerd("simulate", "rebalance", "--trace", churn, "--stages", 2)
    lines = done.out.splitlines()
    assert len(lines) == 2 + len(RULES)
    assert max(map(len, lines)) <= 80
    assert "percent of optimal" in lines[0]
    assert len({len(line) for line in lines[1:]}) == 1


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_plot_is_drawn_in_the_kind_its_name_says(peerd: Command, churn: Path, tmp_path: Path, kind: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"moves.{kind}"
    done = peerd("simulate", "rebalance", "--json", "--trace", churn, "--stages", "1,2", "--plot", picture)
    assert done.code == 0, done.err
    assert json.loads(done.out)["schema"] == 1
    assert picture.read_bytes().startswith(start)


def test_without_matplotlib_a_plot_says_what_to_install_before_it_simulates(
    peerd: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = peerd("simulate", "rebalance", "--plot", tmp_path / "a.png")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("peerd: error: --plot needs matplotlib")
    assert "pip install matplotlib" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stages", "0"], ["--stages"]),
        (["--stages", "4,,8"], ["--stages"]),
        (["--stages", "x"], ["--stages"]),
        (["--stages", "9999"], ["--stages", "512"]),
        (["--peers", "0"], ["--peers"]),
        (["--peers", "3", "--stages", "4"], ["3 peers cannot serve 4 stages"]),
        (["--download", "-1"], ["--download"]),
        (["--download", "nan"], ["--download"]),
        (["--noise", "1"], ["--noise"]),
        (["--runs", "0"], ["--runs"]),
        (["--seed", "x"], ["--seed"]),
        (["--trace", "nowhere.csv"], ["nowhere.csv", "No such file"]),
        (["--trace", "bad.csv"], ["bad.csv, line 2", "'60;1'"]),
        (["--trace", "greedy.csv", "--peers", "4"], ["more peers than there are", "--peers"]),
        (["--plot", "a.jpg"], [".png or .svg"]),
        (["--plot", "nowhere/a.png"], ["nowhere/a.png"]),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    peerd: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.csv").write_text("0,8\n60;1\n")
    Path("greedy.csv").write_text("60,-5\n120,0\n")
    done = peerd("simulate", "rebalance", *arguments)
    assert done.code == 2, done.err
    assert done.out == "" or done.out.startswith("percent of optimal")
    assert done.err.startswith("peerd: error: ")
    assert done.err.count("\n") == 1
    for word in words:
        assert word in done.err


def test_simulate_alone_shows_what_there_is(peerd: Command) -> None:
    done = peerd("simulate")
    assert done.code == 2
    assert "rebalance" in done.err
    assert peerd("simulate", "nonsense").code == 2


@pytest.mark.parametrize("verb", [["simulate"], ["simulate", "rebalance"]])
def test_help_loads_nothing_heavy_and_fits_a_terminal(verb: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", SPY, *verb, "--help"], check=True, capture_output=True, text=True)
    assert done.stderr == "LOADED []\n"
    assert max(map(len, done.stdout.splitlines())) <= 80

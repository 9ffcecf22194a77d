"""What the pages tell people to type, typed: an organiser's run, a volunteer's five minutes, an engineer's comparison and simulations.

Every line is one that a page or a verb's own help shows. Those that only ask are run in tests/cli/test_documents.py, too.
"""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from safetensors.torch import load_file

from peerd.config.paths import Home
from peerd.control.client import ControlClient
from tests.cli.test_documents import ROOT, SHOWN
from tests.swarm.daemons import Swarm, until
from tests.swarm.runs import assert_close, swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(900)]

WITHIN_S = 300.0
LINES = {arguments for _, arguments in SHOWN}


@dataclass(slots=True)
class Person:
    """Somebody at a terminal: a folder to stand in, a home, and what the page's words stand for."""

    folder: Path
    environment: Mapping[str, str]
    stands_for: dict[str, str] = field(default_factory=dict)

    @property
    def home(self) -> Home:
        return Home(self.folder / "home")

    def types(self, line: str) -> str:
        """What it prints; it must be shown somewhere, and end well."""
        arguments = shlex.split(line)[1:]
        assert tuple(arguments) in LINES, f"no page shows `{line}`"
        done = subprocess.run(
            [sys.executable, "-P", "-c", "from peerd.cli.main import main; main()", *(self.stands_for.get(a, a) for a in arguments)],
            env={**self.environment, "PEERD_HOME": str(self.home.folder)},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def step(self) -> int:
        return int(ControlClient(self.home).request("status")["peer"]["step"])


@pytest.fixture
def place() -> Iterator[Swarm]:
    """No daemon of ours: a folder whose processes are all ended, and nothing of them may be left."""
    with Swarm(swarm_manifest()) as swarm:
        yield swarm


def person(place: Swarm, name: str, **stands_for: str) -> Person:
    (place.folder / name).mkdir()
    return Person(place.folder / name, place.environment, stands_for)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_a_run_is_made_joined_watched_exported_left_and_gone_on_with(place: Swarm) -> None:
    organiser = person(place, "organiser-s", **{"31337": free_port(), "8642": free_port()})
    organiser.types("peerd new my-run --stages 2 --steps 1000")
    assert "bytes" in organiser.types("peerd data my-run")
    public = "--relay --dashboard-host 0.0.0.0 --dashboard-port 8642 --dashboard-public"
    told = organiser.types(f"peerd start my-run --host 0.0.0.0 --port 31337 {public} --detach")
    (address,) = re.findall(r"peerd join (\S+)", told)

    volunteer = person(place, "volunteer", ADDRESS=address)
    volunteer.types("peerd doctor ADDRESS")
    volunteer.types("peerd join ADDRESS --detach")
    assert "serving" in volunteer.types("peerd wait --serving --timeout 60")
    until(lambda: organiser.step() >= 3, WITHIN_S)
    for line in ("peerd status", "peerd peers", "peerd history --events", "peerd contributions", "peerd contributions --share"):
        assert volunteer.types(line)
    assert "critical path" in volunteer.types("peerd trace --steps 3 -o timeline.json")
    assert (volunteer.folder / "timeline.json").exists()
    assert '"step finished"' in volunteer.types("peerd logs -n 1000")

    organiser.types("peerd export trained")
    assert organiser.types('peerd generate trained --prompt "def "').startswith("def ")
    organiser.types("peerd export exported")
    for who in (volunteer, organiser):
        who.types("peerd leave")
    organiser.types("peerd new wider --from exported --stages 4 --steps 2000")
    assert "num_stages = 4" in (organiser.folder / "wider" / "run.toml").read_text()


def test_a_demo_and_its_reference_agree(place: Swarm) -> None:
    engineer = person(place, "engineer")
    engineer.types("peerd demo --steps 5 --accumulate float64 --out A")
    engineer.types("peerd reference A/run.toml --steps 5 --out B")
    swarms, one_machines = (load_file(engineer.folder / name / "model.safetensors") for name in "AB")
    assert_close(swarms, one_machines, 1e-5)


def test_the_simulations_that_are_shown_run(place: Swarm) -> None:
    engineer = person(place, "engineer")
    page = (ROOT / "peerd" / "docs" / "simulate.md").read_text()
    (churn,) = re.findall(r"^    time_s,change\n(?:    .*\n)+", page, re.MULTILINE)
    for name in ("churn.csv", "my-churn.csv"):
        (engineer.folder / name).write_text(churn.replace("    ", ""))
    assert "improved" in engineer.types("peerd simulate rebalance")
    assert "improved" in engineer.types("peerd simulate rebalance --trace churn.csv --stages 4")
    told = json.loads(engineer.types("peerd simulate rebalance --trace my-churn.csv --peers 60 --json"))
    assert {"none", "queues", "improved"} <= {row["rule"] for row in told["rows"]}
    pytest.importorskip("matplotlib")
    engineer.types("peerd simulate rebalance --stages 4 --download 240 --plot moves.png")
    assert (engineer.folder / "moves.png").stat().st_size > 10_000

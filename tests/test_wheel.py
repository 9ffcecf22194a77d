"""The wheel works without the source folder, in an environment that has nothing else of peerd."""

from __future__ import annotations

import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from peerd import __version__

ROOT = Path(__file__).resolve().parents[1]


def wheel(*arguments: object, demo: str) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "scripts" / "wheel", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "WHEEL_LIBRARIES")}
    return subprocess.run(
        list(map(str, command)), env={**environment, "WHEEL_DEMO": demo}, capture_output=True, text=True, check=False, timeout=280
    )


@pytest.mark.timeout(290)
def test_the_wheel_is_built_and_its_command_starts_in_an_empty_environment(tmp_path: Path) -> None:
    done = wheel(tmp_path, demo="no")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"peerd, version {__version__}\n"
    assert re.search(r"peerd: build and installation \d+ s; wheel \d+ kB, environment \d+ MB", done.stderr)
    with zipfile.ZipFile(next(tmp_path.glob("peerd-*.whl"))) as packed:
        names = set(packed.namelist())
    assert {"peerd/docs/volunteer.md", "peerd/observe/web/assets/index.html", "peerd/generated/swarm_pb2.py"} <= names
    assert [name for name in names if not name.startswith(("peerd/", f"peerd-{__version__}.dist-info/"))] == []


@pytest.mark.slow
@pytest.mark.timeout(290)
def test_the_demo_runs_from_the_wheel() -> None:
    done = wheel(demo="yes")
    assert done.returncode == 0, done.stderr
    assert "step   3/3" in done.stdout + done.stderr

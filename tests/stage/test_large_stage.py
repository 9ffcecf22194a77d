"""What a stage really takes of a machine's memory, beside its estimate; and that a volunteer allocates no more than its stage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.stage.large_stage import RUNS

NEEDED_BYTES = 6 << 30

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="peak memory is counted in kilobytes on Linux alone"),
    pytest.mark.skipif(psutil.virtual_memory().available < NEEDED_BYTES, reason="needs 6 GiB of free memory"),
]


def found_of(name: str) -> dict[str, int]:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "tests.stage.large_stage", name]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(name, found)
    assert isinstance(found, dict)
    return found


def test_a_stage_of_a_large_model_takes_what_was_estimated_and_never_the_whole() -> None:
    """2 of 24 layers of a Llama of 1.3 billion parameters."""
    pytest.importorskip("transformers")
    found = found_of("llama")
    assert 1.25e9 < found["whole"] / 4 < 1.45e9
    assert found["peak"] - found["before"] == pytest.approx(found["estimate"], rel=0.15), found
    assert found["built"] - found["before"] < found["whole"] / 8, found


@pytest.mark.parametrize("name", [name for name in RUNS if name != "llama"])
def test_what_an_option_takes_is_estimated(name: str) -> None:
    found = found_of(name)
    assert found["peak"] - found["before"] == pytest.approx(found["estimate"], rel=0.1), found

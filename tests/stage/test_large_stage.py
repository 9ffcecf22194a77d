"""A volunteer allocates only its stage: 2 of 24 layers of a Llama of 1.3 billion parameters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytest.importorskip("transformers")

NEEDED_BYTES = 6 << 30


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is counted in kilobytes on Linux alone")
@pytest.mark.skipif(psutil.virtual_memory().available < NEEDED_BYTES, reason="needs 6 GiB of free memory")
def test_a_stage_of_a_large_model_takes_what_was_estimated_and_never_the_whole() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-m", "tests.stage.large_stage"], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 1.25e9 < found["whole"] / 4 < 1.45e9
    assert found["peak"] - found["before"] == pytest.approx(found["estimate"], rel=0.15), found
    assert found["built"] - found["before"] < found["whole"] / 8, found

"""What a daemon's log looks like: words on a terminal, one JSON object a line elsewhere, and secrets on neither."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

SECRET = "5" * 48
PROGRAM = f"""
import sys
from pathlib import Path
import structlog
from peerd.config.paths import Home
from peerd.daemon.log import configure
configure(Home(Path(sys.argv[1])), peer="me", stage=1)
log = structlog.get_logger()
log.debug("not told unless PEERD_LOG says so")
log.info("step finished", step=7, loss=2.5)
log.warning("rebalancing", reason="stage 0 has more to do", token="{SECRET}", address="http://127.0.0.1:1/?token={SECRET}")
"""


def test_where_the_output_is_no_terminal_each_line_is_an_object_with_level_time_and_reason(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, capture_output=True, text=True)
    assert done.stdout == ""
    finished, moved = (json.loads(line) for line in done.stderr.splitlines())
    assert finished.pop("timestamp").endswith("Z")
    assert finished == {"event": "step finished", "level": "info", "peer": "me", "stage": 1, "step": 7, "loss": 2.5}
    assert (moved["level"], moved["reason"]) == ("warning", "stage 0 has more to do")
    assert SECRET not in done.stderr


def test_on_a_terminal_it_is_words(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, stderr=theirs, env={**os.environ, "NO_COLOR": "1"})
    os.close(theirs)
    told = os.read(ours, 65536).decode()
    os.close(ours)
    assert told.count("\n") == 2
    assert "step finished" in told
    assert "{" not in told
    assert SECRET not in told

"""What a daemon says of its start."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys
import structlog
from peerd.daemon.doing import tell_doing
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
tell_doing("one")
sys.stdin.read()
tell_doing("two")
"""


def test_a_daemon_goes_on_when_the_command_that_started_it_has_ended() -> None:
    environment = os.environ | {"PEERD_READY": "steps"}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b'{"doing": "one"}\n'
        process.stdout.close()
        process.stdin.close()
        assert process.wait(30) == 0

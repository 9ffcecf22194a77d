"""A daemon that may open no more files still answers its owner, keeps its p2pd, and trains on."""

from __future__ import annotations

import contextlib
import resource
import socket
import time

import psutil
import pytest

from peerd.daemon.supervisor import CHECK_PERIOD_S
from tests.swarm.daemons import Swarm, run_peerd, until
from tests.swarm.runs import swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(120)]

ROOM = 8


def test_a_daemon_that_may_open_no_more_files_tells_its_owner_so_and_trains_on() -> None:
    with Swarm(swarm_manifest(num_stages=1)) as swarm, contextlib.ExitStack() as strangers:
        daemon = swarm.start(stage=0, compute_stand_in_ms=20)
        daemon.wait_for_step(2)
        p2pd = daemon.p2pd
        port, process = daemon.status["direct"]["port"], psutil.Process(daemon.process.pid)
        few = process.num_fds() + ROOM
        _, most = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (few, most))
        for _ in range(2 * ROOM):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
        until(lambda: process.num_fds() >= few)
        over_s = time.monotonic() + 3 * CHECK_PERIOD_S
        while time.monotonic() < over_s:  # meanwhile the supervisor looks at p2pd
            told = run_peerd(swarm.environment, "status", "--home", daemon.home.folder)
            assert told.returncode == 0, told.stderr
            assert f"{few} files are open; this peer needs 80 open files at least" in " ".join(told.stdout.split())
        daemon.wait_for_step(daemon.status["peer"]["step"] + 2)
        assert daemon.p2pd == p2pd
        strangers.close()
        until(lambda: "open-files" not in {item["code"] for item in daemon.status["health"]})
        swarm.assert_exact()

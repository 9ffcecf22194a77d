"""A router is asked to forward the port where the daemon listens beyond loopback, and what it grants comes first among the addresses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from peerd.link import p2pd
from peerd.link.p2pd import P2pdConfig, is_public
from tests.link import gateway

UNSHARE = ["unshare", "--user", "--map-root-user", "--net"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("ip") is None, reason="needs Linux's network namespaces")
def test_a_router_that_speaks_nat_pmp_forwards_the_port_for_a_minute_at_a_time() -> None:
    try_it = [*UNSHARE, "ip", "link", "add", "home0", "type", "veth", "peer", "name", "home1"]
    if subprocess.run(try_it, check=False, capture_output=True).returncode:
        pytest.skip("this user may not make a network namespace")
    with tempfile.TemporaryDirectory(prefix="peerd-t-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [*UNSHARE, sys.executable, "-m", "tests.link.gateway", folder]
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True, timeout=100)
    told = json.loads(done.stdout)
    outside = told["mappings"][-1]["outside"]
    assert told["addresses"][0].startswith(f"/ip4/{gateway.PUBLIC}/tcp/{outside}/p2p/")
    assert told["addresses"][-1].startswith(f"/ip4/127.0.0.1/tcp/{gateway.PORT}/p2p/")
    assert {(each["inside"], each["life_s"]) for each in told["mappings"]} == {(gateway.PORT, 60)}


@pytest.mark.parametrize("map_port", [False, True])
def test_p2pd_is_told_whether_to_ask(tmp_path: Path, map_port: bool) -> None:
    command = p2pd._command(P2pdConfig(identity_file=tmp_path / "key", run_folder=tmp_path, map_port=map_port), tmp_path / "s")
    assert f"-natPortMap={int(map_port)}" in command


@pytest.mark.parametrize(
    ("host", "public"),
    [("8.8.8.8", True), ("10.0.0.1", False), ("192.168.1.5", False), ("127.0.0.1", False), ("100.64.0.9", False), ("169.254.1.1", False)],
)
def test_what_the_internet_knows_is_public(host: str, public: bool) -> None:
    assert is_public(f"/ip4/{host}/tcp/4001/p2p/12D3") is public

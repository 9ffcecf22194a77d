"""The spot machine: its user data carries the very files of this repository, and a cloud's notice makes peerd leave."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import check

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SPOT = DEPLOY / "cloud-init" / "spot.yaml"
CONFIG: dict[str, Any] = yaml.safe_load(SPOT.read_text())
FILES: dict[str, dict[str, Any]] = {entry["path"]: entry for entry in CONFIG["write_files"]}
WATCHER = DEPLOY / "cloud-init" / "peerd-preemption"

NOTICES = {
    "aws": {
        "/latest/api/token": "token",
        "/latest/meta-data/spot/instance-action": '{"action": "terminate"}',
    },
    "google": {"/computeMetadata/v1/instance/preempted": "TRUE"},
    "azure": {"/metadata/scheduledevents?api-version=2020-07-01": '{"Events": [{"EventType": "Preempt"}]}'},
}
NO_NOTICE = {
    "aws": {"/latest/api/token": "token"},
    "google": {"/computeMetadata/v1/instance/preempted": "FALSE"},
    "azure": {"/metadata/scheduledevents?api-version=2020-07-01": '{"Events": [{"EventType": "Reboot"}]}'},
}


def test_cloud_init_knows_it_for_its_own() -> None:
    assert SPOT.read_text().startswith("#cloud-config\n")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("/etc/systemd/system/peerd.service", "systemd/peerd.service"),
        ("/etc/systemd/system/peerd-preemption.service", "cloud-init/peerd-preemption.service"),
        ("/etc/peerd/peerd-preemption", "cloud-init/peerd-preemption"),
    ],
)
def test_it_carries_the_files_of_this_repository(path: str, source: str) -> None:
    assert FILES[path]["content"] == (DEPLOY / source).read_text()


def test_it_starts_what_it_brings() -> None:
    assert ["systemctl", "enable", "--now", "peerd.service", "peerd-preemption.service"] in CONFIG["runcmd"]
    assert CONFIG["runcmd"][:2] == [["sysctl", "--load", "/etc/sysctl.d/90-peerd.conf"], ["/etc/peerd/install"]]
    assert "/etc/sysctl.d/90-peerd.conf" in FILES
    for path in ("/etc/peerd/install", "/etc/peerd/peerd-preemption"):
        assert FILES[path]["permissions"] == "0755"
        subprocess.run(["bash", "-n"], input=FILES[path]["content"], check=True, text=True)


def test_the_flags_it_sets_exist() -> None:
    environment = dict(line.split("=", 1) for line in FILES["/etc/peerd/peerd.env"]["content"].splitlines())
    check(["join", environment["PEERD_ADDRESS"], *environment["PEERD_FLAGS"].split()])


class Metadata:
    """A cloud's metadata service with the answers of the moment."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers
        self.asked = 0
        self.many = threading.Event()


@contextlib.contextmanager
def serving(metadata: Metadata) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            metadata.asked += 1
            if metadata.asked >= 12:
                metadata.many.set()
            answer = metadata.answers.get(self.path)
            self.send_response(404 if answer is None else 200)
            self.end_headers()
            self.wfile.write((answer or "").encode())

        do_PUT = do_GET  # noqa: N815 - the server's own name

        def log_message(self, *_arguments: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def watching(folder: Path, address: str, *, drains: bool = True) -> Iterator[subprocess.Popen[bytes]]:
    """The watcher with a `peerd` that writes down its calls; one that does not drain hangs until it is cut short."""
    tool = folder / "peerd"
    hang = "" if drains else '[ "$2" = --now ] || exec sleep 60\n'
    tool.write_text(f'#!/bin/sh\necho "$@" >>{folder}/calls\n{hang}')
    tool.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PEERD_METADATA": address,
        "PEERD_NOTICE_PERIOD_S": "0.05",
        "PEERD_DRAIN_S": "30" if drains else "0.5",
        "no_proxy": "127.0.0.1",
    }
    with subprocess.Popen([WATCHER], env=environment, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


needs_curl = pytest.mark.skipif(shutil.which("curl") is None or shutil.which("timeout") is None, reason="needs curl and timeout")


@needs_curl
@pytest.mark.parametrize("cloud", NOTICES)
def test_a_notice_makes_peerd_leave_and_nothing_else_does(cloud: str, tmp_path: Path) -> None:
    metadata = Metadata(NO_NOTICE[cloud])
    with serving(metadata) as address, watching(tmp_path, address) as watcher:
        assert metadata.many.wait(60)
        assert watcher.poll() is None
        assert not (tmp_path / "calls").exists()
        metadata.answers = NOTICES[cloud]
        assert watcher.wait(60) == 0
    assert (tmp_path / "calls").read_text().splitlines() == ["leave"]


@needs_curl
def test_a_drain_that_takes_too_long_is_cut_short(tmp_path: Path) -> None:
    with serving(Metadata(NOTICES["google"])) as address, watching(tmp_path, address, drains=False) as watcher:
        assert watcher.wait(60) == 0
    assert (tmp_path / "calls").read_text().splitlines() == ["leave", "leave --now"]
    check(["leave", "--now"])

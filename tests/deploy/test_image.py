"""The image is built from nothing, and a daemon lives and ends in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from peerd import __version__
from tests.deploy.images import Store, build, store

BUILT_WITHIN_S = 1200.0
ANSWERS_WITHIN_S = 100.0
LOOK_EVERY_S = 0.5


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with store(tmp_path_factory.mktemp("images")) as opened:
        build(opened, "cpu")
        yield opened


def said(images: Store, container: str, *words: str) -> str:
    return subprocess.run(images.inside(container, *words), check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.timeout(BUILT_WITHIN_S)
def test_the_image_runs_as_nobody_and_writes_only_into_its_volume(images: Store) -> None:
    container, config = images.start("peerd:cpu"), images.config("peerd:cpu")
    assert said(images, container, *config["Entrypoint"], "--version") == f"peerd, version {__version__}\n"
    assert said(images, container, "python", "-c", "import torch; print(torch.version.cuda)") == "None\n"
    assert said(images, container, "id", "--user").strip() == config["User"].split(":")[0] == "10001"
    assert list(config["Volumes"]) == [config["WorkingDir"]] == ["/var/lib/peerd"]
    writable = "find / -xdev -writable -not -type l -not -path '/proc/*' -not -path '/dev/*' 2>/dev/null || true"
    places = said(images, container, "sh", "-c", writable).split()
    own = ("/var/lib/peerd", "/run/address", "/tmp", "/var/tmp", "/run/lock")
    assert [place for place in places if not place.startswith(own)] == []


@pytest.mark.slow
@pytest.mark.timeout(BUILT_WITHIN_S)
def test_a_daemon_in_the_image_is_healthy_while_it_answers_and_ends_at_the_signal_of_a_stop(images: Store) -> None:
    container, config = images.start("peerd:cpu"), images.config("peerd:cpu")
    mode, *health = config["Healthcheck"]["Test"]
    assert mode == "CMD"
    assert subprocess.run(images.inside(container, *health), check=False, capture_output=True).returncode == 11
    words = ("bootstrap", "--host", "127.0.0.1", "--port", "0", "--dashboard-port", "0")
    daemon = subprocess.Popen(images.inside(container, *words, environment=("PEERD_NEW=--stages 1 --name image",)))
    try:
        ends_s = time.monotonic() + ANSWERS_WITHIN_S
        while (done := subprocess.run(images.inside(container, *health), check=False, capture_output=True)).returncode != 0:
            assert time.monotonic() < ends_s, done.stderr
            assert daemon.poll() is None
            time.sleep(LOOK_EVERY_S)
        assert json.loads(done.stdout)["run"]["name"] == "image"
        pid = json.loads(said(images, container, "cat", "/run/address/ready.json"))["pid"]
        assert Path(f"/proc/{pid}").stat().st_uid == 10001
        os.kill(pid, getattr(signal, config["StopSignal"]))
        assert daemon.wait(ANSWERS_WITHIN_S) == 0
    finally:
        daemon.kill()

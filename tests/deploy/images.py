"""Builds deploy/Dockerfile with buildah, which needs neither a daemon nor namespaces: `--isolation chroot`.

The base image is pulled. Where its registry cannot be reached, a Debian of the same release takes its place, with Debian's own Python.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
PIP_KEYS = ("cert", "index-url", "extra-index-url", "find-links", "default-timeout")
"""Settings of pip that say where this machine's packages come from. The build gets them and the files they name; the image does not."""


@dataclass(frozen=True, slots=True)
class Store:
    """Images and containers in a folder of their own."""

    place: Path

    def command(self, *words: object) -> list[str]:
        """A command line of buildah for this store."""
        return ["buildah", "--root", f"{self.place}/root", "--runroot", f"{self.place}/runroot", *map(str, words)]

    def run(self, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Raises AssertionError with the end of the output if the command fails."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, f"{words}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done

    def start(self, image: str) -> str:
        """A new container of an image. Returns its name."""
        return self.run("from", "--pull-never", image).stdout.strip()

    def inside(self, container: str, *words: str, environment: tuple[str, ...] = ()) -> list[str]:
        """A command line that runs these words in a container, as its user, with this machine's network and process ids."""
        options = [word for each in environment for word in ("--env", each)]
        return self.command("run", "--isolation", "chroot", *options, container, "--", *words)

    def config(self, image: str) -> dict[str, Any]:
        """What the image says of its use, by Docker's names: User, Volumes, StopSignal, Healthcheck and others."""
        found = json.loads(self.run("inspect", "--type", "image", image).stdout)["Docker"]["config"]
        assert isinstance(found, dict)
        return found


@contextmanager
def store(place: Path) -> Iterator[Store]:
    """An empty store. Skips the test where there can be none."""
    if os.geteuid() != 0 or shutil.which("buildah") is None:
        pytest.skip("needs root and buildah: apt install buildah")
    opened = Store(place)
    try:
        yield opened
    finally:
        opened.run("rm", "--all", check=False)
        opened.run("rmi", "--all", "--force", check=False)
        subprocess.run(["umount", "--lazy", place / "root" / "overlay"], check=False, capture_output=True)
        shutil.rmtree(place, ignore_errors=True)


def build(into: Store, target: str) -> str:
    """Build a target of the file from nothing. Returns the image's name."""
    _have_base(into)
    name = f"peerd:{target}"
    volumes = [word for path in _of_pip(into.place) for word in ("--volume", path)]
    options = ("--isolation", "chroot", "--pull-never", "--format", "docker", *volumes)
    into.run("bud", *options, "--file", DOCKERFILE, "--target", target, "--tag", name, ROOT)
    return name


def _have_base(into: Store) -> None:
    (name,) = set(re.findall(r"^FROM (\S+:\S+) AS", DOCKERFILE.read_text(), re.MULTILINE))
    if into.run("pull", f"docker.io/library/{name}", check=False).returncode == 0:
        return
    if shutil.which("mmdebstrap") is None:
        pytest.skip(f"needs the registry of {name}, or mmdebstrap to make the like of it")
    archive = into.place / "base.tar"
    words = ["mmdebstrap", "--variant=minbase", "--include=ca-certificates,python3,python3-venv", name.rpartition("-")[2], str(archive)]
    subprocess.run(words, check=True, capture_output=True)
    container = into.start("scratch")
    into.run("add", container, archive, "/")
    link = Path(into.run("mount", container).stdout.strip()) / "usr" / "local" / "bin" / "python"
    link.symlink_to("/usr/bin/python3")
    into.run("umount", container)
    into.run("commit", container, f"docker.io/library/{name}")


def _of_pip(place: Path) -> list[str]:
    """What is mounted so that pip finds its packages where this machine does."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True).stdout
    settings = dict(re.findall(r"^\S+?\.([\w-]+)='(.*)'$", listed, re.MULTILINE))
    file = configparser.RawConfigParser()
    file["global"] = {key: value for key, value in settings.items() if key in PIP_KEYS}
    with (place / "pip.conf").open("w") as written:
        file.write(written)
    named = {word.removeprefix("file://") for value in file["global"].values() for word in value.split()}
    paths = sorted(path for path in named if path.startswith("/") and Path(path).exists())
    return [f"{place}/pip.conf:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in _with_files_beside(paths))]


def _with_files_beside(paths: list[str]) -> list[str]:
    """An index in a folder refers to files in the folder around it."""
    return sorted({str(Path(path).parent) if Path(path).name == "simple" else path for path in paths})

"""A real disk of a few kilobytes, which a test can fill: the errors are the system's own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beside import beside

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which needs root")


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """The folder is a disk of that size inside the block."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def kept_full(folder: Path) -> Iterator[None]:
    """What others free on the folder's disk inside the block is taken at once."""

    def take(ended: threading.Event) -> None:
        with (folder / "ballast").open("wb", buffering=0) as file:
            while not ended.wait(0.005):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(4096))

    try:
        with beside(take):
            yield
    finally:
        (folder / "ballast").unlink()


def fill(folder: Path) -> Path:
    """Take all that is free on the folder's disk. Removing the file that is returned frees it."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


def set_read_only(folder: Path, yes: bool) -> None:
    subprocess.run(["mount", "-o", f"remount,{'ro' if yes else 'rw'}", str(folder)], check=True)

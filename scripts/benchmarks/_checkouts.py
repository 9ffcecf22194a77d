"""Daemons of another checkout of the project, which take turns with those of this one: the ratio shows the effect of the changes.

Only the daemons and commands that a benchmark starts are the other checkout's. The benchmark itself is this one's, and reads both
in the same way: by control socket, log and table.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peerd.cli.demo_daemons import Placement
from peerd.errors import UsageError
from scripts.benchmarks._report import Row, paired_interval, paired_ratio

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Checkout:
    """A folder with the project's code; `suffix` tells its rows from those of this checkout, whose suffix is empty."""

    folder: Path = ROOT
    suffix: str = ""

    @property
    def command(self) -> tuple[str, ...]:
        """The prefix that makes a Python command import this checkout's peerd.

        This checkout's folder follows, because a benchmark's own daemons may be newer than the other checkout.
        """
        return ("env", f"PYTHONPATH={self.folder}{os.pathsep}{ROOT}")

    def place(self, _peer: int) -> Placement:
        return Placement(command=self.command)


def add_rounds(parser: argparse.ArgumentParser, rounds: str) -> None:
    """Declare the number of rounds. If two checkouts take turns, a round is a pair."""
    parser.add_argument("--rounds", "--pairs", type=int, default=5, metavar="N", dest="rounds", help=f"{rounds} (default 5)")


def add_options(parser: argparse.ArgumentParser, rounds: str) -> None:
    """Declare the number of rounds and the other checkout."""
    add_rounds(parser, rounds)
    parser.add_argument(
        "--against",
        default="",
        metavar="PATH_OR_COMMIT",
        help="another checkout of the project, or a commit, that takes turns with this one",
    )


@contextlib.contextmanager
def checkouts(against: str) -> Iterator[tuple[Checkout, ...]]:
    """This checkout, and the one that `against` names, if any. A commit is unpacked into a temporary folder."""
    if not against:
        yield (Checkout(),)
        return
    suffix = f" at {against}"
    if (Path(against) / "peerd").is_dir():
        yield (Checkout(), Checkout(Path(against).resolve(), suffix))
        return
    archive = subprocess.run(["git", "-C", ROOT, "archive", "--format=tar", against], capture_output=True, check=False)
    if archive.returncode:
        raise UsageError(
            f"--against {against}: neither a checkout's folder nor a commit: {archive.stderr.decode(errors='replace').strip()}"
        )
    with tempfile.TemporaryDirectory(prefix="peerd-bench-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        yield (Checkout(), Checkout(Path(folder), suffix))


def rows_against(ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]], suffix: str) -> Iterator[Row]:
    """Each of this checkout's figures with its ratio to the other's, pair by pair, and the other's below it."""
    for name, seconds in ours.items():
        yield Row(
            name=name,
            median=statistics.median(seconds),
            ratio=paired_ratio(theirs[name], seconds),
            interval=paired_interval(theirs[name], seconds),
            baseline=suffix.strip(),
        )
        yield Row(name=name + suffix, median=statistics.median(theirs[name]))

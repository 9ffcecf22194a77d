"""Brings the pretend device into a process of its own, such as a daemon: torch starts what says `torch.backends` on the path of modules.

https://pytorch.org/tutorials/unstable/python_extension_autoload.html
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
OTHERS = "PRETEND_OTHERS"
"""The environment variable that names a file with the bytes that other processes take of the device's memory."""


def start() -> None:
    from tests.pretend import METERS

    for meter in METERS:
        meter.others_file = os.environ.get(OTHERS, "")


def environment(others: Path) -> dict[str, str]:
    """For a process that has the device, whose memory others take as this file says."""
    path = [str(ROOT), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), OTHERS: str(others)}

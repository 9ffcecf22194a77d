"""Whether this machine has a GPU, and what is taken of its memory.

The card is not opened in this process: a daemon that is forked from it could not open it then.
"""

from __future__ import annotations

import contextlib

import pytest


def used_bytes() -> int | None:
    """Memory of the first NVIDIA GPU that all processes take together; None where there is none."""
    with contextlib.suppress(Exception):  # no library, no driver, no card
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    return None


NEEDS_GPU = pytest.mark.skipif(used_bytes() is None, reason="no NVIDIA GPU, or not the extra `gpu`")

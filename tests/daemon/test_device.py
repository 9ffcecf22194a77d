"""What a device tells of itself: its memory and how busy it is, and nothing where it does not know."""

from __future__ import annotations

import psutil
import pytest
import torch

from peerd.daemon.device import memory_of, utilisation

CPU = torch.device("cpu")


def test_where_the_cpu_computes_the_devices_memory_is_the_machines() -> None:
    memory = memory_of(CPU)
    assert memory.total == psutil.virtual_memory().total
    assert 0 < memory.used < memory.total
    assert memory.held == 0


def test_a_cpu_tells_how_busy_it_is() -> None:
    told = utilisation(CPU)
    assert told is not None
    assert 0 <= told <= 1


def test_a_device_that_does_not_tell_is_not_idle_but_unknown() -> None:
    assert utilisation(torch.device("mps")) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_tells_what_this_process_holds_and_what_all_use() -> None:
    device = torch.device("cuda", 0)
    held = torch.zeros(1 << 20, device=device)
    memory = memory_of(device)
    assert held.nbytes <= memory.held <= memory.used < memory.total
    if (busy := utilisation(device)) is not None:
        assert 0 <= busy <= 1

"""What a device tells of itself: its memory and how busy it is, and nothing where it does not know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from peerd.checkup.device.kernels import attention_kernel
from peerd.config.manifest import TrainConfig
from peerd.daemon.device import lacks, memory_of, utilisation
from peerd.daemon.thread_stacks import give_back_stacks, take_stacks
from peerd.stage.precision import set_products
from tests.pretend.life import PRETEND

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


def test_a_card_without_bfloat16_is_told_where_a_run_computes_in_it() -> None:
    old = torch.device("pretend", 1)
    assert lacks(old, "bfloat16") == "Pretend GPU 1 computes no bfloat16 by itself: torch imitates it, slowly"
    assert lacks(old, "float16") == lacks(PRETEND, "bfloat16") == lacks(CPU, "bfloat16") == ""


def test_products_are_in_tf32_only_where_a_run_says_so() -> None:
    try:
        set_products(TrainConfig(precision="tf32"))
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", True)
    finally:
        set_products(TrainConfig())
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("highest", False)


def test_the_kernel_of_attention_is_named() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert attention_kernel(CPU, torch.float32) == "plain"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert attention_kernel(CPU, torch.float32) == "flash"


SILENT_NVML = """
class NVMLError(Exception): pass
class NVMLError_DriverNotLoaded(NVMLError): pass
def nvmlInit(): pass
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUtilizationRates(handle): raise NVMLError("Not Supported")
"""


def test_a_gpu_whose_driver_says_not_supported_is_unknown_too(tmp_path: Path) -> None:
    """With a library of NVIDIA's that answers as it does on a virtual GPU or an old one."""
    (tmp_path / "pynvml.py").write_text(SILENT_NVML)
    asks = "import torch; from peerd.daemon.device import utilisation; print(utilisation(torch.device('cuda', 0)))"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    told = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    assert (told.stdout, told.stderr) == ("None\n", "")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_tells_what_this_process_holds_and_what_all_use() -> None:
    device = torch.device("cuda", 0)
    held = torch.zeros(1 << 20, device=device)
    memory = memory_of(device)
    assert held.nbytes <= memory.held <= memory.used < memory.total
    if (busy := utilisation(device)) is not None:
        assert 0 <= busy <= 1


@pytest.mark.parametrize("device", [CPU, PRETEND], ids=str)
def test_where_no_driver_keeps_stacks_a_pause_gives_none_back(device: torch.device) -> None:
    give_back_stacks(device)
    take_stacks(device)

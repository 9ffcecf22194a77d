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
from peerd.checkup.here import device as examine
from peerd.config.manifest import TrainConfig
from peerd.daemon.device import choose_device, has_kernels, lacks, memory_of, utilisation
from peerd.daemon.thread_stacks import give_back_stacks, take_stacks
from peerd.errors import UsageError
from peerd.stage.precision import set_products
from peerd.stage.shortage import empty_cache
from tests.pretend.life import PRETEND

CPU = torch.device("cpu")


def test_where_the_cpu_computes_the_devices_memory_is_the_machines() -> None:
    memory = memory_of(CPU)
    assert memory.total == psutil.virtual_memory().total
    assert 0 < memory.used < memory.total
    assert memory.held == 0


def test_the_number_of_a_processor_only_tells_daemons_apart() -> None:
    assert choose_device("cpu:1") == choose_device("cpu") == torch.device("cpu")


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


@pytest.mark.parametrize("is_old", [False, True])
def test_what_an_nvidia_gpu_gives_back_includes_the_machines_memory_that_was_pinned(monkeypatch: pytest.MonkeyPatch, is_old: bool) -> None:
    emptied: list[str] = []
    if is_old:  # torch 2.6 to 2.9
        monkeypatch.delattr(torch.accelerator, "empty_host_cache", raising=False)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: emptied.append("host"), raising=False)
    else:
        monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: emptied.append("host"), raising=False)
    for each in (torch.device("cuda"), CPU, PRETEND):
        empty_cache(each)
    assert emptied == ["host"]


def test_apples_gpu_has_bfloat16_from_macos_14_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: (major, minor) <= (13, 3))
    assert lacks(torch.device("mps"), "bfloat16") == "Apple's GPUs compute no bfloat16 before macOS 14"
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: (major, minor) <= (14, 5))
    assert lacks(torch.device("mps"), "bfloat16") == ""


@pytest.mark.parametrize(
    ("built_for", "kind", "has"),
    [
        (["sm_75", "sm_80", "sm_86", "sm_90"], "sm_86", True),
        (["sm_75", "sm_80", "sm_90"], "sm_89", True),  # RTX 4090, by sm_80
        (["sm_75", "sm_80", "sm_86", "sm_90"], "sm_61", False),  # GTX 1080
        (["sm_75", "sm_80", "sm_86", "sm_90"], "sm_120", False),  # RTX 5090 with an older torch
        (["sm_90", "sm_100", "sm_120"], "sm_120", True),
        (["sm_100"], "sm_103", True),
        (["sm_86"], "sm_80", False),
        (["sm_90a"], "sm_100", False),
        (["sm_100a"], "sm_103", False),
        (["sm_75", "compute_90"], "sm_120", True),
        (["sm_75", "compute_90"], "sm_61", False),
        (["gfx906", "gfx1030"], "gfx1030", True),
        (["gfx906", "gfx1030"], "gfx1031", False),
        ([], "sm_61", True),
    ],
)
def test_a_build_of_torch_computes_on_the_cards_that_it_has_kernels_for(built_for: list[str], kind: str, has: bool) -> None:
    assert has_kernels(built_for, kind) is has


@pytest.fixture
def gtx_1080(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the pretend devices cards that this torch has no kernels for."""
    for name, answer in (("get_arch_list", ["sm_75", "sm_80"]), ("get_device_capability", (6, 1))):
        monkeypatch.setattr(torch.pretend, name, lambda *_given, answer=answer: answer, raising=False)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("gtx_1080")
def test_a_card_without_kernels_is_told_in_one_sentence_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"GPU 0 is of the kind sm_61, and this torch .* has kernels for sm_75, sm_80 only") as told:
        choose_device("pretend")
    assert "--device cpu" in told.value.remedy
    (finding,) = examine("pretend")
    assert (finding.verdict, "sm_61" in finding.title, "--device cpu" in finding.remedy) == ("problem", True, True)


def test_a_checkup_that_made_one_product_says_how_to_test_the_whole_device() -> None:
    assert [finding.title for finding in examine("cpu")] == ["CPU (cpu) computes"]
    (finding,) = examine("pretend:0")
    assert finding.title.endswith("; this was one product, `peerd doctor --device pretend:0` tests all of it")


@pytest.mark.usefixtures("gtx_1080")
def test_a_card_without_kernels_is_left_out_where_the_device_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerd.daemon.device._cards", lambda: [PRETEND])
    assert choose_device("auto") == CPU
    left, chosen = examine("auto")
    assert (left.verdict, chosen.verdict) == ("warning", "ok")
    assert "a GPU is left out: Pretend GPU 0" in left.title


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

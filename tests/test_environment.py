"""scripts/environment: which build of PyTorch a machine gets, by the GPUs that it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "environment"
AMD = {"rx 7900": 110000, "rx 6800": 100300, "mi250": 90010}

pytestmark = pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="AMD's builds are for Linux on x86-64")


class Machine:
    """A machine with these AMD GPUs, by the numbers of the kernel's driver, and an NVIDIA one or none."""

    def __init__(self, folder: Path, *amd: int, has_nvidia: bool = False) -> None:
        self.folder = folder
        for number, target in enumerate((0, *amd)):
            node = folder / "nodes" / str(number)
            node.mkdir(parents=True)
            (node / "properties").write_text(f"cpu_cores_count 16\ngfx_target_version {target}\n")
        if amd:
            (folder / "kfd").touch()
        (folder / "bin").mkdir()
        if has_nvidia:
            smi = folder / "bin" / "nvidia-smi"
            smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA GeForce RTX 3060'\n")
            smi.chmod(0o755)

    def runs(self, command: str, torch: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command of the script on this machine."""
        folder = self.folder
        here = f"source {SCRIPT}; kfd={folder}/kfd; kfd_nodes={folder}/nodes; venv={folder}/venv; {command}"
        environment = {**os.environ, "PATH": f"{folder}/bin:/usr/bin:/bin", "PEERD_TORCH": torch}
        return subprocess.run(["bash", "-c", here], env=environment, capture_output=True, text=True, check=False, timeout=60)

    def build(self, torch: str = "") -> str:
        return self.runs("chosen_build", torch).stdout

    def install(self, torch: str) -> str:
        """What pip would be told, on a machine without PyTorch."""
        return self.runs(f"pip_install() {{ printf '%s ' \"$@\"; }}; has_torch() {{ false; }}; install_torch {torch}").stdout


@pytest.mark.parametrize("target", AMD.values(), ids=AMD)
def test_an_amd_gpu_gets_the_build_for_rocm(tmp_path: Path, target: int) -> None:
    assert Machine(tmp_path, target).build() == "rocm"


@pytest.mark.parametrize(("amd", "has_nvidia", "build"), [((), False, "cpu"), ((), True, "cuda"), ((110000,), True, "cuda")])
def test_an_nvidia_gpu_comes_first_and_no_gpu_means_the_small_build(
    tmp_path: Path, amd: tuple[int, ...], has_nvidia: bool, build: str
) -> None:
    assert Machine(tmp_path, *amd, has_nvidia=has_nvidia).build() == build


def test_graphics_of_a_processor_for_which_there_is_no_code_does_not_count(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 90012)
    assert machine.build() == "cpu"
    assert machine.build("rocm") == "rocm", "its owner may know better"


@pytest.mark.skipif(os.getuid() == 0, reason="root may open everything")
def test_a_gpu_that_the_user_may_not_open_is_told(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 110000)
    (tmp_path / "kfd").chmod(0)
    told = machine.runs("chosen_build")
    assert told.stdout == "cpu"
    assert "join the groups render and video" in told.stderr


def test_another_build_is_refused(tmp_path: Path) -> None:
    told = Machine(tmp_path).runs("chosen_build", "metal")
    assert told.returncode == 1
    assert "PEERD_TORCH is 'metal'; it must be cpu, cuda or rocm" in told.stderr


def test_the_build_for_rocm_comes_from_its_own_index_with_the_pinned_version(tmp_path: Path) -> None:
    pin = next(line for line in (SCRIPT.parent / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    assert Machine(tmp_path).install("rocm").split()[-3:] == [
        "--extra-index-url",
        "https://download.pytorch.org/whl/rocm7.2",
        f"{pin}+rocm7.2",
    ]
    assert "rocm" not in Machine(tmp_path / "other").install("cuda")


def test_what_is_installed_is_compiled_but_for_tests_and_the_many_models_of_a_library(tmp_path: Path) -> None:
    packages = tmp_path / "venv" / "lib" / "python3" / "site-packages"
    for module in ("torch/nn/module", "torch/tests/module", "transformers/utils", "transformers/models/one/module", "models/module"):
        source = packages / f"{module}.py"
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text("NUMBER = 1\n")
    (packages / "broken.py").write_text("print 1\n")
    (tmp_path / "venv" / "bin").mkdir()
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)
    told = Machine(tmp_path).runs("set -e; compile_all")
    assert (told.returncode, told.stdout, told.stderr) == (0, "", "")
    compiled = {str(path.parent.parent.relative_to(packages)) for path in packages.rglob("*.pyc")}
    assert compiled == {"torch/nn", "transformers", "models"}


@pytest.mark.parametrize(
    ("installed", "fits"),
    [
        ("+rocm7.2", {"rocm", "cpu"}),
        ("+cu130", {"cuda", "cpu"}),
        ("", {"cuda", "cpu"}),
        ("+cpu", {"cpu"}),
        (".post1", set()),
    ],
)
def test_what_is_installed_is_kept_where_it_is_the_wanted_build(tmp_path: Path, installed: str, fits: set[str]) -> None:
    machine = Machine(tmp_path)
    packages = tmp_path / "packages"
    version = machine.runs("printf %s $torch_version").stdout
    (packages / "torch.dist-info").mkdir(parents=True)
    (packages / "torch.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}{installed}\n")
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    assert {build for build in ("cpu", "cuda", "rocm") if machine.runs(f"has_torch {build}").returncode == 0} == fits


def test_an_installation_says_how_much_has_come_and_how_long_it_takes(tmp_path: Path) -> None:
    counted = f'eval "$(declare -f venv_mb | sed s/venv_mb/real_mb/)"; venv_mb() {{ echo >>{tmp_path}/looks; real_mb; }}'
    often = 'eval "$(declare -f tell_progress | sed s/every=20/every=1/)"'
    until = f"until [[ $(wc -l <{tmp_path}/looks) -ge 3 ]]; do sleep 0.1; done"
    installs = f"install() {{ mkdir -p $venv; head -c 3000000 /dev/zero >$venv/it; {until}; echo installed; echo a remark >&2; }}"
    fails = "with_progress quietly false || echo failed"
    told = Machine(tmp_path).runs(f"set -euo pipefail; {counted}; {often}; {installs}; with_progress install; {fails}")
    assert (told.returncode, told.stdout) == (0, "installed\nfailed\n")
    lines = told.stderr.splitlines()
    assert re.fullmatch(r"peerd: 3 MB so far, \d+ s", lines[0])
    assert "a remark" in lines
    assert re.fullmatch(r"peerd: 3 MB in \d+ s", lines[-1])
    assert "Terminated" not in told.stderr

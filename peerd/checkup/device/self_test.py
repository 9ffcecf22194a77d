"""`peerd doctor --device`: tests a device part by part, and names the part that is broken."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from peerd.checkup.device import codecs, kernels, life, measures
from peerd.daemon.device import choose_device, describe, give_back_memory, lacks, memory_of
from peerd.errors import PeerdError
from peerd.owner.sensors import gpu_temperature
from peerd.policy.swarm.checkup import Finding, ok, problem, warning
from peerd.stage.precision import set_products
from peerd.transfers import has_own_memory

REMEDY = "update the driver and torch, rule out overclocking and faulty memory; until then use another --device"
NOT_THERE = "join runs that do without it, or use another --device: torch cannot do this on this one"
OF_PRECISION = "join runs of another precision, or use another --device; cards before NVIDIA's Ampere compute no bfloat16"
HOT_DEGREES = 83.0
"""Where NVIDIA's cards for gamers begin to slow down, in degrees Celsius."""
MUCH_S = 60.0
"""A self-test that takes longer is of a device that is too slow to be of use."""


Begins = Callable[[str], None]
"""Told of each part when it begins."""


def examine(wanted: str, begins: Begins = lambda _part: None) -> Iterator[Finding]:
    """Test the device: about a minute."""
    try:
        device = choose_device(wanted)
    except PeerdError as error:
        yield problem("device", error.message, error.remedy)
        return
    began_s, before = time.monotonic(), memory_of(device)
    yield ok("device", f"{describe(device)} ({device}), torch {torch.__version__}{_rocm()}, {platform.platform(terse=True)}")
    yield from parts("codec", codecs.CHECKS, device, begins)
    yield from parts("kernel", kernels.CHECKS, device, begins)
    for name, section in (
        ("attention", _attention(device)),
        ("stage", _lives(device, begins)),
        ("memory", _memory(device, before.held)),
        ("speed", _speed(device)),
        ("heat", _heat(device)),
    ):
        begins(name)
        try:
            yield from section
        except Exception as error:  # a device breaks in many ways, and telling of it is what the test is for
            yield _failed(name, error)
    took_s = time.monotonic() - began_s
    if took_s > MUCH_S:
        yield warning("self-test", f"took {took_s:.0f} s", "this device may be too slow to be of use, or busy with other work")
    else:
        yield ok("self-test", f"took {took_s:.0f} s")


def parts(what: str, checks: Mapping[str, Callable[[torch.device], str]], device: torch.device, begins: Begins) -> Iterator[Finding]:
    """Make each check, which says what is wrong, in words."""
    for name, check in checks.items():
        code = f"{what} {name}"
        begins(code)
        try:
            fault = check(device)
        except Exception as error:
            yield _failed(code, error)
            continue
        yield problem(code, fault, REMEDY) if fault else ok(code, "right")


def _failed(code: str, error: Exception) -> Finding:
    return problem(code, f"fails: {_said(error)}", NOT_THERE if isinstance(error, NotImplementedError) else REMEDY)


def _attention(device: torch.device) -> Iterator[Finding]:
    """The kernel that torch chooses for attention. The plain one holds the scores of all pairs of tokens, and so takes memory and time."""
    lack = lacks(device, "bfloat16")
    chosen = {name: kernels.attention_kernel(device, getattr(torch, name)) for name in ("float32", "bfloat16", "float16")}
    told = ", ".join(f"{name} {kernel}" for name, kernel in chosen.items()) + (f"; {lack}" if lack else "")
    if device.type == "cuda" and chosen["bfloat16" if not lack else "float16"] == kernels.PLAIN:
        yield warning("attention", told, "this card has no fast kernel for attention: long sequences take much memory and time")
    else:
        yield ok("attention", told)


def _lives(device: torch.device, begins: Begins) -> Iterator[Finding]:
    """Each precision, on the device and in float32 on the processor."""
    exact = life.manifest_of("float32")
    expected = life.live(exact, torch.device("cpu"), keep_graph=False)
    for precision in life.TOLERANCES:
        code = f"stage {precision}"
        begins(code)
        try:
            found = life.live(life.manifest_of(precision), device, keep_graph=True)
        except Exception as error:
            yield problem(code, f"fails: {_said(error)}", OF_PRECISION)
            continue
        finally:
            set_products(exact.train)
        fault = life.fault(found, expected, precision)
        last = f"loss {found.losses[-1]:.4f}, on the processor {expected.losses[-1]:.4f}, in {found.took_s:.1f} s"
        yield problem(code, fault, REMEDY) if fault else ok(code, last)


def _memory(device: torch.device, before: int) -> Iterator[Finding]:
    if not has_own_memory(device):
        yield ok("memory", "the device uses the machine's memory")
        return
    left = give_back_memory(device) - before
    total = memory_of(device).total
    if left > measures.SLACK_BYTES:
        yield problem(
            "memory", f"{left / 1e6:.0f} MB stay held after everything was released", "please report it: a pause must give it back"
        )
    else:
        yield ok("memory", f"{total / 1e9:.1f} GB, and a stage that is left gives back all but {max(left, 0) / 1e6:.0f} MB")


def _speed(device: torch.device) -> Iterator[Finding]:
    try:
        told = [
            f"{name} {measures.flops(device, dtype) / 1e12:.3g}"
            for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
        ]
        yield ok("speed", f"TFLOP/s of matrix products: {', '.join(told)}; memory {measures.memory_rate(device) / 1e9:.3g} GB/s")
        if device.type == "cpu":
            return
        there, back = measures.copy_rates(device)
        yield ok("copies", f"{there / 1e9:.3g} GB/s to the device, {back / 1e9:.3g} GB/s from it")
    except Exception as error:
        yield problem("speed", f"could not be measured: {_said(error)}", REMEDY)


def _heat(device: torch.device) -> Iterator[Finding]:
    degrees = gpu_temperature(device)
    if degrees is None:
        yield ok("heat", "this device does not tell its temperature")
    elif degrees < HOT_DEGREES:
        yield ok("heat", f"{degrees:.0f} degrees Celsius after this test")
    else:
        remedy = "`peerd limits --max-temperature` pauses a peer above a temperature, `--power` and `--duty` keep it below"
        yield warning("heat", f"{degrees:.0f} degrees Celsius after this short test: it may slow itself down", remedy)


def _rocm() -> str:
    """AMD's GPUs have the names of NVIDIA's in torch; its version says which build it is."""
    return f" for ROCm {torch.version.hip}" if torch.version.hip else ""


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]

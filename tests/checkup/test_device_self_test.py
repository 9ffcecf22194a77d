"""The self-test of a device: it passes on a sound one, and names the part that was broken on purpose."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from peerd.checkup.device import codecs, kernels, life
from peerd.checkup.device.self_test import examine, parts
from peerd.checkup.doctor import examine as checkup
from peerd.checkup.here import Order
from peerd.config.codec import EXAMPLES
from peerd.policy.swarm.checkup import Verdict
from peerd.wire import codecs as wire_codecs
from tests.life import CPU
from tests.pretend import METERS
from tests.pretend.life import PRETEND

BLOCKWISE = ("int8", "int6", "int5", "int4")


def broken(checks: dict[str, Callable[[torch.device], str]], device: torch.device = CPU) -> list[str]:
    """The names of the checks that find something wrong."""
    found = parts("", checks, device, lambda _part: None)
    return [finding.code.strip() for finding in found if finding.verdict is Verdict.PROBLEM]


@pytest.mark.parametrize("device", [CPU, PRETEND], ids=str)
def test_a_sound_device_passes_every_codec_and_kernel(device: torch.device) -> None:
    assert broken(codecs.CHECKS, device) == []
    assert broken(kernels.CHECKS, device) == []


def test_a_whole_self_test_tells_each_part_and_leaves_nothing_on_the_device() -> None:
    gc.collect()
    before = METERS[0].allocated
    findings = checkup(Order(home="/nowhere", device="pretend", self_test=True))
    assert [finding for finding in findings if finding.verdict is Verdict.PROBLEM] == []
    told = {finding.code for finding in findings}
    assert {f"codec {example}" for example in EXAMPLES} <= told
    assert torch.get_float32_matmul_precision() == "highest"
    assert {"attention", "stage float32", "stage tf32", "stage bfloat16", "stage float16", "memory", "speed", "copies", "heat"} <= told
    gc.collect()
    assert METERS[0].allocated == before


@pytest.mark.parametrize(
    ("name", "spoil", "hits"),
    [
        ("_quantise_rows", lambda rows, scales, codes, largest: codes.add_(1), BLOCKWISE),
        ("_quantise_rows", lambda rows, scales, codes, largest: scales.mul_(1.05), BLOCKWISE),
    ],
    ids=["a code is off by one", "a scale is too large"],
)
def test_a_codec_that_is_off_is_named(monkeypatch: pytest.MonkeyPatch, name: str, spoil: Callable[..., Any], hits: tuple[str, ...]) -> None:
    right = getattr(wire_codecs, name)

    def wrong(*given: Any) -> None:
        right(*given)
        spoil(*given)

    monkeypatch.setattr(wire_codecs, name, wrong)
    assert broken(codecs.CHECKS) == list(hits)


def test_a_codec_that_keeps_other_numbers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = wire_codecs._keep_largest
    monkeypatch.setattr(wire_codecs, "_keep_largest", lambda codec, values: right(codec, values.roll(1)))
    assert broken(codecs.CHECKS) == ["topk:0.1"]


def test_a_codec_that_decodes_otherwise_on_the_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = wire_codecs._widened

    def wrong(data: Tensor, length: int, bits: int) -> Tensor:
        found = right(data, length, bits)
        return found if data.device.type == "cpu" else found.roll(1)

    monkeypatch.setattr(wire_codecs, "_widened", wrong)
    assert broken(codecs.CHECKS, PRETEND) == ["int6", "int5", "int4"]


@pytest.mark.parametrize(
    ("place", "name", "hits"),
    [
        ("torch.nn.functional", "softmax", ["softmax"]),
        ("torch.nn.functional", "layer_norm", ["layer norm"]),
        ("torch.nn.functional", "gelu", ["gelu"]),
        ("torch.nn.functional", "scaled_dot_product_attention", ["attention"]),
        ("torch.nn.functional", "cross_entropy", ["cross entropy"]),
    ],
)
def test_a_kernel_that_is_slightly_wrong_is_named(monkeypatch: pytest.MonkeyPatch, place: str, name: str, hits: list[str]) -> None:
    right = getattr(torch.nn.functional, name)
    monkeypatch.setattr(f"{place}.{name}", lambda *given, **how: right(*given, **how) * 1.0005)
    assert broken(kernels.CHECKS) == hits


def test_a_stage_whose_numbers_are_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = life.manifest_of("float32")
    expected = life.live(run, CPU, keep_graph=False)
    assert life.fault(life.live(run, CPU, keep_graph=True), expected, "float32") == ""
    right = torch.nn.functional.gelu
    monkeypatch.setattr("torch.nn.functional.gelu", lambda given: right(given) * 1.01)
    assert "in place of" in life.fault(life.live(run, CPU, keep_graph=False), expected, "float32")


def test_a_device_that_is_not_there_is_told() -> None:
    assert [finding.verdict for finding in examine("cuda:77")] == [Verdict.PROBLEM]


def test_an_operation_that_the_device_lacks_is_told_by_the_codec_and_the_kernel_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are tested all the same."""

    def lacking(*_given: Any, **_how: Any) -> None:
        raise NotImplementedError("The operator 'aten::topk' is not currently implemented for the MPS device")

    monkeypatch.setattr(wire_codecs, "_keep_largest", lacking)
    monkeypatch.setattr("torch.nn.functional.gelu", lacking)
    assert broken(codecs.CHECKS) == ["topk:0.1"]
    assert broken(kernels.CHECKS) == ["gelu"]
    (finding,) = parts("codec", {"topk:0.1": codecs.CHECKS["topk:0.1"]}, CPU, lambda _part: None)
    assert finding.title.startswith("fails: NotImplementedError: The operator 'aten::topk'")
    assert "runs that do without it" in finding.remedy


@pytest.mark.parametrize(("broken_part", "place"), [("stage", "life.live"), ("memory", "give_back_memory"), ("attention", "lacks")])
def test_a_section_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, broken_part: str, place: str) -> None:
    def failing(*_given: Any, **_how: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("peerd.checkup.device.self_test.codecs.CHECKS", {})
    monkeypatch.setattr("peerd.checkup.device.self_test.measures.flops", lambda *_given: 1e12)
    monkeypatch.setattr("peerd.checkup.device.self_test.measures.memory_rate", lambda *_given: 1e9)
    monkeypatch.setattr("peerd.checkup.device.self_test.measures.copy_rates", lambda *_given: (1e9, 1e9))
    if broken_part != "stage":
        monkeypatch.setattr("peerd.checkup.device.self_test.life.TOLERANCES", {})
        monkeypatch.setattr("peerd.checkup.device.self_test.life.live", lambda *_given, **_how: None)
    monkeypatch.setattr(f"peerd.checkup.device.self_test.{place}", failing)
    begun: list[str] = []
    findings = [*examine("pretend", begun.append)]
    assert [finding.code for finding in findings if finding.verdict is Verdict.PROBLEM] == [broken_part]
    assert findings[-1].code == "self-test"
    assert begun[-5:] == ["attention", "stage", "memory", "speed", "heat"]


def test_a_device_without_a_type_of_number_has_no_kernel_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(*_given: Any, **_how: Any) -> None:
        raise TypeError("BFloat16 is not supported on MPS")

    monkeypatch.setattr(torch, "zeros", zeros)
    assert kernels.attention_kernel(CPU, torch.bfloat16) == "unknown"

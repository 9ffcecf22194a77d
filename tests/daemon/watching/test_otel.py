"""One microbatch's way as a trace: who begins it, what joins it, and that nobody is disturbed by it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from peerd.daemon.watching.otel import MicrobatchTraces, sampled_of
from peerd.errors import BadMessageError, PeerGoneError
from peerd.generated import stage_pb2
from peerd.observe.otel import Tracer, tracer
from peerd.table.record import PeerId
from peerd.timeline.spans import SpanKind, SpanRing
from peerd.wire.convert import call_from, call_to
from peerd.wire.messages import Call, TensorBytes
from tests.observe.collector import collecting

TOKENS = TensorBytes("int32", (2, 4), ())


def call_of(**changes: object) -> Call:
    sound = Call(call_id=bytes(16), stage=0, step=3, index=3, accumulate=frozenset({0, 1}), inputs=TOKENS, labels=TOKENS)
    return replace(sound, **changes)  # type: ignore[arg-type]


def traces_of(exporter: SpanExporter, peer: str = "a", **provider: object) -> tuple[MicrobatchTraces, SpanRing]:
    """A daemon of paper that exports there."""
    made = TracerProvider(shutdown_on_exit=False, **provider)  # type: ignore[arg-type]
    made.add_span_processor(SimpleSpanProcessor(exporter))
    return paper_daemon(Tracer(made), peer)


def paper_daemon(tracer: Tracer, peer: str) -> tuple[MicrobatchTraces, SpanRing]:
    ring = SpanRing()
    traces = MicrobatchTraces(ring, PeerId(peer), 8)
    traces.begin(tracer)
    return traces, ring


def over_the_wire(call: Call) -> Call:
    header = stage_pb2.CallHeader.FromString(call_to(call, "run", ()).SerializeToString())
    return call_from(header)


def by_name(spans: Sequence[ReadableSpan]) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans}


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def test_the_spans_of_three_daemons_join_into_one_trace() -> None:
    exporters = [InMemorySpanExporter() for _ in range(3)]
    (trainer, _), (first, ring), (last, last_ring) = (traces_of(each, peer) for each, peer in zip(exporters, "tab", strict=True))
    with trainer.launched(call_of()) as launched, first.served(over_the_wire(launched)) as served:
        ring.add(SpanKind.FORWARD, time.monotonic(), 3, 3)
        onward = replace(served, stage=1, inputs=TensorBytes("float32", (2, 4, 8), ()))
        with last.served(over_the_wire(onward)):
            last_ring.add(SpanKind.BACKWARD, time.monotonic(), 3, 3)
            last_ring.add(SpanKind.BACKWARD, time.monotonic(), 3, 4)  # another microbatch's
        ring.add(SpanKind.BELOW, time.monotonic() - 60, 3, 3, "b", 5)  # began before this one was taken

    (root,) = exporters[0].get_finished_spans()
    upper, lower = (by_name(exporter.get_finished_spans()) for exporter in exporters[1:])
    assert set(upper) == {"stage 0", "forward"}
    assert set(lower) == {"stage 1", "backward"}
    every = [root, *upper.values(), *lower.values()]
    assert len({span.context.trace_id for span in every}) == 1
    assert root.parent is None
    assert parent_of(upper["stage 0"]) == root.context.span_id
    assert parent_of(upper["forward"]) == parent_of(lower["stage 1"]) == upper["stage 0"].context.span_id
    assert parent_of(lower["backward"]) == lower["stage 1"].context.span_id
    assert dict(lower["stage 1"].attributes or {}) == {"peerd.step": 3, "peerd.microbatch": 3, "peerd.stage": 1, "peerd.peer": "b"}
    forward, stage = upper["forward"], upper["stage 0"]
    assert forward.start_time is not None
    assert stage.start_time is not None
    assert abs(forward.start_time - stage.start_time) < 1e9  # on the wall clock, though noted on another


def test_a_collector_gets_one_trace_from_all_daemons_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over OTLP, as daemons send it: the environment's endpoint, real exporters, real HTTP."""
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        tracers = [tracer(peer, "run") for peer in "tab"]
        trainer, first, last = (paper_daemon(each, peer)[0] for each, peer in zip(tracers, "tab", strict=True))
        for step in (3, 4):
            with (
                trainer.launched(call_of(step=step, index=step)) as launched,
                first.served(over_the_wire(launched)) as served,
                last.served(over_the_wire(replace(served, stage=1))),
            ):
                pass
        for each in tracers:
            assert each._provider.force_flush(20_000)
            each.close()
    assert len(collector.traces()) == 2
    for spans in collector.traces().values():
        found = {span.name: span for span in spans}
        assert {name: span.daemon for name, span in found.items()} == {"microbatch": "t", "stage 0": "a", "stage 1": "b"}
        assert found["microbatch"].parent == b""
        assert found["stage 0"].parent == found["microbatch"].id
        assert found["stage 1"].parent == found["stage 0"].id


def test_a_daemon_that_exports_nothing_passes_the_trace_on() -> None:
    exporter = InMemorySpanExporter()
    traces, _ = traces_of(exporter)
    with traces.launched(call_of()) as launched:
        passed_on = replace(over_the_wire(launched), stage=1)
        with traces.served(over_the_wire(passed_on)):
            pass
    spans = by_name(exporter.get_finished_spans())
    assert parent_of(spans["stage 1"]) == spans["microbatch"].context.span_id


@given(st.integers(0, 10**6), st.integers(1, 8192))
def test_of_each_step_one_microbatch_is_traced(step: int, per_step: int) -> None:
    assert 0 <= sampled_of(step, per_step) < per_step


def test_others_are_not_traced_and_neither_is_anything_that_came_without_a_trace() -> None:
    exporter = InMemorySpanExporter()
    traces, _ = traces_of(exporter)
    with traces.launched(call_of(index=4)) as launched, traces.served(launched) as served:
        assert served.trace == b""
    assert exporter.get_finished_spans() == ()


def test_what_the_sampler_leaves_out_does_not_travel() -> None:
    exporter = InMemorySpanExporter()
    traces, _ = traces_of(exporter, sampler=ALWAYS_OFF)
    with traces.launched(call_of()) as launched:
        assert launched.trace == b""
    assert exporter.get_finished_spans() == ()


def test_a_microbatch_that_fails_is_told_as_failed_and_fails_as_it_would_without() -> None:
    exporter = InMemorySpanExporter()
    traces, _ = traces_of(exporter)
    with pytest.raises(PeerGoneError, match="out of reach"), traces.launched(call_of()):
        raise PeerGoneError("out of reach")
    (span,) = exporter.get_finished_spans()
    assert not span.status.is_ok
    assert span.status.description == "out of reach"


class Broken(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise RuntimeError("no collector")


def test_an_exporter_that_breaks_disturbs_nobody() -> None:
    traces, _ = traces_of(Broken())
    with traces.launched(call_of()) as launched, traces.served(launched) as served:
        assert len(served.trace) == 24


def test_a_trace_context_that_cannot_be_is_refused() -> None:
    header = call_to(call_of(), "run", ())
    header.trace = bytes(23)
    with pytest.raises(BadMessageError, match="24 bytes"):
        call_from(header)


def test_an_exporter_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(ValueError, match="otlp, console, none"):
        tracer("a", "run")


def test_service_and_instance_are_named_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    for name in ("", "mine"):
        if name:
            monkeypatch.setenv("OTEL_SERVICE_NAME", name)
        found = tracer("12D3", "run")._provider.resource.attributes
        assert found["service.name"] == (name or "peerd")
        assert found["service.instance.id"] == "12D3"
        assert found["deployment.environment"] == "test"

"""OpenTelemetry: the path of a microbatch through the swarm as a trace. Loaded only with --otel.

OpenTelemetry's environment variables configure the export (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, ...);
OTEL_TRACES_EXPORTER is otlp (over HTTP), console (standard error) or none. A thread exports the spans and drops those it cannot send.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping

import structlog
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags, set_span_in_context
from opentelemetry.trace import Span as OpenSpan

from peerd.timeline.spans import Span

EXPORTERS = ("otlp", "console", "none")
CLOSE_WITHIN_S = 3.0
LOG = structlog.get_logger()
Attributes = Mapping[str, str | int]


class Tracer:
    """Makes spans and hands them to an exporter."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("peerd")

    @contextlib.contextmanager
    def root(self, name: str, attributes: Attributes) -> Iterator[bytes]:
        """Start a trace. Yields the context to send along; it is empty if the sampler does not record this trace."""
        span = self._tracer.start_span(name, attributes=attributes)
        with _ended(span):
            yield _packed(span)

    @contextlib.contextmanager
    def child(self, parent: bytes, name: str, attributes: Attributes) -> Iterator[tuple[bytes, OpenSpan]]:
        """Start a span in the trace of another peer. `parent` is the context that came with the request."""
        span = self._tracer.start_span(name, context=_context_of(parent), kind=SpanKind.SERVER, attributes=attributes)
        with _ended(span):
            yield _packed(span), span

    def add(self, parent: OpenSpan, spans: Iterable[Span]) -> None:
        """Add finished spans as children of `parent`."""
        offset_s = time.time() - time.monotonic()
        for done in spans:
            attributes: dict[str, str | int] = {"peerd.peer": done.peer, "peerd.bytes": done.num_bytes} if done.peer else {}
            name, began_ns = done.kind.name.lower().replace("_", " "), _ns(done.began_s + offset_s)
            span = self._tracer.start_span(name, context=set_span_in_context(parent), start_time=began_ns, attributes=attributes)
            span.end(_ns(done.ended_s + offset_s))

    def close(self) -> None:
        """Send the remaining spans, for at most CLOSE_WITHIN_S, so that an unreachable collector does not delay the daemon's end."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_WITHIN_S)


def tracer(peer: str, run: str) -> Tracer:
    """Create a tracer from the environment variables. ValueError for an unknown exporter."""
    _complain_once()
    attributes = {"service.instance.id": peer, "peerd.run": run}
    if "OTEL_SERVICE_NAME" not in os.environ:
        attributes["service.name"] = "peerd"
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    exporter = _exporter(os.environ.get("OTEL_TRACES_EXPORTER") or "otlp")
    if exporter is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(provider)


def _exporter(name: str) -> SpanExporter | None:
    match name:
        case "otlp":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            return OTLPSpanExporter()
        case "console":
            return ConsoleSpanExporter(out=sys.stderr, formatter=_line)
        case "none":
            return None
    raise ValueError(f"OTEL_TRACES_EXPORTER is {name!r}; it must be one of {', '.join(EXPORTERS)}")


def _line(span: ReadableSpan) -> str:
    return f"{span.to_json(indent=None)}\n"


@contextlib.contextmanager
def _ended(span: OpenSpan) -> Iterator[None]:
    """End the span in any case, with an error status if the block raises."""
    try:
        yield
    except BaseException as error:
        span.set_status(Status(StatusCode.ERROR, str(error) or type(error).__name__))
        raise
    finally:
        span.end()


def _packed(span: OpenSpan) -> bytes:
    context = span.get_span_context()
    return context.trace_id.to_bytes(16, "big") + context.span_id.to_bytes(8, "big") if context.trace_flags.sampled else b""


def _context_of(packed: bytes) -> Context:
    trace_id, span_id = int.from_bytes(packed[:16], "big"), int.from_bytes(packed[16:], "big")
    parent = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(parent))


def _ns(time_s: float) -> int:
    return int(time_s * 1e9)


class _Once(logging.Handler):
    """Logs OpenTelemetry's first warning as a warning and repetitions at DEBUG: it warns at every failed export."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said = False

    def emit(self, record: logging.LogRecord) -> None:
        tell = LOG.debug if self._said else LOG.warning
        self._said = True
        tell("OpenTelemetry cannot export", reason=record.getMessage()[:300])


def _complain_once() -> None:
    logger = logging.getLogger("opentelemetry")
    logger.propagate = False
    if not any(isinstance(handler, _Once) for handler in logger.handlers):
        logger.addHandler(_Once())

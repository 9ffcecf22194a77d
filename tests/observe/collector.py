"""A collector of OpenTelemetry's protocol (OTLP over HTTP) in the test's process, which keeps the spans it receives."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """A span, and the daemon that sent it."""

    daemon: str
    name: str
    trace: bytes
    id: bytes
    parent: bytes


@dataclass(slots=True)
class Collector:
    endpoint: str
    spans: list[CollectedSpan] = field(default_factory=list)

    def traces(self) -> dict[bytes, list[CollectedSpan]]:
        found: dict[bytes, list[CollectedSpan]] = {}
        for span in list(self.spans):
            found.setdefault(span.trace, []).append(span)
        return found

    def take(self, request: ExportTraceServiceRequest) -> None:
        for each in request.resource_spans:
            attributes = {attribute.key: attribute.value.string_value for attribute in each.resource.attributes}
            for scope in each.scope_spans:
                for span in scope.spans:
                    name = attributes["service.instance.id"]
                    self.spans.append(CollectedSpan(name, span.name, span.trace_id, span.span_id, span.parent_span_id))


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """`endpoint` is for OTEL_EXPORTER_OTLP_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            collector.take(ExportTraceServiceRequest.FromString(body))
            reply = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_arguments: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    serving = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    serving.start()
    try:
        yield collector
    finally:
        server.shutdown()
        serving.join()
        server.server_close()

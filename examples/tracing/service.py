"""A service with a span for each request, by OpenTelemetry, whose parent is the caller's span:

    service.py NAME FILE

It replies with the request in capitals. Its spans go to FILE, as OTLP in JSON, one export a line. SIGTERM drains it.
"""

import json
import signal
import sys
from collections.abc import Sequence

import pelton
from opentelemetry import trace
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult


class Exporter(SpanExporter):
    """Writes spans to a file, as OTLP in JSON. A program that has a collector takes OTLPSpanExporter instead."""

    def __init__(self, path: str) -> None:
        self.out = open(path, "a")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        listed = []
        for span in spans:
            one = {
                "traceId": trace.format_trace_id(span.context.trace_id),
                "spanId": trace.format_span_id(span.context.span_id),
                "name": span.name,
                # OTLP has 0 for none given.
                "kind": span.kind.value + 1,
                "startTimeUnixNano": str(span.start_time),
                "endTimeUnixNano": str(span.end_time),
            }
            if span.parent is not None:
                one["parentSpanId"] = trace.format_span_id(span.parent.span_id)
            listed.append(one)
        service = {"key": "service.name", "value": {"stringValue": "python"}}
        scope = {"scope": {"name": spans[0].instrumentation_scope.name}, "spans": listed}
        json.dump({"resourceSpans": [{"resource": {"attributes": [service]}, "scopeSpans": [scope]}]}, self.out)
        print(file=self.out, flush=True)
        return SpanExportResult.SUCCESS


def main(name: str, path: str) -> None:
    provider = TracerProvider(resource=Resource.create({"service.name": "python"}))
    provider.add_span_processor(BatchSpanProcessor(Exporter(path)))
    tracer = provider.get_tracer("pelton example")

    def handle(request: pelton.Request) -> bytes:
        parent = extract({"traceparent": request.traceparent or ""})
        with tracer.start_as_current_span("python", parent, trace.SpanKind.SERVER):
            return request.data.upper()

    with pelton.Service.listen(name) as service:
        signal.signal(signal.SIGTERM, lambda *_: service.drain())
        service.run(handle, threads=2)
    provider.shutdown()


main(*sys.argv[1:])

// A service with a span for each request, by OpenTelemetry. Its parent is the caller's span, which came with the
// request, and the call to another service carries its own span on:
//
//	tracing NAME OTHER FILE
//
// It listens under NAME, calls OTHER with each request, and replies with that reply. Its spans go to FILE, as OTLP in
// JSON, one export a line, which OpenTelemetry's collector reads (receiver otlpjsonfile). SIGTERM drains it.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	pelton "github.com/pelton-ipc/pelton/bindings/go"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/trace"
	api "go.opentelemetry.io/otel/trace"
)

// The carrier of W3C's propagator is a map with the header.
const header = "traceparent"

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: tracing NAME OTHER FILE")
	}
	name, other, file := os.Args[1], os.Args[2], os.Args[3]
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	out, err := os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	check(err)
	provider := trace.NewTracerProvider(trace.WithBatcher(&exporter{out}))
	tracer, propagator := provider.Tracer("pelton example"), propagation.TraceContext{}

	service, err := pelton.ListenService(name, nil)
	check(err)
	waits, cancel := context.WithTimeout(ctx, time.Minute)
	client, err := pelton.ConnectClient(waits, other, &pelton.Options{Await: true})
	cancel()
	check(err)
	go func() {
		<-ctx.Done()
		service.Drain()
	}()
	check(service.Serve(context.Background(), func(request pelton.Request) {
		// The span of the request.
		ctx := propagator.Extract(request.Context(), propagation.MapCarrier{header: request.Traceparent()})
		ctx, span := tracer.Start(ctx, "go", api.WithSpanKind(api.SpanKindServer))
		defer span.End()
		// The call's own span, whose position travels with it.
		ctx, call := tracer.Start(ctx, "call "+other, api.WithSpanKind(api.SpanKindClient))
		carrier := propagation.MapCarrier{}
		propagator.Inject(ctx, carrier)
		reply, err := client.Call(ctx, request.Bytes(), pelton.Traceparent(carrier[header]))
		call.End()
		if err != nil {
			span.RecordError(err)
			_ = request.Fail(1, []byte(err.Error()))
			return
		}
		_ = request.Reply(reply)
	}))
	check(client.Close())
	check(service.Close())
	check(provider.Shutdown(context.Background()))
	check(out.Close())
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// exporter writes spans to a file, as OTLP in JSON. A program that has a collector takes otlptracehttp instead.
type exporter struct{ out *os.File }

type object = map[string]any

func (e *exporter) ExportSpans(_ context.Context, spans []trace.ReadOnlySpan) error {
	var list []object
	for _, span := range spans {
		one := object{
			"traceId": span.SpanContext().TraceID(), "spanId": span.SpanContext().SpanID(), "name": span.Name(), "kind": span.SpanKind(),
			"startTimeUnixNano": fmt.Sprint(span.StartTime().UnixNano()), "endTimeUnixNano": fmt.Sprint(span.EndTime().UnixNano()),
		}
		if span.Parent().IsValid() {
			one["parentSpanId"] = span.Parent().SpanID()
		}
		list = append(list, one)
	}
	service := object{"key": "service.name", "value": object{"stringValue": "go"}}
	scope := object{"scope": object{"name": spans[0].InstrumentationScope().Name}, "spans": list}
	return json.NewEncoder(e.out).Encode(object{"resourceSpans": []object{
		{"resource": object{"attributes": []object{service}}, "scopeSpans": []object{scope}},
	}})
}

func (e *exporter) Shutdown(context.Context) error { return nil }

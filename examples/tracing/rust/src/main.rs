//! A service with a span for each request, by `tracing` and OpenTelemetry. Its parent is the caller's span, which came
//! with the request, and the call to another service carries its own span on:
//!
//! ```text
//! tracing-example NAME OTHER FILE
//! ```
//! It listens under NAME, calls OTHER with each request, and replies with that reply. Its spans go to FILE, as OTLP in
//! JSON, one export a line, which OpenTelemetry's collector reads (receiver otlpjsonfile). SIGTERM drains it.

use anyhow::{Result, bail};
use opentelemetry::Context;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_proto::tonic::trace::v1::TracesData;
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};
use pelton::tokio::{AsyncClient, AsyncRequest, AsyncService, OwnedCompletion};
use pelton::{Client, Deadline, Options, Service, Traceparent};
use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{Instrument, Span, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::layer::SubscriberExt;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let [name, other, file] = &std::env::args().skip(1).collect::<Vec<_>>()[..] else {
        bail!("usage: tracing-example NAME OTHER FILE");
    };
    let provider = SdkTracerProvider::builder()
        .with_resource(Resource::builder_empty().with_service_name("rust").build())
        .with_batch_exporter(Exporter { out: File::options().create(true).append(true).open(file)?, resource: None })
        .build();
    let spans = tracing_opentelemetry::layer().with_tracer(provider.tracer("pelton example"));
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(spans))?;

    let mut service = AsyncService::new(Service::listen(name)?)?;
    let options = Options::new().connect_deadline(Duration::from_secs(60));
    let client = AsyncClient::open(Client::start_connect(other, &options)?).await?;
    let (stopper, mut terminated) = (service.stopper(), signal(SignalKind::terminate())?);
    tokio::spawn(async move {
        terminated.recv().await;
        stopper.drain();
    });
    service.run(64, |request| handle(client.clone(), request)).await?;
    provider.shutdown()?;
    Ok(())
}

async fn handle(client: AsyncClient, request: AsyncRequest) {
    let (bytes, responder) = request.into_parts();
    let span = info_span!("rust", otel.kind = "server");
    // It fails only for a span that has begun.
    _ = span.set_parent(context_of(responder.traceparent()));
    let replied = call(&client, &bytes).instrument(span).await.and_then(OwnedCompletion::ok);
    // A client that has gone needs no reply.
    _ = match replied {
        Ok(reply) => responder.reply(reply.as_ref()),
        Err(error) => responder.fail(1, error.to_string().as_bytes()),
    };
}

/// Calls the other service, in a span of its own.
async fn call(client: &AsyncClient, request: &[u8]) -> pelton::Result<OwnedCompletion> {
    let span = info_span!("call", otel.kind = "client");
    let traceparent = traceparent_of(&span);
    async {
        let Some(traceparent) = traceparent else { return client.call(request).await };
        let mut call = client.submit_traced(request, traceparent, Deadline::Never).await?;
        Ok(call.next().await?.expect("nothing of it has been taken"))
    }
    .instrument(span)
    .await
}

/// The header of W3C's propagator.
const HEADER: &str = "traceparent";

/// OpenTelemetry's context of a caller's span.
fn context_of(traceparent: Option<Traceparent>) -> Context {
    let headers: HashMap<_, _> =
        traceparent.map(|traceparent| (HEADER.into(), traceparent.to_string())).into_iter().collect();
    TraceContextPropagator::new().extract(&headers)
}

/// What a call within this span gives on.
fn traceparent_of(span: &Span) -> Option<Traceparent> {
    let mut headers = HashMap::new();
    TraceContextPropagator::new().inject_context(&span.context(), &mut headers);
    Traceparent::parse(headers.get(HEADER)?)
}

/// Writes spans to a file, as OTLP in JSON. A program that has a collector takes `opentelemetry-otlp` instead.
#[derive(Debug)]
struct Exporter {
    out: File,
    resource: Option<Resource>,
}

impl SpanExporter for Exporter {
    async fn export(&self, spans: Vec<SpanData>) -> OTelSdkResult {
        let resource = self.resource.as_ref().map(ResourceAttributesWithSchema::from).unwrap_or_default();
        let resource_spans = group_spans_by_resource_and_scope(spans, &resource);
        let failed = |error: std::io::Error| OTelSdkError::InternalFailure(error.to_string());
        let line = serde_json::to_string(&TracesData { resource_spans }).map_err(|error| failed(error.into()))? + "\n";
        (&self.out).write_all(line.as_bytes()).map_err(failed)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.resource = Some(resource.clone());
    }
}

import { AsyncLocalStorage } from 'node:async_hooks';
import {
  type Context,
  defaultTextMapGetter,
  defaultTextMapSetter,
  type Span as OtelSpan,
  SpanKind as OtelSpanKind,
  type Tracer as OtelTracer,
  ROOT_CONTEXT,
  SpanStatusCode,
  trace,
} from '@opentelemetry/api';
import { type ExportResult, ExportResultCode, W3CTraceContextPropagator } from '@opentelemetry/core';
import { OTLPTraceExporter } from '@opentelemetry/exporter-trace-otlp-proto';
import { resourceFromAttributes } from '@opentelemetry/resources';
import {
  BatchSpanProcessor,
  ParentBasedSampler,
  type ReadableSpan,
  type SpanExporter,
  TraceIdRatioBasedSampler,
  TracerProvider,
} from '@opentelemetry/sdk-trace';
import { BatonError } from '../core/errors.ts';
import type { CallerHeaders, Span, SpanAttributes, SpanEnd, SpanKind, Tracer } from '../obs/tracer.ts';

/** Settings of {@link openOtlpTracer}. */
export interface OtlpTracerOptions {
  /** Where the collector takes traces, the path included. */
  readonly url: string;
  readonly serviceName: string;
  /** Of this process among others of the same name. */
  readonly instanceId: string;
  readonly version: string;
  /** Share of the traces that begin here, 0 to 1; whoever sends a W3C header decides about its own. */
  readonly sampleRatio: number;
  /** Told how an export went, and of how many spans. */
  readonly onExport: (result: 'exported' | 'failed', spans: number) => void;
}

/** Spans wait so long before they are sent, milliseconds. */
const BATCH_MS = 1000;
const EXPORT_TIMEOUT_MS = 5000;
/** Spans that wait; what is more is dropped. */
const MAX_WAITING = 8192;

/** Sends spans by OTLP over HTTP in protobuf; disposing sends what waits. */
export function openOtlpTracer(options: OtlpTracerOptions): Tracer {
  return new OtlpTracer(options);
}

const propagator = new W3CTraceContextPropagator();

const KINDS: Readonly<Record<SpanKind, OtelSpanKind>> = {
  server: OtelSpanKind.SERVER,
  client: OtelSpanKind.CLIENT,
  internal: OtelSpanKind.INTERNAL,
};

class OtlpTracer implements Tracer {
  readonly #provider: TracerProvider;
  readonly #tracer: OtelTracer;
  /** The span of the call that is being served. */
  readonly #serving = new AsyncLocalStorage<StartedSpan>();

  constructor({ url, serviceName, instanceId, version, sampleRatio, onExport }: OtlpTracerOptions) {
    const exporter = new CountingExporter(new OTLPTraceExporter({ url, timeoutMillis: EXPORT_TIMEOUT_MS }), onExport);
    this.#provider = new TracerProvider({
      resource: resourceFromAttributes({
        'service.name': serviceName,
        'service.version': version,
        'service.instance.id': instanceId,
      }),
      sampler: new ParentBasedSampler({ root: new TraceIdRatioBasedSampler(sampleRatio) }),
      spanProcessors: [
        new BatchSpanProcessor({
          exporter,
          scheduledDelayMillis: BATCH_MS,
          exportTimeoutMillis: EXPORT_TIMEOUT_MS,
          maxQueueSize: MAX_WAITING,
        }),
      ],
    });
    this.#tracer = this.#provider.getTracer('baton', version);
  }

  get headers(): Readonly<Record<string, string>> {
    return this.#serving.getStore()?.headers ?? {};
  }

  begin(name: string, headers: CallerHeaders, startAt: number, attributes?: SpanAttributes): Span {
    return this.#begin(name, parentOf(headers), startAt, attributes);
  }

  async serve<T>(name: string, headers: CallerHeaders, work: () => Promise<T>): Promise<T> {
    const within = this.#serving.getStore();
    // What nobody's request is about, like the checks of another process, would fill the collector.
    if (headers.traceparent === undefined && within === undefined) return work();
    const startAt = performance.now();
    const span =
      headers.traceparent === undefined && within !== undefined
        ? within.child(name, 'server', startAt)
        : this.#begin(name, parentOf(headers), startAt);
    try {
      const answer = await this.#serving.run(span, work);
      span.end(performance.now());
      return answer;
    } catch (error) {
      span.end(performance.now(), { failure: error instanceof BatonError ? error.reason.toLowerCase() : 'error' });
      throw error;
    }
  }

  note(name: string, startAt: number, endAt: number): void {
    this.#serving.getStore()?.child(name, 'internal', startAt).end(endAt);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    // A collector that is away must not keep the process; what could not be sent was told.
    await this.#provider.shutdown().catch(() => undefined);
  }

  #begin(name: string, parent: Context, startAt: number, attributes?: SpanAttributes): StartedSpan {
    // Found anew for each trace: the two clocks drift apart in a process that runs for weeks.
    const epochMs = Date.now() - performance.now();
    return startSpan(this.#tracer, epochMs, parent, name, 'server', startAt, attributes);
  }
}

function parentOf(headers: CallerHeaders): Context {
  return propagator.extract(ROOT_CONTEXT, headers, defaultTextMapGetter);
}

function startSpan(
  tracer: OtelTracer,
  epochMs: number,
  parent: Context,
  name: string,
  kind: SpanKind,
  startAt: number,
  attributes: SpanAttributes = {},
): StartedSpan {
  const options = { kind: KINDS[kind], startTime: epochMs + startAt, attributes: { ...attributes } };
  const span = tracer.startSpan(name, options, parent);
  return new StartedSpan(tracer, epochMs, trace.setSpan(parent, span), span);
}

class StartedSpan implements Span {
  readonly #tracer: OtelTracer;
  /** Unix time at the zero of `performance.now()`, milliseconds. */
  readonly #epochMs: number;
  readonly #context: Context;
  readonly #span: OtelSpan;
  #headers: Readonly<Record<string, string>> | undefined;

  constructor(tracer: OtelTracer, epochMs: number, context: Context, span: OtelSpan) {
    this.#tracer = tracer;
    this.#epochMs = epochMs;
    this.#context = context;
    this.#span = span;
  }

  get headers(): Readonly<Record<string, string>> {
    if (this.#headers === undefined) {
      const headers: Record<string, string> = {};
      propagator.inject(this.#context, headers, defaultTextMapSetter);
      this.#headers = headers;
    }
    return this.#headers;
  }

  child(name: string, kind: SpanKind, startAt: number, attributes?: SpanAttributes): StartedSpan {
    return startSpan(this.#tracer, this.#epochMs, this.#context, name, kind, startAt, attributes);
  }

  end(endAt: number, { attributes, failure }: SpanEnd = {}): void {
    if (attributes !== undefined) this.#span.setAttributes({ ...attributes });
    if (failure !== undefined) this.#span.setStatus({ code: SpanStatusCode.ERROR, message: failure });
    this.#span.end(this.#epochMs + endAt);
  }
}

/** Tells how exports go: the SDK itself would only write it to a log of its own. */
class CountingExporter implements SpanExporter {
  readonly #exporter: SpanExporter;
  readonly #onExport: OtlpTracerOptions['onExport'];

  constructor(exporter: SpanExporter, onExport: OtlpTracerOptions['onExport']) {
    this.#exporter = exporter;
    this.#onExport = onExport;
  }

  export(spans: ReadableSpan[], done: (result: ExportResult) => void): void {
    this.#exporter.export(spans, (result) => {
      this.#onExport(result.code === ExportResultCode.SUCCESS ? 'exported' : 'failed', spans.length);
      done(result);
    });
  }

  shutdown(): Promise<void> {
    return this.#exporter.shutdown();
  }

  async forceFlush(): Promise<void> {
    await this.#exporter.forceFlush?.();
  }
}

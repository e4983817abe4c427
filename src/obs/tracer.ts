/** What is told of a span besides its times: ids, words and numbers, never text of a prompt or a reply. */
export type SpanAttributes = Readonly<Record<string, string | number | boolean | undefined>>;

/** Which side of a call a span stands for. */
export type SpanKind = 'server' | 'client' | 'internal';

/** What {@link Span.end} tells. */
export interface SpanEnd {
  readonly attributes?: SpanAttributes;
  /** What went wrong, as a word; absent where all is well. */
  readonly failure?: string | undefined;
}

/** A part of a trace that goes on. Times are milliseconds of `performance.now()`. */
export interface Span {
  /** W3C headers for what is asked of others in its name. */
  readonly headers: Readonly<Record<string, string>>;
  child(name: string, kind: SpanKind, startAt: number, attributes?: SpanAttributes): Span;
  end(endAt: number, end?: SpanEnd): void;
}

/** Makes spans and sends them to a collector. */
export interface Tracer extends AsyncDisposable {
  /** A span of the trace that the caller's headers name, or of a new one. */
  begin(name: string, headers: CallerHeaders, startAt: number, attributes?: SpanAttributes): Span;
  /** Does the work of a call that came with these headers, in a span of its own. */
  serve<T>(name: string, headers: CallerHeaders, work: () => Promise<T>): Promise<T>;
  /** W3C headers of the call that is being served; none outside of one. */
  readonly headers: Readonly<Record<string, string>>;
  /** A span inside the call that is being served, after it is over. */
  note(name: string, startAt: number, endAt: number): void;
}

/** The W3C headers that came with a request. */
export interface CallerHeaders {
  readonly traceparent: string | undefined;
  readonly tracestate: string | undefined;
}

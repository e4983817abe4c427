/** What an engine does: prefill only, decode only, or whole requests. */
export type InstanceRole = 'prefill' | 'decode' | 'both';

/** One engine as whoever names it describes it; durations in milliseconds. */
export interface InstanceSpec {
  /** `host:port[/prefix]` of the URL, or the name that it was given; unique. */
  readonly id: string;
  /** Normalised base URL without a trailing slash; `/v1/...` is appended to it. */
  readonly url: string;
  readonly role: InstanceRole;
  /** Connector name. */
  readonly connector: string;
  readonly headers: Readonly<Record<string, string>>;
  /** Key of this engine; absent: that of the process. */
  readonly apiKey?: string;
  readonly labels: Readonly<Record<string, string>>;
  /** How long P keeps a handle's blocks after its reply. */
  readonly kvLeaseMs: number;
  /** How long D keeps a handle's blocks. */
  readonly decoderTtlMs: number;
  /** `auto`, `on` or `off`. */
  readonly bidirectional: string;
  /** `fail` or `recompute`. */
  readonly loadFailurePolicy: string;
  /** Share of the work relative to the other engines; 1 unless set. */
  readonly weight?: number;
  /** Data parallel ranks that requests are spread over; the engine does that by itself unless set. */
  readonly dataParallelSize?: number;
}

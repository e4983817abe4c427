/** One time series family that baton exposes. */
export interface SeriesSpec {
  readonly name: string;
  readonly kind: 'counter' | 'gauge' | 'histogram';
  readonly help: string;
  readonly labels: readonly string[];
  /** Upper bounds of a histogram, in the unit of its name. */
  readonly buckets?: readonly number[];
}

/** Seconds, 1 ms to 240 s: the range the peers' dashboards use. */
const SECONDS = [
  0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30, 45, 60, 90, 120, 180, 240,
] as const;

/**
 * Every series of a process, the only place that names one; `docs/metrics.md` lists the same.
 * No label takes a value that a client chose: models are folded to the known ones, words to a bounded set.
 */
export const SERIES = [
  {
    name: 'baton_build_info',
    kind: 'gauge',
    help: 'Always 1; the labels tell the version of baton and of Node.',
    labels: ['version', 'node'],
  },
  {
    name: 'baton_requests_total',
    kind: 'counter',
    help: 'Client requests that ended, by the status the client got (499 in 4xx where it left first).',
    labels: ['api', 'model', 'mode', 'status_class'],
  },
  {
    name: 'baton_tenant_requests_total',
    kind: 'counter',
    help: 'Client requests that ended, by tenant and by the status the client got; refusals by its limits are among them.',
    labels: ['tenant', 'status_class'],
  },
  {
    name: 'baton_request_duration_seconds',
    kind: 'histogram',
    help: 'Time from the request to the end of its reply.',
    labels: ['api', 'model', 'mode'],
    buckets: SECONDS,
  },
  {
    name: 'baton_requests_in_flight',
    kind: 'gauge',
    help: 'Client requests that began and did not end.',
    labels: ['api'],
  },
  {
    name: 'baton_ttft_seconds',
    kind: 'histogram',
    help: 'Time from the request to its first content, of whole replies to the reply: the total, and its parts, which add up to it.',
    labels: ['model', 'phase'],
    buckets: SECONDS,
  },
  {
    name: 'baton_itl_seconds',
    kind: 'histogram',
    help: 'Time between two pieces of a streamed reply, as its decode engine sends them: one token each, or a few.',
    labels: ['model'],
    buckets: SECONDS,
  },
  {
    name: 'baton_prefill_duration_seconds',
    kind: 'histogram',
    help: 'Time of a prefill leg that ended well, from its first byte sent to the end of its reply.',
    labels: ['model'],
    buckets: SECONDS,
  },
  {
    name: 'baton_legs_total',
    kind: 'counter',
    help: 'Upstream calls that ended, by how they ended.',
    labels: ['leg', 'ending'],
  },
  {
    name: 'baton_plan_total',
    kind: 'counter',
    help: 'Plans made, by mode and by the reason for it.',
    labels: ['mode', 'reason'],
  },
  {
    name: 'baton_handles_rejected_total',
    kind: 'counter',
    help: 'Handles that an engine returned and that were not usable, by what is wrong with them.',
    labels: ['leg', 'reason'],
  },
  {
    name: 'baton_retries_total',
    kind: 'counter',
    help: 'Legs sent again, by what went wrong before.',
    labels: ['reason'],
  },
  {
    name: 'baton_errors_total',
    kind: 'counter',
    help: 'Failures of requests that baton itself reports, by ErrorInfo reason in lower case.',
    labels: ['reason'],
  },
  {
    name: 'baton_tokens_total',
    kind: 'counter',
    help: 'Tokens as the engines counted them in usage: prompt, cached (a part of prompt), completion.',
    labels: ['model', 'kind'],
  },
  {
    name: 'baton_stream_bytes_total',
    kind: 'counter',
    help: 'Bytes of streamed replies written to clients.',
    labels: [],
  },
  {
    name: 'baton_client_aborts_total',
    kind: 'counter',
    help: 'Requests whose client left early, by the phase they were in.',
    labels: ['phase'],
  },
  {
    name: 'baton_queue_depth',
    kind: 'gauge',
    help: 'Requests that wait for a routable pair.',
    labels: [],
  },
  {
    name: 'baton_queue_wait_seconds',
    kind: 'histogram',
    help: 'Time in the queue of requests that waited, by how the wait ended.',
    labels: ['outcome'],
    buckets: SECONDS,
  },
  {
    name: 'baton_instances',
    kind: 'gauge',
    help: 'Engine instances by role and state.',
    labels: ['role', 'state'],
  },
  {
    name: 'baton_probes_total',
    kind: 'counter',
    help: 'Health probes by result.',
    labels: ['result'],
  },
  {
    name: 'baton_instance_legs',
    kind: 'gauge',
    help: 'Legs that this router has reserved or running on an instance; instances without any are left out.',
    labels: ['engine'],
  },
  {
    name: 'baton_breaker_open',
    kind: 'gauge',
    help: '1 for each breaker that is open: of an instance, of what an instance hands over (transfer), of a pair of instances.',
    labels: ['scope', 'engine', 'peer'],
  },
  {
    name: 'baton_breaker_changes_total',
    kind: 'counter',
    help: 'Breakers of instances and pairs that opened or closed.',
    labels: ['scope', 'to'],
  },
  {
    name: 'baton_registry_stale',
    kind: 'gauge',
    help: '1 while the view of the instances is an old one because the registry does not answer, else 0.',
    labels: [],
  },
  {
    name: 'baton_reuse_total',
    kind: 'counter',
    help: 'Turns that continue a conversation, by what became of the KV of the earlier ones; exactly one outcome each.',
    labels: ['outcome'],
  },
  {
    name: 'baton_reuse_tokens_total',
    kind: 'counter',
    help: 'Prompt tokens of handed-over turns that had a handle: read from a decode engine (reused), or not (computed).',
    labels: ['kind'],
  },
  {
    name: 'baton_decode_handles_total',
    kind: 'counter',
    help: 'Handles that decode engines gave, by what became of them: stored, released, malformed, store_unavailable; none counts turns without one.',
    labels: ['fate'],
  },
  {
    name: 'baton_reuse_alarms_total',
    kind: 'counter',
    help: 'Prefill instances that hung on a handle or used other tokens than those compared, by what followed.',
    labels: ['what'],
  },
  {
    name: 'baton_late_reads_total',
    kind: 'counter',
    help: 'Decode instances drained because they may have read blocks after the lease of the prefill instance.',
    labels: [],
  },
  {
    name: 'baton_releases_total',
    kind: 'counter',
    help: "Handles given back to their decode engine by baton's own one-token requests, by how that went.",
    labels: ['result'],
  },
  {
    name: 'baton_pinned_kv_blocks',
    kind: 'gauge',
    help: 'KV blocks that stored handles keep from being freed, by the decode instance that holds them.',
    labels: ['engine'],
  },
  {
    name: 'baton_pinned_kv_share',
    kind: 'gauge',
    help: 'Share of the KV blocks of a decode instance that stored handles keep from being freed, 0 to 1.',
    labels: ['engine'],
  },
  {
    name: 'baton_pin_events_total',
    kind: 'counter',
    help: 'Decode instances that crossed reuse.pin_watermark (above, below), and whether giving handles back showed in their KV use: effective, ineffective; stuck where nothing carries them back.',
    labels: ['event'],
  },
  {
    name: 'baton_store_entries',
    kind: 'gauge',
    help: 'Live handles in the store of this process.',
    labels: [],
  },
  {
    name: 'baton_store_release_queue',
    kind: 'gauge',
    help: 'Handles that wait to be given back.',
    labels: [],
  },
  {
    name: 'baton_store_duration_seconds',
    kind: 'histogram',
    help: 'Time of calls of this process to the store, in whichever process that is; those that were not made because it does not answer left out.',
    labels: ['method', 'outcome'],
    buckets: SECONDS,
  },
  {
    name: 'baton_store_failures_total',
    kind: 'counter',
    help: 'Calls to a store in another process that requests waited for and that got no answer in time.',
    labels: [],
  },
  {
    name: 'baton_store_breaker_open',
    kind: 'gauge',
    help: '1 while a store in another process is not asked because it did not answer; plans are then made without it.',
    labels: [],
  },
  {
    name: 'baton_rpc_duration_seconds',
    kind: 'histogram',
    help: 'Time of calls with a single answer that the RPC port served; those that it refused before, for want of a token or a right message, left out.',
    labels: ['method', 'outcome'],
    buckets: SECONDS,
  },
  {
    name: 'baton_rebound_total',
    kind: 'counter',
    help: 'Moves of bound conversations (CLIENT_BOUND) to another instance, because theirs was gone or a leg on it failed.',
    labels: ['place', 'reason'],
  },
  {
    name: 'baton_lmcache_notices_total',
    kind: 'counter',
    help: 'Frames on the notice socket of the lmcache connector: matched, orphan (nobody waits for it), ignored, bad.',
    labels: ['result'],
  },
  {
    name: 'baton_lmcache_drains_total',
    kind: 'counter',
    help: "Transfers that no request came for, by what became of them: taken out of the decoder's buffer (sent), failed, nothing_sent.",
    labels: ['result'],
  },
  {
    name: 'baton_config_reloads_total',
    kind: 'counter',
    help: 'Times that the settings were read again, by result: applied, unchanged, refused (a mistake; those in force stayed).',
    labels: ['result'],
  },
  {
    name: 'baton_config_last_reload_successful',
    kind: 'gauge',
    help: '1 unless the settings had a mistake when they were read last; those in force are older then.',
    labels: [],
  },
  {
    name: 'baton_config_last_reload_success_timestamp_seconds',
    kind: 'gauge',
    help: 'Unix time at which the settings were read without a mistake last, the start included.',
    labels: [],
  },
  {
    name: 'baton_tls_certificate_expiry_timestamp_seconds',
    kind: 'gauge',
    help: 'Unix time at which the certificate in use ends, or one of its chain if that ends first: of a listener, or the one shown to other processes (rpc_client).',
    labels: ['use'],
  },
  {
    name: 'baton_trace_spans_total',
    kind: 'counter',
    help: 'Spans of traces that were sent to the collector, by result: exported, failed.',
    labels: ['result'],
  },
  {
    name: 'process_start_time_seconds',
    kind: 'gauge',
    help: 'Unix time at which this process began.',
    labels: [],
  },
  {
    name: 'process_cpu_seconds_total',
    kind: 'counter',
    help: 'User and system CPU time of this process.',
    labels: [],
  },
  {
    name: 'process_resident_memory_bytes',
    kind: 'gauge',
    help: 'Resident memory of this process.',
    labels: [],
  },
  {
    name: 'nodejs_heap_size_used_bytes',
    kind: 'gauge',
    help: 'JavaScript heap in use.',
    labels: [],
  },
  {
    name: 'nodejs_external_memory_bytes',
    kind: 'gauge',
    help: 'Memory outside the JavaScript heap that JavaScript objects hold, buffers included.',
    labels: [],
  },
  {
    name: 'nodejs_eventloop_utilization',
    kind: 'gauge',
    help: 'Share of time, 0 to 1, that the event loop was busy since the scrape before.',
    labels: [],
  },
  {
    name: 'nodejs_eventloop_lag_p50_seconds',
    kind: 'gauge',
    help: 'Median of how late timers were since the scrape before.',
    labels: [],
  },
  {
    name: 'nodejs_eventloop_lag_p99_seconds',
    kind: 'gauge',
    help: '99th percentile of how late timers were since the scrape before.',
    labels: [],
  },
  {
    name: 'nodejs_eventloop_lag_max_seconds',
    kind: 'gauge',
    help: 'How late the latest timer was since the scrape before.',
    labels: [],
  },
] as const satisfies readonly SeriesSpec[];

/** Name of a row of {@link SERIES}. */
export type SeriesName = (typeof SERIES)[number]['name'];

/** Names of the rows of one kind. */
export type SeriesOf<Kind extends SeriesSpec['kind']> = Extract<(typeof SERIES)[number], { kind: Kind }>['name'];

/** Label names of a row. */
export type LabelOf<Name extends SeriesName> = Extract<(typeof SERIES)[number], { name: Name }>['labels'][number];

/** The row of `name`. */
export function seriesSpec(name: SeriesName): SeriesSpec {
  const spec = SERIES.find((row) => row.name === name);
  if (spec === undefined) throw new Error(`no series ${name}`);
  return spec;
}

import { isTenantName } from '../core/tenant.ts';
import type { DurationCounter } from './duration-histogram.ts';
import { isLabelWord, LabelSet, OTHER } from './label-set.ts';
import { addProcessSeries, EventLoopLag } from './process-series.ts';
import { SeriesRegistry } from './series-registry.ts';

/** The parts of the time to the first content, in the order in which a request goes through them. */
export const TTFT_PHASES = ['queue', 'plan', 'tokenize', 'prefill', 'hand_over', 'decode_wait', 'first_byte'] as const;

/** Part of the time to the first content. */
export type TtftPhase = (typeof TTFT_PHASES)[number];

/** Milliseconds of each part; one that did not occur has none. */
export type TtftParts = Readonly<Partial<Record<TtftPhase, number>>>;

/** What `requestFinished` counts; durations in milliseconds. */
export interface FinishedRequest {
  /** As given to `requestStarted`. */
  readonly api: string;
  /** As the client named it; becomes a label only if known. */
  readonly model: string;
  /** Whom the request belongs to; becomes a label only if it is a name that a key, a token or a proxy gave. */
  readonly tenant: string;
  /** Plan mode as a word; absent if no plan was made. */
  readonly mode?: string | undefined;
  /** Status the client got, 499 where it left first. */
  readonly status: number;
  readonly durationMs: number;
  readonly promptTokens?: number | undefined;
  readonly cachedTokens?: number | undefined;
  readonly completionTokens?: number | undefined;
}

/** A call with a single answer that has ended. */
export interface EndedCall {
  /** Name in the contract, e.g. `TakeEntry`. */
  readonly method: string;
  /** `ok`, or the code of its error as a word. */
  readonly outcome: string;
  readonly milliseconds: number;
}

/** Whose certificate: a listener's, or the one that is shown to other processes. */
export type CertificateUse = 'facade' | 'rpc' | 'admin' | 'rpc_client';

/** One instance for `baton_instances`, as words. */
export interface InstanceWords {
  readonly role: string;
  readonly state: string;
}

/** A breaker that is open; `peer` is the decode instance of a pair, else empty. */
export interface OpenBreaker {
  readonly scope: 'instance' | 'transfer' | 'pair';
  readonly instance: string;
  readonly peer: string;
}

/** What the store of this process holds. */
export interface StoreCounts {
  readonly entries: number;
  readonly releaseQueue: number;
  readonly pinnedBlocks: readonly { readonly instance: string; readonly blocks: number }[];
}

/** What stored handles pin on a decode instance. */
export interface PinCounts {
  readonly instance: string;
  readonly blocks: number;
  /** Of its blocks, 0 to 1. */
  readonly share: number;
}

/** Settings of {@link Metrics}. */
export interface MetricsOptions {
  /** Version of baton. */
  readonly version: string;
}

/** Of what may have many names, models and tenants: distinct ones that become labels over the life of a process. */
const MAX_NAMES = 1000;
const MAX_WORDS = 64;

/**
 * The series of one process, each with a method that says what happened; owns a registry of its own.
 * Values that are read and not counted (queue, instances) come from sources that are called at each scrape.
 */
export class Metrics {
  readonly #series = new SeriesRegistry();
  readonly #knownModels = new Set<string>();
  readonly #models = new LabelSet(MAX_NAMES, (name) => this.#knownModels.has(name));
  readonly #tenants = new LabelSet(MAX_NAMES, isTenantName);
  readonly #words = new Map<string, LabelSet>();

  readonly #requests = this.#series.counter('baton_requests_total');
  readonly #tenantRequests = this.#series.counter('baton_tenant_requests_total');
  readonly #requestDuration = this.#series.histogram('baton_request_duration_seconds');
  readonly #inFlight = this.#series.gauge('baton_requests_in_flight');
  readonly #ttft = this.#series.histogram('baton_ttft_seconds');
  readonly #gaps = this.#series.histogram('baton_itl_seconds');
  readonly #prefillDuration = this.#series.histogram('baton_prefill_duration_seconds');
  readonly #legs = this.#series.counter('baton_legs_total');
  readonly #plans = this.#series.counter('baton_plan_total');
  readonly #handlesRejected = this.#series.counter('baton_handles_rejected_total');
  readonly #retries = this.#series.counter('baton_retries_total');
  readonly #errors = this.#series.counter('baton_errors_total');
  readonly #tokens = this.#series.counter('baton_tokens_total');
  #streamedBytes = 0;
  readonly #clientAborts = this.#series.counter('baton_client_aborts_total');
  readonly #queueWait = this.#series.histogram('baton_queue_wait_seconds');
  readonly #probes = this.#series.counter('baton_probes_total');
  readonly #breakerChanges = this.#series.counter('baton_breaker_changes_total');

  readonly #reuse = this.#series.counter('baton_reuse_total');
  readonly #reuseTokens = this.#series.counter('baton_reuse_tokens_total');
  readonly #decodeHandles = this.#series.counter('baton_decode_handles_total');
  readonly #reuseAlarms = this.#series.counter('baton_reuse_alarms_total');
  readonly #lateReads = this.#series.counter('baton_late_reads_total');
  readonly #releases = this.#series.counter('baton_releases_total');
  readonly #pinEvents = this.#series.counter('baton_pin_events_total');
  readonly #rebound = this.#series.counter('baton_rebound_total');
  readonly #notices = this.#series.counter('baton_lmcache_notices_total');
  readonly #drains = this.#series.counter('baton_lmcache_drains_total');
  readonly #storeFailures = this.#series.counter('baton_store_failures_total');
  readonly #storeBreaker = this.#series.gauge('baton_store_breaker_open');
  readonly #rpcDuration = this.#series.histogram('baton_rpc_duration_seconds');
  readonly #storeDuration = this.#series.histogram('baton_store_duration_seconds');
  readonly #certificateEnd = this.#series.gauge('baton_tls_certificate_expiry_timestamp_seconds');
  readonly #spans = this.#series.counter('baton_trace_spans_total');
  readonly #lag = new EventLoopLag(this.#series);
  readonly #storeEntries = this.#series.gauge('baton_store_entries');
  readonly #storeReleaseQueue = this.#series.gauge('baton_store_release_queue');
  readonly #pinnedBlocks = this.#series.gauge('baton_pinned_kv_blocks');
  readonly #pinnedShare = this.#series.gauge('baton_pinned_kv_share');
  readonly #configReloads = this.#series.counter('baton_config_reloads_total');
  readonly #configGood = this.#series.gauge('baton_config_last_reload_successful');
  readonly #configGoodAt = this.#series.gauge('baton_config_last_reload_success_timestamp_seconds');

  #readStore: () => StoreCounts | Promise<StoreCounts> = () => ({ entries: 0, releaseQueue: 0, pinnedBlocks: [] });
  #readQueueDepth: () => number = () => 0;
  #readInstances: () => readonly InstanceWords[] = () => [];
  #readRegistryStale: () => boolean = () => false;
  #readPins: () => readonly PinCounts[] = () => [];
  #readLegs: () => readonly { readonly instance: string; readonly legs: number }[] = () => [];
  #readBreakers: () => readonly OpenBreaker[] = () => [];

  constructor(options: MetricsOptions) {
    this.#series.gauge('baton_build_info').set({ version: options.version, node: process.versions.node }, 1);
    this.#series.counter('baton_stream_bytes_total', (counter) => {
      counter.reset();
      counter.inc(this.#streamedBytes);
    });
    this.#series.gauge('baton_queue_depth', (gauge) => gauge.set(this.#readQueueDepth()));
    this.#series.gauge('baton_registry_stale', (gauge) => gauge.set(this.#readRegistryStale() ? 1 : 0));
    this.#series.gauge('baton_instances', (gauge) => {
      gauge.reset();
      for (const { role, state } of this.#readInstances()) gauge.inc({ role, state });
    });
    this.#series.gauge('baton_instance_legs', (gauge) => {
      gauge.reset();
      for (const { instance, legs } of this.#readLegs()) gauge.set({ engine: instance }, legs);
    });
    this.#series.gauge('baton_breaker_open', (gauge) => {
      gauge.reset();
      for (const { scope, instance, peer } of this.#readBreakers()) gauge.set({ scope, engine: instance, peer }, 1);
    });
    addProcessSeries(this.#series);
  }

  /** What became of the breaker before a store in another process. */
  storeBreaker(event: 'failure' | 'open' | 'closed'): void {
    if (event === 'failure') this.#storeFailures.inc();
    else this.#storeBreaker.set(event === 'open' ? 1 : 0);
  }

  /** Settings were read without a mistake; Unix time in milliseconds. */
  configLoaded(at: number): void {
    this.#configGood.set(1);
    this.#configGoodAt.set(at / 1000);
  }

  /** Settings were read again. */
  configReloaded(result: 'applied' | 'unchanged' | 'refused', at: number): void {
    this.#configReloads.inc({ result });
    if (result === 'refused') this.#configGood.set(0);
    else this.configLoaded(at);
  }

  /** Content type of what `render` returns. */
  get contentType(): string {
    return this.#series.contentType;
  }

  /** All series in the Prometheus text format. */
  async render(): Promise<string> {
    // Before the registry looks: it takes the values of a gauge when it comes to it, whatever another one is still waiting for.
    this.#showStore(await this.#readStore(), this.#readPins());
    this.#lag.show();
    return this.#series.render();
  }

  #showStore(counts: StoreCounts, pins: readonly PinCounts[]): void {
    this.#storeEntries.set(counts.entries);
    this.#storeReleaseQueue.set(counts.releaseQueue);
    for (const gauge of [this.#pinnedBlocks, this.#pinnedShare]) gauge.reset();
    for (const { instance, blocks } of pins) this.#pinnedBlocks.set({ engine: instance }, blocks);
    // A store in this process knows better, also of instances that nobody here watches.
    for (const { instance, blocks } of counts.pinnedBlocks) this.#pinnedBlocks.set({ engine: instance }, blocks);
    for (const pin of pins) this.#pinnedShare.set({ engine: pin.instance }, pin.share);
  }

  /** Begins to measure how late timers are, until the end of what is returned. */
  watchEventLoop(): Disposable {
    return this.#lag.watch();
  }

  /** Counts a bound conversation that moved to another instance. */
  rebound(place: 'prefill' | 'decode', reason: 'gone' | 'failed'): void {
    this.#rebound.inc({ place, reason });
  }

  /** Counts a frame on the notice socket. */
  noticed(result: string): void {
    this.#notices.inc({ result: this.#word('result', result) });
  }

  /** Counts a transfer that nobody came for. */
  drained(result: string): void {
    this.#drains.inc({ result: this.#word('result', result) });
  }

  /** Replaces the set of model names that may become labels; at most 1,000 distinct ones ever do. */
  setKnownModels(names: Iterable<string>): void {
    this.#knownModels.clear();
    for (const name of names) this.#knownModels.add(name);
  }

  /** `name` if it is a known model, `none` if it is empty, else `other`. */
  modelLabel(name: string): string {
    return this.#models.label(name);
  }

  /** Counts a client request in; each call needs one `requestFinished` of the same `api`. */
  requestStarted(api: string): void {
    this.#inFlight.inc({ api: this.#word('api', api) });
  }

  /** Counts a client request out, with its status, duration and tokens. */
  requestFinished(request: FinishedRequest): void {
    const api = this.#word('api', request.api);
    const model = this.modelLabel(request.model);
    const mode = this.#word('mode', request.mode);
    this.#inFlight.dec({ api });
    const status_class = statusClass(request.status);
    this.#requests.inc({ api, model, mode, status_class });
    this.#tenantRequests.inc({ tenant: this.#tenants.label(request.tenant), status_class });
    this.#requestDuration.child(api, model, mode).observe(request.durationMs);
    this.#addTokens(model, 'prompt', request.promptTokens);
    this.#addTokens(model, 'cached', request.cachedTokens);
    this.#addTokens(model, 'completion', request.completionTokens);
  }

  /** Records the time to the first content, milliseconds, and its parts: one that did not occur counts as 0. */
  firstContent(model: string, milliseconds: number, parts: TtftParts): void {
    const label = this.modelLabel(model);
    this.#ttft.child(label, 'total').observe(milliseconds);
    for (const phase of TTFT_PHASES) this.#ttft.child(label, phase).observe(parts[phase] ?? 0);
  }

  /** Where the times between the pieces of a streamed reply are counted; asked for once a reply. */
  gapsOf(model: string): DurationCounter {
    return this.#gaps.child(this.modelLabel(model));
  }

  /** Records a prefill leg that ended well. */
  prefillFinished(model: string, milliseconds: number): void {
    this.#prefillDuration.child(this.modelLabel(model)).observe(milliseconds);
  }

  /** Counts an upstream call; `ending` is a LegEnding as a lower-case word. */
  legEnded(leg: 'prefill' | 'decode', ending: string): void {
    this.#legs.inc({ leg, ending: this.#word('ending', ending) });
  }

  /** Counts a plan by its mode and reason words. */
  planned(mode: string, reason: string): void {
    this.#plans.inc({ mode: this.#word('mode', mode), reason: this.#word('plan_reason', reason) });
  }

  /** Counts a handle that was not usable. */
  handleRejected(leg: 'prefill' | 'decode', reason: string): void {
    this.#handlesRejected.inc({ leg, reason: this.#word('handle_reason', reason) });
  }

  /** Counts a leg that is sent again. */
  retried(reason: string): void {
    this.#retries.inc({ reason: this.#word('retry_reason', reason) });
  }

  /** Counts a failure by its ErrorInfo reason, either case. */
  failed(reason: string): void {
    this.#errors.inc({ reason: this.#word('error_reason', reason.toLowerCase()) });
  }

  /** Adds bytes of a streamed reply. */
  streamed(bytes: number): void {
    this.#streamedBytes += bytes;
  }

  /** Counts a client that left early. */
  clientAborted(phase: string): void {
    this.#clientAborts.inc({ phase: this.#word('phase', phase) });
  }

  /** Records a wait in the queue, e.g. `routed`, `timeout`, `client_gone`, `shutting_down`. */
  queueLeft(outcome: string, milliseconds: number): void {
    this.#queueWait.child(this.#word('queue_outcome', outcome)).observe(milliseconds);
  }

  /** Counts a turn that continues a conversation, by its outcome word. */
  reuseEnded(outcome: string): void {
    this.#reuse.inc({ outcome: this.#word('outcome', outcome) });
  }

  /** Adds prompt tokens of a turn with a handle. */
  reuseTokens(reused: number, computed: number): void {
    this.#reuseTokens.inc({ kind: 'reused' }, Math.max(0, reused));
    this.#reuseTokens.inc({ kind: 'computed' }, Math.max(0, computed));
  }

  /** Counts what became of a decode engine's handle. */
  decodeHandle(fate: string): void {
    this.#decodeHandles.inc({ fate: this.#word('fate', fate) });
  }

  /** Counts a prefill instance that must not get handles any more. */
  reuseAlarm(what: string): void {
    this.#reuseAlarms.inc({ what: this.#word('alarm', what) });
  }

  /** Counts a decode instance that may have read blocks too late. */
  lateRead(): void {
    this.#lateReads.inc();
  }

  /** Counts a release. */
  released(result: string): void {
    this.#releases.inc({ result: this.#word('release', result) });
  }

  /** Counts what happened to the pins of a decode instance. */
  pinEvent(event: string): void {
    this.#pinEvents.inc({ event: this.#word('pin_event', event) });
  }

  /** Counts spans that were sent to the collector, or could not be. */
  spansSent(result: 'exported' | 'failed', spans: number): void {
    this.#spans.inc({ result }, spans);
  }

  /** Records a call that the RPC port served. */
  rpcServed({ method, outcome, milliseconds }: EndedCall): void {
    this.#rpcDuration.child(method, this.#word('rpc_outcome', outcome)).observe(milliseconds);
  }

  /** Records a call of this process to its store. */
  storeCalled({ method, outcome, milliseconds }: EndedCall): void {
    this.#storeDuration.child(method, this.#word('store_outcome', outcome)).observe(milliseconds);
  }

  /** A certificate is in use from now on; Unix time of its end in milliseconds. */
  certificateUsed(use: CertificateUse, endsAt: number): void {
    this.#certificateEnd.set({ use }, endsAt / 1000);
  }

  /** Source of the gauges of pins. Default none. */
  watchPins(read: () => readonly PinCounts[]): void {
    this.#readPins = read;
  }

  /** Source of the store's gauges. Default empty. */
  watchStore(read: () => StoreCounts | Promise<StoreCounts>): void {
    this.#readStore = read;
  }

  /** Counts a health probe by its result word. */
  probed(result: string): void {
    this.#probes.inc({ result: this.#word('probe_result', result) });
  }

  /** Counts a breaker that opens or closes. */
  breakerChanged(scope: OpenBreaker['scope'], to: 'open' | 'closed'): void {
    this.#breakerChanges.inc({ scope, to });
  }

  /** Source of `baton_instance_legs`. Default none. */
  watchLegs(read: () => readonly { readonly instance: string; readonly legs: number }[]): void {
    this.#readLegs = read;
  }

  /** Source of `baton_breaker_open`. Default none. */
  watchBreakers(read: () => readonly OpenBreaker[]): void {
    this.#readBreakers = read;
  }

  /** Source of `baton_queue_depth`. Default 0. */
  watchQueueDepth(read: () => number): void {
    this.#readQueueDepth = read;
  }

  /** Source of `baton_instances`. Default none. */
  watchInstances(read: () => readonly InstanceWords[]): void {
    this.#readInstances = read;
  }

  /** Source of `baton_registry_stale`. Default fresh. */
  watchRegistryStale(read: () => boolean): void {
    this.#readRegistryStale = read;
  }

  #addTokens(model: string, kind: 'prompt' | 'cached' | 'completion', tokens: number | undefined): void {
    // A count that is no count would make the counter throw and fail the request it describes.
    if (tokens !== undefined && Number.isSafeInteger(tokens) && tokens > 0) this.#tokens.inc({ model, kind }, tokens);
  }

  #word(set: string, value: string | undefined): string {
    let words = this.#words.get(set);
    if (words === undefined) {
      words = new LabelSet(MAX_WORDS, isLabelWord);
      this.#words.set(set, words);
    }
    return words.label(value);
  }
}

/** `2xx` to `5xx`, `other` for a number that is no HTTP status. */
export function statusClass(status: number): string {
  return status >= 100 && status < 600 ? `${Math.floor(status / 100)}xx` : OTHER;
}

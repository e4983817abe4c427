import { InstanceState } from '../../../gen/baton/v1/instance_pb.ts';
import type { InstanceSpec } from '../../core/instance-spec.ts';
import type { Probe, ProbeResult, ProbeTarget } from '../../engine/probe.ts';
import { errorFields, type Logger } from '../../obs/log.ts';
import type { Clock } from '../clock.ts';
import { type HealthSettings, type InstanceRecord, PROBE_JITTER } from '../instance-record.ts';

/** What a {@link Prober} runs on. */
export interface ProberOptions {
  /** Read when it is used; {@link Prober.repace} follows a change. */
  readonly health: HealthSettings;
  readonly log: Logger;
  readonly probe: Probe;
  readonly clock: Clock;
  /** Uniform in [0, 1). */
  readonly random: () => number;
  /** Key for probes of one instance; undefined sends none. */
  readonly probeKey: (instance: InstanceSpec) => string | undefined;
  /** Told the kind of each probe's health. */
  readonly onProbe: (kind: string) => void;
  /** A probe changed what is known of this instance. */
  readonly onResult: (record: InstanceRecord) => void;
}

/** Least time between two probes that requests ask for. */
const MIN_PROBE_GAP_MS = 250;
/** Failed probes in a row after which an engine that never answered is worth a warning. */
const WARN_AFTER = 3;
const STRANGER =
  'answers HTTP and is no engine: neither /health, /v1/models, /version nor /metrics; is the path of its URL right?';

interface Runner {
  readonly record: InstanceRecord;
  cancelTimer: (() => void) | undefined;
  probing: boolean;
  /** Another probe is wanted after the running one, which may have begun before the event. */
  again: boolean;
  lastProbeAt: number;
  failuresInRow: number;
  strangerWarned: boolean;
  keyWarned: boolean;
}

/** Probes the instances it is given, each at its own pace, until they are forgotten. */
export class Prober implements AsyncDisposable {
  readonly #options: ProberOptions;
  readonly #runners = new Map<InstanceRecord, Runner>();
  readonly #running = new Set<Promise<void>>();
  readonly #stop = new AbortController();
  #started = false;

  constructor(options: ProberOptions) {
    this.#options = options;
  }

  /** Begins to probe, every instance at once. A second call changes nothing. */
  start(): void {
    if (this.#started || this.#stop.signal.aborted) return;
    this.#started = true;
    for (const runner of this.#runners.values()) this.#schedule(runner, 0);
  }

  /** Takes an instance on; its first probe is at once. */
  add(record: InstanceRecord): void {
    const runner: Runner = {
      record,
      cancelTimer: undefined,
      probing: false,
      again: false,
      lastProbeAt: Number.NEGATIVE_INFINITY,
      failuresInRow: 0,
      strangerWarned: false,
      keyWarned: false,
    };
    this.#runners.set(record, runner);
    this.#schedule(runner, 0);
  }

  /** Probes this one no more; what a running probe finds is not told. */
  forget(record: InstanceRecord): void {
    this.#runners.get(record)?.cancelTimer?.();
    this.#runners.delete(record);
  }

  /** Something happened to this one: looks at it as soon as the pace allows. */
  probeSoon(record: InstanceRecord): void {
    const runner = this.#runners.get(record);
    if (runner !== undefined) this.#probeSoon(runner);
  }

  /** The pace has changed: each next probe is when it would be had the pace been so before. */
  repace(): void {
    const now = this.#options.clock.now();
    for (const runner of this.#runners.values()) {
      if (runner.probing) continue;
      const delay = this.#delayOf(runner);
      this.#schedule(runner, delay === undefined ? undefined : Math.max(0, runner.lastProbeAt + delay - now));
    }
  }

  /** Resolves when no timer and no socket is left. */
  async [Symbol.asyncDispose](): Promise<void> {
    this.#stop.abort();
    for (const runner of this.#runners.values()) runner.cancelTimer?.();
    this.#runners.clear();
    await Promise.all(this.#running);
  }

  #schedule(runner: Runner, delayMs: number | undefined): void {
    runner.cancelTimer?.();
    runner.cancelTimer = undefined;
    if (delayMs === undefined || !this.#started || !this.#isKept(runner)) return;
    runner.cancelTimer = this.#options.clock.setTimer(() => {
      runner.cancelTimer = undefined;
      const run = this.#probeOnce(runner).finally(() => this.#running.delete(run));
      this.#running.add(run);
    }, delayMs);
  }

  #isKept(runner: Runner): boolean {
    return !this.#stop.signal.aborted && this.#runners.get(runner.record) === runner;
  }

  #probeSoon(runner: Runner): void {
    if (runner.probing) {
      runner.again = true;
      return;
    }
    this.#schedule(runner, Math.max(0, runner.lastProbeAt + MIN_PROBE_GAP_MS - this.#options.clock.now()));
  }

  /** An engine that never came up, is none, or refuses baton's key, would else be silent at the usual log level. */
  #warnUnseen(runner: Runner, result: ProbeResult): void {
    const { log } = this.#options;
    const { record } = runner;
    const { kind, detail } = result.health;
    runner.failuresInRow = kind === 'ok' ? 0 : runner.failuresInRow + 1;
    const { id: instance, url } = record.spec;
    const isStranger = kind === 'no_engine';
    if (isStranger && !runner.strangerWarned) log.warn({ instance, url, detail }, STRANGER);
    runner.strangerWarned = isStranger || (runner.strangerWarned && kind !== 'ok');
    if (runner.failuresInRow === WARN_AFTER && record.state === InstanceState.STARTING && !isStranger) {
      log.warn({ instance, kind, detail }, 'an engine cannot be reached since it was named');
    }
    if (result.keyRefused === true && !runner.keyWarned) {
      log.warn({ instance }, "an engine refuses baton's key (OPENAI_API_KEY or the pool's api_key)");
    }
    runner.keyWarned = result.keyRefused ?? runner.keyWarned;
  }

  #targetOf({ spec }: InstanceRecord): ProbeTarget {
    const key = this.#options.probeKey(spec);
    return { url: spec.url, headers: spec.headers, ...(key === undefined ? {} : { apiKey: key }) };
  }

  async #probeOnce(runner: Runner): Promise<void> {
    const { clock, health, log, onProbe, onResult, probe } = this.#options;
    const { record } = runner;
    const startedAt = clock.now();
    runner.probing = true;
    runner.lastProbeAt = startedAt;
    try {
      const parts = record.partsDue(startedAt);
      const result = await probe(this.#targetOf(record), parts, health.timeoutMs, this.#stop.signal);
      if (!this.#isKept(runner)) return;
      onProbe(result.health.kind);
      if (result.health.kind !== 'ok' && log.isEnabled('debug')) {
        log.debug({ instance: record.spec.id, kind: result.health.kind, detail: result.health.detail }, 'probe failed');
      }
      record.applyProbe(result, startedAt, clock.now());
      this.#warnUnseen(runner, result);
    } catch (error) {
      if (!this.#isKept(runner)) return;
      log.error({ instance: record.spec.id, ...errorFields(error) }, 'probe broke');
      record.applyProbe({ health: { kind: 'unreachable', detail: 'probe broke' } }, startedAt, clock.now());
    } finally {
      runner.probing = false;
    }
    onResult(record);
    const again = runner.again;
    runner.again = false;
    if (again) {
      this.#probeSoon(runner);
      return;
    }
    this.#schedule(runner, this.#delayOf(runner));
  }

  /** From one probe to the next; undefined where none is due. */
  #delayOf({ record }: Runner): number | undefined {
    const delay = record.nextDelayMs();
    return delay === undefined ? undefined : delay * (1 - PROBE_JITTER + 2 * PROBE_JITTER * this.#options.random());
  }
}

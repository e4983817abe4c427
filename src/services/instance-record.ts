import { create } from '@bufbuild/protobuf';
import { durationFromMs } from '@bufbuild/protobuf/wkt';
import {
  type Incarnation,
  IncarnationSchema,
  type Instance,
  InstanceSchema,
  InstanceState,
  KvSettingsSchema,
  type PinnedKv,
  PinnedKvSchema,
  Role,
} from '../../gen/baton/v1/instance_pb.ts';
import type { InstanceSpec } from '../core/instance-spec.ts';
import type { ProbeHealth, ProbePart, ProbeResult } from '../engine/probe.ts';
import { type DescribedEngine, EngineDetails, type SentLoad } from './engine-details.ts';
import type { LearntOfEngine } from './instance-view.ts';
import type { InstancePins } from './pin-watch.ts';
import { SignsOfLife } from './signs-of-life.ts';

/** How instances are watched; durations in milliseconds. */
export interface HealthSettings {
  /** Between two probes of a healthy instance; 0 = only until it is healthy, and after a refused connection. */
  readonly intervalMs: number;
  /** Per request of a probe; 0 = no limit. */
  readonly timeoutMs: number;
  /** Failed probes in a row that make a READY instance SUSPECT. */
  readonly failures: number;
  /**
   * How long an instance that was lost a second time within a minute must pass its probes before it is READY again, twice
   * as long with each further time; default 0: one good probe is enough.
   */
  readonly dampingMs?: number;
}

/** Losses that are further apart have nothing to do with each other. */
const FLAP_WINDOW_MS = 60_000;
const MAX_DAMPING = 16;

/** Share of a delay by which probes are spread, so that instances started together are not probed together for ever. */
export const PROBE_JITTER = 0.1;

const FIRST_RETRY_MS = 250;
const DEFAULT_RETRY_CAP_MS = 5000;

/** What is known of one instance, and the rules by which probes and calls change it; holds no timer and no socket. */
export class InstanceRecord {
  readonly #health: HealthSettings;
  #spec: InstanceSpec;

  #up: 'unknown' | 'up' | 'down' = 'unknown';
  #reason = 'awaiting_first_probe';
  #drainReason: string | undefined;
  /** Why it is GONE whatever probes say; while it still drains, a resume brings it back. */
  #left: string | undefined;
  #leftForGood = false;
  /** Its prefix cache cannot be trusted. */
  #taint: Taint | undefined;
  /** What was known of this place before, until the first good probe tells whether it is still that process. */
  #past: PastProcess | undefined;
  #failures = 0;
  #fastRetries = 0;
  #lastFailure: ProbeHealth['kind'] | undefined;
  /** Connections were refused since the last good probe, so another process may answer next. */
  #refusedSinceGood = false;
  #lastPassiveOk = Number.NEGATIVE_INFINITY;
  #signs: SignsOfLife;
  /** Losses in a row that were less than a minute apart, and the newest. */
  #losses = 0;
  #lostAt = Number.NEGATIVE_INFINITY;
  /** Since when it has passed its probes without being READY yet, and for how long it still has to. */
  #passingSince: number | undefined;
  #holdMs = 0;

  #generation: number;
  #engineId = '';
  readonly #engine = new EngineDetails();
  /** What trials found out, where the configuration leaves it open. */
  #bidirectional: 'on' | 'off' | undefined;
  #pins: InstancePins | undefined;
  /** A new process was seen by its start time alone; what it serves is read at once. */
  #recheck = false;

  /** `generation` is 1 unless the id was known before. */
  constructor(spec: InstanceSpec, health: HealthSettings, generation = 1, engine?: DescribedEngine) {
    this.#spec = spec;
    this.#health = health;
    this.#signs = this.#newSigns();
    this.#generation = generation;
    if (engine === undefined) return;
    this.#engineId = engine.engineId;
    this.#engine.describe(engine);
  }

  get spec(): InstanceSpec {
    return this.#spec;
  }

  get state(): InstanceState {
    if (this.#left !== undefined) return InstanceState.GONE;
    if (this.#isDraining) return this.#up === 'down' ? InstanceState.GONE : InstanceState.DRAINING;
    if (this.#up === 'unknown') return InstanceState.STARTING;
    return this.#up === 'up' ? InstanceState.READY : InstanceState.SUSPECT;
  }

  /** Why it is in this state, a snake_case word. */
  get reason(): string {
    if (this.#left !== undefined) return this.#left;
    return this.state === InstanceState.DRAINING ? (this.outOfUse ?? this.#reason) : this.#reason;
  }

  /** Why somebody drained it, until it is resumed. */
  get drainReason(): string | undefined {
    return this.#drainReason;
  }

  /** Why it gets no legs although it may be in good health. */
  get outOfUse(): string | undefined {
    return this.#taint === undefined ? this.#drainReason : LATE_READ;
  }

  /** What a record of the same place has to take over. */
  get past(): PastProcess {
    return {
      taint: this.#taint,
      signs: this.#signs,
      processStartSeconds: this.#engine.processStartSeconds ?? this.#past?.processStartSeconds,
      wasRefused: this.#refusedSinceGood,
    };
  }

  get #isDraining(): boolean {
    return this.outOfUse !== undefined;
  }

  /** Whether a probe of this record ever passed, so that it may hold blocks. */
  get hasServed(): boolean {
    return this.#up !== 'unknown';
  }

  /** The current life. */
  get incarnation(): Incarnation {
    const start = this.#engine.processStartSeconds;
    return create(IncarnationSchema, {
      generation: this.#generation,
      engineId: this.#engineId,
      ...(start === undefined ? {} : { processStartSeconds: start }),
    });
  }

  /** When the load was read, by the clock that `applyProbe` is given. */
  get loadReadAt(): number {
    return this.#engine.loadReadAt;
  }

  /** What the next probe reads beside the health. */
  partsDue(now: number): ReadonlySet<ProbePart> {
    const stale = this.#up !== 'up' || this.#engine.isStale(now);
    return new Set<ProbePart>(stale ? ['models', 'version', 'metrics', 'template'] : ['metrics']);
  }

  /** Takes the result of a probe that began at `startedAt` and ended at `now`. */
  applyProbe(result: ProbeResult, startedAt: number, now: number): void {
    if (result.health.kind === 'ok') this.#applyGood(result, now);
    else this.#applyBad(result.health.kind, startedAt, now);
  }

  /** Takes what a request learnt; `refused` makes a READY instance SUSPECT, `ok` lets a slow health answer pass. */
  applyPassive(outcome: 'refused' | 'ok', now: number): void {
    if (outcome === 'ok') {
      this.#lastPassiveOk = now;
      this.#signs.heard(now);
      return;
    }
    if (this.#up === 'unknown') return;
    this.#refusedSinceGood = true;
    // A draining instance is GONE only by probes: GONE means that what it holds is lost.
    if (this.#up !== 'up' || this.#isDraining) return;
    this.#lose(now);
    this.#reason = 'connection_refused';
    this.#fastRetries = 0;
  }

  /** Takes what a trial found out about reading from decode engines; holds for the current life. */
  noteBidirectional(state: 'on' | 'off'): void {
    this.#bidirectional = state;
  }

  /** Takes what its replies showed; holds for the current life. */
  noteLearnt(learnt: LearntOfEngine): void {
    this.#engine.learn(learnt);
  }

  /** Takes what stored handles pin on it. */
  notePins(pins: InstancePins): void {
    this.#pins = pins;
  }

  /** Takes a load that the instance sent, unless a newer one was read off its metrics. */
  noteLoad(load: SentLoad): void {
    this.#engine.noteLoad(load);
  }

  /** Takes a changed description of the same engine: labels, times, headers. */
  respec(spec: InstanceSpec): void {
    this.#spec = spec;
  }

  /** Stops new legs; a second call changes nothing, unless it says that the prefix cache cannot be trusted. */
  drain(reason: string): void {
    // No leg goes to a process whose prefix cache may hold the KV of other tokens; the next process has a new cache.
    if (reason === LATE_READ) this.#taint ??= { processStartSeconds: this.#engine.processStartSeconds };
    else if (this.#left === undefined) this.#drainReason ??= reason;
  }

  /** Goes on with what is known of the process that had this place, before anything is heard of it. */
  inherit(past: PastProcess): void {
    this.#past = past;
    this.#taint ??= past.taint;
    this.#signs = past.signs;
    this.#refusedSinceGood = past.wasRefused;
  }

  /** What it held while it drained is used or past its time: GONE until it is resumed. */
  endDrain(): void {
    // Who is told that it is gone is to know what brings it back: another process.
    if (this.#isDraining) this.#left ??= this.#taint === undefined ? 'drained' : LATE_READ;
  }

  /** For how long it has been silent by `now`, milliseconds; undefined where it is not. */
  silentMs(now: number): number | undefined {
    return this.#signs.lastingMs(now);
  }

  /** Whether it is GONE for good. */
  get hasLeft(): boolean {
    return this.#leftForGood;
  }

  /** It is GONE for good. */
  leave(reason: string): void {
    this.#left = reason;
    this.#leftForGood = true;
    this.#drainReason = undefined;
  }

  /**
   * Ends draining; legs come back with the next good probe. Where it was drained and is not trusted either, the first call
   * ends the drain: whoever drained it need not know of the other.
   */
  resume(): void {
    if (!this.#isDraining || this.#leftForGood) return;
    if (this.#drainReason === undefined) this.#taint = undefined;
    this.#drainReason = undefined;
    this.#left = undefined;
    if (this.#up === 'unknown') return;
    this.#up = 'down';
    this.#reason = 'resumed';
    this.#fastRetries = 0;
  }

  /** Milliseconds until the next probe, without jitter; undefined where none is due. */
  nextDelayMs(): number | undefined {
    if (this.#recheck) return 0;
    const { intervalMs } = this.#health;
    // A slow answer may be a busy engine's; quick repeats would make it slower.
    const patient = this.#up === 'up' && (this.#failures === 0 || this.#lastFailure === 'timeout');
    if (patient) return intervalMs > 0 ? intervalMs : undefined;
    const cap = intervalMs > 0 ? intervalMs : DEFAULT_RETRY_CAP_MS;
    if (this.#passingSince !== undefined) return Math.min(this.#holdMs, cap);
    return Math.min(FIRST_RETRY_MS * 2 ** Math.min(Math.max(this.#fastRetries - 1, 0), 16), cap);
  }

  /** The instance as others see it. */
  toInstance(revision: bigint): Instance {
    const spec = this.#spec;
    const load = this.#engine.load();
    const { kvExpired } = this.#engine;
    const silence = this.#signs.toMessage();
    return create(InstanceSchema, {
      id: spec.id,
      url: spec.url,
      role: ROLES[spec.role],
      connector: spec.connector,
      models: [...this.#engine.models],
      modelsKnown: this.#engine.modelsKnown,
      labels: { ...spec.labels },
      state: this.state,
      stateReason: this.reason,
      incarnation: this.incarnation,
      engine: this.#engine.info(spec.dataParallelSize ?? 0),
      kv: create(KvSettingsSchema, {
        lease: durationFromMs(spec.kvLeaseMs),
        decoderTtl: durationFromMs(spec.decoderTtlMs),
        bidirectional: spec.bidirectional === 'auto' ? (this.#bidirectional ?? 'auto') : spec.bidirectional,
        loadFailurePolicy: spec.loadFailurePolicy,
      }),
      ...(load === undefined ? {} : { load }),
      ...(this.#pins === undefined ? {} : { pins: pinsMessage(this.#pins) }),
      ...(kvExpired === undefined ? {} : { kvExpired: BigInt(Math.round(kvExpired)) }),
      ...(spec.weight === undefined ? {} : { weight: spec.weight }),
      ...(silence === undefined ? {} : { silence }),
      revision,
    });
  }

  #applyGood(result: ProbeResult, now: number): void {
    const startBefore = this.#engine.processStartSeconds ?? this.#past?.processStartSeconds;
    const start = result.metrics?.processStartSeconds;
    const sameProcess = start !== undefined && start === startBefore;
    const otherProcess = start !== undefined && startBefore !== undefined && start !== startBefore;
    const newLife = this.#up !== 'unknown' && (otherProcess || (this.#refusedSinceGood && !sameProcess));
    if (newLife) this.#beginLife();
    // The life of this record begins with this probe whatever was here before; only what is known of that may end.
    else if (this.#past !== undefined && (otherProcess || (this.#refusedSinceGood && !sameProcess)))
      this.#signs = this.#newSigns();
    this.#past = undefined;
    const tainted = this.#taint?.processStartSeconds;
    if (start !== undefined && tainted !== undefined && start !== tainted) this.#trust();
    else if (this.#taint !== undefined && tainted === undefined) this.#taint = { processStartSeconds: start };

    // Only a probe that was to read the details of this process may stand for them.
    const wasUp = this.#up === 'up';
    this.#recheck = newLife && wasUp && result.models === undefined;
    // What it serves, and with which template, is known with the next probe; it may be another engine's place by now.
    if (this.#recheck && !this.#isDraining) this.#waitForDetails();
    else this.#rise(now);
    this.#signs.heard(now);
    this.#failures = 0;
    this.#fastRetries = 0;
    this.#lastFailure = undefined;
    this.#refusedSinceGood = false;
    this.#engine.take(result, now, this.#health.intervalMs);
  }

  #applyBad(kind: ProbeHealth['kind'], startedAt: number, now: number): void {
    this.#recheck = false;
    // It served a request while the probe waited: busy, and busy is not dead.
    if (kind === 'timeout' && this.#up === 'up' && this.#lastPassiveOk >= startedAt) return;
    if (kind === 'refused' && (this.#up !== 'unknown' || this.#past !== undefined)) this.#refusedSinceGood = true;
    this.#signs.missed(now);
    this.#failures += 1;
    this.#lastFailure = kind;
    if (this.#up !== 'up' || kind !== 'timeout') this.#fastRetries += 1;
    if (this.#up === 'up') {
      if (this.#failures < this.#health.failures) return;
      this.#lose(now);
    }
    this.#passingSince = undefined;
    this.#reason = `probe_${kind}`;
  }

  #lose(now: number): void {
    this.#up = 'down';
    this.#losses = now - this.#lostAt < FLAP_WINDOW_MS ? this.#losses + 1 : 1;
    this.#lostAt = now;
    this.#passingSince = undefined;
  }

  /** READY, or not yet where it was lost again and again: each time costs the requests that it had. */
  #rise(now: number): void {
    this.#passingSince ??= now;
    const { dampingMs = 0 } = this.#health;
    // One that drains gets no requests anyway, and GONE would mean that what it holds is lost.
    const isSteady = this.#losses < 2 || this.#isDraining;
    const holdMs = isSteady ? 0 : dampingMs * Math.min(2 ** (this.#losses - 2), MAX_DAMPING);
    this.#holdMs = this.#up === 'down' ? Math.max(0, this.#passingSince + holdMs - now) : 0;
    if (this.#holdMs > 0) {
      this.#reason = 'flapping';
      return;
    }
    this.#up = 'up';
    this.#reason = 'probe_ok';
    this.#passingSince = undefined;
  }

  #waitForDetails(): void {
    this.#up = 'down';
    this.#reason = 'restarted';
    this.#passingSince = undefined;
  }

  #beginLife(): void {
    this.#generation += 1;
    this.#engineId = '';
    this.#bidirectional = undefined;
    this.#pins = undefined;
    this.#engine.forget();
    this.#signs = this.#newSigns();
    this.#trust();
  }

  #trust(): void {
    if (this.#taint === undefined) return;
    this.#taint = undefined;
    if (!this.#leftForGood && this.#drainReason === undefined) this.#left = undefined;
  }

  #newSigns(): SignsOfLife {
    return new SignsOfLife(() => {
      const { intervalMs, timeoutMs } = this.#health;
      return intervalMs > 0 && timeoutMs > 0 ? longestCalmMs(this.#health) : Number.POSITIVE_INFINITY;
    });
  }
}

/** Longest time between two signs of life of an instance in good health, milliseconds. */
export function longestCalmMs({ intervalMs, timeoutMs }: Pick<HealthSettings, 'intervalMs' | 'timeoutMs'>): number {
  return intervalMs * (1 + PROBE_JITTER) + timeoutMs;
}

/** The drain of an engine whose prefix cache may hold the KV of other tokens: it read blocks whose lease was over. */
export const LATE_READ = 'late_read';

/** The process that is not trusted. */
export interface Taint {
  readonly processStartSeconds: number | undefined;
}

/** What is known of a process that had a place: an id, or a URL. */
export interface PastProcess {
  readonly taint: Taint | undefined;
  readonly signs: SignsOfLife;
  readonly processStartSeconds: number | undefined;
  /** Connections were refused since it was heard of last, so another process may answer next. */
  readonly wasRefused: boolean;
}

function pinsMessage({ entries, blocks, share }: InstancePins): PinnedKv {
  return create(PinnedKvSchema, { entries, blocks: BigInt(blocks), share });
}

/** Whether two descriptions can be of the same life: every field that both know is equal. */
export function isSameLife(a: Incarnation, b: Incarnation): boolean {
  if (a.generation !== 0 && b.generation !== 0 && a.generation !== b.generation) return false;
  if (a.engineId !== '' && b.engineId !== '' && a.engineId !== b.engineId) return false;
  const [startA, startB] = [a.processStartSeconds, b.processStartSeconds];
  return startA === undefined || startB === undefined || startA === startB;
}

const ROLES = { prefill: Role.PREFILL, decode: Role.DECODE, both: Role.BOTH } as const;

import { create } from '@bufbuild/protobuf';
import {
  type EngineInfo,
  EngineInfoSchema,
  type LoadSample,
  LoadSampleSchema,
  type ModelCard,
  ModelCardSchema,
} from '../../gen/baton/v1/instance_pb.ts';
import { honouredMembers } from '../core/prompt-members.ts';
import type { EngineMetrics } from '../engine/metrics-text.ts';
import type { ProbeResult } from '../engine/probe.ts';
import type { LearntOfEngine } from './instance-view.ts';

/** What whoever registered an instance said of its engine; holds until a probe tells. */
export interface DescribedEngine {
  readonly engineId: string;
  readonly processStartSeconds?: number;
  readonly models: readonly ModelCard[];
  readonly modelsKnown: boolean;
  readonly kind: string;
  readonly version: string;
  readonly blockSize: number;
  readonly numGpuBlocks: number;
  readonly templateFingerprint: string;
}

/** A reading of the load that the instance sent itself. */
export interface SentLoad {
  readonly running: number;
  /** Without the deferred ones. */
  readonly waiting: number;
  readonly waitingDeferred: number;
  readonly kvCacheUsage: number;
  /** When it was taken, by the clock that `applyProbe` is given. */
  readonly at: number;
}

const UNLEARNT: LearntOfEngine = { handles: '', kvGroups: 0 };

/** How long model cards and version are believed before they are read again. */
const DETAILS_MAX_AGE_MS = 30_000;

/** A load that is older, and older than three probes, tells nothing any more. */
const LOAD_MAX_AGE_MS = 15_000;

const MAX_MODELS = 256;

/** What an engine is, serves and has to do, as probes read it and as it says itself. */
export class EngineDetails {
  #metrics: EngineMetrics = {};
  #metricsAt = 0;
  #sentLoad: SentLoad | undefined;
  #learnt: LearntOfEngine = UNLEARNT;
  #kind = '';
  #version = '';
  #templateFingerprint = '';
  #adapters: ProbeResult['adapters'];
  #models: readonly ModelCard[] = [];
  #modelsKnown = false;
  #detailsAt = Number.NEGATIVE_INFINITY;

  get models(): readonly ModelCard[] {
    return this.#models;
  }

  get modelsKnown(): boolean {
    return this.#modelsKnown;
  }

  get processStartSeconds(): number | undefined {
    return this.#metrics.processStartSeconds;
  }

  /** Requests whose blocks the engine freed because nobody came for them; undefined where it does not tell. */
  get kvExpired(): number | undefined {
    return this.#metrics.kvExpired;
  }

  /** When the load was read. */
  get loadReadAt(): number {
    return this.#newestSentLoad()?.at ?? this.#metricsAt;
  }

  /** Whether model cards and version have to be read again. */
  isStale(now: number): boolean {
    return now - this.#detailsAt >= DETAILS_MAX_AGE_MS;
  }

  /** Takes a load that the instance sent, unless a newer one was read off its metrics. */
  noteLoad(load: SentLoad): void {
    if (load.at >= this.loadReadAt) this.#sentLoad = load;
  }

  /** Takes what its replies showed. */
  learn(learnt: LearntOfEngine): void {
    this.#learnt = learnt;
  }

  /** The engine as others see it. */
  info(dataParallelSize: number): EngineInfo {
    return create(EngineInfoSchema, {
      kind: this.#kind,
      version: this.#version,
      blockSize: this.#metrics.blockSize ?? 0,
      numGpuBlocks: this.#metrics.numGpuBlocks ?? 0,
      templateFingerprint: this.#templateFingerprint,
      dataParallelSize,
      kvGroups: this.#learnt.kvGroups,
      handles: this.#learnt.handles,
      tokenizeMembers: [...honouredMembers(this.#version)],
      adapters: this.#adapters ?? '',
    });
  }

  /** Takes what whoever registered it said. */
  describe(engine: DescribedEngine): void {
    const { processStartSeconds, models, modelsKnown, kind, version, templateFingerprint } = engine;
    this.#metrics = {
      ...(processStartSeconds === undefined ? {} : { processStartSeconds }),
      ...(engine.blockSize === 0 ? {} : { blockSize: engine.blockSize }),
      ...(engine.numGpuBlocks === 0 ? {} : { numGpuBlocks: engine.numGpuBlocks }),
    };
    this.#models = models;
    this.#modelsKnown = modelsKnown;
    this.#kind = kind;
    this.#version = version;
    this.#templateFingerprint = templateFingerprint;
  }

  /** Another process has its place; its models stay until they are read. */
  forget(): void {
    this.#sentLoad = undefined;
    this.#learnt = UNLEARNT;
    this.#metrics = {};
    this.#version = '';
    this.#kind = '';
    this.#templateFingerprint = '';
    this.#adapters = undefined;
    this.#detailsAt = Number.NEGATIVE_INFINITY;
  }

  /** Takes what a good probe at `now` read; `intervalMs` is between two of them. */
  take(result: ProbeResult, now: number, intervalMs: number): void {
    if (result.metrics !== undefined) {
      // The layout and the start time are facts of the process; a text that lacks them does not unsay them.
      this.#metrics = { ...factsOf(this.#metrics), ...result.metrics };
      this.#metricsAt = now;
    } else if (now - this.#metricsAt > Math.max(LOAD_MAX_AGE_MS, 3 * intervalMs)) {
      this.#metrics = factsOf(this.#metrics);
    }
    this.#kind = result.kind ?? this.#kind;
    this.#version = result.version ?? this.#version;
    this.#templateFingerprint = result.templateFingerprint ?? this.#templateFingerprint;
    if (result.models === undefined) return;
    this.#adapters = result.adapters;
    this.#modelsKnown = result.models.length <= MAX_MODELS;
    this.#models = result.models
      .slice(0, MAX_MODELS)
      .map(({ id, root, parent, maxModelLen, rawJson }) =>
        create(ModelCardSchema, { id, root, parent, rawJson, ...(maxModelLen === undefined ? {} : { maxModelLen }) }),
      );
    this.#detailsAt = now;
  }

  /** The load that was sent, where no newer one was read off the metrics. */
  #newestSentLoad(): SentLoad | undefined {
    const sent = this.#sentLoad;
    return sent === undefined || (this.#hasLoadMetrics() && this.#metricsAt > sent.at) ? undefined : sent;
  }

  #hasLoadMetrics(): boolean {
    const { running, waiting, kvCacheUsage } = this.#metrics;
    return running !== undefined || waiting !== undefined || kvCacheUsage !== undefined;
  }

  /** The newest reading of its load; undefined where none is known. */
  load(): LoadSample | undefined {
    const sent = this.#newestSentLoad();
    if (sent !== undefined) {
      const { at: _, ...load } = sent;
      return create(LoadSampleSchema, load);
    }
    if (!this.#hasLoadMetrics()) return undefined;
    const { running, waiting, waitingDeferred, kvCacheUsage } = this.#metrics;
    return create(LoadSampleSchema, {
      running: toUint32(running),
      // The engine's waiting number has the deferred ones in it; the message counts them apart.
      waiting: Math.max(0, toUint32(waiting) - toUint32(waitingDeferred)),
      waitingDeferred: toUint32(waitingDeferred),
      kvCacheUsage: kvCacheUsage ?? 0,
    });
  }
}

/** What holds for all of a life once it was read. */
function factsOf({ blockSize, numGpuBlocks, processStartSeconds, kvExpired }: EngineMetrics): EngineMetrics {
  return Object.fromEntries(
    Object.entries({ blockSize, numGpuBlocks, processStartSeconds, kvExpired }).filter(
      ([, value]) => value !== undefined,
    ),
  );
}

function toUint32(value: number | undefined): number {
  return Math.min(Math.max(Math.round(value ?? 0), 0), 0xffff_ffff);
}

import type { Engine } from './engine.ts';
import type { JsonObject } from './json.ts';
import type { SimRole } from './options.ts';
import { type EngineStats, sumStats } from './stats.ts';

/**
 * What a simulated engine reports about itself; counters are of the current engine life, and of all its data parallel ranks
 * together.
 */
export interface SimState extends EngineStats {
  /** Of the first rank. */
  readonly engineId: string;
  readonly role: SimRole;
  readonly url: string;
  /** Live pins of either kind, leaked ones included. */
  readonly pins: number;
  readonly pinnedBlocks: number;
  readonly pinList: readonly {
    readonly requestId: string;
    readonly kind: string;
    readonly blocks: number;
    readonly tokens: number;
  }[];
  readonly pinsExpired: number;
  readonly freeBlocks: number;
  /** Of the fullest rank. */
  readonly usage: number;
  readonly running: number;
  readonly waiting: number;
  readonly loading: number;
  /** Requests that hang at this moment; `hung` counts all of them. */
  readonly hanging: number;
  /** Prompts in the buffer of an LMCache decode engine. */
  readonly buffered: number;
  /** Transfers of an LMCache prefill engine that failed. */
  readonly transfersFailed: number;
  readonly killed: boolean;
  readonly paused: boolean;
  readonly deathReason: string | null;
  readonly listening: boolean;
  readonly starts: number;
  /** Generate requests received by this process, all lives. */
  readonly requests: number;
  /** The same by data parallel rank. */
  readonly rankRequests: readonly number[];
  readonly faults: readonly JsonObject[];
}

/** What the engines of a process say, added up. */
export type CoreState = Omit<
  SimState,
  'role' | 'url' | 'killed' | 'paused' | 'listening' | 'starts' | 'requests' | 'faults' | 'rankRequests'
>;

/** Why a rank ends when another of its process does. */
export const DIED_WITH = 'another rank died';

/** Reads the engines of one process. */
export function coreState(engines: readonly Engine[]): CoreState {
  const pins = engines.flatMap((engine) => engine.pins.list());
  const sum = (read: (engine: Engine) => number): number => engines.reduce((total, engine) => total + read(engine), 0);
  const reasons = engines.flatMap(({ deathReason }) => deathReason ?? []);
  return {
    ...sumStats(engines.map(({ stats }) => stats)),
    engineId: engines[0]?.engineId ?? '',
    pins: pins.length,
    pinnedBlocks: pins.reduce((total, pin) => total + pin.blocks.length, 0),
    pinList: pins.map((pin) => ({
      requestId: pin.requestId,
      kind: pin.kind,
      blocks: pin.blocks.length,
      tokens: pin.tokens,
    })),
    pinsExpired: sum((engine) => engine.pins.expired),
    freeBlocks: sum((engine) => engine.pool.freeCount),
    usage: Math.max(...engines.map((engine) => engine.pool.usage)),
    running: sum((engine) => engine.countPhase('running')),
    waiting: sum((engine) => engine.countPhase('waiting')),
    loading: sum((engine) => engine.countPhase('loading')),
    hanging: sum((engine) => engine.countPhase('hung')),
    buffered: sum((engine) => engine.lmcache?.buffer.size ?? 0),
    transfersFailed: sum((engine) => engine.lmcache?.sender.failed ?? 0),
    deathReason: reasons.find((reason) => reason !== DIED_WITH) ?? reasons[0] ?? null,
  };
}

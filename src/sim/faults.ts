import { isObject, type JsonObject } from './json.ts';
import type { Leg } from './kv-params.ts';

/**
 * What an injected fault does. `refuse`: no listener until the faults are cleared or `ms` are over. `status`: an error reply. `reset`: the
 * connection is reset before a reply. `reset_reused`: the same, only on a connection that served a request before.
 * `reset_stream`, `end_stream`, `error_event`: after `events` events the connection is reset, ends cleanly without
 * `[DONE]`, or carries an error event. `no_done`: the terminator is left out. `stall`: silent for `ms`, then normal.
 * `hang`: never answers. `slow`: `ms` before the first and between tokens. `kill`: the process dies, and starts again after `ms` if given. `crash`: the engine
 * core dies, open requests get 500. `pause`: the process is stopped until the faults are cleared or `ms` are over. `restart`: a new engine life, the connection is reset. `load_failure`: the handle is
 * made unreadable. `no_handle`, `patch_handle`: the reply's handle is null, or gets the members of `patch`.
 * LMCache prefill engines: `notice_lost`, `notice_late` (by `ms`), `notice_early` (before the reply), `notice_doubled`,
 * `notice_foreign` (among others' and junk), `kv_unwritten` (the transfer fails: no notice at all).
 */
export const faultKinds = [
  'refuse',
  'status',
  'reset',
  'reset_reused',
  'reset_stream',
  'end_stream',
  'error_event',
  'no_done',
  'stall',
  'hang',
  'slow',
  'kill',
  'crash',
  'pause',
  'restart',
  'load_failure',
  'no_handle',
  'patch_handle',
  'notice_lost',
  'notice_late',
  'notice_early',
  'notice_doubled',
  'notice_foreign',
  'kv_unwritten',
] as const;

/** One of `faultKinds`. */
export type FaultKind = (typeof faultKinds)[number];

/** A fault and the requests it hits; unset matchers match everything, and only a `path` hits other requests than POST. */
export interface FaultRule {
  readonly kind: FaultKind;
  readonly leg?: Leg;
  /** Exact path. */
  readonly path?: string;
  readonly model?: string;
  /** Engine id that the handle in the request names: the two cannot talk to each other. */
  readonly remote?: string;
  /** How many matching requests are hit; default 1, unlimited with a probability. */
  readonly count?: number;
  /** Matching requests let through first. */
  readonly skip?: number;
  /** Chance per matching request, drawn from the engine's seed. */
  readonly probability?: number;
  readonly ms?: number;
  readonly status?: number;
  /** Body of a `status` fault: text as it is, anything else as JSON; default the engine's own 500. */
  readonly body?: unknown;
  readonly headers?: Readonly<Record<string, string>>;
  readonly events?: number;
  readonly patch?: JsonObject;
}

/** What a rule is matched against. */
export interface FaultTarget {
  readonly method: string;
  readonly leg: Leg;
  readonly path: string;
  readonly model: string;
  /** Engine id in the handle of the request; empty without one. */
  readonly remote: string;
  readonly isReused: boolean;
}

/** Small seeded generator of numbers in [0, 1). */
export function createRandom(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
    return ((x ^ (x >>> 14)) >>> 0) / 4_294_967_296;
  };
}

/** The active faults, in the order they were set; the first that matches a request is taken. */
export class FaultBook {
  private rules: { rule: FaultRule; left: number; skip: number }[] = [];
  private readonly random: () => number;

  constructor(random: () => number) {
    this.random = random;
  }

  /** True while a `refuse` fault is set. */
  get refuses(): boolean {
    return this.rules.some(({ rule }) => rule.kind === 'refuse');
  }

  add(rule: FaultRule): void {
    const left = rule.count ?? (rule.probability === undefined ? 1 : Number.POSITIVE_INFINITY);
    this.rules.push({ rule, left, skip: rule.skip ?? 0 });
  }

  clear(): void {
    this.rules = [];
  }

  /** Drops the `refuse` faults only. */
  endRefusal(): void {
    this.rules = this.rules.filter(({ rule }) => rule.kind !== 'refuse');
  }

  /** The rules as set, with the hits left. */
  list(): readonly JsonObject[] {
    return this.rules.map(({ rule, left }) => ({ ...rule, left: Number.isFinite(left) ? left : null }));
  }

  /** The fault for a request, counted as used. */
  match(target: FaultTarget): FaultRule | undefined {
    for (const entry of this.rules) {
      const { rule } = entry;
      if (rule.kind === 'refuse' || rule.kind === 'pause' || entry.left <= 0) continue;
      if (target.method !== 'POST' && rule.path === undefined) continue;
      if (rule.leg !== undefined && rule.leg !== target.leg) continue;
      if (rule.path !== undefined && rule.path !== target.path) continue;
      if (rule.model !== undefined && rule.model !== target.model) continue;
      if (rule.remote !== undefined && rule.remote !== target.remote) continue;
      if (rule.kind === 'reset_reused' && !target.isReused) continue;
      if (entry.skip > 0) {
        entry.skip -= 1;
        continue;
      }
      if (rule.probability !== undefined && this.random() >= rule.probability) continue;
      entry.left -= 1;
      return rule;
    }
    return undefined;
  }
}

/** Reads a rule from JSON; undefined if it is not one. */
export function readFault(value: unknown): FaultRule | undefined {
  if (!isObject(value)) return undefined;
  const kind = faultKinds.find((name) => name === value['kind']);
  return kind === undefined ? undefined : { ...value, kind };
}

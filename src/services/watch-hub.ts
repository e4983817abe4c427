import { type Duration, durationMs } from '@bufbuild/protobuf/wkt';
import { BatonError } from '../core/errors.ts';
import type { Clock } from './clock.ts';

const DEFAULT_CHECKPOINT_MS = 15_000;
const MIN_CHECKPOINT_MS = 1000;
/** A timer that is set for more than 24 days is over at once. */
const MAX_CHECKPOINT_MS = 3_600_000;

/** One step of a watch; `token` is where a later watch goes on, empty within a snapshot. */
export type WatchEvent<T> = (
  | { readonly kind: 'reset'; readonly reason: 'compacted' | 'epoch' }
  | { readonly kind: 'snapshot-item'; readonly value: T }
  | { readonly kind: 'snapshot-complete'; readonly count: number }
  | { readonly kind: 'delta'; readonly value: T }
  | { readonly kind: 'checkpoint' }
) & { readonly token: string; readonly revision: bigint };

/** Settings of {@link WatchHub}. */
export interface WatchHubOptions {
  readonly clock: Clock;
  /** Names this life of the pool, `[a-z0-9]+`; a token of another one gets a reset. */
  readonly epoch: string;
  /** Deltas kept for readers that resume or lag. */
  readonly historyLimit: number;
  /** Watches open at a time. Default no limit. */
  readonly maxWatches?: number;
  /** Newest revision at the start: what was before is no longer told. Default 0. */
  readonly revision?: bigint;
}

/** How one watch runs. */
export interface WatchRequest<T> {
  /** From the newest event of an earlier watch; empty begins with a snapshot. */
  readonly token: string;
  /** What a snapshot shows; called whenever one begins. It may show changes that are told again after it. */
  readonly snapshot: () => Iterable<T> | AsyncIterable<T>;
  /** Which deltas are told. Default all. */
  readonly wants?: (value: T) => boolean;
  /** Longest time without an event, milliseconds. */
  readonly checkpointMs: number;
  /** Ends the watch without an error. */
  readonly signal: AbortSignal;
}

/** Within one, revisions grow, and none is left out. */
interface Life {
  readonly epoch: string;
}

interface Delta<T> {
  readonly revision: bigint;
  readonly value: T;
}

/**
 * Hands the changes of a pool to any number of readers: snapshot, deltas in order, checkpoints, resume tokens.
 * Readers share one bounded history and hold only a position in it, so a slow one costs no memory: it gets a reset.
 */
export class WatchHub<T> {
  readonly #options: WatchHubOptions;
  readonly #history: Delta<T>[] = [];
  readonly #wakes = new Set<() => void>();
  #revision = 0n;
  /** The newest revision that is no longer in the history. */
  #compacted = 0n;
  #life: Life;
  #watches = 0;
  #closed = false;

  constructor(options: WatchHubOptions) {
    this.#options = options;
    this.#life = { epoch: options.epoch };
    this.#revision = options.revision ?? 0n;
    this.#compacted = this.#revision;
  }

  /** Revision of the newest change; 0 before the first. */
  get revision(): bigint {
    return this.#revision;
  }

  /** Makes the value of the next revision and hands it out. */
  publish(make: (revision: bigint) => T): T {
    const value = make(this.#revision + 1n);
    this.publishAt(this.#revision + 1n, value);
    return value;
  }

  /** Hands out the value of a revision that is newer than every one before. */
  publishAt(revision: bigint, value: T): void {
    this.#revision = revision;
    this.#history.push({ revision, value });
    while (this.#history.length > this.#options.historyLimit) {
      this.#compacted = this.#history.shift()?.revision ?? this.#compacted;
    }
    this.#wakeAll();
  }

  /** Begins anew at a revision, which can be an older one: changes before it may not have been told. Readers get a snapshot. */
  begin(epoch: string, revision: bigint): void {
    this.#life = { epoch };
    this.#history.length = 0;
    this.#revision = revision;
    this.#compacted = revision;
    this.#wakeAll();
  }

  /** Ends all watches and refuses new ones, with SHUTTING_DOWN. */
  close(): void {
    this.#closed = true;
    this.#wakeAll();
  }

  /**
   * Streams events until the signal aborts; the first comes at once.
   * Throws INVALID_ARGUMENT for a foreign token, RESOURCE_EXHAUSTED over the limit, SHUTTING_DOWN when the hub closes.
   */
  async *watch(request: WatchRequest<T>): AsyncGenerator<WatchEvent<T>, undefined> {
    const resume = request.token === '' ? undefined : parseToken(request.token);
    const { maxWatches = Number.POSITIVE_INFINITY } = this.#options;
    if (this.#watches >= maxWatches) {
      throw new BatonError({
        reason: 'LIMIT_EXCEEDED',
        message: 'too many open watches',
        metadata: { limit: 'watches', max: String(maxWatches) },
      });
    }
    this.#watches += 1;
    try {
      yield* this.#stream(request, resume);
    } finally {
      this.#watches -= 1;
    }
  }

  async *#stream(request: WatchRequest<T>, resume: Resume | undefined): AsyncGenerator<WatchEvent<T>, undefined> {
    let cursor: bigint | undefined;
    let reset: 'compacted' | 'epoch' | undefined;
    let life = this.#life;
    if (resume !== undefined) {
      // A revision ahead of ours is of another life that happened to draw the same epoch.
      if (resume.epoch !== life.epoch || resume.revision > this.#revision) reset = 'epoch';
      else cursor = resume.revision;
    }
    let quiet = false;
    while (!request.signal.aborted) {
      this.#throwIfClosed();
      if (life !== this.#life) {
        reset = life.epoch === this.#life.epoch ? 'compacted' : 'epoch';
        cursor = undefined;
        life = this.#life;
      } else if (cursor !== undefined && cursor < this.#compacted) {
        cursor = undefined;
        reset = 'compacted';
      }
      if (cursor === undefined) {
        cursor = this.#revision;
        if (reset !== undefined) yield { kind: 'reset', reason: reset, token: '', revision: cursor };
        let count = 0;
        for await (const value of request.snapshot()) {
          if (request.signal.aborted) return undefined;
          // The rest of it need not fit what was shown.
          if (life !== this.#life) break;
          count += 1;
          yield { kind: 'snapshot-item', value, token: '', revision: cursor };
        }
        if (life !== this.#life) continue;
        yield { kind: 'snapshot-complete', count, ...this.#position(cursor) };
        reset = undefined;
        quiet = true;
        continue;
      }
      const next = this.#after(cursor);
      if (next !== undefined) {
        cursor = next.revision;
        if (request.wants?.(next.value) === false) continue;
        yield { kind: 'delta', value: next.value, ...this.#position(cursor) };
        quiet = true;
        continue;
      }
      if (quiet && (await this.#changed(cursor, request.checkpointMs, request.signal))) continue;
      if (!request.signal.aborted) yield { kind: 'checkpoint', ...this.#position(cursor) };
      quiet = true;
    }
    return undefined;
  }

  #after(cursor: bigint): Delta<T> | undefined {
    let [low, high] = [0, this.#history.length];
    while (low < high) {
      const middle = (low + high) >>> 1;
      if ((this.#history[middle]?.revision ?? cursor) > cursor) high = middle;
      else low = middle + 1;
    }
    return this.#history[low];
  }

  #position(revision: bigint): { token: string; revision: bigint } {
    return { token: `${this.#life.epoch}.${revision}`, revision };
  }

  /** Whether something happened (a change, the close, the abort) before `timeoutMs` were over. */
  async #changed(cursor: bigint, timeoutMs: number, signal: AbortSignal): Promise<boolean> {
    if (signal.aborted || this.#closed || this.#revision > cursor) return true;
    const { promise, resolve } = Promise.withResolvers<boolean>();
    const wake = () => resolve(true);
    const cancelTimer = this.#options.clock.setTimer(() => resolve(false), timeoutMs);
    this.#wakes.add(wake);
    signal.addEventListener('abort', wake);
    try {
      return await promise;
    } finally {
      cancelTimer();
      this.#wakes.delete(wake);
      signal.removeEventListener('abort', wake);
    }
  }

  #wakeAll(): void {
    for (const wake of this.#wakes) wake();
  }

  #throwIfClosed(): void {
    if (this.#closed) throw new BatonError({ reason: 'SHUTTING_DOWN', message: 'the process stops' });
  }
}

/** Longest time without a message of a watch, milliseconds. */
export function readCheckpointInterval(interval: Duration | undefined): number {
  const ms = interval === undefined ? 0 : durationMs(interval);
  return ms <= 0 ? DEFAULT_CHECKPOINT_MS : Math.min(Math.max(ms, MIN_CHECKPOINT_MS), MAX_CHECKPOINT_MS);
}

interface Resume {
  readonly epoch: string;
  readonly revision: bigint;
}

function parseToken(token: string): Resume {
  const [, epoch, revision] = /^([a-z0-9]{1,64})\.(\d{1,19})$/.exec(token) ?? [];
  if (epoch === undefined || revision === undefined) {
    throw new BatonError({ reason: 'RESUME_TOKEN_INVALID', message: 'not a resume token of this service' });
  }
  return { epoch, revision: BigInt(revision) };
}

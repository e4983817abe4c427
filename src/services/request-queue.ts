import { BatonError } from '../core/errors.ts';

/** Limits of a {@link RequestQueue}; 0 tenants' share: as many as there is room for. */
export interface QueueLimits {
  /** Requests that may wait at once. */
  readonly max: number;
  /** Requests of one tenant that may wait at once; 0: no limit of its own. */
  readonly tenantMax: number;
}

/** How a wait ended. */
export type QueueOutcome = 'routed' | 'refused' | 'displaced' | 'timeout' | 'client_gone' | 'shutting_down';

/** What a {@link RequestQueue} works with. */
export interface QueueOptions {
  readonly limits: QueueLimits;
  readonly now: () => number;
  /** Calls back whenever waiting requests should try again; returns what ends that. */
  readonly onChange: (listener: () => void) => () => void;
  readonly observe?: (outcome: QueueOutcome, milliseconds: number) => void;
}

/** A request that wants to be placed. */
export interface Placing<T> {
  readonly tenant: string;
  /** Lower is earlier, among the requests of one tenant. */
  readonly priority: number;
  /** Requests of one kind are placed or not placed alike at one moment. */
  readonly kind: string;
  readonly maxWaitMs: number;
  readonly signal: AbortSignal;
  /** Places it and takes what it needs, or undefined where it has to wait; a throw ends the wait. */
  readonly attempt: () => T | undefined;
}

interface Waiter {
  readonly priority: number;
  readonly kind: string;
  /** False where it has to wait on. */
  readonly tryNow: () => boolean;
  /** Ends the wait, for a request of another tenant. */
  readonly giveWay: () => void;
}

/** Retry-After is the time that requests have waited lately, between these. */
const LEAST_RETRY_MS = 1000;
const LONGEST_RETRY_MS = 30_000;
/** Weight of the newest wait in that time. */
const NEWEST = 0.1;

/**
 * Where requests wait for an engine, before a leg has cost anything. Tenants take turns, so that none waits behind all the
 * requests of another; of one tenant's requests those of the lowest priority value go first, in order of arrival. What
 * cannot be placed keeps nobody of another kind waiting. When the queue is full, a tenant with fewer requests in it takes the
 * place of the newest one of the tenant with the most.
 */
export class RequestQueue {
  readonly #options: QueueOptions;
  /** By tenant, whose turn is next first; each in the order in which they are placed. */
  readonly #tenants = new Map<string, Waiter[]>();
  readonly #kinds = new Map<string, number>();
  readonly #stop = new AbortController();
  #unsubscribe: (() => void) | undefined;
  #depth = 0;
  #pumping = false;
  #again = false;
  #usualWaitMs = 0;

  constructor(options: QueueOptions) {
    this.#options = options;
  }

  /** Requests that wait. */
  get depth(): number {
    return this.#depth;
  }

  /** When who was turned away may come again. */
  get retryAfterMs(): number {
    return Math.min(LONGEST_RETRY_MS, Math.max(LEAST_RETRY_MS, Math.round(this.#usualWaitMs)));
  }

  /** Nobody waits here any more: another router, or the next one, has all the time that is left to a request. */
  stop(): void {
    const message = 'This router is shutting down.';
    this.#stop.abort(new BatonError({ reason: 'SHUTTING_DOWN', message, retryAfterMs: LEAST_RETRY_MS }));
  }

  /**
   * Places a request, at once or when it is its turn; undefined when its time has run out. Throws when the caller or this
   * router gives up, when there is no room to wait, and what `attempt` throws.
   */
  async place<T>(placing: Placing<T>): Promise<T | undefined> {
    // Whoever waits for the same has come earlier.
    const first = this.#kinds.has(placing.kind) ? undefined : placing.attempt();
    if (first !== undefined || placing.maxWaitMs <= 0) return first;
    this.#admit(placing.tenant);
    return this.#wait(placing);
  }

  /** Lets those who wait try again: somewhere there may be room now. */
  pump(): void {
    if (this.#pumping) {
      this.#again = true;
      return;
    }
    this.#pumping = true;
    try {
      do {
        this.#again = false;
        this.#placeAll();
      } while (this.#again);
    } finally {
      this.#pumping = false;
    }
  }

  #admit(tenant: string): void {
    const { max, tenantMax } = this.#options.limits;
    const own = this.#tenants.get(tenant)?.length ?? 0;
    if (tenantMax > 0 && own >= tenantMax) throw this.#tenantQueueFull();
    if (this.#depth < max) return;
    const most = this.#mostOfOneTenant();
    if (most.length > own + 1) {
      most.at(-1)?.giveWay();
      return;
    }
    const message = 'Too many requests are waiting for an engine.';
    throw new BatonError({ reason: 'QUEUE_FULL', message, retryAfterMs: this.retryAfterMs });
  }

  #mostOfOneTenant(): readonly Waiter[] {
    let most: readonly Waiter[] = [];
    for (const waiters of this.#tenants.values()) if (waiters.length > most.length) most = waiters;
    return most;
  }

  #tenantQueueFull(): BatonError {
    return new BatonError({
      reason: 'TENANT_QUEUE_FULL',
      message: 'Too many of your requests are waiting for an engine; send fewer at a time.',
      retryAfterMs: this.retryAfterMs,
    });
  }

  #wait<T>({ tenant, priority, kind, maxWaitMs, signal, attempt }: Placing<T>): Promise<T | undefined> {
    const since = this.#options.now();
    const stop = this.#stop.signal;
    return new Promise((resolve, reject) => {
      const settle = (outcome: QueueOutcome, act: () => void) => {
        clearTimeout(timer);
        signal.removeEventListener('abort', leave);
        stop.removeEventListener('abort', close);
        this.#remove(tenant, waiter);
        const waitedMs = this.#options.now() - since;
        if (outcome === 'routed' || outcome === 'timeout') this.#usualWaitMs += NEWEST * (waitedMs - this.#usualWaitMs);
        this.#options.observe?.(outcome, waitedMs);
        act();
      };
      const leave = () => settle('client_gone', () => reject(gone(signal)));
      const close = () => settle('shutting_down', () => reject(asError(stop.reason)));
      const waiter: Waiter = {
        priority,
        kind,
        tryNow: () => {
          try {
            const value = attempt();
            if (value !== undefined) settle('routed', () => resolve(value));
            return value !== undefined;
          } catch (error) {
            settle('refused', () => reject(asError(error)));
            return true;
          }
        },
        giveWay: () => settle('displaced', () => reject(this.#tenantQueueFull())),
      };
      const timer = setTimeout(() => settle('timeout', () => resolve(undefined)), maxWaitMs);
      this.#add(tenant, waiter);
      if (signal.aborted) return leave();
      if (stop.aborted) return close();
      signal.addEventListener('abort', leave, { once: true });
      stop.addEventListener('abort', close, { once: true });
    });
  }

  /** Each turn places one request of a tenant, or finds out that its kind has to wait on. */
  #placeAll(): void {
    const stuck = new Set<string>();
    let waitsOn = false;
    while (!waitsOn) {
      waitsOn = true;
      for (const [tenant, waiters] of [...this.#tenants]) {
        const next = waiters.find(({ kind }) => !stuck.has(kind));
        if (next === undefined) continue;
        waitsOn = false;
        if (next.tryNow()) this.#endTurn(tenant);
        else stuck.add(next.kind);
      }
    }
  }

  #endTurn(tenant: string): void {
    const waiters = this.#tenants.get(tenant);
    if (waiters === undefined) return;
    this.#tenants.delete(tenant);
    this.#tenants.set(tenant, waiters);
  }

  #add(tenant: string, waiter: Waiter): void {
    const waiters = this.#tenants.get(tenant) ?? [];
    const at = waiters.findLastIndex(({ priority }) => priority <= waiter.priority) + 1;
    waiters.splice(at, 0, waiter);
    this.#tenants.set(tenant, waiters);
    this.#kinds.set(waiter.kind, (this.#kinds.get(waiter.kind) ?? 0) + 1);
    this.#depth += 1;
    this.#unsubscribe ??= this.#options.onChange(() => this.pump());
  }

  #remove(tenant: string, waiter: Waiter): void {
    const waiters = this.#tenants.get(tenant) ?? [];
    const at = waiters.indexOf(waiter);
    if (at < 0) return;
    waiters.splice(at, 1);
    if (waiters.length === 0) this.#tenants.delete(tenant);
    const left = (this.#kinds.get(waiter.kind) ?? 1) - 1;
    if (left > 0) this.#kinds.set(waiter.kind, left);
    else this.#kinds.delete(waiter.kind);
    this.#depth -= 1;
    if (this.#depth > 0) return;
    this.#unsubscribe?.();
    this.#unsubscribe = undefined;
  }
}

function gone(signal: AbortSignal): BatonError {
  return new BatonError({ reason: 'CLIENT_GONE', message: 'The caller gave up.' }, { cause: signal.reason });
}

function asError(error: unknown): Error {
  return error instanceof Error ? error : new Error(String(error));
}

import { BatonError } from '../core/errors.ts';
import type { TenantLimit } from '../core/tenant.ts';

/** A request that was let in. */
export interface Admission {
  /** Counts tokens before it is known how many they are; the next call, or `settle`, counts others in their place. */
  reserve(tokens: number): void;
  /** Counts the tokens that were used. */
  settle(tokens: number): void;
  /** The request has ended; only the first call counts. */
  leave(): void;
}

/** Tenants that are remembered; over it the one that was seen longest ago is forgotten. */
const MAX_TENANTS = 50_000;
const MINUTE_MS = 60_000;
/** How many that need not be remembered leave with each request. */
const TRIM_PER_REQUEST = 2;
/** When a place may be free again is not known. */
const BUSY_RETRY_MS = 1_000;

/** What was used of a limit per minute, less what time has given back: a bucket that holds one minute's worth. */
class Meter {
  #spent = 0;
  #at = 0;

  /** Milliseconds until one more fits; 0: at once. */
  wait(perMinute: number, now: number): number {
    this.#giveBack(perMinute, now);
    return perMinute === 0 ? 0 : Math.max(0, ((this.#spent + 1 - perMinute) / perMinute) * MINUTE_MS);
  }

  add(units: number): void {
    this.#spent = Math.max(0, this.#spent + units);
  }

  #giveBack(perMinute: number, now: number): void {
    const given = perMinute === 0 ? this.#spent : ((now - this.#at) * perMinute) / MINUTE_MS;
    this.#spent = Math.max(0, this.#spent - given);
    this.#at = now;
  }
}

interface Account {
  readonly requests: Meter;
  readonly tokens: Meter;
  running: number;
  seenAt: number;
}

/** Counts what tenants use of their limits, which are asked for with every request. */
export class TenantLimits {
  readonly #limitOf: (tenant: string) => TenantLimit;
  readonly #now: () => number;
  /** Those seen last are last. */
  readonly #accounts = new Map<string, Account>();

  /** @param now milliseconds on a clock that never goes back */
  constructor(limitOf: (tenant: string) => TenantLimit, now: () => number) {
    this.#limitOf = limitOf;
    this.#now = now;
  }

  /** How many tenants are remembered. */
  get size(): number {
    return this.#accounts.size;
  }

  /** Lets a request in, or says which limit it is over and when to come again. */
  admit(tenant: string): Admission | BatonError {
    const limit = this.#limitOf(tenant);
    if (limit.requestsPerMinute + limit.tokensPerMinute + limit.concurrency === 0) return FREE;
    const now = this.#now();
    const account = this.#accountOf(tenant, now);
    const { concurrency, tokensPerMinute, requestsPerMinute } = limit;
    if (concurrency > 0 && account.running >= concurrency) {
      return refusal(`It has ${concurrency} requests running, and may not have more.`, BUSY_RETRY_MS);
    }
    const tokensMs = account.tokens.wait(tokensPerMinute, now);
    if (tokensMs > 0) return refusal(`It has used its ${tokensPerMinute} tokens a minute.`, tokensMs);
    const requestsMs = account.requests.wait(requestsPerMinute, now);
    if (requestsMs > 0) return refusal(`It has used its ${requestsPerMinute} requests a minute.`, requestsMs);
    account.requests.add(1);
    account.running += 1;
    return admissionOf(account);
  }

  #accountOf(tenant: string, now: number): Account {
    const known = this.#accounts.get(tenant);
    this.#accounts.delete(tenant);
    this.#trim(now);
    const account = known ?? { requests: new Meter(), tokens: new Meter(), running: 0, seenAt: now };
    account.seenAt = now;
    this.#accounts.set(tenant, account);
    return account;
  }

  /** Forgets who is as if it had never come, and under pressure whoever has nothing running. */
  #trim(now: number): void {
    let looks = TRIM_PER_REQUEST;
    for (const [tenant, account] of this.#accounts) {
      const isFull = this.#accounts.size >= MAX_TENANTS;
      if (looks === 0 || (!isFull && now - account.seenAt < MINUTE_MS)) return;
      looks -= 1;
      this.#accounts.delete(tenant);
      const owes = !isFull && account.tokens.wait(this.#limitOf(tenant).tokensPerMinute, now) > 0;
      // It must not stand in the way of those after it.
      if (account.running > 0 || owes) this.#accounts.set(tenant, account);
    }
  }
}

const FREE: Admission = { reserve: () => undefined, settle: () => undefined, leave: () => undefined };

function admissionOf(account: Account): Admission {
  let reserved = 0;
  let isOver = false;
  const count = (tokens: number) => {
    account.tokens.add(tokens - reserved);
    reserved = tokens;
  };
  return {
    reserve: count,
    settle: count,
    leave() {
      if (isOver) return;
      isOver = true;
      account.running -= 1;
    },
  };
}

function refusal(why: string, retryAfterMs: number): BatonError {
  return new BatonError({
    reason: 'RATE_LIMIT_EXCEEDED',
    message: `The tenant of this request is over its limit. ${why}`,
    // A part of a microsecond is only how numbers are written.
    retryAfterMs: Math.max(1, Math.ceil(retryAfterMs - 0.001)),
  });
}

import { createLocalJWKSet, type JSONWebKeySet, type JWTVerifyGetKey } from 'jose';
import type { Logger } from '../obs/log.ts';

/** What a {@link KeyCache} needs; times in milliseconds. */
export interface KeyCacheOptions {
  /** Gets the text of the key set; a rejection says in words why it cannot. */
  readonly read: () => Promise<string>;
  /** Between two looks; 0: none by itself after a good one. */
  readonly refreshMs: number;
  /** After a look that failed. */
  readonly retryMs: number;
  /** Between two looks that unknown keys cause, so that forged tokens cannot make many. */
  readonly cooldownMs: number;
  readonly log: Logger;
}

/**
 * Reads a JSON Web Key Set.
 *
 * @throws Error with what is wrong of it
 */
export function parseKeySet(text: string): JWTVerifyGetKey {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error('the key set is no JSON', { cause: error });
  }
  if (!isKeySet(value)) throw new Error('the key set has no list "keys" of keys');
  // Almost surely a slip: every token would be refused.
  if (value.keys.length === 0) throw new Error('the key set has no key');
  return createLocalJWKSet(value);
}

function isKeySet(value: unknown): value is JSONWebKeySet {
  if (typeof value !== 'object' || value === null || !('keys' in value) || !Array.isArray(value.keys)) return false;
  return value.keys.every((key: unknown) => typeof key === 'object' && key !== null && 'kty' in key);
}

/** Keys by which tokens are checked. */
export interface TokenKeys {
  /** Undefined while there are none. */
  current(): Promise<JWTVerifyGetKey | undefined>;
  /** Reads them again because one is not among them; false where that would give nothing else. */
  lookAgain(): Promise<boolean>;
}

/** Keys by which tokens are checked: those that were read last, however long that is ago. */
export class KeyCache implements TokenKeys, Disposable {
  readonly #options: KeyCacheOptions;
  #keys: JWTVerifyGetKey | undefined;
  #looking: Promise<void> | undefined;
  #lookedAt = Number.NEGATIVE_INFINITY;
  #timer: NodeJS.Timeout | undefined;
  #complaint = '';
  #isDisposed = false;

  /** Reads the keys at once, and again from time to time. */
  constructor(options: KeyCacheOptions) {
    this.#options = options;
    void this.#look();
  }

  [Symbol.dispose](): void {
    this.#isDisposed = true;
    clearTimeout(this.#timer);
  }

  /** The keys; undefined while none could be read ever. The first look is waited for. */
  async current(): Promise<JWTVerifyGetKey | undefined> {
    if (this.#keys === undefined) await this.#looking;
    return this.#keys;
  }

  /** Reads the keys again because one is not among them; resolves to false where that was done just now. */
  async lookAgain(): Promise<boolean> {
    if (this.#looking === undefined && performance.now() - this.#lookedAt < this.#options.cooldownMs) return false;
    await this.#look();
    return true;
  }

  #look(): Promise<void> {
    this.#looking ??= this.#read().finally(() => {
      this.#looking = undefined;
    });
    return this.#looking;
  }

  async #read(): Promise<void> {
    const { read, refreshMs, retryMs, log } = this.#options;
    clearTimeout(this.#timer);
    let wait = refreshMs;
    try {
      this.#keys = parseKeySet(await read());
      if (this.#complaint !== '') log.info('the keys of tokens can be read again');
      this.#complaint = '';
    } catch (error) {
      wait = retryMs;
      const cause = error instanceof Error ? error.message : String(error);
      // Once for each thing that is wrong, not at every look.
      if (cause !== this.#complaint) {
        const what = this.#keys === undefined ? 'no token can be checked' : 'those read last stay in use';
        log.error({ cause }, `the keys of tokens cannot be read; ${what}`);
      }
      this.#complaint = cause;
    }
    this.#lookedAt = performance.now();
    if (this.#isDisposed || wait === 0) return;
    this.#timer = setTimeout(() => void this.#look(), wait);
    this.#timer.unref();
  }
}

/** Largest key set that is read, bytes. */
const MAX_BYTES = 1_048_576;

/** Gets a key set by HTTP; a redirect is not followed, because it could lead anywhere. */
export async function fetchKeySet(url: string, timeoutMs: number): Promise<string> {
  const signal = AbortSignal.timeout(timeoutMs);
  let reply: Response;
  try {
    reply = await fetch(url, { redirect: 'error', signal, headers: { accept: 'application/json' } });
  } catch (error) {
    if (signal.aborted) throw new Error(`no answer within ${timeoutMs} ms`, { cause: error });
    throw new Error(whyUnreached(error), { cause: error });
  }
  if (reply.status !== 200 || reply.body === null) {
    await reply.body?.cancel();
    throw new Error(`the answer has the status ${reply.status}`);
  }
  const chunks: Uint8Array[] = [];
  let bytes = 0;
  for await (const chunk of reply.body) {
    bytes += chunk.byteLength;
    if (bytes > MAX_BYTES) throw new Error(`the answer is larger than ${MAX_BYTES} bytes`);
    chunks.push(chunk);
  }
  return Buffer.concat(chunks).toString('utf8');
}

function whyUnreached(error: unknown): string {
  const cause = error instanceof Error ? error.cause : undefined;
  if (!(cause instanceof Error)) return 'the address cannot be reached';
  return 'code' in cause ? `the address cannot be reached (${String(cause.code)})` : cause.message;
}

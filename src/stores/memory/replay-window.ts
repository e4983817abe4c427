import { AgingMap, type AgingMapOptions } from '../aging-map.ts';
import { joinUnambiguously } from '../entry.ts';
import { idempotencyKeyReused } from '../refusals.ts';
import type { CallId } from '../store.ts';

interface Answer<T> {
  /** As text, which takes a fifth of an array's memory. */
  readonly fingerprint: string;
  readonly value: T;
}

/** Rough size of what is kept beside the key and the answer. */
const OVERHEAD_BYTES = 256;

/** The answers of one method, by idempotency key, for a while. */
export class ReplayWindow<T> {
  readonly #answers: AgingMap<string, Answer<T>>;

  constructor({ onForgotten, ...bounds }: AgingMapOptions<T>) {
    const forget = onForgotten && ((answer: Answer<T>) => onForgotten(answer.value));
    this.#answers = new AgingMap({ ...bounds, ...(forget === undefined ? {} : { onForgotten: forget }) });
  }

  /** The answer this call got before; throws IDEMPOTENCY_KEY_REUSED if another request had the key. */
  find(id: CallId, now: number): T | undefined {
    const answer = this.#answers.get(joinUnambiguously([id.scope, id.key]), now);
    if (answer === undefined) return undefined;
    if (answer.fingerprint !== textOf(id.fingerprint)) {
      throw idempotencyKeyReused(id.key);
    }
    return answer.value;
  }

  /** Keeps an answer that takes about `bytes`. */
  remember(id: CallId, value: T, now: number, bytes: number): T {
    const key = joinUnambiguously([id.scope, id.key]);
    this.#answers.set(
      key,
      { fingerprint: textOf(id.fingerprint), value },
      now,
      OVERHEAD_BYTES + 2 * key.length + bytes,
    );
    return value;
  }

  /** Forgets up to `batch` answers that are too old. */
  trim(now: number, batch: number): void {
    this.#answers.trim(now, batch);
  }
}

function textOf(bytes: Uint8Array): string {
  return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength).toString('latin1');
}

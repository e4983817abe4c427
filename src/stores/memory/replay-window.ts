import type { AgingMapOptions } from '../aging-map.ts';
import { joinUnambiguously } from '../entry.ts';
import { idempotencyKeyReused } from '../refusals.ts';
import type { CallId } from '../store.ts';
import { AgingRows } from './aging-rows.ts';
import { DIGEST_WORDS, digestOf, wordsOf } from './digest.ts';
import { NumberLists } from './number-lists.ts';

/** Rough size of an answer, beside what it holds elsewhere. */
const ANSWER_BYTES = 256;

/**
 * The answers of one method, by idempotency key, for a while. They come as often as calls, so they are no objects: an
 * answer is a list of numbers, which only the method itself can read.
 */
export class ReplayWindow {
  readonly #lists = new NumberLists();
  /** Of each key the request's fingerprint and the list. */
  readonly #answers: AgingRows;

  constructor({ onForgotten, ...bounds }: AgingMapOptions<readonly number[]>) {
    this.#answers = new AgingRows(
      { key: DIGEST_WORDS, value: DIGEST_WORDS + 1 },
      {
        ...bounds,
        onForgotten: (value) => {
          const list = listOf(value);
          const answer = onForgotten && this.#lists.read(list);
          this.#lists.free(list);
          if (answer !== undefined) onForgotten?.(answer);
        },
      },
    );
  }

  /** The answer this call got before; throws IDEMPOTENCY_KEY_REUSED if another request had the key. */
  find(id: CallId, now: number): readonly number[] | undefined {
    const value = this.#answers.get(keyOf(id), now);
    if (value === undefined) return undefined;
    if (wordsOf(id.fingerprint).some((word, index) => word !== value[index])) throw idempotencyKeyReused(id.key);
    return this.#lists.read(listOf(value));
  }

  /** Keeps an answer that holds about `bytes` elsewhere. */
  remember(id: CallId, answer: readonly number[], now: number, bytes = 0): readonly number[] {
    const value = [...wordsOf(id.fingerprint), this.#lists.write(answer)];
    this.#answers.set(keyOf(id), value, now, ANSWER_BYTES + bytes);
    return answer;
  }

  /** Forgets up to `batch` answers that are too old. */
  trim(now: number, batch: number): void {
    this.#answers.trim(now, batch);
  }
}

function keyOf({ scope, key }: CallId): readonly number[] {
  return digestOf(joinUnambiguously([scope, key]));
}

function listOf(value: readonly number[]): number {
  return value[DIGEST_WORDS] ?? 0;
}

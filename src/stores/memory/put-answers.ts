import { hash } from 'node:crypto';
import { joinUnambiguously } from '../entry.ts';
import { idempotencyKeyReused } from '../refusals.ts';
import type { CallId } from '../store.ts';
import { RowIndex } from './row-index.ts';
import { NO_ROW, Rows } from './rows.ts';

/** What of a put has to be remembered: the rest of its answer stands in the call itself. */
export interface PutAnswer {
  /** Number of the entry. */
  readonly seq: number;
  readonly revision: number;
  readonly at: number;
  readonly displaced: readonly string[];
}

interface PutAnswersOptions {
  readonly lifetimeMs: number;
  readonly maxCount: number;
  /** Of the ids of displaced entries, in characters; all else of an answer is of one size. */
  readonly maxBytes: number;
}

/** Columns of a row; `key` and `fingerprint` are digests of four words each. */
const COLUMN = { hash: 0, older: 1, newer: 2, seq: 3, revision: 4, at: 5, key: 6, fingerprint: 10 } as const;
const COLUMNS = 14;
const WORDS = 4;
/** How many that are too old leave with each write. */
const TRIM_PER_WRITE = 2;

/**
 * The answers of puts by idempotency key, as `ReplayWindow` keeps those of other methods; the oldest are forgotten first.
 * Puts come as often as entries, so these are no objects: they lie in rows.
 */
export class PutAnswers {
  readonly #options: PutAnswersOptions;
  readonly #rows = new Rows(COLUMNS);
  readonly #index = new RowIndex(this.#rows, COLUMN.older);
  /** Of the few that displaced any. */
  readonly #displaced = new Map<number, readonly string[]>();
  #displacedBytes = 0;
  #oldest = NO_ROW;
  #newest = NO_ROW;
  #count = 0;

  constructor(options: PutAnswersOptions) {
    this.#options = options;
  }

  /** The answer this call got before; throws IDEMPOTENCY_KEY_REUSED if another request had the key. */
  find(id: CallId, now: number): PutAnswer | undefined {
    const row = this.#rowOf(keyWords(id));
    if (row === NO_ROW || this.#isOld(row, now)) return undefined;
    if (!this.#holds(row, COLUMN.fingerprint, wordsOf(id.fingerprint))) throw idempotencyKeyReused(id.key);
    const get = (column: number) => this.#rows.get(row, column);
    const displaced = this.#displaced.get(row) ?? [];
    return { seq: get(COLUMN.seq), revision: get(COLUMN.revision), at: get(COLUMN.at), displaced };
  }

  remember(id: CallId, answer: PutAnswer): PutAnswer {
    const key = keyWords(id);
    const row = this.#rows.acquire();
    const set = (column: number, value: number) => this.#rows.set(row, column, value);
    set(COLUMN.hash, key[0] ?? 0);
    set(COLUMN.newer, NO_ROW);
    set(COLUMN.seq, answer.seq);
    set(COLUMN.revision, answer.revision);
    set(COLUMN.at, answer.at);
    for (const [index, word] of key.entries()) set(COLUMN.key + index, word);
    for (const [index, word] of wordsOf(id.fingerprint).entries()) set(COLUMN.fingerprint + index, word);
    this.#index.add(key[0] ?? 0, row);
    if (answer.displaced.length > 0) {
      this.#displaced.set(row, answer.displaced);
      this.#displacedBytes += bytesOf(answer.displaced);
    }
    if (this.#newest === NO_ROW) this.#oldest = row;
    else this.#rows.set(this.#newest, COLUMN.newer, row);
    this.#newest = row;
    this.#count += 1;
    this.trim(answer.at, TRIM_PER_WRITE);
    const { maxCount, maxBytes } = this.#options;
    while (this.#count > maxCount || this.#displacedBytes > maxBytes) this.#forgetOldest();
    return answer;
  }

  /** Forgets up to `batch` answers that are too old. */
  trim(now: number, batch: number): void {
    for (let left = batch; left > 0 && this.#oldest !== NO_ROW && this.#isOld(this.#oldest, now); left--) {
      this.#forgetOldest();
    }
  }

  #forgetOldest(): void {
    const row = this.#oldest;
    this.#oldest = this.#rows.get(row, COLUMN.newer);
    if (this.#oldest === NO_ROW) this.#newest = NO_ROW;
    this.#count -= 1;
    this.#index.delete(this.#rows.get(row, COLUMN.hash), row);
    this.#displacedBytes -= bytesOf(this.#displaced.get(row) ?? []);
    this.#displaced.delete(row);
    this.#rows.release(row);
  }

  #isOld(row: number, now: number): boolean {
    return now - this.#rows.get(row, COLUMN.at) >= this.#options.lifetimeMs;
  }

  /** The newest: one that is too old may be there still. */
  #rowOf(key: Int32Array): number {
    for (const row of this.#index.of(key[0] ?? 0)) if (this.#holds(row, COLUMN.key, key)) return row;
    return NO_ROW;
  }

  #holds(row: number, column: number, words: Int32Array): boolean {
    return words.every((word, index) => this.#rows.get(row, column + index) === word);
  }
}

function keyWords({ scope, key }: CallId): Int32Array {
  return wordsOf(Buffer.from(hash('sha256', joinUnambiguously([scope, key]), 'latin1'), 'latin1'));
}

/** The first 16 bytes of a digest. */
function wordsOf(digest: Uint8Array): Int32Array {
  const view = new DataView(digest.buffer, digest.byteOffset, digest.byteLength);
  const words = new Int32Array(WORDS);
  for (let index = 0; index < WORDS; index++) words[index] = view.getInt32(4 * index);
  return words;
}

function bytesOf(ids: readonly string[]): number {
  return ids.reduce((sum, id) => sum + id.length, 0);
}

/** Label value for everything that is not let through. */
export const OTHER = 'other';

/** Label value where there is nothing to tell. */
const NONE = 'none';

/** Lets a bounded number of distinct label values through and folds the rest to `other`. */
export class LabelSet {
  readonly #seen = new Set<string>();
  readonly #limit: number;
  readonly #accepts: (value: string) => boolean;

  /** `limit` counts distinct values over the life of the set, because a series once made stays. */
  constructor(limit: number, accepts: (value: string) => boolean) {
    this.#limit = limit;
    this.#accepts = accepts;
  }

  /** The label for `value`; `none` for an empty or absent one. */
  label(value: string | undefined): string {
    if (value === undefined || value === '') return NONE;
    if (this.#seen.has(value)) return this.#accepts(value) ? value : OTHER;
    if (this.#seen.size >= this.#limit || !this.#accepts(value)) return OTHER;
    this.#seen.add(value);
    return value;
  }
}

/** Whether `value` looks like a word of baton's own vocabulary. */
export function isLabelWord(value: string): boolean {
  return /^[a-z][a-z0-9_.]{0,47}$/.test(value);
}

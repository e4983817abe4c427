/** What a turn left in a decode engine, as the model knows it. */
export interface ModelEntry {
  readonly id: string;
  /** Order of the puts, from the id that the store made. */
  readonly seq: number;
  /** Every token of prompt and reply. */
  readonly tokens: readonly number[];
  /** How many of them the handle names. */
  readonly stored: number;
  /** Instance that holds the blocks. */
  readonly owner: string;
  /** Times between which it expires. */
  readonly endsFrom: number;
  readonly endsUntil: number;
  /** The time at which it was seen first. */
  readonly seenAt: number;
  /** The owner was away when it was put: nobody can say whether it is still good. */
  doubtful: boolean;
}

/** One conversation of one tenant, with one model or adapter and one salt. */
export interface ModelKey {
  readonly tenant: string;
  readonly model: string;
  readonly adapter: string;
  readonly salt: string;
  readonly conversation: string;
}

/** What becomes of the KV of earlier turns in one turn. */
export interface Expectation {
  readonly outcome: string;
  /** Tokens that are read, for a hit. */
  readonly matched: number;
  readonly takes: ModelEntry | undefined;
  /** Entries that the prompt rules out. */
  readonly rules: readonly ModelEntry[];
}

/** What the model has to know of a request. */
export interface TurnFacts {
  /** It cannot be split: one leg, nothing is taken. */
  readonly isLocal: boolean;
  /** Its messages hold an assistant's. */
  readonly continues: boolean;
  /** A member of it could shape the prompt unseen. */
  readonly isUnproven: boolean;
  /** The prompt's tokens, by an engine that has nothing to do with reuse. */
  readonly prompt: readonly number[];
}

const BLOCK = 64;
const LEAST = 64;
const MOST_ENTRIES = 8;

/** Leading tokens of `prompt` that are proven to be those of the entry: whole blocks, exact only behind the last one. */
export function provenTokens(entry: Pick<ModelEntry, 'tokens' | 'stored'>, prompt: readonly number[]): number {
  const { tokens, stored } = entry;
  let equal = 0;
  while (equal < tokens.length && equal < prompt.length && tokens[equal] === prompt[equal]) equal += 1;
  const tail = tokens.length - (tokens.length % BLOCK);
  const exact = equal >= tail ? equal : equal - (equal % BLOCK);
  return Math.min(exact, stored, tokens.length);
}

/** State of one conversation. Where a fault or a second turn made several states possible, it holds all of them. */
export class ModelConversation {
  /** Oldest first. */
  live: ModelEntry[] = [];
  /** The newest entry that is gone, and the outcomes it may lead to. */
  #dead: { seq: number; outcomes: Set<string> } | undefined;
  /** Why the last turn left no entry; undefined: it left one, or there was none; `media`: it did, under its very messages. */
  lastLeft: Set<string | undefined> = new Set([undefined]);
  /** Whether the router may, or must, remember a turn. */
  remembered: 'yes' | 'no' | 'maybe' = 'no';

  /** What may have become of an entry that came and went unseen, after everything that was seen. */
  unseen = new Set<string>();

  bury(entry: ModelEntry, outcomes: readonly string[]): void {
    this.live = this.live.filter((other) => other !== entry);
    if (this.#dead === undefined || this.#dead.seq <= entry.seq) {
      this.#dead = { seq: entry.seq, outcomes: new Set(outcomes) };
    }
  }

  /** A key holds so many entries; the oldest make room. */
  add(entry: ModelEntry): void {
    this.unseen.clear();
    this.live = [...this.live, entry].sort((a, b) => a.seq - b.seq);
    while (this.live.length > MOST_ENTRIES && this.live[0] !== undefined) this.bury(this.live[0], ['miss_released']);
  }

  /** Buries what has certainly expired by `now`. */
  expire(now: number): void {
    for (const entry of [...this.live]) {
      if (entry.endsUntil < now)
        this.bury(entry, entry.doubtful ? ['miss_expired', 'miss_owner_gone'] : ['miss_expired']);
    }
  }

  /** Every outcome that a turn between `from` and `until` may have, if nothing goes wrong in it; one where all is known. */
  expect(facts: TurnFacts, from: number, until: number): readonly Expectation[] {
    const none = (...outcomes: readonly string[]) =>
      outcomes.map((outcome): Expectation => ({ outcome, matched: 0, takes: undefined, rules: [] }));
    if (facts.isLocal) {
      if (facts.continues || this.remembered === 'yes') return none('decode_local');
      return this.remembered === 'no' ? none('none') : none('none', 'decode_local');
    }
    this.expire(from);
    const unsure = this.live.filter(({ doubtful, endsFrom }) => doubtful || endsFrom <= until);
    const sure = this.live.filter((entry) => !unsure.includes(entry));
    const found: Expectation[] = [];
    for (let mask = 0; mask < 2 ** Math.min(unsure.length, 6); mask += 1) {
      const present = unsure.filter((_, index) => (mask & (1 << index)) !== 0);
      const absent = unsure.filter((entry) => !present.includes(entry));
      const live = [...sure, ...present].sort((a, b) => a.seq - b.seq);
      found.push(...this.#expectOf(live, absent, facts, none));
    }
    if (unsure.some(({ doubtful }) => doubtful)) {
      found.push(...none('miss_owner_gone', 'miss_unverifiable', 'warm_failed_cold_retry'));
    }
    // It may expire between the look and the take.
    if (unsure.length > 0) found.push(...none('miss_expired'));
    return found;
  }

  #expectOf(
    live: readonly ModelEntry[],
    absent: readonly ModelEntry[],
    facts: TurnFacts,
    none: (...outcomes: readonly string[]) => readonly Expectation[],
  ): readonly Expectation[] {
    let dead = this.#dead;
    for (const entry of absent) {
      if (dead === undefined || dead.seq <= entry.seq) {
        dead = { seq: entry.seq, outcomes: new Set(['miss_expired', 'miss_owner_gone']) };
      }
    }
    if (live.length === 0) {
      const found: Expectation[] = [];
      for (const left of this.lastLeft) {
        if (left === 'media' && dead !== undefined) found.push(...none(...dead.outcomes));
        else if (left === 'media') found.push(...none(facts.isUnproven ? 'miss_unsupported' : 'miss_mismatch'));
        else if (left !== undefined) found.push(...none(left));
        else found.push(...none(...(dead?.outcomes ?? [facts.continues ? 'miss_never' : 'none'])));
      }
      if (this.lastLeft.has(undefined) || this.lastLeft.has('media')) found.push(...none(...this.unseen));
      return found;
    }
    if (facts.isUnproven) return none('miss_unsupported');
    const large = live.filter(({ stored, tokens }) => Math.min(stored, tokens.length) >= LEAST);
    const proven = large.map((entry) => ({ entry, matched: provenTokens(entry, facts.prompt) }));
    const most = Math.max(0, ...proven.map(({ matched }) => matched));
    if (most >= LEAST) {
      const best = proven
        .filter(({ matched }) => matched === most)
        .sort((a, b) => a.entry.stored - b.entry.stored || b.entry.seq - a.entry.seq)[0]?.entry;
      const outcome = most >= (best?.stored ?? 0) ? 'hit' : 'hit_cut';
      return [{ outcome, matched: most, takes: best, rules: [] }];
    }
    if (large.length > 0) return [{ outcome: 'miss_mismatch', matched: 0, takes: undefined, rules: large }];
    const newest = live.at(-1);
    if (dead !== undefined && newest !== undefined && dead.seq > newest.seq) return none(...dead.outcomes);
    return none('miss_too_small', ...this.unseen);
  }
}

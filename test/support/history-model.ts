import { provenTokens } from '../long/reuse-model.ts';

/** What a turn left: its tokens, and how many of them have KV. */
interface Left {
  readonly tokens: readonly number[];
  readonly stored: number;
}

interface Said {
  readonly role: string;
}

/** What a turn is to find. */
interface Found {
  readonly outcome: string;
  readonly matched: number;
}

/** Fewest equal tokens that are read at all. */
const LEAST = 64;

/**
 * Which turn finds what, on one decode engine where nothing runs out: by the conversation's name, or by the messages of an
 * earlier turn. The proof of tokens is the model's own.
 */
export class HistoryModel {
  readonly #left = new Map<string, Left[]>();

  /** What the turn finds; a hit takes it away. */
  take(messages: readonly Said[], prompt: readonly number[], conversation?: string): Found {
    let seen = false;
    let mismatch = false;
    for (const key of conversation === undefined ? lookups(messages) : [conversation]) {
      const left = this.#left.get(key);
      if (left === undefined) continue;
      seen = true;
      const proven = left.map((one) => ({ one, matched: provenTokens(one, prompt) }));
      // Of several with as much, the one with the least to spare.
      const [best] = proven.toSorted((a, b) => b.matched - a.matched || a.one.stored - b.one.stored);
      if (best === undefined) continue;
      if (best.matched >= LEAST) {
        left.splice(left.indexOf(best.one), 1);
        return { outcome: best.matched >= best.one.stored ? 'hit' : 'hit_cut', matched: best.matched };
      }
      mismatch = true;
    }
    const goesOn = messages.some(({ role }) => role === 'assistant');
    if (mismatch) return { outcome: 'miss_mismatch', matched: 0 };
    if (seen) return { outcome: 'miss_taken', matched: 0 };
    return { outcome: goesOn ? 'miss_never' : 'none', matched: 0 };
  }

  /** The last token that an engine generates has no KV yet. */
  put(messages: readonly Said[], tokens: readonly number[], conversation?: string): void {
    const key = conversation ?? JSON.stringify(messages);
    this.#left.set(key, [...(this.#left.get(key) ?? []), { tokens, stored: tokens.length - 1 }]);
  }
}

/** All messages; those before a reply at the end; those before the assistant's last that others follow. */
function lookups(messages: readonly Said[]): readonly string[] {
  const last = messages.findLastIndex(({ role }, i) => role === 'assistant' && i < messages.length - 1);
  const begun = messages.at(-1)?.role === 'assistant' ? [messages.slice(0, -1)] : [];
  return [messages, ...begun, ...(last < 0 ? [] : [messages.slice(0, last)])].map((part) => JSON.stringify(part));
}

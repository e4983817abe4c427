import { afterAll, beforeAll, expect, test } from 'vitest';
import { contentOf, type Harness, post, startHarness } from '../support/harness.ts';
import { seeded } from '../support/seeded.ts';
import { storedTurns } from '../support/stored-turns.ts';

// Clients that name nothing walk through trees of conversations: they go on from any reply, edit, generate again, and
// begin alike. One request at a time, so that a model of the store can say what each turn finds.

const SEED = Number(process.env['BATON_SEED'] ?? Math.floor(Math.random() * 2 ** 31));
const TURNS = 400;
const MODEL = 'sim-model';

interface Message {
  readonly role: 'system' | 'user' | 'assistant';
  readonly content: string;
}

/** A turn that was answered, to be gone on from. */
interface Node {
  readonly messages: readonly Message[];
  readonly reply: string;
}

/** What the store holds under the messages of a turn. */
interface Kept {
  readonly reply: string;
  readonly seq: number;
}

let harness: Harness;
beforeAll(async () => {
  harness = await startHarness({
    engine: { bidirectional: true, numBlocks: 60_000, maxModelLen: 16_384, eosEvery: 0, seed: 3, tokenizer: 'bytes' },
    yaml: 'pools: {prefill: {bidirectional: on}}\n',
  });
  await harness.ready();
});
afterAll(async () => {
  await harness?.[Symbol.asyncDispose]();
});

const keyOf = (messages: readonly Message[]) => JSON.stringify(messages);

/** Which history finds what, and what a take leaves of it. */
class Model {
  readonly #kept = new Map<string, Kept[]>();
  readonly #everKept = new Set<string>();
  #seq = 0;

  /** What the turn will be told: `hit`, `hit_cut`, or that there is nothing. */
  take(messages: readonly Message[]): string {
    const before = messages.findLastIndex(({ role }, i) => role === 'assistant' && i < messages.length - 1);
    const keys = [messages, ...(before < 0 ? [] : [messages.slice(0, before)])].map(keyOf);
    for (const [i, key] of keys.entries()) {
      const kept = this.#kept.get(key) ?? [];
      if (kept.length === 0) continue;
      const said = i === 0 ? undefined : messages[before]?.content;
      const best = kept.toSorted((a, b) => rank(b, said) - rank(a, said) || b.seq - a.seq)[0];
      this.#kept.set(
        key,
        kept.filter((one) => one !== best),
      );
      return best?.reply === said ? 'hit' : 'hit_cut';
    }
    if (before < 0) return 'none';
    return keys.some((key) => this.#everKept.has(key)) ? 'miss_taken' : 'miss_never';
  }

  put(messages: readonly Message[], reply: string): void {
    const key = keyOf(messages);
    this.#everKept.add(key);
    this.#kept.set(key, [...(this.#kept.get(key) ?? []), { reply, seq: this.#seq++ }]);
  }
}

/** How much of what is kept the new prompt goes on with; where nothing was said, the shortest of them has least to spare. */
function rank({ reply }: Kept, said: string | undefined): number {
  if (said === undefined) return -reply.length;
  let equal = 0;
  while (equal < said.length && reply[equal] === said[equal]) equal++;
  return equal * 10_000 - reply.length;
}

test(`${TURNS} turns of conversations without names`, { timeout: 200_000 }, async () => {
  const draw = seeded(SEED);
  const pick = <T>(all: readonly T[]): T => {
    const one = all[Math.floor(draw() * all.length)];
    if (one === undefined) throw new Error('nothing to pick');
    return one;
  };
  const model = new Model();
  const nodes: Node[] = [];
  const tally: Record<string, number> = {};
  for (let turn = 0; turn < TURNS; turn++) {
    const messages = next();
    const expected = model.take(messages);
    const stream = draw() < 0.5;
    const body = { model: MODEL, messages, max_tokens: 20, temperature: 1, seed: Math.floor(draw() * 1e6), stream };
    const reply = await post(`${harness.url}/v1/chat/completions`, body, { headers: { 'x-baton-debug': '1' } });
    const plain = await post(`${harness.plain.url}/v1/chat/completions`, body);
    const where = `seed ${SEED}, turn ${turn}`;
    expect(reply.status, where).toBe(200);
    const [text = ''] = contentOf(reply.text).texts;
    expect(text, where).toBe(contentOf(plain.text).texts[0]);
    const outcome = /outcome=(\w+)/.exec(reply.headers.get('x-baton-plan') ?? '')?.[1];
    expect(outcome, where).toBe(expected);
    tally[expected] = (tally[expected] ?? 0) + 1;
    model.put(messages, text);
    nodes.push({ messages, reply: text });
    await storedTurns(harness.adminUrl, turn + 1);
  }
  for (const sim of [...harness.prefill, ...harness.decode]) {
    expect(sim.state()).toMatchObject({ mismatchedPulls: 0, doubleReads: 0, expiredReads: 0, leakedPins: 0, hung: 0 });
  }
  for (const outcome of ['none', 'hit', 'hit_cut', 'miss_taken']) {
    expect({ outcome, met: (tally[outcome] ?? 0) > 5 }, JSON.stringify(tally)).toEqual({ outcome, met: true });
  }

  function next(): readonly Message[] {
    const kind = nodes.length < 3 ? 0 : draw();
    if (kind < 0.12) {
      const system: Message = { role: 'system', content: `You are helper ${Math.floor(draw() * 3)}. `.repeat(8) };
      return [system, { role: 'user', content: `Question ${Math.floor(draw() * 12)} about relays. `.repeat(3) }];
    }
    // The last ones are gone on with more often: they still have their handle.
    const node = draw() < 0.7 ? pick(nodes.slice(-6)) : pick(nodes);
    if (kind < 0.3 || node.messages.length > 12) return node.messages;
    const said: Message = {
      role: 'assistant',
      content: kind < 0.4 ? `${node.reply.slice(0, 8)} (edited)` : node.reply,
    };
    return [...node.messages, said, { role: 'user', content: `More of ${Math.floor(draw() * 100)}?` }];
  }
});

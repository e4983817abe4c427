import { afterEach, describe, expect, test } from 'vitest';
import { contentOf, post, startHarness, startQuietly } from '../support/harness.ts';
import { startLmcache } from '../support/lmcache.ts';

type Env = Readonly<Record<string, string>>;
type Harness = Awaited<ReturnType<(typeof STARTS)[keyof typeof STARTS]>>;
interface Message {
  readonly role: string;
  readonly content: string;
}

const ENGINE = { maxModelLen: 4096, eosEvery: 0, defaultMaxTokens: 16 } as const;
const HEALTH = 'health: { interval: 200ms, failures: 1 }';
const STARTS = {
  nixl: (env: Env) => startHarness({ engine: { ...ENGINE, bidirectional: true }, yaml: HEALTH, env }),
  lmcache: (env: Env) => startLmcache({ engine: ENGINE, yaml: HEALTH, lmcache: 'notice_timeout: 1s', env }),
};
const BOUND = { CLIENT_BOUND: 'true' };

let harness: Harness;
afterEach(() => harness?.[Symbol.asyncDispose]());

/** One client's chat, every answer of which is compared with the plain engine's. */
class Session {
  readonly #id: string;
  #messages: readonly Message[];

  constructor(id: string) {
    this.#id = id;
    this.#messages = [{ role: 'user', content: `${id}: tell me who carries the baton, and where to, and why then` }];
  }

  async turn(): Promise<void> {
    const body = { model: 'sim-model', messages: this.#messages, max_tokens: 16 };
    const [got, want] = await Promise.all([
      post(`${harness.url}/v1/chat/completions`, body, { headers: { 'session-id': this.#id } }),
      post(`${harness.plain.url}/v1/chat/completions`, body),
    ]);
    expect(got.status, got.text).toBe(200);
    const [text = ''] = contentOf(got.text).texts;
    expect(text).toBe(contentOf(want.text).texts[0]);
    this.#messages = [...this.#messages, { role: 'assistant', content: text }, { role: 'user', content: 'go on' }];
  }
}

const sessions = (count: number) => Array.from({ length: count }, (_, i) => new Session(`session-${i}`));
const idOf = (sim: { readonly url: string } | undefined) => new URL(sim?.url ?? '').host;
const lines = () => harness.log.filter(({ msg }) => msg === 'request');

/** The pairs of each session in the order of its turns, from the access log. */
async function pairsOf(requests: number): Promise<readonly (readonly string[])[]> {
  await expect.poll(() => lines().length).toBe(requests);
  const bySession = Map.groupBy(lines(), ({ conv }) => conv);
  return [...bySession.values()].map((turns) =>
    turns.map(({ prefill_instance: prefill, decode_instance: decode }) => `${prefill} ${decode}`),
  );
}

async function rebound(place: string): Promise<number> {
  const text = await (await fetch(`${harness.adminUrl}/metrics`)).text();
  const counts = text.matchAll(new RegExp(`^baton_rebound_total\\{place="${place}",reason="\\w+"\\} (\\d+)`, 'gm'));
  return [...counts].reduce((sum, [, count]) => sum + Number(count), 0);
}

describe.each(['nixl', 'lmcache'] as const)('%s', (connector) => {
  test('40 sessions of 3 turns stay on their pair, and share the pairs evenly', async () => {
    harness = await STARTS[connector](BOUND);
    const all = sessions(40);
    for (let turn = 0; turn < 3; turn += 1) await Promise.all(all.map((session) => session.turn()));
    const pairs = await pairsOf(120);
    expect(pairs.map((turns) => turns.length)).toEqual(Array(40).fill(3));
    for (const turns of pairs) expect(new Set(turns).size).toBe(1);
    const shares = Map.groupBy(pairs, ([pair]) => pair);
    expect([...shares.values()].map((share) => share.length)).toEqual([20, 20]);
    expect([await rebound('prefill'), await rebound('decode')]).toEqual([0, 0]);
  });

  test('sessions one after the other share the pairs too, whatever number of turns they have', async () => {
    harness = await STARTS[connector](BOUND);
    for (const session of sessions(4)) for (let turn = 0; turn < 2; turn += 1) await session.turn();
    const pairs = await pairsOf(8);
    for (const turns of pairs) expect(new Set(turns).size).toBe(1);
    expect(new Set(pairs.map(([pair]) => pair)).size).toBe(2);
    expect(pairs.map(([pair]) => pair === pairs[0]?.[0])).toEqual([true, false, true, false]);
  });

  test.each(['prefill', 'decode'] as const)('a %s instance that is gone: its sessions move, once', async (place) => {
    harness = await STARTS[connector](BOUND);
    const all = sessions(6);
    for (const session of all) await session.turn();
    const before = await pairsOf(6);
    const [gone, heir] = harness[place];
    await gone?.close();
    for (let turn = 0; turn < 2; turn += 1) for (const session of all) await session.turn();
    const pairs = await pairsOf(18);
    const moved = before.map(([pair = '']) => pair.replace(idOf(gone), idOf(heir)));
    expect(moved.filter((pair, i) => pair !== before[i]?.[0])).toHaveLength(3);
    expect(pairs).toEqual(before.map(([pair], i) => [pair, moved[i], moved[i]]));
    expect(await rebound(place)).toBe(3);
    expect(await rebound(place === 'prefill' ? 'decode' : 'prefill')).toBe(0);
  });
});

test('lmcache: without the variable both pools take turns, whoever asks', async () => {
  harness = await STARTS.lmcache({});
  const [one, other] = [new Session('one'), new Session('other')];
  for (const session of [one, one, one, other, one, other, other, one]) await session.turn();
  await pairsOf(8);
  const turns = (place: string) => lines().map((line) => line[place]);
  const inTurn = (pool: Harness['prefill']) => Array.from({ length: 8 }, (_, i) => idOf(pool[i % 2]));
  expect(turns('prefill_instance')).toEqual(inTurn(harness.prefill));
  expect(turns('decode_instance')).toEqual(inTurn(harness.decode));
});

test('nixl: without the variable the prefill pool takes turns, and first turns do so in both', async () => {
  harness = await STARTS.nixl({});
  const all = sessions(4);
  for (const session of all) await session.turn();
  const first = await pairsOf(4);
  const pair = (i: number) => `${idOf(harness.prefill[i % 2])} ${idOf(harness.decode[i % 2])}`;
  expect(first.map(([taken]) => taken)).toEqual([0, 1, 2, 3].map(pair));
  for (const session of [0, 0, 0, 1, 1, 1].map((i) => all[i])) await session?.turn();
  await pairsOf(10);
  expect(lines().map((line) => line['prefill_instance'])).toEqual(
    Array.from({ length: 10 }, (_, i) => idOf(harness.prefill[i % 2])),
  );
});

test('nixl: a session whose prefill instance may not read stays there, and its handle is not taken for another', async () => {
  const started = await STARTS.nixl(BOUND);
  harness = started;
  const [barred, reader] = started.prefill.map(idOf);
  const instances = started.config.instances.map((instance) =>
    instance.id === barred ? { ...instance, bidirectional: 'off' as const } : instance,
  );
  const { baton, log } = await startQuietly({ ...started.config, instances });
  try {
    harness = { ...started, log, url: `http://${baton.addresses.facade}` };
    for (const session of sessions(2)) for (let turn = 0; turn < 3; turn += 1) await session.turn();
    for (const turns of await pairsOf(6)) expect(new Set(turns).size).toBe(1);
    const reuse = Map.groupBy(lines(), (line) => line['prefill_instance']);
    expect(reuse.get(barred)?.map((line) => line['reuse'])).toEqual([undefined, 'miss_disabled', 'miss_disabled']);
    expect(reuse.get(reader)?.map((line) => line['reuse'])).toEqual([undefined, 'hit', 'hit']);
  } finally {
    await baton.stop();
  }
});

import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { contentOf, type Harness, post, startHarness } from '../support/harness.ts';

/** Turns of conversations on engines that let prefill read from decode. */
let harness: Harness;

beforeAll(async () => {
  harness = await startHarness({
    prefill: 2,
    decode: 2,
    engine: { bidirectional: true, blockSize: 16, maxModelLen: 4096, eosEvery: 0, seed: 5 },
  });
  await harness.ready();
});
afterAll(async () => {
  await harness?.[Symbol.asyncDispose]();
});

type Message = { role: string; content: string };

interface Turn {
  readonly text: string;
  readonly plan: Record<string, string>;
}

/** Runs one turn through baton and on the plain engine; both must say the same. */
async function turn(messages: readonly Message[], extra: Record<string, unknown> = {}): Promise<Turn> {
  const body = { model: 'sim-model', messages, max_tokens: 40, ignore_eos: true, ...extra };
  const reply = await post(`${harness.url}/v1/chat/completions`, body, { headers: { 'x-baton-debug': '1' } });
  expect(reply.status, reply.text).toBe(200);
  const { conversation_id: _, ...plainBody } = body as Record<string, unknown>;
  const plain = await post(`${harness.plain.url}/v1/chat/completions`, plainBody);
  const [text = ''] = contentOf(reply.text).texts;
  expect(text).toBe(contentOf(plain.text).texts[0]);
  expect(reply.text).not.toMatch(/remote_block_ids|"token_ids":\[|"prompt_token_ids":\[/);
  const plan = Object.fromEntries(
    (reply.headers.get('x-baton-plan') ?? '').split('; ').map((part) => part.split('=') as [string, string]),
  );
  return { text, plan };
}

const said = (role: string, content: string): Message => ({ role, content });
const long = (topic: string) => `${topic} `.repeat(30);

describe.each([false, true])('chat, stream %s', (stream) => {
  const id = (name: string) => `${name}-${stream}`;

  test('an append-only conversation reads the whole of each earlier turn', async () => {
    const messages = [said('user', long('batons'))];
    const extra = { conversation_id: id('append'), stream };
    const first = await turn(messages, extra);
    expect(first.plan).toMatchObject({ mode: 'prefill_decode', outcome: 'none' });
    for (let i = 0, last = first; i < 4; i++) {
      messages.push(said('assistant', last.text), said('user', `and then ${i}?`));
      last = await turn(messages, extra);
      expect(last.plan, `turn ${i + 2}`).toMatchObject({ mode: 'prefill_decode_reuse', outcome: 'hit' });
    }
  });

  test('a request may name no model', async () => {
    const messages = [said('user', long('relays'))];
    const extra = { conversation_id: id('unnamed'), stream, model: undefined };
    const first = await turn(messages, extra);
    messages.push(said('assistant', first.text), said('user', 'and then?'));
    expect((await turn(messages, extra)).plan).toMatchObject({ mode: 'prefill_decode_reuse', outcome: 'hit' });
  });

  test('an edited history reads only what is proven equal', async () => {
    const extra = { conversation_id: id('edit'), stream };
    const messages = [said('system', long('rules')), said('user', long('relay'))];
    const { text } = await turn(messages, extra);
    messages[1] = said('user', `${long('relay')} but faster`);
    messages.push(said('assistant', text), said('user', 'why?'));
    const edited = await turn(messages, extra);
    expect(edited.plan).toMatchObject({ outcome: 'hit_cut' });
    expect(Number(edited.plan['matched'])).toBeGreaterThan(64);
  });

  test('another prompt under the same id is cold', async () => {
    const extra = { conversation_id: id('other'), stream };
    await turn([said('user', long('one'))], extra);
    const other = await turn([said('user', 'x'), said('assistant', 'y'), said('user', long('two'))], extra);
    expect(other.plan).toMatchObject({ mode: 'prefill_decode', outcome: 'miss_mismatch' });
  });

  test('a request that cannot be split leaves the handle for the next turn', async () => {
    const extra = { conversation_id: id('local'), stream };
    const messages = [said('user', long('local'))];
    const { text } = await turn(messages, extra);
    messages.push(said('assistant', text), said('user', 'two, please'));
    expect((await turn(messages, { ...extra, n: 2, temperature: 0.4 })).plan).toMatchObject({
      outcome: 'decode_local',
    });
    expect((await turn(messages, extra)).plan).toMatchObject({ outcome: 'hit' });
  });

  test('two tenants never share a conversation', async () => {
    const extra = { conversation_id: id('tenant'), stream };
    const messages = [said('user', long('secret'))];
    const { text } = await turn(messages, extra);
    messages.push(said('assistant', text), said('user', 'again'));
    const body = { model: 'sim-model', messages, max_tokens: 4, ...extra };
    const headers = { 'x-baton-debug': '1', authorization: 'Bearer somebody-else' };
    const reply = await post(`${harness.url}/v1/chat/completions`, body, { headers });
    expect(reply.headers.get('x-baton-plan')).toMatch(/outcome=miss_never/);
  });
});

test('completions reuse by prompt', async () => {
  const ask = async (prompt: string | number[]) => {
    const body = { model: 'sim-model', prompt, max_tokens: 24, ignore_eos: true, conversation_id: 'text' };
    const headers = { 'x-baton-debug': '1' };
    const reply = await post(`${harness.url}/v1/completions`, body, { headers });
    const plain = await post(`${harness.plain.url}/v1/completions`, { ...body, conversation_id: undefined });
    const [text = ''] = contentOf(reply.text).texts;
    expect(text).toBe(contentOf(plain.text).texts[0]);
    return { text, plan: reply.headers.get('x-baton-plan') };
  };
  const prompt = 'Once upon a time '.repeat(12);
  const first = await ask(prompt);
  const second = await ask(`${prompt}${first.text} and`);
  expect(second.plan).toMatch(/outcome=hit;/);
});

test('nothing was read that should not have been, and the counters say what happened', async () => {
  for (const sim of [...harness.prefill, ...harness.decode]) {
    expect(sim.state()).toMatchObject({ mismatchedPulls: 0, doubleReads: 0, expiredReads: 0, leakedPins: 0, hung: 0 });
  }
  const pulled = harness.prefill.reduce((sum, sim) => sum + sim.state().pulledTokens, 0);
  expect(pulled).toBeGreaterThan(500);
  const metrics = await (await fetch(`${harness.adminUrl}/metrics`)).text();
  expect(metrics).toMatch(/baton_reuse_total\{outcome="hit"\} (?!0)/);
  expect(metrics).toMatch(/baton_reuse_total\{outcome="hit_cut"\} (?!0)/);
  const health = (await (await fetch(`${harness.url}/health`)).json()) as Record<string, unknown>;
  expect(health['cached_conversations']).toBeGreaterThan(0);
});

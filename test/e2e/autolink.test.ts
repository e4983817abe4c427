import OpenAI from 'openai';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { contentOf, type Harness, post, startHarness } from '../support/harness.ts';

/** Clients that have never heard of baton: no id of a conversation anywhere. */
let harness: Harness;
let client: OpenAI;

beforeAll(async () => {
  harness = await startHarness({
    prefill: 2,
    decode: 2,
    engine: { bidirectional: true, blockSize: 16, maxModelLen: 8192, eosEvery: 0, seed: 11 },
  });
  await harness.ready();
  client = new OpenAI({ baseURL: `${harness.url}/v1`, apiKey: 'none', maxRetries: 0 });
  // The first handle of each prefill engine is a trial that runs alone; no test is to meet another's.
  for (let i = 0; i < 4; i++) {
    const messages: Message[] = [said('user', long(`warm ${i}`))];
    const { text } = await turn(messages);
    await turn([...messages, said('assistant', text), said('user', 'on')]);
  }
});
afterAll(async () => {
  await harness?.[Symbol.asyncDispose]();
});

interface Message {
  readonly role: string;
  readonly content: string | null;
  readonly tool_calls?: unknown;
  readonly tool_call_id?: string;
}

const said = (role: string, content: string): Message => ({ role, content });
const long = (topic: string) => `${topic} `.repeat(30);

interface Turn {
  readonly text: string;
  readonly outcome: string;
  readonly matched: number;
}

/** One turn through baton; a plain engine must say the same. */
async function turn(messages: readonly Message[], extra: Record<string, unknown> = {}): Promise<Turn> {
  const body = { model: 'sim-model', messages, max_tokens: 40, ignore_eos: true, ...extra };
  return sendBoth('/v1/chat/completions', body);
}

async function sendBoth(path: string, body: unknown): Promise<Turn> {
  const reply = await post(`${harness.url}${path}`, body, { headers: { 'x-baton-debug': '1' } });
  expect(reply.status, reply.text).toBe(200);
  const plain = await post(`${harness.plain.url}${path}`, body);
  const [text = ''] = contentOf(reply.text).texts;
  expect(text).toBe(contentOf(plain.text).texts[0]);
  expect(reply.text).not.toMatch(/remote_block_ids|"token_ids":\[|"prompt_token_ids":\[/);
  const plan = reply.headers.get('x-baton-plan') ?? '';
  return {
    text,
    outcome: /outcome=(\w+)/.exec(plan)?.[1] ?? 'untold',
    matched: Number(/matched=(\d+)/.exec(plan)?.[1] ?? 0),
  };
}

const lastRequest = () => harness.log.findLast(({ msg }) => msg === 'request') ?? {};

test('the official client: five streamed turns, and each after the first reuses, whichever engine prefills', async () => {
  const messages: { role: 'user' | 'assistant'; content: string }[] = [
    { role: 'user', content: 'Tell me the history of relay races.' },
  ];
  const seen: unknown[] = [];
  for (let i = 0; i < 5; i++) {
    const body = { model: 'sim-model', messages, max_tokens: 220, seed: i };
    const content = await client.chat.completions.stream(body).finalContent();
    const whole = await post(`${harness.plain.url}/v1/chat/completions`, body);
    expect(content).toBe(contentOf(whole.text).texts[0]);
    const { reuse = 'none', prefill_instance: prefill, completion_tokens: _ } = lastRequest();
    seen.push(reuse);
    prefills.add(prefill);
    messages.push({ role: 'assistant', content: content ?? '' }, { role: 'user', content: `And after that (${i})?` });
  }
  expect(seen).toEqual(['none', 'hit', 'hit', 'hit', 'hit']);
});
const prefills = new Set<unknown>();

describe.each([false, true])('chat, stream %s', (stream) => {
  const topic = (name: string) => long(`${name} ${stream}`);

  test('a regenerated reply reads the prompt that D still holds', async () => {
    const messages = [said('user', topic('regenerate'))];
    await turn(messages, { stream });
    // The stored tokens are prompt and reply, the asked ones the prompt alone.
    const again = await turn(messages, { stream, seed: 7 });
    expect(again.outcome).toBe('hit_cut');
    expect(again.matched).toBeGreaterThan(64);
  });

  test('an edited last message reads up to the edit', async () => {
    const messages = [said('system', topic('rules')), said('user', topic('edit'))];
    const first = await turn(messages, { stream });
    const branch = [...messages, said('assistant', first.text)];
    const second = await turn([...branch, said('user', 'this way')], { stream });
    expect(second.outcome).toBe('hit');
    // The handle of the first turn is used up; that of the second is found by its own history only.
    const edited = await turn([...branch, said('user', 'that way')], { stream });
    expect(edited.outcome).toBe('miss_taken');
    const goneOn = [...branch, said('user', 'that way'), said('assistant', edited.text), said('user', 'go on')];
    expect((await turn(goneOn, { stream })).outcome).toBe('hit');
    const other = [...branch, said('user', 'this way'), said('assistant', second.text), said('user', 'go on')];
    expect((await turn(other, { stream })).outcome).toBe('hit');
  });

  test('two that begin alike go on side by side', async () => {
    const messages = [said('user', topic('branches'))];
    const begun = await Promise.all([1, 2].map((seed) => turn(messages, { stream, seed, temperature: 1 })));
    expect(begun[0]?.text).not.toBe(begun[1]?.text);
    for (const { text } of begun) {
      const next = [...messages, said('assistant', text), said('user', 'why?')];
      expect((await turn(next, { stream })).outcome).toBe('hit');
    }
  });

  test('calls of tools, several at once', async () => {
    const call = (id: string) => ({ id, type: 'function', function: { name: 'look', arguments: '{"at":"it"}' } });
    const messages: Message[] = [said('user', topic('tools'))];
    await turn(messages, { stream });
    const calls: Message = { role: 'assistant', content: null, tool_calls: [call('a'), call('b')] };
    const results = ['a', 'b'].map((id): Message => ({ role: 'tool', content: `result ${id}`, tool_call_id: id }));
    const next = await turn([...messages, calls, ...results], { stream });
    // What the model said was no call: the prompt is equal, and the reply is not.
    expect(next.outcome).toBe('hit_cut');
    expect(next.matched).toBeGreaterThan(64);
  });

  test('a short prompt is nobody’s turn, however often it comes', async () => {
    for (let i = 0; i < 3; i++) {
      expect((await turn([said('user', `ping ${stream}`)], { stream, max_tokens: 4 })).outcome).toBe('none');
    }
  });

  test('another tenant finds nothing', async () => {
    const messages = [said('user', topic('secret'))];
    const { text } = await turn(messages, { stream });
    const body = {
      model: 'sim-model',
      messages: [...messages, said('assistant', text), said('user', 'again')],
      stream,
    };
    const headers = { 'x-baton-debug': '1', authorization: 'Bearer somebody-else' };
    const reply = await post(`${harness.url}/v1/chat/completions`, body, { headers });
    expect(reply.headers.get('x-baton-plan')).toMatch(/outcome=miss_never/);
  });
});

test('completions go on with what was their prompt', async () => {
  const ask = (prompt: string) =>
    sendBoth('/v1/completions', { model: 'sim-model', prompt, max_tokens: 24, ignore_eos: true });
  let prompt = 'Once upon a relay, the runners of the north '.repeat(10);
  const outcomes: string[] = [];
  for (let i = 0; i < 4; i++) {
    const { text, outcome } = await ask(prompt);
    outcomes.push(outcome);
    prompt = `${prompt}${text} and then`;
  }
  expect(outcomes).toEqual(['none', 'hit', 'hit', 'hit']);
});

test('both prefill engines took turns, and nothing was read that should not have been', () => {
  expect(prefills.size).toBe(2);
  for (const sim of [...harness.prefill, ...harness.decode]) {
    expect(sim.state()).toMatchObject({ mismatchedPulls: 0, doubleReads: 0, expiredReads: 0, leakedPins: 0, hung: 0 });
  }
});

import { afterAll, beforeAll, expect, test } from 'vitest';
import { type Harness, startHarness } from '../support/harness.ts';

/**
 * The wire form of vLLM's multi-turn benchmark client with --send-conversation-id: what it asks, and how strictly it
 * reads. A comment, an `event:` line, a usage chunk without choices or an error event ends that client.
 */
let harness: Harness;

beforeAll(async () => {
  harness = await startHarness({ engine: { bidirectional: true, eosEvery: 0 } });
  await harness.ready();
});
afterAll(async () => {
  await harness?.[Symbol.asyncDispose]();
});

interface Message {
  readonly role: 'user' | 'assistant';
  readonly content: string;
}

test('conversations of the benchmark run through, and every turn but the first reuses', async () => {
  expect((await fetch(`${harness.url}/version`)).status).toBe(200);
  expect((await fetch(`${harness.url}/v1/models`)).status).toBe(200);
  const outcomes: string[] = [];
  await Promise.all(
    Array.from({ length: 4 }, async (_, client) => {
      const id = `CONV_ID_${client}`;
      const messages: Message[] = [];
      for (let turn = 0; turn < 4; turn++) {
        messages.push({ role: 'user', content: `turn ${turn} of ${id}: ${'some words '.repeat(12)}` });
        const { text, outcome } = await ask(id, messages);
        messages.push({ role: 'assistant', content: text });
        if (turn > 0) outcomes.push(outcome);
      }
    }),
  );
  expect(outcomes).toHaveLength(12);
  // Each prefill engine's first handle is a trial that runs alone; turns that meet it run cold.
  expect(outcomes.filter((outcome) => outcome === 'hit').length).toBeGreaterThan(6);
  expect(outcomes.filter((outcome) => outcome !== 'hit' && outcome !== 'miss_disabled')).toEqual([]);
});

async function ask(id: string, messages: readonly Message[]): Promise<{ text: string; outcome: string }> {
  const reply = await fetch(`${harness.url}/v1/chat/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json', 'x-session-id': id, 'x-baton-debug': '1' },
    body: JSON.stringify({
      model: 'sim-model',
      messages,
      stream: true,
      stream_options: { include_usage: false },
      max_tokens: 30,
      conversation_id: id,
    }),
  });
  expect(reply.status).toBe(200);
  let text = '';
  for (const line of (await reply.text()).split('\n')) {
    const stripped = line.trim();
    if (stripped === '') continue;
    const chunk = stripped.replace(/^data: /, '');
    if (chunk === '[DONE]') break;
    const { choices } = JSON.parse(chunk) as { choices: [{ delta: { content?: string } }] };
    text += choices[0].delta.content ?? '';
  }
  expect(text).not.toBe('');
  const outcome = /outcome=([a-z_]+)/.exec(reply.headers.get('x-baton-plan') ?? '')?.[1] ?? '';
  return { text, outcome };
}

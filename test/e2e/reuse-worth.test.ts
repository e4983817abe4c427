import type { MessageInitShape } from '@bufbuild/protobuf';
import OpenAI from 'openai';
import { expect, test } from 'vitest';
import { PlanMode, type RequestFactsSchema, ReuseOutcome } from '../../gen/baton/v1/router_pb.ts';
import { connectRemote } from '../../src/rpc/clients.ts';
import { contentOf, type Harness, post, startHarness } from '../support/harness.ts';

/** What a handle has to save, with the default of `reuse.min_saved_tokens`, and short rests that stay on decode. */

const ENGINE = { bidirectional: true, blockSize: 16, maxModelLen: 8192, eosEvery: 0, seed: 17 };
const DEFAULT = { 'reuse-min-saved-tokens': '64' };

interface Message {
  readonly role: 'user' | 'assistant';
  readonly content: string;
}

/** One turn of a conversation without a name, as it has to be; answers its outcome and what is said next. */
async function turn(harness: Harness, messages: Message[], max_tokens: number, name = {}): Promise<string | undefined> {
  const body = { model: 'sim-model', messages, max_tokens, ignore_eos: true };
  const reply = await post(
    `${harness.url}/v1/chat/completions`,
    { ...body, ...name },
    { headers: { 'x-baton-debug': '1' } },
  );
  const plain = await post(`${harness.plain.url}/v1/chat/completions`, body);
  const [text = ''] = contentOf(reply.text).texts;
  expect(text).toBe(contentOf(plain.text).texts[0]);
  messages.push({ role: 'assistant', content: text }, { role: 'user', content: 'And then?' });
  return /outcome=(\w+)/.exec(reply.headers.get('x-baton-plan') ?? '')?.[1];
}

const opening = (): Message[] => [{ role: 'user', content: 'Tell me the history of relay races. '.repeat(6) }];

test('an engine that holds the prompt reads only replies that are long enough, and nothing is lost meanwhile', async () => {
  await using harness = await startHarness({ prefill: 1, decode: 1, engine: ENGINE, flags: DEFAULT });
  await harness.ready();
  const messages = opening();
  const outcomes = [
    await turn(harness, messages, 10),
    await turn(harness, messages, 10),
    await turn(harness, messages, 200),
    await turn(harness, messages, 10),
  ];
  expect(outcomes).toEqual(['none', 'miss_too_small', 'miss_too_small', 'hit']);
  expect(harness.decode[0]?.state().pins).toBe(3);
});

test('the official client, five streamed turns over two prefill engines: four hits', async () => {
  await using harness = await startHarness({ engine: ENGINE, flags: DEFAULT });
  await harness.ready();
  const client = new OpenAI({ baseURL: `${harness.url}/v1`, apiKey: 'none', maxRetries: 0 });
  const messages: Message[] = [{ role: 'user', content: 'Tell me the history of relay races.' }];
  for (let i = 0; i < 5; i++) {
    const body = { model: 'sim-model', messages, max_tokens: 220, seed: i };
    const content = await client.chat.completions.stream(body).finalContent();
    const plain = await post(`${harness.plain.url}/v1/chat/completions`, body);
    expect(content).toBe(contentOf(plain.text).texts[0]);
    messages.push({ role: 'assistant', content: content ?? '' }, { role: 'user', content: 'And after that?' });
  }
  const requests = () => harness.log.filter(({ msg }) => msg === 'request');
  const outcomes = () => requests().map(({ reuse = 'none' }) => reuse);
  await expect.poll(outcomes).toEqual(['none', 'hit', 'hit', 'hit', 'hit']);
  const turns = requests();
  expect(new Set(turns.map((line) => line['prefill_instance'])).size).toBe(2);
  const [{ pulledTokens: first = 0 } = {}, { pulledTokens: second = 0 } = {}] = harness.prefill.map((s) => s.state());
  expect(first + second).toBeGreaterThan(4 * 220);
});

test('a short rest stays on the decode engine, and the handle is still there for the next turn', async () => {
  const yaml = 'disagg: {local_tail_tokens: 120}\n';
  await using harness = await startHarness({ engine: ENGINE, flags: DEFAULT, yaml });
  await harness.ready();
  const messages = opening();
  const ask = (maxTokens: number) => turn(harness, messages, maxTokens, { conversation_id: 'short' });
  expect(await ask(100)).toBe('none');
  expect(await ask(10)).toBe('decode_local');
  const last = () => harness.log.findLast(({ msg }) => msg === 'request');
  await expect.poll(last).toMatchObject({ plan_reason: 'short_tail' });
  messages.push({ role: 'user', content: 'Now what takes longer to say than so many tokens. '.repeat(4) });
  expect(await ask(10)).toBe('hit');
});

test('a dry run says that there is a handle, who would read it and where the turn would stay, and takes nothing', async () => {
  await using harness = await startHarness({ engine: ENGINE, flags: DEFAULT });
  await harness.ready();
  const remote = connectRemote({ url: harness.rpcUrl });
  const explain = async (facts: MessageInitShape<typeof RequestFactsSchema>) =>
    (await remote.router.explainRoute({ facts: { requestId: 'r', tenant: 'anonymous', model: 'sim-model', ...facts } }))
      .plan;
  const named = { conversationId: 'dry', continues: true };
  expect(await explain(named)).toMatchObject({ mode: PlanMode.PREFILL_DECODE, reuseOutcome: ReuseOutcome.MISS_NEVER });
  const messages = opening();
  await turn(harness, messages, 100, { conversation_id: 'dry' });
  await expect.poll(async () => (await explain(named))?.mode, { timeout: 5000 }).toBe(PlanMode.PREFILL_DECODE_REUSE);
  const decodes = () => harness.log.filter(({ msg }) => msg === 'request').map((line) => line['decode_instance']);
  await expect.poll(decodes).toHaveLength(1);
  const [decode] = decodes();
  const plan = await explain(named);
  expect(plan).toMatchObject({ decode: { instanceId: decode }, prefillHandle: { claimId: '' } });
  expect(plan?.prefillHandle?.instanceIds[0]).toBe(plan?.prefill?.instanceId);
  expect(await turn(harness, messages, 10, { conversation_id: 'dry' })).toBe('hit');
  remote[Symbol.dispose]();
});

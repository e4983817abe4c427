import { afterEach, describe, expect, test } from 'vitest';
import type { Sim } from '../../src/sim/start-sim.ts';
import { contentOf, type Harness, type HarnessOptions, post, startHarness } from '../support/harness.ts';
import { engine } from './ladder-support.ts';

/** A prompt is rendered and tokenised by one engine; the others get its token ids. */
const open: AsyncDisposable[] = [];
afterEach(async () => {
  while (open.length > 0) await open.pop()?.[Symbol.asyncDispose]();
});

async function start(options: HarnessOptions = {}): Promise<Harness> {
  const harness = await startHarness({
    prefill: 1,
    decode: 1,
    ...options,
    engine: { bidirectional: true, eosEvery: 0, blockSize: 16, recordRequests: true, ...options.engine },
    yaml: `timeouts: { store: 5s, tokenize: 5s }\n${options.yaml ?? ''}`,
  });
  open.push(harness);
  await harness.ready();
  return harness;
}

const PATHS = { chat: '/v1/chat/completions', completions: '/v1/completions' } as const;
type Kind = keyof typeof PATHS;
const long = (topic: string) => `${topic} `.repeat(40);
const said = (role: string, content: unknown) => ({ role, content });

interface Body {
  readonly kv_transfer_params?: { readonly prompt_token_ids?: readonly number[] };
  readonly prompt?: unknown;
  readonly return_token_ids?: boolean;
}

/** The body of the last leg that an engine got. */
function lastLeg(sim: Sim, kind: Kind): Body {
  return JSON.parse(String(sim.requests.findLast(({ path }) => path === PATHS[kind])?.body));
}

const idsOf = (kind: Kind, body: Body) => (kind === 'chat' ? body.kv_transfer_params?.prompt_token_ids : body.prompt);

/** Sends it to baton and to an engine alone; the replies are the same but for ids and times. */
async function ask(harness: Harness, kind: Kind, body: object) {
  const reply = await post(`${harness.url}${PATHS[kind]}`, body, { headers: { 'x-baton-debug': '1' } });
  const right = await post(`${harness.plain.url}${PATHS[kind]}`, body);
  expect(reply.status, reply.text).toBe(right.status);
  expect(normal(reply.text)).toBe(normal(right.text));
  const { tokens } = JSON.parse((await post(`${harness.plain.url}/tokenize`, body)).text);
  return { tokens, text: contentOf(reply.text).texts[0] ?? '', plan: reply.headers.get('x-baton-plan') ?? '' };
}

/** Ids, times and what was cached differ between engines. */
function normal(text: string): string {
  return text
    .replaceAll(/"(id|system_fingerprint)":"[^"]*"/g, '"$1":""')
    .replaceAll(/"created":\d+/g, '"created":0')
    .replaceAll(/"prompt_tokens_details":(null|\{[^}]*\})/g, '"prompt_tokens_details":null');
}

const bodyOf = (kind: Kind, topic: string, more: object = {}) => ({
  model: 'sim-model',
  max_tokens: 12,
  ...(kind === 'chat' ? { messages: [said('user', long(topic))] } : { prompt: long(topic) }),
  ...more,
});

describe.each(['chat', 'completions'] as const)('%s', (kind) => {
  test('the decode engine gets the ids that the prefill engine reports', async () => {
    const harness = await start();
    const [p, d] = [engine(harness.prefill), engine(harness.decode)];
    const variants: object[] = [
      {},
      { stream: true, stream_options: { include_usage: true } },
      { return_token_ids: true },
      { logprobs: kind === 'chat' ? true : 2 },
    ];
    // The prefill engine cuts the prompt; the ids are what it left.
    if (kind === 'chat') variants.push({ truncate_prompt_tokens: 50 });
    for (const [i, more] of variants.entries()) {
      const { tokens } = await ask(harness, kind, bodyOf(kind, `forward ${i}`, more));
      expect(lastLeg(p, kind).return_token_ids).toBe(true);
      expect(idsOf(kind, lastLeg(d, kind))).toEqual('truncate_prompt_tokens' in more ? tokens.slice(-50) : tokens);
    }
  });

  test('a prompt whose ids were asked for is rendered once, whether or not there was a hit', async () => {
    const harness = await start({ prefill: 2 });
    const d = engine(harness.decode);
    const named = { conversation_id: 'c', max_tokens: 90 };
    const rendered = () => {
      const calls = [...harness.prefill, d].flatMap((sim) => sim.requests);
      const legs = calls.filter(({ path }) => path === PATHS[kind]).map(({ body }) => JSON.parse(String(body)));
      const alone = legs.filter((leg) => !Array.isArray(idsOf(kind, leg)));
      return calls.filter(({ path }) => path === '/tokenize').length + alone.length;
    };
    const started = rendered();
    const { text } = await ask(harness, kind, bodyOf(kind, 'first', named));
    expect(rendered() - started).toBe(1);
    const next =
      kind === 'chat'
        ? { messages: [said('user', long('first')), said('assistant', text), said('user', 'go on')] }
        : { prompt: `${long('first')}${text} and on` };
    const hit = await ask(harness, kind, { ...bodyOf(kind, 'first', named), ...next });
    expect(hit.plan).toMatch(/outcome=hit/);
    expect(rendered() - started).toBe(2);
    const other = await ask(harness, kind, bodyOf(kind, 'another matter', named));
    expect(other.plan).toContain('outcome=miss_mismatch');
    expect(rendered() - started).toBe(3);
    for (const sim of [...harness.prefill, d]) expect(sim.state()).toMatchObject({ mismatchedPulls: 0 });
  });

  test('a short rest on the decode engine alone: it gets the ids where they need no transfer parameters', async () => {
    const harness = await start({ yaml: 'disagg: { local_tail_tokens: 120 }' });
    const d = engine(harness.decode);
    const named = { conversation_id: 'short', max_tokens: 90 };
    const { text } = await ask(harness, kind, bodyOf(kind, 'begin', named));
    const next =
      kind === 'chat'
        ? { messages: [said('user', long('begin')), said('assistant', text), said('user', 'on')] }
        : { prompt: `${long('begin')}${text} on` };
    const { tokens, plan } = await ask(harness, kind, { ...bodyOf(kind, 'begin', named), ...next });
    expect(plan).toMatch(/reason=short_tail; outcome=decode_local/);
    const leg = lastLeg(d, kind);
    expect(leg).not.toHaveProperty('kv_transfer_params');
    expect(leg.prompt).toEqual(kind === 'chat' ? undefined : tokens);
  });

  test.each([
    ['an engine whose version was not tested', { engine: { version: '0.34.0' } }, undefined],
    // What the two came to is compared then.
    ['who turned it off', { yaml: 'kv: { forward_token_ids: false }' }, true],
  ] as const)('%s: each engine renders by itself', async (_, options, tells) => {
    const harness = await start(options);
    const body = bodyOf(kind, 'alone');
    await ask(harness, kind, body);
    expect(lastLeg(engine(harness.prefill), kind).return_token_ids).toBe(tells);
    expect(lastLeg(engine(harness.decode), kind).kv_transfer_params).not.toHaveProperty('prompt_token_ids');
    expect(lastLeg(engine(harness.decode), kind).prompt).toEqual('prompt' in body ? body.prompt : undefined);
  });
});

test('what engines render whatever ids they get goes to both as it came', async () => {
  const harness = await start();
  const picture = { type: 'image_url', image_url: { url: 'data:image/png;base64,iVBORw0KGgo=' } };
  const requests: readonly (readonly [Kind, object])[] = [
    ['chat', { messages: [said('user', [{ type: 'text', text: long('look') }, picture])] }],
    ['chat', { echo: true }],
    ['completions', { echo: true }],
    ['completions', { prompt: [5, 6, 7, 8] }],
  ];
  for (const [kind, more] of requests) {
    const body = { ...bodyOf(kind, 'echo'), ...more };
    await ask(harness, kind, body);
    // What each engine makes of a chat is compared: D may be another process by now, with another template.
    const tells = lastLeg(engine(harness.prefill), kind).return_token_ids;
    expect(tells).toBe(kind === 'chat' ? true : undefined);
    const decode = lastLeg(engine(harness.decode), kind);
    expect(decode.kv_transfer_params).not.toHaveProperty('prompt_token_ids');
    expect(decode.prompt).toEqual('prompt' in body ? body.prompt : undefined);
  }
});

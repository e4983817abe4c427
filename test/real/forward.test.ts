import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { type BatonProcess, startBatonProcess } from '../support/baton-process.ts';
import { hasRealEngines, type RealEngines, realEngines } from '../support/real-engines.ts';
import { RealLog } from '../support/real-log.ts';
import { tokenIdCases } from './token-id-cases.ts';

// Real vLLM, 1P1D over NIXL, with a plain instance of the same weights as the oracle.

const MODEL = process.env['BATON_REAL_MODEL'] ?? 'tiny';
const log = new RealLog('Prefill to decode, vLLM 0.33 (CPU), NixlConnector, 1P1D, against a plain instance');
let engines: RealEngines;
let baton: BatonProcess;

describe.runIf(hasRealEngines())('real engines, prefill to decode', () => {
  beforeAll(async () => {
    engines = await realEngines({ version: '0.33', tokens: 'bytes', prefill: 1 });
    baton = await startBatonProcess(['--prefill', ...engines.prefill, '--decode', engines.decode]);
    await untilReady();
  });

  afterAll(async () => {
    await baton?.[Symbol.asyncDispose]();
    await engines?.[Symbol.asyncDispose]();
    log.write();
  });

  const prompts = [2, 12, 60, 250, 900, 1900].map((words, i) => words_(words, i + 1));

  test.each(['chat', 'completion'] as const)('%s: every answer equals the plain instance', async (kind) => {
    for (const [i, prompt] of prompts.entries()) {
      for (const stream of [false, true]) {
        const body = bodyOf(kind, prompt, { max_tokens: 24, stream });
        const before = await promptTokens(engines.decode);
        const through = await answer(baton.url, kind, body);
        const after = await promptTokens(engines.decode);
        const plain = await answer(engines.plain, kind, body);
        expect(through.text, `prompt ${i}`).toBe(plain.text);
        expect(through.finish).toBe(plain.finish);
        expect(through.usage).toEqual(plain.usage);
        expect(through.raw).not.toMatch(/remote_block_ids|"kv_transfer_params":\{/);
        // The point of it all: D computes no prompt token that P has handed it.
        const computed = after.local_compute - before.local_compute;
        expect(computed, 'prompt tokens computed by D').toBe(0);
        log.push(
          `${kind}${stream ? ', streamed' : ''}, ${plain.usage[0]} prompt tokens: ${plain.usage[1]} tokens equal; ` +
            `D computed ${computed}, received ${after.external_kv_transfer - before.external_kv_transfer}`,
        );
      }
    }
  });

  test('sampling fields, n = 2, log-probabilities and stop strings pass', async () => {
    const prompt = prompts[2] ?? '';
    const cases: Record<string, unknown>[] = [
      { n: 2, temperature: 0.8, seed: 3 },
      { logprobs: true, top_logprobs: 2 },
      { max_completion_tokens: 7, max_tokens: undefined },
      { min_tokens: 5 },
      { seed: 11, temperature: 0.9, top_p: 0.8 },
      { stop: ['e'] },
      { logit_bias: { '70': 4 } },
    ];
    for (const extra of cases) {
      const body = bodyOf('chat', prompt, { max_tokens: 12, ...extra });
      const through = JSON.parse((await answer(baton.url, 'chat', body)).raw);
      const plain = JSON.parse((await answer(engines.plain, 'chat', body)).raw);
      const shape = (reply: { choices: unknown }) => reply.choices;
      expect(shape(through), JSON.stringify(extra)).toEqual(shape(plain));
      log.push(`chat with ${Object.keys(extra).join(', ')}: choices equal`);
    }
  });

  test("errors are the engine's: status, message, type, param and code", async () => {
    const broken: Record<string, unknown>[] = [
      { messages: [] },
      { messages: undefined },
      { max_tokens: 0 },
      { temperature: -3 },
      { messages: [{ role: 'user', content: 'x '.repeat(6000) }] },
      { tools: [{ type: 'function', function: { name: 'f', parameters: {} } }], tool_choice: 'auto' },
      { stream_options: { include_usage: true } },
    ];
    for (const extra of broken) {
      const body = bodyOf('chat', 'hello there', { max_tokens: 4, ...extra });
      const through = await post(`${baton.url}/v1/chat/completions`, body);
      const direct = await post(`${engines.plain}/v1/chat/completions`, body);
      expect(through.status, through.text).toBe(direct.status);
      // vLLM's message counts the members of the body it got, and the leg to P has some of baton's.
      const normal = (text: string) => JSON.parse(text.replace(/<dict of \d+ items>/g, '<dict>'));
      expect(normal(through.text)).toEqual(normal(direct.text));
      const { error } = JSON.parse(through.text);
      log.push(`error ${through.status} ${error.type}: equal (${JSON.stringify(error.message).slice(0, 60)}…)`);
    }
    const unknown = await post(`${baton.url}/v1/chat/completions`, { ...bodyOf('chat', 'hi', {}), model: 'nope' });
    expect([unknown.status, JSON.parse(unknown.text).error.code]).toEqual([404, 'model_not_found']);
  });

  tokenIdCases(() => engines, log);

  test('several requests at once, and clients that leave, harm nobody', async () => {
    const leave = Array.from({ length: 4 }, async (_, i) => {
      const signal = AbortSignal.timeout(30 + 40 * i);
      await post(
        `${baton.url}/v1/chat/completions`,
        bodyOf('chat', words_(700, 50 + i), { max_tokens: 400 }),
        signal,
      ).catch(() => undefined);
    });
    const stay = Array.from({ length: 6 }, async (_, i) => {
      const body = bodyOf('chat', words_(90 + 40 * i, 80 + i), { max_tokens: 30, stream: i % 2 === 0 });
      const through = await answer(baton.url, 'chat', body);
      return { through, body };
    });
    await Promise.all(leave);
    for (const { through, body } of await Promise.all(stay)) {
      expect(through.text).toBe((await answer(engines.plain, 'chat', body)).text);
    }
    for (const url of [...engines.prefill, engines.decode]) expect((await fetch(`${url}/health`)).status).toBe(200);
    log.push('6 requests at once beside 4 clients that left: answers equal, both engines healthy');
  });
});

type Kind = 'chat' | 'completion';

function words_(count: number, seed: number): string {
  const list =
    'the of and to in is that it for on with as at by this from are be or an prefill decode cache block token'.split(
      ' ',
    );
  let state = seed * 7919;
  const next = () => {
    state = (state * 1103515245 + 12345) % 2147483648;
    return list[Math.floor(state / 65536) % list.length];
  };
  return Array.from({ length: count }, next).join(' ');
}

function bodyOf(kind: Kind, prompt: string, extra: Record<string, unknown>): Record<string, unknown> {
  const text = kind === 'chat' ? { messages: [{ role: 'user', content: prompt }] } : { prompt };
  const usage = extra['stream'] === true ? { stream_options: { include_usage: true } } : {};
  return { model: MODEL, temperature: 0, ...text, ...usage, ...extra };
}

async function post(url: string, body: unknown, signal?: AbortSignal): Promise<{ status: number; text: string }> {
  const reply = await fetch(url, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify(body),
    ...(signal === undefined ? {} : { signal }),
  });
  return { status: reply.status, text: await reply.text() };
}

interface Answer {
  readonly text: string;
  readonly finish: string | null;
  readonly usage: readonly [number, number];
  readonly raw: string;
}

async function answer(base: string, kind: Kind, body: Record<string, unknown>): Promise<Answer> {
  const { status, text: raw } = await post(`${base}/v1/${kind === 'chat' ? 'chat/completions' : 'completions'}`, body);
  expect(status, raw).toBe(200);
  const replies = raw.startsWith('data:')
    ? raw.split('\n\n').flatMap((event) => (event.startsWith('data: {') ? [JSON.parse(event.slice(6))] : []))
    : [JSON.parse(raw)];
  if (raw.startsWith('data:')) expect(raw.endsWith('data: [DONE]\n\n')).toBe(true);
  let text = '';
  let finish: string | null = null;
  let usage: readonly [number, number] = [0, 0];
  for (const reply of replies) {
    expect(reply.error, raw.slice(-400)).toBeUndefined();
    const [choice] = reply.choices;
    text += choice?.delta?.content ?? choice?.message?.content ?? choice?.text ?? '';
    finish = choice?.finish_reason ?? finish;
    if (reply.usage) usage = [reply.usage.prompt_tokens, reply.usage.completion_tokens];
  }
  return { text, finish, usage, raw };
}

/** Prompt tokens of an engine by where their KV came from. */
async function promptTokens(base: string): Promise<{ local_compute: number; external_kv_transfer: number }> {
  const text = await (await fetch(`${base}/metrics`)).text();
  const read = (source: string) =>
    [
      ...text.matchAll(
        new RegExp(`^vllm:prompt_tokens_by_source_total\\{[^}]*source="${source}"[^}]*\\} (\\S+)$`, 'gm'),
      ),
    ]
      .map((match) => Number(match[1]))
      .reduce((sum, value) => sum + value, 0);
  return { local_compute: read('local_compute'), external_kv_transfer: read('external_kv_transfer') };
}

async function untilReady(): Promise<void> {
  const end = Date.now() + 60_000;
  while (Date.now() < end) {
    if ((await fetch(`${baton.url}/readiness`)).status === 200) return;
    await new Promise((next) => setTimeout(next, 200));
  }
  throw new Error(`not ready:\n${baton.lines.join('\n')}`);
}

import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { parseJson } from '../../src/core/parse-json.ts';
import { createRandom, type FaultRule } from '../../src/sim/faults.ts';
import { type Content, contentOf } from '../support/harness.ts';
import { type LmcacheHarness, startLmcache } from '../support/lmcache.ts';
import { Draw } from './property-requests.ts';

/** `BATON_TEST_SEED=n` repeats the requests and faults of a run; what happens at the same time is never the same. */
const SEED = Number(process.env['BATON_TEST_SEED'] ?? Math.floor(Math.random() * 2 ** 31));
const WORKERS = 8;
const REQUESTS = 500;
const WINDOW = 600;

/** A worker has a model name of its own for the same weights: a fault hits the requests of that worker alone. */
const modelOf = (worker: number) => `m-${worker}`;
const MODELS = Array.from({ length: WORKERS }, (_, worker) => ({ id: modelOf(worker), root: 'm' }));
const NOTICE_FAULTS = [
  'notice_lost',
  'notice_late',
  'notice_early',
  'notice_doubled',
  'notice_foreign',
  'kv_unwritten',
] as const;

interface Ask {
  readonly path: string;
  readonly body: Readonly<Record<string, unknown>>;
}

const WORDS = 'the baton passes from hand to hand while both of them run and nobody may look back'.split(' ');

function drawAsk(draw: Draw, model: string): Ask {
  const stream = draw.chance(0.6);
  const size = draw.int(1, draw.pick([6, 60, 90]));
  const text = `${Array.from({ length: size }, () => WORDS[draw.int(0, WORDS.length - 1)]).join(' ')}`;
  const common = {
    model,
    stream,
    ...(stream
      ? { stream_options: { include_usage: true, ...(draw.chance(0.2) ? { continuous_usage_stats: true } : {}) } }
      : {}),
    ...(draw.chance(0.85) ? { max_tokens: draw.pick([1, 2, draw.int(2, 8), draw.int(5, 40)]) } : {}),
    ...(draw.chance(0.3) ? { temperature: draw.pick([0, 0.7, 1]) } : {}),
    ...(draw.chance(0.2) ? { seed: draw.int(0, 5) } : {}),
    ...(draw.chance(0.3) ? { stop: draw.pick<unknown>(['e', ['th', 'q'], ['e ', ' e', 'ee'], ['\n']]) } : {}),
    ...(draw.chance(0.1) ? { ignore_eos: true } : {}),
    ...(draw.chance(0.1) ? { return_token_ids: true } : {}),
    ...(draw.chance(0.05) ? { cache_salt: draw.pick(['a', 'b']) } : {}),
  };
  if (draw.chance(0.4)) {
    const ids = Array.from(text, (letter) => letter.charCodeAt(0) % 128);
    const prompt = draw.pick<unknown>([text, text, [text], ids, [ids]]);
    return {
      path: '/v1/completions',
      body: { ...common, prompt, ...(draw.chance(0.2) ? { logprobs: draw.int(1, 3) } : {}) },
    };
  }
  const messages = [
    { role: 'system', content: 'Be brief.' },
    { role: 'user', content: text },
  ].slice(draw.int(0, 1));
  const tools = draw.chance(0.2) ? { tools: [{ type: 'function', function: { name: 'f', parameters: {} } }] } : {};
  const logprobs = draw.chance(0.2)
    ? { logprobs: true, ...(draw.chance(0.7) ? { top_logprobs: draw.int(1, 3) } : {}) }
    : {};
  const template = draw.chance(0.1) ? { chat_template_kwargs: { enable_thinking: false } } : {};
  return { path: '/v1/chat/completions', body: { ...common, messages, ...tools, ...logprobs, ...template } };
}

interface Piece {
  readonly choices?: readonly { readonly logprobs?: unknown; readonly token_ids?: readonly number[] | null }[];
  readonly id?: string;
  readonly object?: string;
}

function piecesOf(text: string): readonly Piece[] {
  if (!text.startsWith('data:')) return [parseJson(text) as Piece];
  return text
    .split('\n\n')
    .flatMap((event) => (event.startsWith('data: {') ? [parseJson(event.slice(6)) as Piece] : []));
}

/** Lists of log probabilities joined: how a stream cuts them is the engine's business. */
function joined(pieces: readonly Piece[], { body }: Ask): string {
  const lists: Record<string, unknown[]> = {};
  for (const piece of pieces) {
    for (const choice of piece.choices ?? []) {
      for (const [key, list] of Object.entries((choice.logprobs ?? {}) as Record<string, unknown[]>)) {
        lists[key] = [...(lists[key] ?? []), ...(list ?? [])];
      }
      if (choice.token_ids) lists['ids'] = [...(lists['ids'] ?? []), ...choice.token_ids];
    }
  }
  // With stop strings the simulator counts its offsets from text that it holds back.
  if (body['stop'] !== undefined) delete lists['text_offset'];
  return JSON.stringify(lists, (_key, value: unknown) =>
    typeof value === 'number' ? Number(value.toFixed(9)) : value,
  );
}

function countsOf({ usage }: Content) {
  const { prompt_tokens, completion_tokens, total_tokens } = usage as Record<string, number>;
  return { prompt_tokens, completion_tokens, total_tokens };
}

/** The reply equals that of one engine that does everything itself, and is one reply in form. */
function check(ask: Ask, text: string, want: string): void {
  const [got, right] = [contentOf(text), contentOf(want)];
  expect({ texts: got.texts, finish: got.finish, errors: got.errors, done: got.done }).toEqual({
    texts: right.texts,
    finish: right.finish,
    errors: [],
    done: right.done,
  });
  expect(countsOf(got)).toEqual(countsOf(right));
  const pieces = piecesOf(text);
  expect(joined(pieces, ask)).toBe(joined(piecesOf(want), ask));
  expect(new Set(pieces.map(({ id }) => id)).size).toBe(1);
  const isChat = ask.path.includes('chat');
  expect(pieces[0]?.id).toMatch(isChat ? /^chatcmpl-/ : /^cmpl-/);
  const objects = new Set(pieces.map(({ object }) => object));
  const stream = ask.body['stream'] === true;
  expect([...objects]).toEqual([isChat ? `chat.completion${stream ? '.chunk' : ''}` : 'text_completion']);
}

describe.each([1, 2])('tensor parallel size %i', (ranks) => {
  let harness: LmcacheHarness;
  const rejections: unknown[] = [];
  const onRejection = (reason: unknown) => void rejections.push(reason);

  beforeAll(async () => {
    process.on('unhandledRejection', onRejection);
    harness = await startLmcache({
      prefill: 3,
      decode: 2,
      ranks,
      engine: {
        models: MODELS,
        maxModelLen: WINDOW,
        defaultMaxTokens: WINDOW,
        pdBufferTokens: 4096,
        allocTimeoutMs: 400,
      },
      // Room for fewer prompts than there are workers, so that some wait.
      lmcache: 'notice_timeout: 250ms, pd_buffer_size: 4MiB, kv_bytes_per_token: 1024, chunk_size: 256',
      yaml: 'retry: { budget_percent: 100 }\nlog: { level: info }',
    });
  });
  afterAll(async () => {
    await harness?.[Symbol.asyncDispose]();
    process.off('unhandledRejection', onRejection);
  });

  async function inject(draw: Draw, model: string): Promise<FaultRule['kind'] | undefined> {
    if (!draw.chance(0.35)) return undefined;
    const kind = draw.pick<FaultRule['kind']>([...NOTICE_FAULTS, 'slow', 'stall'] as unknown as [FaultRule['kind']]);
    const ms = kind === 'slow' ? draw.int(1, 4) : draw.int(5, 400);
    for (const sim of harness.prefill) await sim.setFault({ kind, model, path: '/v1/completions', count: 1, ms });
    return kind;
  }

  async function work(worker: number, seen: Record<string, number>): Promise<void> {
    const model = modelOf(worker);
    for (let i = worker; i < REQUESTS; i += WORKERS) {
      const draw = new Draw(createRandom(SEED + ranks * 1_000_003 + i * 7919));
      const fault = await inject(draw, model);
      const ask = drawAsk(draw, model);
      const client = new AbortController();
      const leaves = draw.chance(0.08);
      if (leaves) setTimeout(() => client.abort(), draw.int(0, 120));
      const init = { method: 'POST', body: JSON.stringify(ask.body) };
      const headers = { 'content-type': 'application/json', 'x-baton-debug': '1' };
      const where = `seed ${SEED}, request ${i}, ${fault ?? 'no fault'}: ${JSON.stringify(ask.body)}`;
      try {
        const signal = AbortSignal.any([client.signal, AbortSignal.timeout(10_000)]);
        const reply = await fetch(harness.url + ask.path, { ...init, headers, signal });
        const text = await reply.text();
        const want = await (await fetch(harness.plain.url + ask.path, { ...init, headers })).text();
        expect(reply.status, `${where}\n${text}`).toBe(200);
        expect(() => check(ask, text, want), where).not.toThrow();
        const plan = reply.headers.get('x-baton-plan') ?? '';
        const reason = /reason=(\w+)/.exec(plan)?.[1] ?? 'none';
        seen[reason] = (seen[reason] ?? 0) + 1;
      } catch (error) {
        if (!client.signal.aborted) throw error;
        seen['left'] = (seen['left'] ?? 0) + 1;
      }
      if (fault !== undefined) {
        seen[fault] = (seen[fault] ?? 0) + 1;
        for (const sim of harness.prefill) await sim.clearFaults();
      }
    }
  }

  test(`${REQUESTS} requests are answered right, whatever becomes of their notices`, async () => {
    const seen: Record<string, number> = {};
    await Promise.all(Array.from({ length: WORKERS }, (_, worker) => work(worker, seen)));
    for (const kind of [...NOTICE_FAULTS, 'disaggregated', 'left']) expect(seen[kind], kind).toBeGreaterThan(0);
    for (const sim of [...harness.prefill, ...harness.decode]) {
      expect(sim.state()).toMatchObject({ deathReason: null, mismatchedTokens: 0 });
      await expect.poll(() => sim.state().running + sim.state().waiting).toBe(0);
    }
    expect(harness.decode.reduce((sum, sim) => sum + sim.state().externalHits, 0)).toBeGreaterThan(0);
    expect(rejections).toEqual([]);
  });
});

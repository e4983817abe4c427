import { expect, test } from 'vitest';
import type { RealEngines } from '../support/real-engines.ts';
import type { RealLog } from '../support/real-log.ts';
import { post, REAL_MODEL, said, startRealBaton, words } from '../support/real-turns.ts';

const PATHS = { chat: '/v1/chat/completions', completions: '/v1/completions' } as const;
type Kind = keyof typeof PATHS;

const FLAGS = { do_remote_decode: true, do_remote_prefill: false };
const OUTPUT = { temperature: 0, max_tokens: 16, ignore_eos: true };

const bodyOf = (kind: Kind, text: string) => ({
  model: REAL_MODEL,
  ...(kind === 'chat' ? { messages: [said('user', text)] } : { prompt: text }),
});

async function call(url: string, body: object) {
  const { status, text } = await post(url, body);
  return { status, json: JSON.parse(text) };
}

/** Ids that the engine reports of the prompt that it used. */
const reported = (kind: Kind, json: ReturnType<typeof JSON.parse>): number[] =>
  kind === 'chat' ? json.prompt_token_ids : json.choices[0].prompt_token_ids;

/** What a real engine makes of a prompt's token ids, and that answers are the same with them and without. */
export function tokenIdCases(engines: () => RealEngines, log: RealLog): void {
  const tokensOf = async (kind: Kind, text: string): Promise<number[]> =>
    (await call(`${engines().plain}/tokenize`, bodyOf(kind, text))).json.tokens;
  const [one, other] = [words(50, 501), words(50, 502)];

  test('token ids: what a prefill engine takes', async () => {
    const [prefill = ''] = engines().prefill;
    const ask = async (kind: Kind, params: object, extra: object = {}) => {
      const asked = { ...bodyOf(kind, one), max_tokens: 1, return_token_ids: true, ...extra };
      return call(`${prefill}${PATHS[kind]}`, { ...asked, kv_transfer_params: { ...FLAGS, ...params } });
    };
    const chat = await ask('chat', { prompt_token_ids: await tokensOf('chat', other) });
    expect(reported('chat', chat.json)).toEqual(await tokensOf('chat', other));
    const beside = await ask('completions', { prompt_token_ids: await tokensOf('completions', other) });
    expect(reported('completions', beside.json)).toEqual(await tokensOf('completions', one));
    const ids = await tokensOf('completions', other);
    const prompt = await ask('completions', {}, { prompt: ids });
    expect(reported('completions', prompt.json)).toEqual(ids);
    for (const bad of [[], [-1], [10 ** 7], ['1'], [1.5]]) {
      expect((await ask('chat', { prompt_token_ids: bad })).status, JSON.stringify(bad)).toBe(400);
    }
    log.push(
      'token ids: chat takes them in kv_transfer_params, completions as the prompt alone; ids that are none are a 400',
    );
  });

  test.each(['chat', 'completions'] as const)(
    'token ids: a decode engine uses them instead of the text, %s',
    async (kind) => {
      const [prefill = ''] = engines().prefill;
      const body = { ...bodyOf(kind, one), ...OUTPUT };
      const first = { ...body, max_tokens: 1, return_token_ids: true, kv_transfer_params: FLAGS };
      const { json } = await call(`${prefill}${PATHS[kind]}`, first);
      const ids = reported(kind, json);
      // Another, shorter text beside the ids of the one that was prefilled.
      const decode = {
        ...body,
        ...(kind === 'chat' ? { messages: [said('user', 'no')] } : { prompt: ids }),
        kv_transfer_params: { ...json.kv_transfer_params, ...(kind === 'chat' ? { prompt_token_ids: ids } : {}) },
        return_token_ids: true,
      };
      const got = await call(`${engines().decode}${PATHS[kind]}`, decode);
      const right = await call(`${engines().plain}${PATHS[kind]}`, { ...body, return_token_ids: true });
      expect(reported(kind, got.json)).toEqual(ids);
      expect(got.json.choices).toEqual(right.json.choices);
    },
  );

  test('token ids: answers through baton are the same with and without them', async () => {
    await using forwards = await startRealBaton(engines());
    await using renders = await startRealBaton(engines(), [], 'kv: { forward_token_ids: false }\n');
    for (const [kind, variants] of Object.entries(VARIANTS) as [Kind, readonly object[]][]) {
      for (const [i, extra] of variants.entries()) {
        const body = { ...bodyOf(kind, words(50, 510 + i)), ...OUTPUT, ...extra };
        const right = await call(`${engines().plain}${PATHS[kind]}`, body);
        expect(right.status, JSON.stringify(extra)).toBe(200);
        for (const baton of [forwards, renders]) {
          const { json } = await call(`${baton.url}${PATHS[kind]}`, body);
          expect(json.choices, JSON.stringify(extra)).toEqual(right.json.choices);
          expect(json.prompt_token_ids, JSON.stringify(extra)).toEqual(right.json.prompt_token_ids);
          expect(json.usage.prompt_tokens).toBe(right.json.usage.prompt_tokens);
        }
      }
      const names = variants.map((extra) => Object.keys(extra).join('+') || 'nothing else').join(', ');
      log.push(`token ids, ${kind}, answers equal with, without and on the plain instance; with ${names}`);
    }
  });
}

const TOOLS = [{ type: 'function', function: { name: 'f', parameters: {} } }];

const VARIANTS: Readonly<Record<Kind, readonly object[]>> = {
  chat: [
    {},
    { truncate_prompt_tokens: 40 },
    { documents: [{ title: 't', text: 'u' }] },
    { reasoning_effort: 'low' },
    { response_format: { type: 'json_object' } },
    { tools: TOOLS, tool_choice: 'none' },
    { logprobs: true, top_logprobs: 2 },
    { return_token_ids: true },
    { echo: true },
    { add_special_tokens: true },
    { stop: ['e'] },
    { cache_salt: 'x' },
    { chat_template_kwargs: { x: 1 } },
    {
      messages: [said('user', words(40, 530)), said('assistant', 'It was')],
      continue_final_message: true,
      add_generation_prompt: false,
    },
  ],
  completions: [
    {},
    { prompt: [words(40, 531)] },
    { truncate_prompt_tokens: 40 },
    { logprobs: 2 },
    { return_token_ids: true },
    { add_special_tokens: false },
    { echo: true },
    { stop: ['e'] },
  ],
};

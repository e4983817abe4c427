import OpenAI from 'openai';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { type Harness, startHarness } from '../support/harness.ts';

/** The official client, unmodified, against the facade and against a plain engine. */
let harness: Harness;
let client: OpenAI;
let plain: OpenAI;
const model = 'sim-model';
const messages = [{ role: 'user' as const, content: 'Tell me something about batons.' }];

beforeAll(async () => {
  harness = await startHarness();
  client = new OpenAI({ baseURL: `${harness.url}/v1`, apiKey: 'none', maxRetries: 0 });
  plain = new OpenAI({ baseURL: `${harness.plain.url}/v1`, apiKey: 'none', maxRetries: 0 });
});
afterAll(async () => {
  await harness?.[Symbol.asyncDispose]();
});

/** Ids, times, fingerprints and cache hits differ between two engines; everything else must not. */
function comparable(value: unknown): unknown {
  return JSON.parse(
    JSON.stringify(value, (key, member) =>
      ['id', 'created', 'system_fingerprint', 'prompt_tokens_details'].includes(key) ? undefined : member,
    ),
  );
}

describe('chat completions', () => {
  test('whole reply', async () => {
    const body = { model, messages, max_tokens: 20 };
    expect(comparable(await client.chat.completions.create(body))).toEqual(
      comparable(await plain.chat.completions.create(body)),
    );
  });

  test('streamed reply with usage', async () => {
    const body = { model, messages, max_tokens: 20, stream: true, stream_options: { include_usage: true } } as const;
    const read = async (from: OpenAI) => {
      const chunks: unknown[] = [];
      for await (const chunk of await from.chat.completions.create(body)) chunks.push(comparable(chunk));
      return chunks;
    };
    const chunks = await read(client);
    expect(chunks.length).toBeGreaterThan(3);
    expect(chunks).toEqual(await read(plain));
  });

  test('stream helper gives the same message', async () => {
    const final = await client.chat.completions.stream({ model, messages, max_tokens: 12 }).finalContent();
    const whole = await plain.chat.completions.create({ model, messages, max_tokens: 12 });
    expect(final).toBe(whole.choices[0]?.message.content);
  });

  test('tools', async () => {
    const body = {
      model,
      messages,
      tools: [
        {
          type: 'function' as const,
          function: { name: 'weather', parameters: { type: 'object', properties: { city: { type: 'string' } } } },
        },
      ],
      tool_choice: 'required' as const,
    };
    const reply = await client.chat.completions.create(body);
    expect(comparable(reply.choices[0]?.message.tool_calls)).toEqual(
      comparable((await plain.chat.completions.create(body)).choices[0]?.message.tool_calls),
    );
    expect(reply.choices[0]?.message.tool_calls).toHaveLength(1);
    const streamed = await client.chat.completions.stream(body).finalChatCompletion();
    expect(streamed.choices[0]?.message.tool_calls?.[0]).toMatchObject({ function: { name: 'weather' } });
  });

  test('logprobs', async () => {
    const body = { model, messages, max_tokens: 4, logprobs: true, top_logprobs: 2 };
    const reply = await client.chat.completions.create(body);
    expect(reply.choices[0]?.logprobs?.content?.length).toBe(reply.usage?.completion_tokens);
    expect(reply.choices[0]?.logprobs).toEqual((await plain.chat.completions.create(body)).choices[0]?.logprobs);
  });

  test('n = 2 runs on the decode engine alone and gives both choices', async () => {
    const body = { model, messages, max_tokens: 8, n: 2, temperature: 0.5 };
    const { data, response } = await client.chat.completions
      .create(body, { headers: { 'x-baton-debug': '1' } })
      .withResponse();
    expect(data.choices.map(({ index }) => index)).toEqual([0, 1]);
    expect(comparable(data.choices)).toEqual(comparable((await plain.chat.completions.create(body)).choices));
    expect(response.headers.get('x-baton-plan')).toMatch(/^mode=decode_local; reason=n;/);
  });

  test('abort reaches the engine', async () => {
    for (const sim of harness.decode) await sim.setFault({ kind: 'slow', ms: 50, count: 1 });
    const stream = await client.chat.completions.create({
      model,
      messages: [{ role: 'user', content: 'A long story, please.' }],
      max_tokens: 500,
      stream: true,
      ...{ ignore_eos: true },
    });
    for await (const chunk of stream) {
      if (chunk.choices[0]?.delta.content) break;
    }
    const running = () => harness.decode.reduce((sum, sim) => sum + sim.state().running, 0);
    await expect.poll(running).toBe(0);
    for (const sim of harness.decode) await sim.clearFaults();
  });

  test('errors are typed', async () => {
    await expect(client.chat.completions.create({ model: 'nobody', messages })).rejects.toMatchObject({
      constructor: OpenAI.NotFoundError,
      status: 404,
      code: 'model_not_found',
      param: 'model',
    });
    await expect(client.chat.completions.create({ model, messages: [] })).rejects.toMatchObject({
      constructor: OpenAI.BadRequestError,
      status: 400,
      type: 'BadRequestError',
    });
  });
});

test('completions, whole and streamed', async () => {
  const body = { model, prompt: 'Once upon a time', max_tokens: 16 };
  const whole = await client.completions.create(body);
  expect(comparable(whole)).toEqual(comparable(await plain.completions.create(body)));
  let text = '';
  for await (const chunk of await client.completions.create({ ...body, stream: true }))
    text += chunk.choices[0]?.text ?? '';
  expect(text).toBe(whole.choices[0]?.text);
});

test('models', async () => {
  const ids: string[] = [];
  for await (const card of client.models.list()) ids.push(card.id);
  expect(ids).toEqual([model]);
});

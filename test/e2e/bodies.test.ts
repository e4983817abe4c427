import { isDeepStrictEqual } from 'node:util';
import fc from 'fast-check';
import { afterAll, beforeAll, beforeEach, describe, expect, test } from 'vitest';
import {
  ODD_HANDLE,
  type Stubbed,
  type StubRequest,
  sayHandle,
  sayJson,
  startStubbed,
} from '../support/stub-engine.ts';
import { objectText, valueText } from '../unit/json-text.ts';

/** What reaches the engines, byte for byte, against a reading of the client's body that shares no code with baton. */
let stubbed: Stubbed;

beforeAll(async () => {
  stubbed = await startStubbed({ yaml: 'facade: { client_kv_transfer_params: drop }' });
});
afterAll(async () => {
  await stubbed?.[Symbol.asyncDispose]();
});
beforeEach(() => stubbed.reset());

interface TopMember {
  readonly key: string;
  /** The value as written, white space inside it included. */
  readonly raw: string;
}

/** Cuts a valid JSON object into its members by counting brackets outside strings. */
function topMembers(text: string): readonly TopMember[] {
  const members: TopMember[] = [];
  let depth = 0;
  let inString = false;
  let from = 0;
  let key: string | undefined;
  const close = (at: number) => {
    if (key !== undefined) members.push({ key, raw: text.slice(from, at).trim() });
    key = undefined;
    from = at + 1;
  };
  for (let i = 0; i < text.length; i++) {
    const c = text[i];
    if (inString) {
      if (c === '\\') i++;
      else if (c === '"') inString = false;
    } else if (c === '"') inString = true;
    else if (c === '{' || c === '[') {
      depth++;
      if (depth === 1) from = i + 1;
    } else if (c === '}' || c === ']') {
      depth--;
      if (depth === 0) close(i);
    } else if (depth === 1 && c === ',') close(i);
    else if (depth === 1 && c === ':' && key === undefined) {
      key = String(JSON.parse(text.slice(from, i)));
      from = i + 1;
    }
  }
  return members;
}

const CONSUMED = ['conversation_id', 'kv_transfer_params', 'ec_transfer_params'];
const PREFILL_DROPS = [...CONSUMED, 'stream_options', 'min_tokens', 'logprobs', 'top_logprobs', 'echo'];
const PREFILL_SETS = ['stream', 'max_tokens', 'max_completion_tokens'];

/** Every member but the named ones, in the client's order, duplicates included. */
const without = (members: readonly TopMember[], keys: readonly string[]) =>
  members.filter(({ key }) => !keys.includes(key));
const valuesOf = (members: readonly TopMember[], key: string) =>
  members.filter((member) => member.key === key).map(({ raw }) => raw);

function expectPrefillBody(sent: string, client: string): void {
  JSON.parse(sent);
  const members = topMembers(sent);
  const original = topMembers(client);
  const changed = [...PREFILL_DROPS, ...PREFILL_SETS];
  expect(without(members, changed)).toEqual(without(original, changed));
  expect(valuesOf(members, 'stream')).toEqual(['false']);
  expect(valuesOf(members, 'max_tokens')).toEqual(['1']);
  const hasOther = original.some(({ key }) => key === 'max_completion_tokens');
  expect(valuesOf(members, 'max_completion_tokens')).toEqual(hasOther ? ['1'] : []);
  const params = valuesOf(members, 'kv_transfer_params').map((raw): unknown => JSON.parse(raw));
  expect(params).toEqual([{ do_remote_decode: true, do_remote_prefill: false }]);
  const dropped = PREFILL_DROPS.filter((key) => key !== 'kv_transfer_params');
  expect(members.filter(({ key }) => dropped.includes(key))).toEqual([]);
}

function expectDecodeBody(sent: string, client: string, handle: string | undefined): void {
  JSON.parse(sent);
  const members = topMembers(sent);
  const original = topMembers(client);
  // With a handle D may be asked for the token ids too: then for nothing else, and once.
  const asked = handle !== undefined && isDeepStrictEqual(valuesOf(members, 'return_token_ids'), ['true']);
  const changed = asked ? [...CONSUMED, 'return_token_ids'] : CONSUMED;
  expect(without(members, changed)).toEqual(without(original, changed));
  expect(members.filter(({ key }) => CONSUMED.includes(key))).toEqual(
    handle === undefined ? [] : [{ key: 'kv_transfer_params', raw: handle }],
  );
  // Where nothing has to go and nothing has to come, not even white space may differ.
  if (handle === undefined && !original.some(({ key }) => CONSUMED.includes(key))) expect(sent).toBe(client);
}

async function send(path: string, body: string | Buffer<ArrayBuffer>): Promise<void> {
  const reply = await fetch(stubbed.url + path, { method: 'POST', body });
  expect(await reply.text()).toContain('hello');
  expect(reply.status).toBe(200);
}

/** Keys that the legs change, keys that only they read, and spellings of both with escapes. */
const KEYS = [
  'messages',
  'messages',
  'stream',
  'str\\u0065am',
  'max_tokens',
  'max\\u005ftokens',
  'max_completion_tokens',
  'stream_options',
  'min_tokens',
  'logprobs',
  'top_logprobs',
  'echo',
  'kv_transfer_params',
  'kv_transfer_param\\u0073',
  'ec_transfer_params',
  'conversation_id',
  'conversation\\u005Fid',
  'session_id',
  'return_token_ids',
  'seed',
  'tools',
  '',
];

test('a thousand odd bodies reach both legs with nothing changed but what a leg must change', {
  timeout: 120_000,
}, async () => {
  const counts = { handed: 0, local: 0, refused: 0 };
  // A body of which some make D work alone: n, echo with logprobs, prompt_logprobs.
  const local = fc.constantFrom('', '', '', '"n":2', '"n":1', '"n":1.0', '"prompt_logprobs":0');
  const chat = fc.boolean();
  await fc.assert(
    fc.asyncProperty(objectText(KEYS), local, chat, async (object, extra, isChat) => {
      const isEmpty = topMembers(object).length === 0;
      const at = object.indexOf('{') + 1;
      const body = extra === '' ? object : `${object.slice(0, at)}${extra}${isEmpty ? '' : ','}${object.slice(at)}`;
      stubbed.p.requests.length = 0;
      stubbed.d.requests.length = 0;
      const reply = await fetch(stubbed.url + (isChat ? '/v1/chat/completions' : '/v1/completions'), {
        method: 'POST',
        body,
      });
      const text = await reply.text();
      if (reply.status === 400) {
        // The one member that baton judges itself is its own.
        expect(JSON.parse(text)).toMatchObject({ error: { param: 'conversation_id' } });
        expect(valuesOf(topMembers(body), 'conversation_id')).not.toEqual([]);
        expect(stubbed.p.requests.length + stubbed.d.requests.length).toBe(0);
        counts.refused += 1;
        return;
      }
      expect([reply.status, text]).toEqual([200, expect.stringContaining('hello')]);
      const toPrefill = stubbed.p.requests.map((request) => request.body.toString());
      const [toDecode] = stubbed.d.requests.map((request) => request.body.toString());
      counts[toPrefill.length === 0 ? 'local' : 'handed'] += 1;
      expect(toPrefill.length).toBeLessThanOrEqual(1);
      for (const sent of toPrefill) expectPrefillBody(sent, body);
      expectDecodeBody(toDecode ?? '', body, toPrefill.length === 0 ? undefined : ODD_HANDLE);
    }),
    { numRuns: 1000 },
  );
  expect(counts.handed).toBeGreaterThan(300);
  expect(counts.local).toBeGreaterThan(150);
  expect(counts.refused).toBeLessThan(400);
});

test('values that a serialiser would change arrive as they were written', async () => {
  const values = [
    '12345678901234567890123',
    '-0',
    '1E400',
    '0.10000000000000000000001',
    '"\\ud800 \\u0061\\/ \u2028 \u{1f600} \\uD83D\\uDE00"',
    '{"a":1,"a":{"a":[ 1 ,2 ]},"__proto__":{"x":1},"constructor":null}',
    '[[],{},[ ], { } ]',
  ];
  const members = values.map((value, i) => `"x${i}" : ${value}`).join(' ,\r\n');
  const body = `\n{ ${members} }\t`;
  await send('/v1/completions', body);
  const sent = stubbed.d.requests[0]?.body.toString() ?? '';
  expect(sent).toBe(body.replace(' }\t', `,"kv_transfer_params":${ODD_HANDLE} }\t`));
  for (const value of values) expect(stubbed.p.requests[0]?.body.toString()).toContain(value);
});

test('duplicates at the top level never leave a second value behind for an engine to read', async () => {
  const body =
    '{"stream":true,"max_tokens":5,"kv_transfer_params":{"do_remote_prefill":true},"stream":true,"conversation_id":"a",' +
    '"max_tokens":7,"conversation_id":"b","kv_transfer_params":null,"seed":1,"seed":2}';
  await send('/v1/completions', body);
  expectPrefillBody(stubbed.p.requests[0]?.body.toString() ?? '', body);
  expectDecodeBody(stubbed.d.requests[0]?.body.toString() ?? '', body, ODD_HANDLE);
  expect(topMembers(stubbed.d.requests[0]?.body.toString() ?? '').filter(({ key }) => key === 'seed')).toHaveLength(2);
});

test('a body of some megabytes and one of a hundred thousand levels pass unharmed', async () => {
  const long = `{"prompt":"${'€\\n'.repeat(1_000_000)}","seed":1}`;
  await send('/v1/completions', long);
  expectDecodeBody(stubbed.d.requests[0]?.body.toString() ?? '', long, ODD_HANDLE);
  stubbed.reset();
  const levels = 100_000;
  const deep = `{"tools":${'['.repeat(levels)}${']'.repeat(levels)}}`;
  const reply = await fetch(`${stubbed.url}/v1/completions`, { method: 'POST', body: deep });
  expect(reply.status).toBe(200);
  expect(stubbed.d.requests[0]?.body.toString()).toContain(deep.slice(0, -1));
});

describe('the handle', () => {
  const base = '{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1]],"remote_engine_id":"e",';
  const rest = '"remote_request_id":"r","remote_port":5600';

  test('reaches D in the bytes that P wrote, whatever else P put into it', async () => {
    await fc.assert(
      fc.asyncProperty(valueText, valueText, async (one, two) => {
        const handle = `${base} "zy" : ${one},"remote_host":"10.0.0.9", ${rest},"zz":${two} }`;
        stubbed.p.answer = sayHandle(handle);
        stubbed.d.requests.length = 0;
        await send('/v1/completions', '{"prompt":"x"}');
        expectDecodeBody(stubbed.d.requests[0]?.body.toString() ?? '', '{"prompt":"x"}', handle);
      }),
      { numRuns: 100 },
    );
  });

  test.each([
    ['is missing', '{"choices":[]}'],
    ['is null', '{"kv_transfer_params":null}'],
    ['is no object', '{"kv_transfer_params":[1]}'],
    ['has both flags false', '{"kv_transfer_params":{"do_remote_prefill":false,"do_remote_decode":false}}'],
    ['is empty', '{"kv_transfer_params":{}}'],
  ])('that %s leaves D with no member of that name at all', async (_name, reply) => {
    stubbed.p.answer = sayJson(reply);
    await send('/v1/completions', '{"prompt":"x","conversation_id":"c"}');
    expect(stubbed.d.requests[0]?.body.toString()).toBe('{"prompt":"x"}');
  });
});

test('a D that cannot take what P computes never stands in for one that can', async () => {
  await using mixed = await startStubbed({ decode: 2, prefillBlockSize: 16, decodeBlockSizes: [16, 32] });
  const [first, second] = mixed.decode;
  const ask = () => fetch(`${mixed.url}/v1/completions`, { method: 'POST', body: '{"prompt":"x"}' });
  for (let i = 0; i < 3; i++) expect((await ask()).status).toBe(200);
  await first?.[Symbol.asyncDispose]();
  expect((await ask()).status).toBe(503);
  expect([first?.requests.length, second?.requests.length]).toEqual([3, 0]);
});

describe('headers of the legs', () => {
  test("both get the client's headers, the request id, and none of those that belong to one connection", async () => {
    await fetch(`${stubbed.url}/v1/completions?a=1&b=%20`, {
      method: 'POST',
      body: '{"prompt":"x"}',
      headers: {
        'x-request-id': 'id.1:2-3_4',
        traceparent: '00-1-2-03',
        'x-session-id': 's',
        'x-baton-debug': '1',
        'accept-encoding': 'gzip, br',
        cookie: 'a=b',
        authorization: 'Bearer client',
        'content-type': 'text/plain',
      },
    });
    for (const engine of [stubbed.p, stubbed.d]) {
      const [request] = engine.requests;
      expect(request?.path).toBe('/v1/completions?a=1&b=%20');
      expect(request?.headers).toMatchObject({
        'x-request-id': 'id.1:2-3_4',
        traceparent: '00-1-2-03',
        'x-session-id': 's',
        'accept-encoding': 'identity',
        authorization: 'Bearer client',
        'content-type': 'application/json',
      });
      for (const name of ['cookie', 'x-baton-debug', 'expect', 'te']) expect(request?.headers).not.toHaveProperty(name);
      expect(request?.headers.host).toBe(new URL(engine.url).host);
    }
  });

  test.each(['/v1/completions/', '/v1/completions/?x=1', '/v1/%63ompletions'])(
    'engines get the path as they know it for %s',
    async (path) => {
      await send(path, '{"prompt":"x"}');
      const query = path.includes('?') ? '?x=1' : '';
      for (const { requests } of [stubbed.p, stubbed.d]) expect(requests[0]?.path).toBe(`/v1/completions${query}`);
    },
  );
});

describe('credentials', () => {
  const ENV = { OPENAI_API_KEY: 'own-key' };
  const ask = (url: string, authorization?: string) =>
    fetch(`${url}/v1/completions`, {
      method: 'POST',
      body: '{"prompt":"x"}',
      ...(authorization === undefined ? {} : { headers: { authorization } }),
    });
  const sentTo = ({ requests }: { readonly requests: readonly StubRequest[] }) =>
    requests.map(({ headers }) => headers.authorization);
  const refuse = (status: number) => sayJson('{"error":{"message":"bad key","code":"invalid_api_key"}}', status);

  test("baton's own key goes to engines with every leg and every probe, and its refusal is not the client's fault", async () => {
    await using own = await startStubbed({ env: ENV });
    await (await ask(own.url, 'Bearer client')).text();
    for (const engine of [own.p, own.d]) {
      expect(sentTo(engine)).toEqual(['Bearer own-key']);
      expect(engine.probes.length).toBeGreaterThan(1);
      expect(new Set(engine.probes.map(({ headers }) => headers.authorization))).toEqual(new Set(['Bearer own-key']));
    }
    for (const engine of [own.d, own.p]) {
      for (const status of [401, 403]) {
        engine.answer = refuse(status);
        const reply = await ask(own.url, 'Bearer client');
        expect(reply.status).toBe(502);
        const { error } = (await reply.json()) as { error: Record<string, unknown> };
        expect(error).toMatchObject({ code: 'engine_auth', type: 'upstream_error' });
        expect(String(error['message'])).not.toContain('bad key');
      }
    }
    expect(JSON.stringify(own.log)).not.toContain('own-key');
  });

  test("the client's own key is passed on where baton has none, and so is its refusal", async () => {
    await (await ask(stubbed.url, 'Bearer client')).text();
    expect([sentTo(stubbed.p), sentTo(stubbed.d)]).toEqual([['Bearer client'], ['Bearer client']]);
    expect(stubbed.p.probes.every(({ headers }) => headers.authorization === undefined)).toBe(true);
    stubbed.p.answer = refuse(401);
    const reply = await ask(stubbed.url, 'Bearer client');
    expect(reply.status).toBe(401);
    expect(await reply.json()).toMatchObject({ error: { message: 'bad key', code: 'invalid_api_key' } });
    expect(stubbed.d.requests).toHaveLength(1);
  });

  test.each([
    ['forward', 'Bearer client', 'Bearer client'],
    ['strip', 'Bearer client', undefined],
    ['replace', undefined, 'Bearer own-key'],
  ])('--engine-auth %s of %s sends %s', async (mode, client, expected) => {
    await using moded = await startStubbed({ env: ENV, flags: { 'engine-auth': mode } });
    await (await ask(moded.url, client)).text();
    expect([sentTo(moded.p), sentTo(moded.d)]).toEqual([[expected], [expected]]);
  });
});

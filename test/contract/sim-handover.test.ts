import fc from 'fast-check';
import { afterAll, afterEach, beforeAll, describe, expect, test } from 'vitest';
import { createManualClock } from '../../src/sim/clock.ts';
import type { JsonObject } from '../../src/sim/json.ts';
import { type Sim, startSim } from '../../src/sim/start-sim.ts';
import {
  at,
  chatBody,
  objectAt,
  outcome,
  post,
  prefill,
  prefillFlags,
  sim,
  stopSims,
  textOf,
  until,
} from './sim-support.ts';

const chat = '/v1/chat/completions';
const completions = '/v1/completions';
const story = 'the router carries a baton from prefill to decode '.repeat(3);

afterEach(stopSims);

async function pair(options: object = {}): Promise<readonly [Sim, Sim]> {
  return [await sim({ role: 'prefill', ...options }), await sim({ role: 'decode', ...options })];
}

async function bytesFrom(target: Sim, path: string, body: JsonObject): Promise<string> {
  const reply = await post(target, path, body);
  expect(reply.status).toBe(200);
  return textOf(reply);
}

describe('any prompt gives the same text through a pair as on one engine', () => {
  let engines: Sim[] = [];
  beforeAll(async () => {
    // Few blocks: prefix caches evict, and blocks are used again all the time.
    const options = {
      blockSize: 8,
      numBlocks: 90,
      models: ['sim-model', { id: 'lora', root: 'adapter', parent: 'sim-model' }],
    };
    engines = await Promise.all([
      startSim({ ...options, role: 'prefill' }),
      startSim({ ...options, role: 'decode' }),
      startSim({ ...options, connector: 'none' }),
    ]);
  });
  afterAll(() => Promise.all(engines.map((engine) => engine.close())));

  test('random bodies', async () => {
    const [p, d, plain] = engines;
    if (p === undefined || d === undefined || plain === undefined) throw new Error('no engines');
    const words = fc.array(fc.constantFrom('a', 'token', 'of ', 'the ', 'é', '"', '\\n', '\n'), {
      minLength: 1,
      maxLength: 40,
    });
    const bodies = fc.record({
      words,
      isChat: fc.boolean(),
      stream: fc.boolean(),
      max_tokens: fc.integer({ min: 1, max: 40 }),
      seed: fc.option(fc.integer({ min: 0, max: 5 }), { nil: undefined }),
      cache_salt: fc.option(fc.constantFrom('s1', 's2'), { nil: undefined }),
      model: fc.constantFrom('sim-model', 'lora'),
    });
    await fc.assert(
      fc.asyncProperty(bodies, async ({ words: list, isChat, ...rest }) => {
        const text = list.join('');
        const prompt = isChat ? { messages: [{ role: 'user', content: text }] } : { prompt: text };
        const path = isChat ? chat : completions;
        const body: JsonObject = { ...rest, ...prompt };
        const kv = await prefill(p, path, body);
        expect(await bytesFrom(d, path, { ...body, kv_transfer_params: kv })).toBe(await bytesFrom(plain, path, body));
      }),
      { numRuns: 150 },
    );
    expect(p.state()).toMatchObject({ pins: 0, freeBlocks: 89, mismatchedPulls: 0, expiredReads: 0, doubleReads: 0 });
    expect(d.state()).toMatchObject({ pins: 0, freeBlocks: 89, mismatchedPulls: 0, localCompute: 0 });
    expect(d.state().pulls).toBe(150);
  });
});

test('the decode engine computes nothing, reads only what its prefix cache lacks, and reports the cached tokens of the prefill engine', async () => {
  const [p, d] = await pair();
  const body = chatBody(story);
  await bytesFrom(p, chat, body);
  const kv = await prefill(p, chat, body);
  expect(kv['remote_prefill_cached_tokens']).toBe(144);
  const first = await post(d, chat, { ...body, kv_transfer_params: kv });
  expect(at(first.json, 'usage', 'prompt_tokens_details', 'cached_tokens')).toBe(144);
  expect(d.state()).toMatchObject({ pulls: 1, pulledTokens: 153, localCompute: 0, externalTransfer: 153 });
  await post(d, chat, { ...body, kv_transfer_params: await prefill(p, chat, body) });
  expect(d.state()).toMatchObject({ pulls: 2, pulledTokens: 153 + 9, localCacheHit: 144 });
});

test('a handle of another prompt gives other text with status 200, and poisons the cache for later requests', async () => {
  const [p, d] = await pair();
  const mine = chatBody(story);
  const other = chatBody(story.toUpperCase());
  const right = await bytesFrom(await sim(), chat, mine);
  expect(await bytesFrom(d, chat, { ...mine, kv_transfer_params: await prefill(p, chat, other) })).not.toBe(right);
  expect(d.state().mismatchedPulls).toBe(1);
  expect(await bytesFrom(d, chat, mine)).not.toBe(right);
});

test('one wrong token is a mismatch, though the last one does not change the text', async () => {
  const [p, d] = await pair();
  const kv = await prefill(p, completions, { prompt: `${story}a` });
  const leg = { model: 'sim-model', prompt: `${story}b`, kv_transfer_params: kv };
  const text = await bytesFrom(d, completions, leg);
  expect(d.state()).toMatchObject({ mismatchedPulls: 1, mismatchedTokens: 1 });
  expect(text).toBe(await bytesFrom(await sim(), completions, { prompt: `${story}b` }));
});

test('the last token is computed anew, so a prompt of whole blocks never hits to its end', async () => {
  const [p, d] = await pair();
  const body = { prompt: 'x'.repeat(32), return_token_ids: true };
  const cached = async (target: Sim, more: JsonObject = {}): Promise<unknown> => {
    const reply = await post(target, completions, { ...body, ...more });
    return at(reply.json, 'usage', 'prompt_tokens_details', 'cached_tokens');
  };
  expect([await cached(p), await cached(p)]).toEqual([0, 16]);
  for (let i = 0; i < 2; i += 1) await cached(d, { kv_transfer_params: await prefill(p, completions, body) });
  expect(d.state()).toMatchObject({ pulls: 2, pulledTokens: 32 + 16, localCacheHit: 16 });
});

test('a read after the lease is no error: right while the blocks are untouched, wrong once they were used again', async () => {
  const clock = createManualClock();
  const [p, d] = await pair({ clock, numBlocks: 40 });
  const body = chatBody(story);
  const right = await bytesFrom(await sim(), chat, body);
  const early = await prefill(p, chat, body);
  const late = await prefill(p, chat, chatBody(`${story}!`));
  expect(p.state().pins).toBe(2);
  clock.advance(29_999);
  expect(p.state().pins).toBe(2);
  clock.advance(1);
  expect(p.state()).toMatchObject({ pins: 0, pinsExpired: 2, freeBlocks: 39 });
  expect(await bytesFrom(d, chat, { ...body, kv_transfer_params: early })).toBe(right);
  expect(p.state()).toMatchObject({ expiredReads: 1, notificationsAfterExpiry: 1 });
  for (let i = 0; i < 6; i += 1) await bytesFrom(p, chat, chatBody(`${i} other words entirely `.repeat(8)));
  const wrong = await bytesFrom(d, chat, { ...chatBody(`${story}!`), kv_transfer_params: late });
  expect(wrong).not.toBe(await bytesFrom(await sim(), chat, chatBody(`${story}!`)));
  expect(p.state().expiredReads).toBe(2);
  expect(d.state().mismatchedPulls).toBe(1);
});

test('a second use of a handle is counted', async () => {
  const [p, d] = await pair();
  const body = chatBody(story);
  const kv = await prefill(p, chat, body);
  await bytesFrom(d, chat, { ...body, kv_transfer_params: kv });
  await bytesFrom(await sim(), chat, { ...body, kv_transfer_params: kv });
  expect(p.state()).toMatchObject({ doubleReads: 1, notificationsAfterExpiry: 1, pins: 0 });
});

test('a queued decode leg keeps the lease alive, and an aborted one frees it', async () => {
  const clock = createManualClock();
  const p = await sim({ clock });
  const d = await sim({ clock, maxNumSeqs: 1, decodeMsPerToken: 1000 });
  const kv = await prefill(p, chat, chatBody(story));
  const busy = outcome(post(d, chat, chatBody('busy', { max_tokens: 100, ignore_eos: true })));
  await until(() => d.state().running === 1);
  const stop = new AbortController();
  const queued = outcome(post(d, chat, { ...chatBody(story), kv_transfer_params: kv }, { signal: stop.signal }));
  await until(() => d.state().waiting === 1 && p.state().heartbeats === 1);
  for (let beats = 2; beats <= 10; beats += 1) {
    clock.advance(5000);
    await until(() => p.state().heartbeats >= beats);
  }
  expect(p.state().pins).toBe(1);
  stop.abort();
  await queued;
  await until(() => p.state().pins === 0);
  expect(p.state().pinsExpired).toBe(0);
  await d.crash();
  expect(await busy).toBe('reset');
});

test('a leg that the decode engine refuses after parsing frees the blocks at once', async () => {
  const [p, d] = await pair();
  const kv = await prefill(p, chat, chatBody(story));
  const reply = await post(d, chat, { ...chatBody(story, { model: 'nope' }), kv_transfer_params: kv });
  expect(reply.status).toBe(404);
  expect(p.state().pins).toBe(0);
});

test.each([
  ['wrong engine id', { remote_engine_id: 'someone-else' }],
  ['block ids out of range', { remote_block_ids: [Array.from({ length: 10 }, (_, i) => 90_000 + i)] }],
  ['dead peer', { remote_port: 1 }],
])('load failure (%s): 500, an error in the stream, or computed by itself, as the policy says', async (_, change) => {
  const [p, d] = await pair();
  const body = chatBody(story);
  const right = await bytesFrom(await sim(), chat, body);
  const kv = { ...(await prefill(p, chat, body)), ...change };
  const failed = await post(d, chat, { ...body, kv_transfer_params: kv });
  expect({ status: failed.status, body: failed.json }).toEqual({
    status: 500,
    body: { error: { message: 'Internal server error', type: 'InternalServerError', param: null, code: 500 } },
  });
  const text = { model: 'sim-model', prompt: story, stream: true };
  const broken = { ...(await prefill(p, completions, text)), ...change };
  const streamed = await post(d, completions, { ...text, kv_transfer_params: broken });
  expect(streamed.status).toBe(200);
  expect(streamed.text).toMatch(/^data: \{"error": .*\}\n\ndata: \[DONE\]\n\n$/);
  const careful = await sim({ policy: 'recompute' });
  expect(await bytesFrom(careful, chat, { ...body, kv_transfer_params: kv })).toBe(right);
  expect(careful.state()).toMatchObject({ loadFailures: 1, pulls: 0 });
  const lost = await post(await sim({ policy: 'recompute' }), chat, {
    ...body,
    kv_transfer_params: { ...kv, remote_prefill_cached_tokens: 99 },
  });
  expect(at(lost.json, 'usage', 'prompt_tokens_details', 'cached_tokens')).toBe(0);
});

describe('malformed parameters', () => {
  const cases: readonly (readonly [string, (kv: JsonObject) => JsonObject, 'crash' | 'hang' | 'silent'])[] = [
    ['block ids missing', ({ remote_block_ids: _, ...kv }) => kv, 'crash'],
    ['block ids null', (kv) => ({ ...kv, remote_block_ids: null }), 'crash'],
    ['block ids flat', (kv) => ({ ...kv, remote_block_ids: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] }), 'crash'],
    ['too few block ids', (kv) => ({ ...kv, remote_block_ids: [[1]] }), 'crash'],
    ['null coordinates', (kv) => ({ ...kv, remote_engine_id: null, remote_host: null, remote_port: null }), 'crash'],
    ['no request id', ({ remote_request_id: _, ...kv }) => kv, 'silent'],
    ['no engine id', ({ remote_engine_id: _, ...kv }) => kv, 'hang'],
    ['no host', ({ remote_host: _, ...kv }) => kv, 'hang'],
    ['no port', ({ remote_port: _, ...kv }) => kv, 'hang'],
  ];

  test.each(cases)('to a decode engine, %s', async (_, change, effect) => {
    const [p, d] = await pair();
    const body = chatBody(story);
    const kv = change(await prefill(p, chat, body));
    const stop = new AbortController();
    const leg = outcome(post(d, chat, { ...body, kv_transfer_params: kv }, { signal: stop.signal }));
    if (effect === 'crash') expect(await leg).toBe(500);
    else await until(() => d.state().hung === 1);
    if (effect === 'hang') {
      expect(await bytesFrom(d, chat, chatBody('others are served'))).not.toBe('');
      stop.abort();
      await leg;
      await until(() => d.state().hanging === 0);
      expect(d.state()).toMatchObject({ killed: false, leakedBlocks: 10, freeBlocks: 16_383 - 10 });
      return;
    }
    await until(() => !d.state().listening);
    expect(d.state().killed).toBe(true);
    expect(await outcome(post(d, chat, body))).toBe('refused');
    stop.abort();
    await leg;
  });

  test('to a prefill engine, remote_num_tokens of the wrong type kills it', async () => {
    const [p] = await pair({ bidirectional: true });
    const handle = {
      ...prefillFlags,
      remote_block_ids: [[1]],
      remote_engine_id: 'e',
      remote_request_id: 'r',
      remote_host: '127.0.0.1',
      remote_port: 9,
    };
    expect(
      await outcome(post(p, chat, chatBody(story, { kv_transfer_params: { ...handle, remote_num_tokens: '99' } }))),
    ).toBe(500);
    await until(() => !p.state().listening);
  });

  test('to a prefill engine without bidirectional transfer, a handle hangs and leaks', async () => {
    const p = await sim();
    const handle = {
      ...prefillFlags,
      remote_block_ids: [[1, 2, 3, 4, 5]],
      remote_engine_id: 'e',
      remote_request_id: 'r',
      remote_host: '127.0.0.1',
      remote_port: 9,
      remote_num_tokens: 80,
    };
    const stop = new AbortController();
    const leg = outcome(post(p, chat, chatBody(story, { kv_transfer_params: handle }), { signal: stop.signal }));
    await until(() => p.state().hung === 1);
    stop.abort();
    await leg;
    await until(() => p.state().leakedBlocks === 10);
  });

  test.each([{ do_remote_prefill: false, do_remote_decode: false }, { foo: 1 }])(
    '%j to a bidirectional decode engine pins its blocks for ever',
    async (kv) => {
      const clock = createManualClock();
      const d = await sim({ bidirectional: true, clock });
      const reply = await post(d, chat, chatBody(story, { kv_transfer_params: kv }));
      expect(at(reply.json, 'kv_transfer_params', 'do_remote_decode')).toBe(true);
      clock.advance(10_000_000);
      expect(d.state()).toMatchObject({ pins: 1, leakedPins: 1 });
      const one = await sim();
      const plain = await post(one, chat, chatBody(story, { kv_transfer_params: kv }));
      expect(at(plain.json, 'kv_transfer_params')).toBeNull();
      expect(one.state().pins).toBe(0);
    },
  );

  test('an empty object counts as absent', async () => {
    const d = await sim({ bidirectional: true });
    const reply = await post(d, chat, chatBody(story, { kv_transfer_params: {} }));
    expect(at(reply.json, 'kv_transfer_params')).toBeNull();
  });
});

test('a port as text and a missing tp_size are accepted', async () => {
  const [p, d] = await pair();
  const body = chatBody(story);
  const { tp_size: _, ...kv } = await prefill(p, chat, body);
  const leg = { ...body, kv_transfer_params: { ...kv, remote_port: String(kv['remote_port']) } };
  expect(await bytesFrom(d, chat, leg)).toBe(await bytesFrom(await sim(), chat, body));
});

test('a request waits for blocks that a lease holds', async () => {
  const clock = createManualClock();
  const p = await sim({ clock, numBlocks: 13 });
  await prefill(p, chat, chatBody(story));
  const waiting = post(p, chat, chatBody(`x${story}`));
  await until(() => p.state().waiting === 1);
  clock.advance(30_000);
  expect((await waiting).status).toBe(200);
});

test('a request that runs out of blocks while it generates is computed again and ends with the same text', async () => {
  const small = await sim({ numBlocks: 12, eosEvery: 0, decodeMsPerToken: 0.01 });
  const roomy = await sim({ eosEvery: 0 });
  const bodies = ['first of two', 'other of two'].map((text) => chatBody(text, { max_tokens: 90 }));
  const replies = await Promise.all(bodies.map((body) => bytesFrom(small, chat, body)));
  expect(replies).toEqual(await Promise.all(bodies.map((body) => bytesFrom(roomy, chat, body))));
  expect(small.state().preemptions).toBeGreaterThan(0);
  expect(small.state().freeBlocks).toBe(11);
});

test('a dead prefill engine fails its readers; a restarted one has another engine id and no KV', async () => {
  const [p, d] = await pair();
  const body = chatBody(story);
  const before = await prefill(p, chat, body);
  const warm = await prefill(p, chat, chatBody(`${story}.`));
  await bytesFrom(d, chat, { ...chatBody(`${story}.`), kv_transfer_params: warm });
  const { engineId, port } = p;
  await p.crash();
  expect(p.state().killed).toBe(true);
  // The client may still hold the dead connection; the next one is refused.
  expect(['reset', 'refused']).toContain(await outcome(post(p, chat, body)));
  expect(await outcome(post(p, chat, body))).toBe('refused');
  expect(await outcome(post(d, chat, { ...body, kv_transfer_params: before }))).toBe(500);
  await p.restart();
  expect(p.engineId).not.toBe(engineId);
  expect(p.port).toBe(port);
  expect(p.state()).toMatchObject({ killed: false, pins: 0, starts: 2 });
  expect(await outcome(post(d, chat, { ...body, kv_transfer_params: before }))).toBe(500);
  const after = await prefill(p, chat, body);
  expect(after['remote_port']).toBe(before['remote_port']);
  expect(await bytesFrom(d, chat, { ...body, kv_transfer_params: after })).toBe(
    await bytesFrom(await sim(), chat, body),
  );
});

describe('decode to prefill', () => {
  async function turnOne(options: object = {}, body = chatBody(story, { max_tokens: 90, ignore_eos: true })) {
    const [p, d] = await pair({ bidirectional: true, ...options });
    const first = await post(d, chat, {
      ...body,
      return_token_ids: true,
      kv_transfer_params: await prefill(p, chat, body),
    });
    const messages = [
      { role: 'user', content: story },
      { role: 'assistant', content: textOf(first) },
      { role: 'user', content: 'go on' },
    ];
    const handle = objectAt(first.json, 'kv_transfer_params');
    return { p, d, first, handle, next: { ...chatBody('', { max_tokens: 20 }), messages } };
  }
  const warmLeg = (body: JsonObject, kv: JsonObject): JsonObject => ({
    ...body,
    max_tokens: 1,
    kv_transfer_params: kv,
  });

  test('a whole handle, then a cut one, give the text of one engine', async () => {
    const { p, d, handle, next } = await turnOne();
    const right = await bytesFrom(await sim(), chat, next);
    expect(handle['remote_num_tokens']).toBe(153 + 90 - 1);
    const warm = await post(p, chat, warmLeg(next, handle));
    expect(await bytesFrom(d, chat, { ...next, kv_transfer_params: objectAt(warm.json, 'kv_transfer_params') })).toBe(
      right,
    );
    const other = await turnOne();
    const ids = at(other.handle, 'remote_block_ids', 0);
    const cut = {
      ...other.handle,
      remote_num_tokens: 224,
      remote_block_ids: [Array.isArray(ids) ? ids.slice(0, 14) : []],
    };
    const again = await post(other.p, chat, warmLeg(other.next, cut));
    expect(other.p.state()).toMatchObject({ pulledTokens: 224 - 144, mismatchedPulls: 0 });
    expect(textOf(again)).toBe(right.slice(0, 1));
  });

  test('cutting only the count reads the wrong blocks', async () => {
    const { p, handle, next } = await turnOne();
    await post(p, chat, warmLeg(next, { ...handle, remote_num_tokens: 224 }));
    expect(p.state().mismatchedPulls).toBe(1);
  });

  test('a count of 0 releases, a small gain is computed, and both free the decode engine', async () => {
    const { p, d, handle, next } = await turnOne();
    await post(p, chat, warmLeg(next, { ...handle, remote_num_tokens: 0 }));
    expect(p.state().pulls).toBe(0);
    expect(d.state().pins).toBe(0);
    const small = await turnOne({}, chatBody(story, { max_tokens: 20, ignore_eos: true }));
    await post(small.p, chat, warmLeg(small.next, small.handle));
    expect(small.p.state().pulls).toBe(0);
    expect(small.d.state().pins).toBe(0);
  });

  test('past the TTL: 500 under fail, computed when warm and hung when cold under recompute', async () => {
    for (const policy of ['fail', 'recompute'] as const) {
      const clock = createManualClock();
      const { p, d, handle, next } = await turnOne({ clock, policy, decoderTtlMs: 60_000 });
      expect(d.state().pins).toBe(1);
      clock.advance(60_000);
      expect(d.state().pins).toBe(0);
      const warm = await outcome(post(p, chat, warmLeg(next, handle)));
      expect(warm).toBe(policy === 'fail' ? 500 : 200);
      const cold = await sim({ clock, policy, bidirectional: true });
      const stop = new AbortController();
      const leg = outcome(post(cold, chat, warmLeg(next, handle), { signal: stop.signal }));
      if (policy === 'recompute') await until(() => cold.state().hung === 1);
      else expect(await leg).toBe(500);
      stop.abort();
      await leg;
      expect(d.state().refusedReads).toBe(2);
    }
  });

  test('an answer that a stop string ended has no handle', async () => {
    const { first } = await turnOne();
    const letter = textOf(first)[3] ?? '';
    const [p, d] = await pair({ bidirectional: true });
    const body = chatBody(story, { stop: [letter], max_tokens: 90 });
    const reply = await post(d, chat, { ...body, kv_transfer_params: await prefill(p, chat, body) });
    expect(at(reply.json, 'choices', 0, 'stop_reason')).toBe(letter);
    expect(at(reply.json, 'kv_transfer_params')).toBeNull();
    expect(d.state()).toMatchObject({ pins: 0, freeBlocks: 16_383 });
  });

  test('a stop string in the last token that is allowed aborts nothing: there is a handle', async () => {
    const { first } = await turnOne();
    const letter = textOf(first)[3] ?? '';
    const [p, d] = await pair({ bidirectional: true });
    const max = textOf(first).indexOf(letter) + 1;
    const body = chatBody(story, { stop: [letter], max_tokens: max });
    const reply = await post(d, chat, { ...body, kv_transfer_params: await prefill(p, chat, body) });
    expect(at(reply.json, 'choices', 0, 'stop_reason')).toBe(letter);
    expect(at(reply.json, 'kv_transfer_params', 'remote_num_tokens')).toBe(153 + max - 1);
  });

  describe('the number of tokens', () => {
    // Ten whole blocks: one token more needs another one.
    const body = chatBody(`${story}1234567`, { max_tokens: 90 });
    const counts = async (options: object) => {
      const [p, d] = await pair({ bidirectional: true, ...options });
      const ofP = await prefill(p, chat, body);
      const reply = await post(d, chat, { ...body, kv_transfer_params: ofP });
      const handle = objectAt(reply.json, 'kv_transfer_params');
      const blocks = (of: JsonObject) => {
        const ids = at(of, 'remote_block_ids', 0);
        return Array.isArray(ids) ? ids.length : 0;
      };
      const usage = objectAt(reply.json, 'usage');
      return {
        prompt: usage['prompt_tokens'],
        output: usage['completion_tokens'],
        p: [ofP['remote_num_tokens'], blocks(ofP)],
        d: [handle['remote_num_tokens'], blocks(handle)],
      };
    };

    test('leaves out the last token', async () => {
      expect(await counts({ eosEvery: 1 })).toEqual({ prompt: 160, output: 1, p: [160, 10], d: [160, 10] });
    });

    test('async scheduling: an EOS counts, but not where no more was allowed', async () => {
      const got = await counts({ eosEvery: 1, asyncScheduling: true });
      expect(got).toEqual({ prompt: 160, output: 1, p: [160, 10], d: [161, 11] });
    });

    test('speculative decoding: drafts behind the end count too', async () => {
      const got = await counts({ eosEvery: 1, speculativeTokens: 3 });
      expect(got).toEqual({ prompt: 160, output: 1, p: [160, 10], d: [164, 11] });
    });
  });
});

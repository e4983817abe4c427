import { describe, expect, test } from 'vitest';
import type { FaultRule } from '../../src/sim/faults.ts';
import { contentOf, post } from '../support/harness.ts';
import { chatBody, engine, errorOf, legsOf, metricOf, startLadder } from './ladder-support.ts';

const STREAMED = [false, true] as const;

describe('the prefill engine cannot be reached', () => {
  test.each(STREAMED)('the next one is asked and nothing is lost, stream %s', async (stream) => {
    await using harness = await startLadder();
    await engine(harness.prefill).setFault({ kind: 'refuse' });
    const body = chatBody({ stream });
    const reply = await harness.ask(body);
    await harness.expectRight(reply, body);
    expect(harness.callCounts()).toEqual([0, 1, 1, 0]);
    // Nothing was sent, so this is no second attempt, and no retry of the budget.
    expect(legsOf(engine(harness.prefill, 1))[0]?.id).toBe('req');
    expect(await harness.lastAccess()).toMatchObject({ status: 200, ending: 'ok', retries: 0 });
    expect(await metricOf(harness, 'baton_legs_total{leg="prefill",ending="not_sent"}')).toBe(1);
    await harness.expectUnharmed();
  });

  test('none of them: 503 with Retry-After, decode is not asked', async () => {
    await using harness = await startLadder();
    for (const sim of harness.prefill) await sim.setFault({ kind: 'refuse' });
    const reply = await harness.ask();
    expect(reply.status).toBe(503);
    expect(Number(reply.headers.get('retry-after'))).toBeGreaterThan(0);
    expect(errorOf(reply)).toMatchObject({ code: 'engine_unreachable', type: 'service_unavailable_error' });
    expect(harness.callCounts()).toEqual([0, 0, 0, 0]);
  });
});

describe('the prefill engine is none', () => {
  test.each(STREAMED)('404 without a word of the model: the next one is asked, stream %s', async (stream) => {
    await using harness = await startLadder();
    await engine(harness.prefill).setFault({ kind: 'status', status: 404, body: { detail: 'Not Found' } });
    const body = chatBody({ stream });
    await harness.expectRight(await harness.ask(body), body);
    expect(harness.callCounts()).toEqual([1, 1, 1, 0]);
    expect(await harness.lastAccess()).toMatchObject({ status: 200, ending: 'ok', retries: 1 });
    expect(await metricOf(harness, 'baton_retries_total{reason="route_missing"}')).toBe(1);
    expect(await metricOf(harness, 'baton_legs_total{leg="prefill",ending="server_error"}')).toBe(1);
    await harness.expectUnharmed();
  });

  test('nor is any other: 502', async () => {
    await using harness = await startLadder();
    for (const sim of harness.prefill)
      await sim.setFault({ kind: 'status', status: 404, body: { detail: 'Not Found' } });
    const reply = await harness.ask();
    expect(reply.status).toBe(502);
    expect(errorOf(reply).code).toBe('engine_reply_invalid');
    expect(harness.callCounts()).toEqual([1, 1, 0, 0]);
  });
});

describe('the prefill engine refuses the request', () => {
  test.each([400, 404, 413, 422])('%i goes to the client as it is', async (status) => {
    await using harness = await startLadder();
    const error = { message: 'no, not like this', type: 'BadRequestError', param: 'messages', code: status };
    await engine(harness.prefill).setFault({ kind: 'status', status, body: { error } });
    const reply = await harness.ask(chatBody({ stream: true }));
    expect(reply.status).toBe(status);
    expect(errorOf(reply)).toEqual(error);
    expect(harness.callCounts()).toEqual([1, 0, 0, 0]);
    expect(await harness.lastAccess()).toMatchObject({ ending: 'refused', retries: 0 });
  });

  test('a credential of the client: 401 is the client’s', async () => {
    await using harness = await startLadder({ engine: { apiKey: 'right' } });
    const reply = await harness.ask(chatBody(), { authorization: 'Bearer wrong' });
    expect(reply.status).toBe(401);
    expect(harness.callCounts()).toEqual([1, 0, 0, 0]);
    const good = await harness.ask(chatBody(), { authorization: 'Bearer right' });
    expect(good.status).toBe(200);
  });

  test('a credential of baton: 502 engine_auth', async () => {
    await using harness = await startLadder({ engine: { apiKey: 'right' }, env: { OPENAI_API_KEY: 'wrong' } });
    const reply = await harness.ask();
    expect(reply.status).toBe(502);
    expect(errorOf(reply).code).toBe('engine_auth');
    expect(harness.callCounts()).toEqual([1, 0, 0, 0]);
  });
});

describe('the prefill engine fails', () => {
  const faults: readonly FaultRule[] = [
    { kind: 'status', status: 429 },
    { kind: 'status', status: 500 },
    { kind: 'status', status: 502, body: '<html>bad gateway</html>' },
    { kind: 'status', status: 503 },
    { kind: 'reset' },
    { kind: 'hang' },
    { kind: 'restart' },
    { kind: 'crash' },
  ];
  const named = faults.map((fault) => [fault.status ?? fault.kind, fault] as const);

  test.each(named)('%s: the next one is asked, cold, under a new id', async (_name, fault) => {
    await using harness = await startLadder({ yaml: 'timeouts: { prefill_cold: 400ms }' });
    const [first, second] = [engine(harness.prefill), engine(harness.prefill, 1)];
    await first.setFault(fault);
    const reply = await harness.ask();
    await harness.expectRight(reply);
    expect(reply.headers.get('x-request-id')).toBe('req');
    expect(harness.callCounts()).toEqual([1, 1, 1, 0]);
    expect(legsOf(first)[0]?.id).toBe('req');
    expect(legsOf(second)[0]).toMatchObject({ id: 'req-r1', params: { do_remote_decode: true } });
    expect(legsOf(second)[0]?.params).not.toHaveProperty('remote_request_id');
    expect(legsOf(engine(harness.decode))[0]?.params).toMatchObject({ do_remote_prefill: true });
    expect(await harness.lastAccess()).toMatchObject({ status: 200, retries: 1 });
    await expect.poll(() => first.state().running).toBe(0);
  });

  test('all of them: the last engine’s status and words', async () => {
    await using harness = await startLadder();
    for (const [index, sim] of harness.prefill.entries()) {
      const body = {
        error: { message: `busy ${index} at http://10.1.2.3:8000/x`, type: 'Service Unavailable', code: 503 },
      };
      await sim.setFault({ kind: 'status', status: 503, body, headers: { 'retry-after': '7' } });
    }
    const reply = await harness.ask();
    expect(reply.status).toBe(503);
    expect(reply.headers.get('retry-after')).toBe('7');
    expect(errorOf(reply)).toMatchObject({ message: 'busy 1 at [url]', type: 'Service Unavailable', code: 503 });
    expect(harness.callCounts()).toEqual([1, 1, 0, 0]);
  });

  test('a kept connection that the engine had closed: once more on a fresh one', async () => {
    await using harness = await startLadder({ prefill: 1, decode: 1 });
    const prefill = engine(harness.prefill);
    await harness.ask();
    await prefill.setFault({ kind: 'reset_reused', leg: 'prefill' });
    await harness.expectRight(await harness.ask(chatBody(), { 'x-request-id': 'two' }));
    const [warm, stale, again, ...more] = legsOf(prefill);
    expect(more).toEqual([]);
    expect(stale).toMatchObject({
      id: 'two',
      connection: warm?.connection,
      onConnection: (warm?.onConnection ?? 0) + 1,
    });
    expect(again).toMatchObject({ id: 'two-r1', onConnection: 1 });
    expect(legsOf(engine(harness.decode))).toHaveLength(2);
    await harness.expectUnharmed();
  });

  test('a fresh connection that is reset too: the failure is final where no other engine is left', async () => {
    await using harness = await startLadder({ prefill: 1, decode: 1 });
    await harness.ask();
    await engine(harness.prefill).setFault({ kind: 'reset', count: 5 });
    const reply = await harness.ask();
    expect(reply.status).toBe(502);
    expect(errorOf(reply).code).toBe('engine_connection_lost');
    expect(harness.callCounts()).toEqual([3, 1]);
  });

  test('no retry when the budget is spent', async () => {
    await using harness = await startLadder({ yaml: 'retry: { budget_percent: 0 }' });
    await engine(harness.prefill).setFault({ kind: 'status', status: 500 });
    const reply = await harness.ask();
    expect(reply.status).toBe(500);
    expect(harness.callCounts()).toEqual([1, 0, 0, 0]);
  });
});

describe('the prefill engine gives no usable handle', () => {
  const malformed: readonly (readonly [string, Readonly<Record<string, unknown>>])[] = [
    ['flat_block_ids', { remote_block_ids: [1, 2, 3] }],
    ['no_block_ids', { remote_block_ids: null }],
    ['no_block_ids', { remote_block_ids: undefined }],
    ['empty_block_ids', { remote_block_ids: [[]] }],
    ['empty_block_ids', { remote_block_ids: [] }],
    ['bad_block_ids', { remote_block_ids: [['1', '2']] }],
    ['bad_block_ids', { remote_block_ids: 'blocks' }],
    ['kv_group_count', { remote_block_ids: [[1, 2], [3]] }],
    ['block_count_mismatch', { remote_block_ids: [[1]] }],
    ['block_count_mismatch', { remote_num_tokens: 5000 }],
    ['bad_engine_id', { remote_engine_id: null }],
    ['bad_engine_id', { remote_engine_id: undefined }],
    ['bad_engine_id', { remote_engine_id: 7 }],
    ['bad_request_id', { remote_request_id: undefined }],
    ['bad_request_id', { remote_request_id: null }],
    ['bad_host', { remote_host: null }],
    ['bad_host', { remote_host: ['localhost'] }],
    ['bad_port', { remote_port: undefined }],
    ['bad_port', { remote_port: 'http' }],
    ['bad_port', { remote_port: 70_000 }],
    ['wrong_flags', { do_remote_decode: true }],
    ['wrong_flags', { do_remote_prefill: false }],
    ['wrong_flags', { do_remote_prefill: false, do_remote_decode: true }],
    ['not_pull', { transfer_mode: 'push' }],
    ['bad_tp_size', { tp_size: 0 }],
    ['bad_num_tokens', { remote_num_tokens: '40' }],
    ['bad_num_tokens', { remote_num_tokens: 0 }],
    ['bad_expiry_time', { remote_blocks_expiry_time: 'soon' }],
    ['bad_generation', { remote_registration_generation: -1 }],
    ['bad_cached_tokens', { remote_prefill_cached_tokens: 1.5 }],
    ['bad_prompt_token_ids', { prompt_token_ids: 'x' }],
  ];

  test('malformed in any way: decode works alone, without parameters, and no engine is hurt', async () => {
    await using harness = await startLadder({ prefill: 1, decode: 1 });
    const [prefill, decode] = [engine(harness.prefill), engine(harness.decode)];
    for (const [index, [word, patch]] of malformed.entries()) {
      const reason = `malformed_${word}`;
      await prefill.setFault({ kind: 'patch_handle', patch });
      const body = chatBody({ stream: index % 2 === 1, seed: index, ignore_eos: true });
      const reply = await harness.ask(body, { 'x-baton-debug': '1' });
      await harness.expectRight(reply, body);
      expect(reply.headers.get('x-baton-plan')).toContain(`no_handle=${reason}`);
      const leg = legsOf(decode).at(-1);
      expect(Object.keys(leg?.body ?? {})).not.toContain('kv_transfer_params');
    }
    const total = malformed.length;
    expect(harness.callCounts()).toEqual([total, total]);
    const flat = 'baton_handles_rejected_total{leg="prefill",reason="malformed_flat_block_ids"}';
    expect(await metricOf(harness, flat)).toBe(1);
    await harness.expectUnharmed();
    expect(decode.state().pulls).toBe(0);
  });

  test.each([
    ['absent', { kind: 'no_handle' }],
    ['malformed_not_object', { kind: 'status', status: 200, body: { choices: [], kv_transfer_params: [1] } }],
    ['absent', { kind: 'status', status: 200, body: 'this is no JSON' }],
  ] as const)('%s', async (reason, fault) => {
    await using harness = await startLadder();
    await engine(harness.prefill).setFault(fault);
    const reply = await harness.ask(chatBody(), { 'x-baton-debug': '1' });
    await harness.expectRight(reply);
    expect(reply.headers.get('x-baton-plan')).toContain(`no_handle=${reason}`);
    expect(legsOf(engine(harness.decode))[0]?.params).toBeUndefined();
    expect(harness.callCounts()).toEqual([1, 0, 1, 0]);
    await harness.expectUnharmed();
  });

  test('a well-formed handle to the wrong blocks is what no check finds: the answer differs, and the engine tells', async () => {
    await using harness = await startLadder({ prefill: 1, decode: 1 });
    // Blocks of another prompt, as many as this one has.
    await harness.ask(chatBody({ messages: [{ role: 'user', content: 'z'.repeat(400) }] }));
    const tokens = (await harness.ask(chatBody({ max_tokens: 1 }))).text;
    const count = Math.ceil(Number(JSON.parse(tokens).usage.prompt_tokens) / 16);
    const wrong = [Array.from({ length: count }, (_, index) => index + 1)];
    await engine(harness.prefill).setFault({ kind: 'patch_handle', patch: { remote_block_ids: wrong } });
    const body = chatBody({ cache_salt: 'other' });
    const reply = await harness.ask(body);
    expect(reply.status).toBe(200);
    const { text } = await post(`${harness.plain.url}/v1/chat/completions`, body);
    expect(contentOf(reply.text).texts).not.toEqual(contentOf(text).texts);
    expect(engine(harness.decode).state().mismatchedPulls).toBe(1);
  });
});

describe('an engine that was restarted', () => {
  test.each(['prefill', 'decode'] as const)('%s: the next request is right', async (pool) => {
    await using harness = await startLadder({ prefill: 1, decode: 1 });
    await harness.expectRight(await harness.ask());
    const sim = engine(harness[pool]);
    const before = sim.engineId;
    await sim.crash();
    await sim.restart();
    expect(sim.engineId).not.toBe(before);
    const body = chatBody({ stream: true });
    await harness.expectRight(await harness.ask(body), body);
    await harness.expectUnharmed();
  });
});

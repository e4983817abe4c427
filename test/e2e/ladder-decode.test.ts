import { describe, expect, test } from 'vitest';
import type { FaultRule } from '../../src/sim/faults.ts';
import { contentOf } from '../support/harness.ts';
import { chatBody, engine, errorOf, type Ladder, legsOf, metricOf, startLadder } from './ladder-support.ts';

const STREAMED = [false, true] as const;

function paramsOf(harness: Ladder, index: number) {
  return legsOf(engine(harness.decode, index)).map(({ params }) => params);
}

describe('the decode engine cannot be reached', () => {
  test.each(STREAMED)('the next one gets the same handle, stream %s', async (stream) => {
    await using harness = await startLadder();
    await engine(harness.decode).setFault({ kind: 'refuse' });
    const body = chatBody({ stream });
    await harness.expectRight(await harness.ask(body), body);
    expect(harness.callCounts()).toEqual([1, 0, 0, 1]);
    const [leg] = legsOf(engine(harness.decode, 1));
    expect(leg).toMatchObject({ id: 'req', params: { do_remote_prefill: true } });
    expect(leg?.params?.['remote_request_id']).toMatch(/^chatcmpl-req-[0-9a-f]{8}$/);
    expect(await harness.lastAccess()).toMatchObject({ ending: 'ok', retries: 0 });
    expect(engine(harness.prefill).state().pins).toBe(0);
    await harness.expectUnharmed();
  });

  test('no other: 503 with Retry-After at once, prefill is not asked again', async () => {
    await using harness = await startLadder();
    for (const sim of harness.decode) await sim.setFault({ kind: 'refuse' });
    const reply = await harness.ask(chatBody({ stream: true }));
    expect(reply.status).toBe(503);
    expect(Number(reply.headers.get('retry-after'))).toBeGreaterThan(0);
    expect(errorOf(reply).code).toBe('engine_unreachable');
    expect(harness.callCounts()).toEqual([1, 0, 0, 0]);
  });
});

describe('the decode engine refuses the request', () => {
  test('400 goes to the client as it is, nobody else is asked', async () => {
    await using harness = await startLadder();
    const error = { message: 'not with these tools', type: 'BadRequestError', param: 'tools', code: 400 };
    await engine(harness.decode).setFault({ kind: 'status', status: 400, body: { error } });
    const reply = await harness.ask(chatBody({ stream: true }));
    expect(reply.status).toBe(400);
    expect(errorOf(reply)).toEqual(error);
    expect(harness.callCounts()).toEqual([1, 0, 1, 0]);
  });
});

/** What a server that has no such route answers. */
const NO_ROUTE: readonly FaultRule[] = [
  { kind: 'status', status: 404, body: { detail: 'Not Found' } },
  { kind: 'status', status: 404, body: '<html>404 Not Found</html>' },
  { kind: 'status', status: 405, body: { detail: 'Method Not Allowed' } },
  // An HTML page is no reply, and no token was made for it.
  { kind: 'status', status: 200, body: '<!doctype html><title>It works</title>' },
];

describe('the decode engine is none', () => {
  const cases = NO_ROUTE.flatMap((fault) => STREAMED.map((stream) => ({ fault, stream })));

  test.each(cases)('$fault.status $fault.body: another D, stream $stream', async ({ fault, stream }) => {
    await using harness = await startLadder();
    await engine(harness.decode).setFault({ ...fault, leg: 'decode' });
    const body = chatBody({ stream });
    await harness.expectRight(await harness.ask(body), body);
    expect(harness.callCounts()).toEqual([2, 0, 1, 1]);
    expect(await harness.lastAccess()).toMatchObject({ status: 200, ending: 'ok', retries: 1 });
    const reason = fault.status === 200 ? 'status' : 'route_missing';
    expect(await metricOf(harness, `baton_retries_total{reason="${reason}"}`)).toBe(1);
    expect(await metricOf(harness, 'baton_legs_total{leg="decode",ending="server_error"}')).toBe(1);
  });

  test('nor is the other: 502', async () => {
    await using harness = await startLadder();
    for (const sim of harness.decode)
      await sim.setFault({ kind: 'status', status: 404, body: { detail: 'Not Found' } });
    const reply = await harness.ask();
    expect(reply.status).toBe(502);
    expect(errorOf(reply).code).toBe('engine_reply_invalid');
  });

  test('that it misses the model is the client’s to know', async () => {
    await using harness = await startLadder();
    const error = { message: 'The model `x` does not exist.', type: 'NotFoundError', param: 'model', code: 404 };
    await engine(harness.decode).setFault({ kind: 'status', status: 404, body: { error } });
    const reply = await harness.ask();
    expect(reply.status).toBe(404);
    expect(errorOf(reply)).toEqual(error);
    expect(harness.callCounts()).toEqual([1, 0, 1, 0]);
  });
});

describe('the decode engine fails before its first content', () => {
  const whole: readonly FaultRule[] = [
    { kind: 'status', status: 500 },
    { kind: 'status', status: 503 },
    { kind: 'load_failure' },
    { kind: 'reset' },
    { kind: 'hang' },
    { kind: 'crash' },
    { kind: 'restart' },
  ];
  const streamed: readonly FaultRule[] = [
    ...whole,
    { kind: 'error_event', events: 0 },
    { kind: 'error_event', events: 1 },
    { kind: 'reset_stream', events: 0 },
    { kind: 'reset_stream', events: 1 },
    { kind: 'end_stream', events: 0 },
    { kind: 'end_stream', events: 1 },
  ];
  const cases = [
    ...whole.map((fault) => ({ name: `${fault.kind} ${fault.status ?? ''}`, stream: false, fault })),
    ...streamed.map((fault) => ({
      name: `${fault.kind} ${fault.status ?? fault.events ?? ''}`,
      stream: true,
      fault,
    })),
  ];

  test.each(cases)('$name, stream $stream: the same P again, another D', async ({ stream, fault }) => {
    await using harness = await startLadder({ yaml: 'timeouts: { first_content: 400ms, whole_reply: 400ms }' });
    const first = engine(harness.decode);
    await first.setFault({ leg: 'decode', ...fault });
    const body = chatBody({ stream });
    await harness.expectRight(await harness.ask(body), body);
    expect(harness.callCounts()).toEqual([2, 0, 1, 1]);
    const prefills = legsOf(engine(harness.prefill));
    expect(prefills.map(({ id }) => id)).toEqual(['req', 'req-r1']);
    // The second P leg carries no handle, and the second D leg a new one.
    expect(prefills[1]?.params).toEqual({ do_remote_decode: true, do_remote_prefill: false });
    const [spent, used] = [paramsOf(harness, 0)[0], paramsOf(harness, 1)[0]];
    expect(used).toMatchObject({ do_remote_prefill: true });
    expect(used?.['remote_request_id']).not.toBe(spent?.['remote_request_id']);
    expect(legsOf(engine(harness.decode, 1))[0]?.id).toBe('req-r1');
    expect(await harness.lastAccess()).toMatchObject({ status: 200, ending: 'ok', retries: 1 });
    await expect.poll(() => first.state().running).toBe(0);
    expect(first.state().hung).toBe(0);
  });

  test.each(STREAMED)('twice: the second engine’s own status and words, stream %s', async (stream) => {
    await using harness = await startLadder({ decode: 3 });
    for (const [index, sim] of harness.decode.entries()) {
      const error = { message: `out of luck ${index}`, type: 'InternalServerError', param: null, code: 500 };
      await sim.setFault({ kind: 'status', status: 500, body: { error } });
    }
    const reply = await harness.ask(chatBody({ stream }));
    expect(reply.status).toBe(500);
    expect(errorOf(reply).message).toBe('out of luck 1');
    expect(harness.callCounts()).toEqual([2, 0, 1, 1, 0]);
  });

  test.each([
    [{ kind: 'status', status: 503, headers: { 'retry-after': '9' } }, 503, 500],
    [{ kind: 'load_failure' }, 500, 500],
  ] as const)('the only one, whole: its own status', async (fault, status, code) => {
    await using harness = await startLadder({ decode: 1 });
    await engine(harness.decode).setFault(fault);
    const reply = await harness.ask();
    expect(reply.status).toBe(status);
    expect(errorOf(reply)).toMatchObject({ message: 'Internal server error', code });
    if (status === 503) expect(reply.headers.get('retry-after')).toBe('9');
    expect(harness.callCounts()).toEqual([1, 0, 1]);
  });

  test('the only one, an error inside a 200 stream: a true status, no stream', async () => {
    await using harness = await startLadder({ decode: 1 });
    await engine(harness.decode).setFault({ kind: 'load_failure' });
    const reply = await harness.ask(chatBody({ stream: true }));
    expect(reply.status).toBe(500);
    expect(errorOf(reply)).toEqual({
      message: 'Internal server error',
      type: 'InternalServerError',
      param: null,
      code: 500,
    });
    expect(harness.callCounts()).toEqual([1, 0, 1]);
  });

  test('another that cannot be reached does not count: the one after it is asked', async () => {
    await using harness = await startLadder({ decode: 3 });
    await engine(harness.decode).setFault({ kind: 'status', status: 500 });
    await engine(harness.decode, 1).setFault({ kind: 'refuse' });
    await harness.expectRight(await harness.ask());
    expect(harness.callCounts()).toEqual([2, 0, 1, 0, 1]);
    await harness.expectUnharmed();
  });

  test('one that has fallen silent meanwhile is not the other: it has a single try', async () => {
    await using harness = await startLadder({ decode: 3, yaml: 'health: { interval: 100ms, failures: 1 }' });
    const [first, silent] = [engine(harness.decode), engine(harness.decode, 1)];
    await first.setFault({ kind: 'hang', leg: 'decode' });
    const asked = harness.ask(chatBody({ stream: true }));
    await expect.poll(() => legsOf(first).length, { timeout: 5000 }).toBe(1);
    await silent.setFault({ kind: 'pause' });
    const states = async () => (await (await fetch(`${harness.url}/health`)).json()) as { instances: object };
    await expect.poll(states, { timeout: 5000 }).toMatchObject({ instances: { suspect: 1 } });
    await first.crash();
    await harness.expectRight(await asked, chatBody({ stream: true }));
    expect(harness.callCounts()).toEqual([2, 0, 1, 0, 1]);
    await silent.clearFaults();
  });

  test('no retry when the budget is spent', async () => {
    await using harness = await startLadder({ yaml: 'retry: { budget_percent: 0 }' });
    await engine(harness.decode).setFault({ kind: 'status', status: 500 });
    expect((await harness.ask()).status).toBe(500);
    expect(harness.callCounts()).toEqual([1, 0, 1, 0]);
  });

  test('a kept connection that the engine had closed: P again, then the same D on a fresh one', async () => {
    await using harness = await startLadder({ prefill: 1, decode: 1 });
    const [prefill, decode] = [engine(harness.prefill), engine(harness.decode)];
    await harness.ask();
    await decode.setFault({ kind: 'reset_reused', leg: 'decode' });
    const body = chatBody({ stream: true });
    await harness.expectRight(await harness.ask(body, { 'x-request-id': 'two' }), body);
    expect(legsOf(prefill).map(({ id }) => id)).toEqual(['req', 'two', 'two-r1']);
    expect(legsOf(prefill).at(-1)?.onConnection).toBe(1);
    const [, stale, again] = legsOf(decode);
    expect([stale?.onConnection, again?.onConnection]).toEqual([2, 1]);
    expect(again?.id).toBe('two-r1');
    expect(again?.params?.['remote_request_id']).not.toBe(stale?.params?.['remote_request_id']);
    await harness.expectUnharmed();
  });

  test('silent and failing its health checks for as long as a lease: given up, another D', async () => {
    await using harness = await startLadder({
      yaml: 'health: { interval: 100ms, failures: 1 }\npools: { prefill: { kv_lease: 900ms } }',
    });
    const first = engine(harness.decode);
    await first.setFault({ kind: 'hang', leg: 'decode' });
    const asked = harness.ask(chatBody({ stream: true }));
    await expect.poll(() => legsOf(first).length).toBe(1);
    // No new connections, so the checks fail; the open one stays silent.
    await first.setFault({ kind: 'refuse' });
    await harness.expectRight(await asked, chatBody({ stream: true }));
    expect(harness.callCounts()).toEqual([2, 0, 1, 1]);
    expect(await metricOf(harness, 'baton_retries_total{reason="unhealthy"}')).toBe(1);
  });
});

describe('the decode engine fails after its first content', () => {
  async function expectBroken(harness: Ladder, text: string, code: unknown): Promise<void> {
    const { texts, errors, done } = contentOf(text);
    expect(texts[0]?.length).toBeGreaterThan(0);
    expect(errors).toMatchObject([{ code }]);
    expect(done).toBe(true);
    expect(harness.callCounts()).toEqual([1, 0, 1, 0]);
    expect(await harness.lastAccess()).toMatchObject({ status: 200, ending: 'broken', retries: 0 });
  }
  const body = chatBody({ stream: true, ignore_eos: true });

  test.each([
    ['reset_stream', 'engine_connection_lost'],
    ['end_stream', 'engine_connection_lost'],
    ['error_event', 500],
  ] as const)('%s: an error in the stream and [DONE], no second decode', async (kind, code) => {
    await using harness = await startLadder();
    await engine(harness.decode).setFault({ kind, events: 4 });
    const reply = await harness.ask(body);
    expect(reply.status).toBe(200);
    await expectBroken(harness, reply.text, code);
    await harness.expectUnharmed();
  });

  test('silence', async () => {
    await using harness = await startLadder({ yaml: 'timeouts: { idle: 150ms }' });
    await engine(harness.decode).setFault({ kind: 'slow', ms: 600 });
    const reply = await harness.ask(body);
    await expectBroken(harness, reply.text, 'engine_timeout');
    await harness.expectUnharmed();
  });

  test('the process dies', async () => {
    await using harness = await startLadder();
    const first = engine(harness.decode);
    await first.setFault({ kind: 'slow', ms: 20 });
    const reply = await fetch(`${harness.url}/v1/chat/completions`, {
      method: 'POST',
      body: JSON.stringify({ ...body, max_tokens: 4000 }),
    });
    let text = '';
    const decoder = new TextDecoder();
    for await (const chunk of reply.body ?? []) {
      if (text === '') await first.crash();
      text += decoder.decode(chunk, { stream: true });
    }
    await expectBroken(harness, text, 'engine_connection_lost');
  });

  test('only [DONE] is missing: baton writes it', async () => {
    await using harness = await startLadder();
    await engine(harness.decode).setFault({ kind: 'no_done' });
    await harness.expectRight(await harness.ask(body), body);
    expect(await harness.lastAccess()).toMatchObject({ ending: 'ok' });
  });

  test('a whole reply that is cut: 502, no second decode', async () => {
    await using harness = await startLadder();
    // Not JSON to its end, as after a proxy that lost its engine.
    await engine(harness.decode).setFault({ kind: 'status', status: 200, body: '{"choices":[{"index":0,' });
    const reply = await harness.ask();
    expect(reply.status).toBe(502);
    expect(errorOf(reply).code).toBe('engine_reply_invalid');
    expect(harness.callCounts()).toEqual([1, 0, 1, 0]);
  });
});

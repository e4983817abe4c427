import { Agent, request } from 'undici';
import { afterEach, describe, expect, test } from 'vitest';
import { createManualClock } from '../../src/sim/clock.ts';
import { type Sim, startSim } from '../../src/sim/start-sim.ts';
import {
  at,
  chatBody,
  eventsOf,
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

afterEach(stopSims);

/** Posts over the one connection of an agent. */
async function postOver(agent: Agent, target: Sim): Promise<string | number> {
  try {
    const reply = await request(target.url + chat, {
      method: 'POST',
      dispatcher: agent,
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify(chatBody('hello')),
    });
    await reply.body.dump();
    return reply.statusCode;
  } catch {
    return 'failed';
  }
}

test('refuse closes the listener until the faults are cleared', async () => {
  const p = await sim();
  expect(await outcome(post(p, chat, chatBody('a')))).toBe(200);
  await p.setFault({ kind: 'refuse' });
  expect(p.state().listening).toBe(false);
  await until(() => !p.state().listening);
  expect(['reset', 'refused']).toContain(await outcome(post(p, chat, chatBody('a'))));
  expect(await outcome(post(p, chat, chatBody('a')))).toBe('refused');
  await p.clearFaults();
  expect(await outcome(post(p, chat, chatBody('a')))).toBe(200);
});

test('a refusal and a kill can end by themselves, for engines that only HTTP reaches', async () => {
  const clock = createManualClock();
  const exits: string[] = [];
  const p = await sim({ clock, onExit: (reason) => exits.push(reason) });
  expect((await post(p, '/sim/fault', { kind: 'refuse', ms: 1000 })).status).toBe(200);
  await until(() => !p.state().listening);
  clock.advance(1000);
  await until(() => p.state().listening);
  await post(p, '/sim/fault', { kind: 'kill', ms: 1000 });
  expect(await outcome(post(p, chat, chatBody('a')))).toBe('reset');
  await until(() => exits.length === 1);
  expect(exits).toEqual(['crash']);
  clock.advance(1000);
  await until(() => p.state().listening);
  expect(await outcome(post(p, chat, chatBody('a')))).toBe(200);
});

test('kept connections are not announced', async () => {
  const { headers } = await post(await sim(), chat, chatBody('a'));
  expect([headers.get('keep-alive'), headers.get('connection'), headers.get('server')]).toEqual([
    null,
    null,
    'uvicorn',
  ]);
});

test('a status fault has its own body and headers, and hits its leg as often as it says', async () => {
  const p = await sim();
  await p.setFault({
    kind: 'status',
    status: 503,
    leg: 'prefill',
    count: 2,
    headers: { 'retry-after': '3' },
    body: { error: 'busy' },
  });
  expect(await outcome(post(p, chat, chatBody('plain legs are not hit')))).toBe(200);
  const leg = chatBody('a', { kv_transfer_params: prefillFlags });
  const first = await post(p, chat, leg);
  expect([first.status, first.json, first.headers.get('retry-after')]).toEqual([503, { error: 'busy' }, '3']);
  expect(await outcome(post(p, chat, leg))).toBe(503);
  expect(await outcome(post(p, chat, leg))).toBe(200);
  await p.setFault({ kind: 'status' });
  expect(at((await post(p, chat, leg)).json, 'error', 'type')).toBe('InternalServerError');
});

test('faults match by path and model, and skip', async () => {
  const p = await sim({ models: ['a', 'b'] });
  await p.setFault({ kind: 'status', status: 418, path: '/v1/completions', model: 'b', skip: 1 });
  const body = (model: string) => ({ model, prompt: 'x' });
  expect(await outcome(post(p, '/v1/completions', body('a')))).toBe(200);
  expect(await outcome(post(p, '/v1/completions', body('b')))).toBe(200);
  expect(await outcome(post(p, '/v1/completions', body('b')))).toBe(418);
  expect(await outcome(post(p, '/v1/completions', body('b')))).toBe(200);
});

test('the same seed draws the same faults', async () => {
  const statuses = async (): Promise<unknown[]> => {
    const p = await sim({ seed: 7 });
    await p.setFault({ kind: 'status', status: 500, probability: 0.5 });
    const all: unknown[] = [];
    for (let i = 0; i < 12; i += 1) all.push(await outcome(post(p, chat, chatBody('a'))));
    return all;
  };
  const first = await statuses();
  expect(new Set(first)).toEqual(new Set([200, 500]));
  expect(await statuses()).toEqual(first);
});

test('reset hits before a reply; reset_reused only a connection that served before', async () => {
  const p = await sim();
  await p.setFault({ kind: 'reset' });
  expect(await outcome(post(p, chat, chatBody('a')))).toBe('reset');
  await p.setFault({ kind: 'reset_reused' });
  const agent = new Agent({ connections: 1, pipelining: 1 });
  expect(await postOver(agent, p)).toBe(200);
  expect(await postOver(agent, p)).toBe('failed');
  expect(await postOver(agent, p)).toBe(200);
  await agent.close();
});

describe('streams that break', () => {
  const streamed = chatBody('a story', { stream: true, max_tokens: 8, ignore_eos: true });
  const whole = async (): Promise<string[]> => eventsOf((await post(await sim(), chat, streamed)).text);

  test('end_stream stops without the end mark', async () => {
    const p = await sim();
    await p.setFault({ kind: 'end_stream', events: 3 });
    const events = eventsOf((await post(p, chat, streamed, { id: 'r' })).text);
    expect(events).toHaveLength(3);
    expect(events).not.toContain('[DONE]');
  });

  test('no_done leaves out only the end mark', async () => {
    const p = await sim();
    await p.setFault({ kind: 'no_done' });
    expect(eventsOf((await post(p, chat, streamed)).text)).toHaveLength((await whole()).length - 1);
  });

  test('error_event is in the stream, then its end', async () => {
    const p = await sim();
    await p.setFault({ kind: 'error_event', events: 2 });
    const events = eventsOf((await post(p, chat, streamed)).text);
    expect(events).toHaveLength(4);
    expect(at(JSON.parse(events[2] ?? ''), 'error', 'code')).toBe(500);
    expect(events[3]).toBe('[DONE]');
  });

  test('reset_stream shows the events before the reset', async () => {
    const p = await sim({ decodeMsPerToken: 1 });
    await p.setFault({ kind: 'reset_stream', events: 4 });
    const response = await fetch(p.url + chat, {
      method: 'POST',
      headers: { 'content-type': 'application/json' },
      body: JSON.stringify(streamed),
    });
    let seen = '';
    const read = async (): Promise<void> => {
      for await (const chunk of response.body ?? []) seen += new TextDecoder().decode(chunk);
    };
    await expect(read()).rejects.toThrow();
    expect(eventsOf(seen)).toHaveLength(4);
  });
});

test('stall waits on the clock, hang for ever', async () => {
  const clock = createManualClock();
  const p = await sim({ clock });
  await p.setFault({ kind: 'stall', ms: 500 });
  let done = false;
  const stalled = outcome(post(p, chat, chatBody('a'))).then((status) => {
    done = true;
    return status;
  });
  await until(() => p.state().requests === 1);
  expect(done).toBe(false);
  clock.advance(500);
  expect(await stalled).toBe(200);
  await p.setFault({ kind: 'hang' });
  const stop = new AbortController();
  const hung = outcome(post(p, chat, chatBody('a'), { signal: stop.signal }));
  await until(() => p.state().requests === 2);
  stop.abort();
  await hung;
});

test('kill resets and refuses; crash answers 500 and then refuses; restart brings a new life', async () => {
  const p = await sim();
  await p.setFault({ kind: 'kill' });
  expect(await outcome(post(p, chat, chatBody('a')))).toBe('reset');
  expect(await outcome(post(p, chat, chatBody('a')))).toBe('refused');
  await p.restart();
  await p.setFault({ kind: 'crash' });
  const open = post(p, chat, chatBody('a'));
  expect(at((await open).json, 'error', 'message')).toBe('The server had an error while processing your request.');
  await until(() => !p.state().listening);
  await p.restart();
  const { engineId } = p;
  await p.setFault({ kind: 'restart' });
  expect(await outcome(post(p, chat, chatBody('a')))).toBe('reset');
  await until(() => p.state().listening && p.engineId !== engineId);
  expect(await outcome(post(p, chat, chatBody('a')))).toBe(200);
  expect(p.state().starts).toBe(4);
});

test('handles can be left out, changed, or made unreadable', async () => {
  const [p, d] = [await sim(), await sim()];
  const body = chatBody('a longer prompt that has more than one block');
  const leg = { ...body, max_tokens: 1, kv_transfer_params: prefillFlags };
  await p.setFault({ kind: 'no_handle' });
  expect(at((await post(p, chat, leg)).json, 'kv_transfer_params')).toBeNull();
  await p.setFault({ kind: 'patch_handle', patch: { remote_block_ids: [1, 2] } });
  expect(at((await post(p, chat, leg)).json, 'kv_transfer_params', 'remote_block_ids')).toEqual([1, 2]);
  await d.setFault({ kind: 'load_failure', leg: 'decode' });
  const kv = await prefill(p, chat, body);
  expect(await outcome(post(d, chat, { ...body, kv_transfer_params: kv }))).toBe(500);
});

test('slow takes its time before each token', async () => {
  const clock = createManualClock();
  const p = await sim({ clock });
  await p.setFault({ kind: 'slow', ms: 10 });
  const reply = post(p, chat, chatBody('a', { max_tokens: 3, ignore_eos: true }));
  let steps = 0;
  await until(() => p.state().running === 1);
  let settled = false;
  void reply.finally(() => {
    settled = true;
  });
  while (!settled) {
    clock.advance(10);
    steps += 1;
    await new Promise((resolve) => setImmediate(resolve));
  }
  expect(steps).toBeGreaterThanOrEqual(3);
  expect((await reply).status).toBe(200);
});

test('state and faults are there over HTTP for engines in other processes', async () => {
  const p = await sim();
  await post(p, chat, chatBody('a', { kv_transfer_params: prefillFlags }));
  const state: unknown = await (await fetch(`${p.url}/sim/state`)).json();
  expect(at(state, 'pins')).toBe(1);
  expect(at(state, 'engineId')).toBe(p.engineId);
  expect((await post(p, '/sim/fault', { kind: 'status', status: 429 })).status).toBe(200);
  expect(await outcome(post(p, chat, chatBody('a')))).toBe(429);
  expect((await post(p, '/sim/fault', { kind: 'nonsense' })).status).toBe(400);
  await post(p, '/sim/fault', { kind: 'hang', path: chat });
  expect((await post(p, '/sim/fault', { kind: 'clear' })).json).toEqual({ faults: [] });
  expect((await fetch(`${p.url}/sim/other`)).status).toBe(404);
});

test('a port in use rejects', async () => {
  const p = await sim();
  await expect(startSim({ port: p.port })).rejects.toThrow('EADDRINUSE');
  await expect(startSim({ sidePort: p.sideChannel.port })).rejects.toThrow('EADDRINUSE');
});

test('requests are recorded as received', async () => {
  const p = await sim({ recordRequests: true });
  const body = '{ "model": "sim-model",  "prompt": "x", "max_tokens": 1.0 }';
  await post(p, '/v1/completions', body, { id: 'given' });
  expect(p.requests).toHaveLength(1);
  expect(p.requests[0]?.body.toString()).toBe(body);
  expect(p.requests[0]?.headers['x-request-id']).toBe('given');
  expect(p.requests[0]).toMatchObject({ method: 'POST', path: '/v1/completions', leg: 'plain', onConnection: 1 });
});

test('a client that leaves ends its request', async () => {
  const clock = createManualClock();
  const p = await sim({ clock, decodeMsPerToken: 5 });
  const stop = new AbortController();
  const reply = outcome(post(p, chat, chatBody('a'), { signal: stop.signal }));
  await until(() => p.state().running === 1);
  stop.abort();
  await reply;
  await until(() => p.state().running === 0);
  expect(p.state()).toMatchObject({ freeBlocks: 16_383, finished: { abort: 1 } });
  expect(textOf(await post(await sim(), chat, chatBody('a')))).not.toBe('');
});

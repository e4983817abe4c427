import { once } from 'node:events';
import { connect, type Socket } from 'node:net';
import { describe, expect, test } from 'vitest';
import { contentOf, post } from '../support/harness.ts';
import {
  chatBody,
  engine,
  errorOf,
  type Ladder,
  legsOf,
  metricOf,
  startLadder,
  untilUnread,
} from './ladder-support.ts';

const LONG = { stream: true, ignore_eos: true, max_tokens: 4000 };

describe('the client leaves', () => {
  test.each(['prefill', 'decode'] as const)('in the %s leg: the engine sees the abort', async (leg) => {
    await using harness = await startLadder();
    const sim = engine(harness[leg]);
    await sim.setFault({ kind: 'slow', ms: 60_000, leg });
    const client = new AbortController();
    const asked = fetch(`${harness.url}/v1/chat/completions`, {
      method: 'POST',
      body: JSON.stringify(chatBody(LONG)),
      signal: client.signal,
    });
    await expect.poll(() => sim.state().running).toBe(1);
    client.abort();
    await expect(asked).rejects.toThrow();
    await expect.poll(() => sim.state().running).toBe(0);
    expect(sim.state().finished.abort).toBe(1);
    expect(harness.callCounts()).toEqual(leg === 'prefill' ? [1, 0, 0, 0] : [1, 0, 1, 0]);
    expect(await harness.lastAccess()).toMatchObject({ status: 499, ending: 'client_closed', retries: 0 });
    expect(await metricOf(harness, `baton_legs_total{leg="${leg}",ending="aborted"}`)).toBe(1);
    await harness.expectUnharmed();
  });

  test('in the middle of a stream: no second decode, no error is counted', async () => {
    await using harness = await startLadder();
    const sim = engine(harness.decode);
    await sim.setFault({ kind: 'slow', ms: 10 });
    const client = new AbortController();
    const reply = await fetch(`${harness.url}/v1/chat/completions`, {
      method: 'POST',
      body: JSON.stringify(chatBody(LONG)),
      signal: client.signal,
    });
    const reader = reply.body?.getReader();
    await reader?.read();
    client.abort();
    await expect.poll(() => sim.state().running).toBe(0);
    expect(await harness.lastAccess()).toMatchObject({ status: 200, ending: 'client_closed', retries: 0 });
    expect(await metricOf(harness, 'baton_client_aborts_total{phase="closed"}')).toBe(1);
    expect(await metricOf(harness, 'baton_requests_in_flight{api="chat.completions"}')).toBe(0);
    expect(harness.callCounts()).toEqual([1, 0, 1, 0]);
    await harness.expectUnharmed();
  });

  test('in the queue: nobody is asked', async () => {
    await using harness = await startLadder();
    await takeAway(harness, 'decode');
    const client = new AbortController();
    const asked = fetch(`${harness.url}/v1/chat/completions`, {
      method: 'POST',
      body: JSON.stringify(chatBody()),
      signal: client.signal,
    });
    await expect.poll(() => metricOf(harness, 'baton_queue_depth')).toBe(1);
    const before = harness.callCounts();
    client.abort();
    await expect(asked).rejects.toThrow();
    await expect.poll(() => metricOf(harness, 'baton_queue_depth')).toBe(0);
    expect(await harness.lastAccess()).toMatchObject({ status: 499, ending: 'client_closed' });
    expect(harness.callCounts()).toEqual(before);
  });
});

/** Events of a kilobyte and more, so that a few thousand of them fill every buffer of the operating system. */
const WIDE = { ...LONG, max_tokens: 6000, logprobs: true, top_logprobs: 10 };

/** Sends a request and reads nothing of its reply. */
async function sendUnread(harness: Ladder, body: unknown): Promise<Socket> {
  const { hostname, port } = new URL(harness.url);
  const socket = connect(Number(port), hostname);
  socket.on('error', () => undefined);
  await once(socket, 'connect');
  const text = JSON.stringify(body);
  socket.write(
    `POST /v1/chat/completions HTTP/1.1\r\nhost: baton\r\nconnection: close\r\ncontent-length: ${text.length}\r\n\r\n${text}`,
  );
  socket.pause();
  return socket;
}

describe('the client reads slowly', () => {
  test('no byte for too long: both sides are closed', async () => {
    await using harness = await startLadder({ yaml: 'timeouts: { client_stall: 300ms }' });
    const socket = await sendUnread(harness, chatBody(WIDE));
    const access = await harness.lastAccess();
    expect(access).toMatchObject({ status: 200, ending: 'client_stalled' });
    expect(await metricOf(harness, 'baton_client_aborts_total{phase="stalled"}')).toBe(1);
    await harness.expectUnharmed();
    socket.destroy();
  });

  test.each(['1KiB', '256KiB'])('with %s of waiting allowed, everything arrives', async (size) => {
    await using harness = await startLadder({ yaml: `facade: { stream_buffer: ${size} }` });
    const socket = await sendUnread(harness, chatBody(WIDE));
    const before = await untilUnread(harness);
    expect(harness.log.some(({ msg }) => msg === 'request')).toBe(false);
    const chunks: Buffer[] = [];
    for await (const chunk of socket) chunks.push(chunk as Buffer);
    const { text } = await post(`${harness.plain.url}/v1/chat/completions`, chatBody(WIDE));
    const raw = Buffer.concat(chunks).toString();
    expect(raw.length).toBeGreaterThan(before);
    const got = contentOf(dechunk(raw));
    expect(got.done).toBe(true);
    expect(got.texts).toEqual(contentOf(text).texts);
    expect(await harness.lastAccess()).toMatchObject({ status: 200, ending: 'ok' });
  });
});

/** The body of a reply in chunked encoding. */
function dechunk(raw: string): string {
  let rest = raw.slice(raw.indexOf('\r\n\r\n') + 4);
  const parts: string[] = [];
  for (;;) {
    const end = rest.indexOf('\r\n');
    const size = Number.parseInt(rest.slice(0, end), 16);
    if (!(size > 0)) return parts.join('');
    parts.push(rest.slice(end + 2, end + 2 + size));
    rest = rest.slice(end + 4 + size);
  }
}

/** Lets a pool refuse connections until baton has seen it. */
async function takeAway(harness: Ladder, pool: 'prefill' | 'decode'): Promise<void> {
  for (const sim of harness[pool]) await sim.setFault({ kind: 'refuse' });
  await harness.ask();
  await expect.poll(async () => (await fetch(`${harness.url}/readiness`)).status, { timeout: 10_000 }).toBe(503);
}

describe('no engine is ready', () => {
  test.each(['prefill', 'decode'] as const)('%s comes back: the request that waited is served', async (pool) => {
    await using harness = await startLadder();
    await takeAway(harness, pool);
    const asked = harness.ask();
    await expect.poll(() => metricOf(harness, 'baton_queue_depth')).toBe(1);
    await engine(harness[pool], 1).clearFaults();
    await harness.expectRight(await asked);
    expect((await fetch(`${harness.url}/readiness`)).status).toBe(200);
    expect(legsOf(engine(harness[pool]))).toEqual([]);
    expect(await metricOf(harness, 'baton_queue_wait_seconds_count{outcome="routed"}')).toBe(1);
  });

  test('none comes back: 503 with Retry-After after the queue’s time', async () => {
    await using harness = await startLadder({ flags: { 'queue-timeout': '200ms' } });
    await takeAway(harness, 'decode');
    const reply = await harness.ask(chatBody({ stream: true }));
    expect(reply.status).toBe(503);
    expect(Number(reply.headers.get('retry-after'))).toBeGreaterThan(0);
    expect(errorOf(reply).code).toBe('no_routable_pair');
    expect(await metricOf(harness, 'baton_queue_wait_seconds_count{outcome="timeout"}')).toBeGreaterThan(0);
  });

  test('a queue that is full: 503 with Retry-After at once', async () => {
    await using harness = await startLadder({ yaml: 'queue: { max: 1 }' });
    await takeAway(harness, 'decode');
    const waiting = harness.ask();
    await expect.poll(() => metricOf(harness, 'baton_queue_depth')).toBe(1);
    const reply = await harness.ask();
    expect(reply.status).toBe(503);
    expect(Number(reply.headers.get('retry-after'))).toBeGreaterThan(0);
    expect(errorOf(reply).code).toBe('queue_full');
    for (const sim of harness.decode) await sim.clearFaults();
    await harness.expectRight(await waiting);
  });
});

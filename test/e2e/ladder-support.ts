import { expect } from 'vitest';
import type { Sim } from '../../src/sim/start-sim.ts';
import { contentOf, type Harness, type HarnessOptions, post, type Reply, startHarness } from '../support/harness.ts';

/** Engines that record what they are sent and are READY; a test starts its own, so that the first request goes to P 0 and D 0. */
export async function startLadder(options: HarnessOptions = {}): Promise<Ladder> {
  const harness = await startHarness({ ...options, engine: { recordRequests: true, ...options.engine } });
  await harness.ready();
  return {
    ...harness,
    ask: (body, headers) => ask(harness, body, headers),
    callCounts: () => [...harness.prefill, ...harness.decode].map((sim) => legsOf(sim).length),
    expectRight: (reply, body) => expectRight(harness, reply, body),
    expectUnharmed: () => expectUnharmed(harness),
    lastAccess: () => lastAccess(harness),
  };
}

/** baton and its engines, with what tests of failures ask of them. */
export interface Ladder extends Harness {
  /** Sends a request under the id `req`. */
  ask(body?: unknown, headers?: Record<string, string>): Promise<Reply>;
  /** How many generate requests each engine received, prefill engines first. */
  callCounts(): readonly number[];
  /** A 200 whose text, finish reason and completeness equal the answer of one engine that does everything itself. */
  expectRight(reply: Reply, body?: unknown): Promise<void>;
  /** No engine was hurt or read what it must not read, and nothing runs any more. */
  expectUnharmed(): Promise<void>;
  /** The access-log line of the last request, once it is written. */
  lastAccess(): Promise<Readonly<Record<string, unknown>>>;
}

/** A leg as an engine saw it. */
export interface SeenLeg {
  readonly id: string;
  /** `kv_transfer_params` of the body; undefined if it has none. */
  readonly params: Readonly<Record<string, unknown>> | undefined;
  readonly body: Readonly<Record<string, unknown>>;
  readonly connection: number;
  readonly onConnection: number;
}

/** The generate requests an engine received, in order. */
export function legsOf(sim: Sim): readonly SeenLeg[] {
  return sim.requests
    .filter(({ path }) => /^\/v1\/(chat\/)?completions$/.test(path))
    .map(({ headers, body, connection, onConnection }) => {
      const parsed = JSON.parse(body.toString()) as SeenLeg['body'];
      const params = parsed['kv_transfer_params'] as SeenLeg['params'];
      return { id: String(headers['x-request-id']), params, body: parsed, connection, onConnection };
    });
}

/** Engine `index` of a pool. */
export function engine(pool: readonly Sim[], index = 0): Sim {
  const sim = pool[index];
  if (sim === undefined) throw new Error(`no engine ${index}`);
  return sim;
}

/** A chat request of several blocks. */
export function chatBody(extra: Readonly<Record<string, unknown>> = {}): Record<string, unknown> {
  const content = 'Which relay team lost its baton, and who picked it up again? Tell the story.';
  return { model: 'sim-model', messages: [{ role: 'user', content }], max_tokens: 24, ...extra };
}

function ask(harness: Harness, body: unknown = chatBody(), headers: Record<string, string> = {}): Promise<Reply> {
  return post(`${harness.url}/v1/chat/completions`, body, { headers: { 'x-request-id': 'req', ...headers } });
}

async function expectRight(harness: Harness, reply: Reply, body: unknown = chatBody()): Promise<void> {
  expect(reply.status, reply.text).toBe(200);
  const want = await post(`${harness.plain.url}/v1/chat/completions`, body);
  const { texts, finish, done, errors } = contentOf(reply.text);
  const right = contentOf(want.text);
  expect({ texts, finish, done, errors }).toEqual({
    texts: right.texts,
    finish: right.finish,
    done: right.done,
    errors: [],
  });
  expect(right.texts[0]?.length).toBeGreaterThan(0);
}

/** An error in the OpenAI envelope. */
export interface Envelope {
  readonly message: string;
  readonly type: string;
  readonly param: string | null;
  readonly code: string | number | null;
}

/** The error of a reply that must be one. */
export function errorOf(reply: Reply): Envelope {
  expect(reply.headers.get('content-type')).toMatch(/^application\/json/);
  const parsed = JSON.parse(reply.text) as { readonly error: Envelope };
  expect(Object.keys(parsed)).toEqual(['error']);
  expect(Object.keys(parsed.error).sort()).toEqual(['code', 'message', 'param', 'type']);
  return parsed.error;
}

async function expectUnharmed(harness: Harness): Promise<void> {
  for (const sim of [...harness.prefill, ...harness.decode]) {
    await expect.poll(() => sim.state().running + sim.state().loading + sim.state().waiting).toBe(0);
    const { deathReason, hung, leakedPins, leakedBlocks, mismatchedPulls, expiredReads, doubleReads } = sim.state();
    expect({ deathReason, hung, leakedPins, leakedBlocks, mismatchedPulls, expiredReads, doubleReads }).toEqual({
      deathReason: null,
      hung: 0,
      leakedPins: 0,
      leakedBlocks: 0,
      mismatchedPulls: 0,
      expiredReads: 0,
      doubleReads: 0,
    });
  }
}

async function lastAccess(harness: Harness): Promise<Readonly<Record<string, unknown>>> {
  const find = () => harness.log.findLast(({ msg }) => msg === 'request');
  await expect.poll(find, { timeout: 10_000 }).toBeDefined();
  return find() ?? {};
}

/** The value of one series of the admin port, labels as in the text format; 0 where it has not been counted. */
export async function metricOf(harness: Pick<Harness, 'adminUrl'>, series: string): Promise<number> {
  const text = await (await fetch(`${harness.adminUrl}/metrics`)).text();
  const line = text.split('\n').find((candidate) => candidate.startsWith(`${series} `));
  return Number(line?.slice(series.length + 1) ?? 0);
}

/** Waits until a client that does not read holds its stream up, the rest waiting in the engine; returns the bytes written. */
export async function untilUnread(harness: Harness): Promise<number> {
  let before = -1;
  const stands = async () => {
    const written = await metricOf(harness, 'baton_stream_bytes_total');
    const same = written > 0 && written === before;
    before = written;
    return same;
  };
  await expect.poll(stands, { interval: 150, timeout: 10_000 }).toBe(true);
  return before;
}

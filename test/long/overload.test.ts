import { afterAll, beforeAll, expect, test } from 'vitest';
import { pause } from '../../src/services/pause.ts';
import { metricOf } from '../e2e/ladder-support.ts';
import { type Harness, startHarness } from '../support/harness.ts';
import { memoryInUse } from '../support/heap.ts';
import { type Answer, PlainClient } from '../support/plain-client.ts';

const SEATS = 12;
const WAITING = 12;
/** Of each leg, and of a token: long beside what a machine that is busy needs, so that there is too little of engines alone. */
const LEG_MS = 300;
const TOKEN_MS = 25;
/** Tokens of a usual reply; others have a few more or less, so that engines do not all become free at once. */
const TOKENS = 16;
const REQUEST_MS = 2 * LEG_MS + TOKEN_MS * TOKENS;
/** The engines' own limit: so many requests a second. */
const CAPACITY = (SEATS * 1000) / REQUEST_MS;

let harness: Harness;
const client = new PlainClient();

beforeAll(async () => {
  harness = await startHarness({
    prefill: 1,
    decode: 1,
    engine: { fixedMs: LEG_MS, decodeMsPerToken: TOKEN_MS, eosEvery: 0 },
    yaml: `limits: { decode: ${SEATS} }\nqueue: { max: ${WAITING} }\nlog: { level: error }`,
  });
  await harness.ready();
});
afterAll(async () => {
  client[Symbol.dispose]();
  await harness[Symbol.asyncDispose]();
});

function ask(tenant: string, tokens = TOKENS): Promise<Answer> {
  const messages = [{ role: 'user', content: 'hi' }];
  const body = { model: 'sim-model', messages, max_tokens: tokens, ignore_eos: true, stream: true };
  const headers = { authorization: `Bearer ${tenant}` };
  return client.post(`${harness.url}/v1/chat/completions`, JSON.stringify(body), { headers });
}

const isServed = ({ status, text }: Answer) => status === 200 && text.endsWith('data: [DONE]\n\n');

interface Flooded {
  readonly answers: readonly Answer[];
  /** Answers that were served in the time, after what it took to fill the engines. */
  readonly served: number;
  readonly deepestQueue: number;
}

/** Sends so many requests a second for a time, however many are answered. */
async function flood(tenant: string, rate: number, signal: AbortSignal): Promise<Flooded> {
  const beganAt = performance.now();
  const asked: Promise<Answer>[] = [];
  let served = 0;
  let deepestQueue = 0;
  let look = 0;
  while (!signal.aborted) {
    const due = Math.floor(((performance.now() - beganAt) * rate) / 1000);
    while (asked.length < due) {
      const answer = ask(tenant, TOKENS - 8 + ((asked.length * 7) % 17));
      asked.push(answer);
      void answer.then((ended) => {
        if (isServed(ended) && !signal.aborted && performance.now() - beganAt > FILL_MS) served += 1;
      });
    }
    look += 1;
    if (look % 20 === 0) deepestQueue = Math.max(deepestQueue, await metricOf(harness, 'baton_queue_depth'));
    await pause(20, signal);
  }
  return { answers: await Promise.all(asked), served, deepestQueue };
}

/** Before the first answers can have come. */
const FILL_MS = 1.5 * REQUEST_MS;
const PART_MS = 8000;

test('at five times what the engines can do they do as much as ever, and the rest is told when to come again', async () => {
  let peak = 0;
  let overloaded = 0;
  const answers: Answer[] = [];
  await flood('warm', CAPACITY, AbortSignal.timeout(1000));
  const before = memoryInUse().heap;
  // In turns, so that a machine that is busy with other things for a while is so for both.
  for (const _ of [1, 2]) {
    peak += (await flood('a', 1.2 * CAPACITY, AbortSignal.timeout(PART_MS))).served;
    const over = await flood('a', 5 * CAPACITY, AbortSignal.timeout(PART_MS));
    overloaded += over.served;
    answers.push(...over.answers);
    expect(over.deepestQueue).toBeLessThanOrEqual(WAITING);
  }
  const grown = memoryInUse().heap - before;
  const refused = answers.filter((answer) => !isServed(answer));
  process.stdout.write(
    `goodput ${overloaded} of ${answers.length} requests, at peak ${peak}; ` +
      `${refused.length} refused; heap grew by ${(grown / 2 ** 20).toFixed(1)} MiB\n`,
  );
  expect(overloaded).toBeGreaterThanOrEqual(0.9 * peak);
  expect(refused.length).toBeGreaterThan(answers.length / 2);
  for (const { status } of refused) expect([429, 503]).toContain(status);
  for (const { retryAfter } of refused) expect(Number(retryAfter)).toBeGreaterThanOrEqual(1);
  const inFlight = 'baton_requests_in_flight{api="chat.completions"}';
  expect([await metricOf(harness, inFlight), await metricOf(harness, 'baton_queue_depth')]).toEqual([0, 0]);
  expect(grown).toBeLessThan(16 * 2 ** 20);
});

/** The time that all but one in a hundred took at most. */
const p99 = (times: readonly number[]) => times.toSorted((a, b) => a - b)[Math.ceil(0.99 * times.length) - 1] ?? 0;

/** A tenant with a few clients that each send their next request when they have their answer. */
async function quietTenant(): Promise<readonly number[]> {
  const times: number[] = [];
  const one = async () => {
    for (let turn = 0; turn < 5; turn += 1) {
      const answer = await ask('quiet');
      expect(isServed(answer), answer.text).toBe(true);
      times.push(answer.tookMs);
    }
  };
  await Promise.all([one(), one()]);
  return times;
}

test('what one tenant floods does not keep another waiting', async () => {
  const quiet: number[] = [];
  const beside: number[] = [];
  for (const _ of [1, 2, 3]) {
    quiet.push(...(await quietTenant()));
    const end = new AbortController();
    const flooding = flood('loud', 5 * CAPACITY, end.signal);
    await pause(FILL_MS);
    try {
      beside.push(...(await quietTenant()));
    } finally {
      end.abort();
    }
    const { answers } = await flooding;
    expect(answers.some((answer) => !isServed(answer))).toBe(true);
  }
  process.stdout.write(`p99 alone ${p99(quiet).toFixed(0)} ms, beside the flood ${p99(beside).toFixed(0)} ms\n`);
  expect(p99(beside)).toBeLessThanOrEqual(2 * p99(quiet));
});

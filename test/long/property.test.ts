import { afterAll, beforeAll, expect, test } from 'vitest';
import { createRandom, type FaultRule } from '../../src/sim/faults.ts';
import type { Sim } from '../../src/sim/start-sim.ts';
import type { SimState } from '../../src/sim/state.ts';
import { type Harness, startHarness } from '../support/harness.ts';
import { type Ask, Draw, drawAsk, drawFault, isHarmless } from './property-requests.ts';
import { readSubstance } from './reuse-reply.ts';

/** `BATON_TEST_SEED=n` repeats the requests and faults of a run; what happens at the same time is never the same. */
const SEED = Number(process.env['BATON_TEST_SEED'] ?? Math.floor(Math.random() * 2 ** 31));
const REQUESTS = 3200;
const WORKERS = 16;
const LEASE_MS = 5000;
const BLOCKS = 1000;

const ROOTS = ['alpha', 'beta'] as const;
/** Each worker has names of its own for the same weights, so that a fault hits the requests of that worker alone. */
const modelOf = (root: string, worker: number) => `${root}-${worker}`;
const MODELS = ROOTS.flatMap((root) => Array.from({ length: WORKERS }, (_, w) => ({ id: modelOf(root, w), root })));

const YAML = `
pools: { prefill: { kv_lease: ${LEASE_MS}ms } }
kv: { lease_margin: 2s }
timeouts: { prefill_cold: 2s, first_content: 2s, whole_reply: 2s, idle: 2s, queue: 10s, drain: 5s }
health: { interval: 200ms, timeout: 2s, failures: 2 }
retry: { budget_percent: 100 }
log: { level: info }
`;

let harness: Harness;
const rejections: unknown[] = [];
const onRejection = (reason: unknown) => void rejections.push(reason);

beforeAll(async () => {
  process.on('unhandledRejection', onRejection);
  harness = await startHarness({
    prefill: 3,
    decode: 3,
    engine: {
      models: MODELS,
      blockSize: 8,
      numBlocks: BLOCKS,
      maxModelLen: 700,
      maxNumSeqs: 256,
      defaultMaxTokens: 16,
      kvLeaseMs: LEASE_MS,
      seed: SEED,
    },
    yaml: YAML,
  });
  await harness.ready();
});
afterAll(async () => {
  await harness?.[Symbol.asyncDispose]();
  process.off('unhandledRejection', onRejection);
});

/** What a client saw of one request. */
type Outcome =
  | { readonly kind: 'left' }
  | { readonly kind: 'reply'; readonly status: number; readonly headers: Headers; readonly text: string };

async function send(url: string, { path, body }: Ask, id: string, leaveAfterMs?: number): Promise<Outcome> {
  const client = new AbortController();
  const timer = leaveAfterMs === undefined ? undefined : setTimeout(() => client.abort(), leaveAfterMs);
  try {
    const reply = await fetch(url + path, {
      method: 'POST',
      body: JSON.stringify(body),
      headers: { 'content-type': 'application/json', 'x-request-id': id },
      signal: client.signal,
    });
    return { kind: 'reply', status: reply.status, headers: reply.headers, text: await reply.text() };
  } catch (error) {
    if (client.signal.aborted) return { kind: 'left' };
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

/** Everything a reply says that has to be the same whoever computed it: cached tokens, ids and times are not. */
function substanceOf(text: string, stream: boolean) {
  const { same, errors } = readSubstance(text, stream);
  return { ...same, errors };
}

/** Whether `text` is one error in the OpenAI envelope. */
function isEnvelope(text: string): boolean {
  const parsed = JSON.parse(text) as { readonly error?: Readonly<Record<string, unknown>> };
  const { error } = parsed;
  return (
    Object.keys(parsed).length === 1 &&
    error !== undefined &&
    Object.keys(error).sort().join() === 'code,message,param,type' &&
    typeof error['message'] === 'string' &&
    typeof error['type'] === 'string'
  );
}

/** Counts what may never happen, over all lives of the engines. */
class Watch {
  readonly harm = { mismatchedPulls: 0, leakedPins: 0, leakedBlocks: 0, expiredReads: 0, doubleReads: 0, hung: 0 };
  readonly deaths: string[] = [];
  pulls = 0;
  preemptions = 0;

  /** Takes the counters of a life that has ended, or of the last one. */
  add(state: SimState): void {
    for (const key of Object.keys(this.harm) as (keyof Watch['harm'])[]) this.harm[key] += state[key];
    this.pulls += state.pulls;
    this.preemptions += state.preemptions;
    if (state.deathReason !== null && state.deathReason !== 'injected') this.deaths.push(state.deathReason);
  }
}

/** Times at which an engine was away for all. */
class Outages {
  readonly #spans: { readonly from: number; until: number }[] = [];

  begin(): { until: number } {
    const span = { from: performance.now(), until: Number.POSITIVE_INFINITY };
    this.#spans.push(span);
    return span;
  }

  overlap(from: number, until: number): boolean {
    return this.#spans.some((span) => span.from <= until && span.until >= from);
  }
}

async function untilReady(): Promise<void> {
  for (;;) {
    const health = (await (await fetch(`${harness.url}/health`)).json()) as { instances: { ready?: number } };
    if (health.instances.ready === 6) return;
    await new Promise((next) => setTimeout(next, 30));
  }
}

/** Takes one engine away at a time until told to stop, in every way an engine can go. */
async function makeOutages(outages: Outages, watch: Watch, isOver: () => boolean): Promise<Record<string, number>> {
  const draw = new Draw(createRandom(SEED ^ 0x0a7a6e));
  const made: Record<string, number> = {};
  while (!isOver()) {
    const pool = draw.chance(0.5) ? harness.prefill : harness.decode;
    const sim = pool[draw.int(0, pool.length - 1)];
    if (sim === undefined) continue;
    const kind = draw.pick(['crash', 'core', 'refuse', 'restart']);
    made[kind] = (made[kind] ?? 0) + 1;
    const span = outages.begin();
    if (kind === 'refuse') {
      await sim.setFault({ kind: 'refuse' });
      await new Promise((next) => setTimeout(next, draw.int(10, 300)));
      await sim.clearFaults();
    } else {
      if (kind === 'core') {
        await sim.setFault({ kind: 'crash', path: '/v1/chat/completions' });
        while (!sim.state().killed && !isOver()) await new Promise((next) => setTimeout(next, 5));
      }
      if (kind !== 'restart') await sim.crash();
      const ended = sim.state();
      if (kind === 'crash') await new Promise((next) => setTimeout(next, draw.int(0, 200)));
      await sim.restart();
      watch.add(ended);
    }
    await untilReady();
    span.until = performance.now();
    await new Promise((next) => setTimeout(next, draw.int(2000, 5000)));
  }
  return made;
}

/** Sets faults for the next requests of a worker. */
async function injectFaults(draw: Draw, root: string, worker: number): Promise<void> {
  for (let i = draw.int(1, 2); i > 0; i -= 1) {
    const leg = draw.pick(['prefill', 'decode', 'decode', 'plain'] as const);
    const rule = drawFault(draw, leg, modelOf(root, worker));
    for (const sim of leg === 'prefill' ? harness.prefill : harness.decode) {
      if (draw.chance(0.6)) await sim.setFault(rule);
    }
  }
}

/** Hits left of each fault that is set for a worker, by engine. */
function faultsLeft(worker: number): Map<string, { readonly rule: FaultRule; readonly left: number }> {
  const left = new Map<string, { readonly rule: FaultRule; readonly left: number }>();
  const engines: readonly Sim[] = [...harness.prefill, ...harness.decode];
  for (const [index, sim] of engines.entries()) {
    for (const [place, fault] of sim.state().faults.entries()) {
      const rule = fault as unknown as FaultRule & { readonly left: number };
      if (rule.model?.endsWith(`-${worker}`)) left.set(`${index}.${place}`, { rule, left: rule.left });
    }
  }
  return left;
}

test(`${REQUESTS} random requests with faults on every leg`, { timeout: 280_000 }, async () => {
  const watch = new Watch();
  const outages = new Outages();
  const problems: string[] = [];
  const count = { right: 0, refused: 0, failed: 0, broken: 0, left: 0, clean: 0 };
  const complete = new Set<string>();
  let next = 0;
  let stopped = false;

  async function runOne(number: number, worker: number): Promise<void> {
    const draw = new Draw(createRandom(SEED + number * 7919));
    const root = draw.pick(ROOTS);
    const ask = drawAsk(draw, modelOf(root, worker));
    const id = `q${number}`;
    if (draw.chance(0.3)) await injectFaults(draw, root, worker);
    const leaveAfterMs = draw.chance(0.08) ? draw.int(0, 40) : undefined;
    const before = faultsLeft(worker);
    const from = performance.now();
    const outcome = await send(harness.url, ask, id, leaveAfterMs);
    const until = performance.now();
    const after = faultsLeft(worker);
    const hit = [...before].flatMap(([key, { rule, left }]) => ((after.get(key)?.left ?? 0) < left ? [rule] : []));
    const wasOut = outages.overlap(from, until);
    const excused = wasOut || hit.some((rule) => !isHarmless(rule, ask));
    const tell = (what: string, got?: unknown) =>
      problems.push(
        `${id}: ${what}; faults ${JSON.stringify(hit)}; outage ${wasOut}; ${JSON.stringify(ask).slice(0, 600)}; ${JSON.stringify(got)?.slice(0, 900)}`,
      );

    if (outcome.kind === 'left') {
      count.left += 1;
      return;
    }
    complete.add(id);
    const { status, headers, text } = outcome;
    if (headers.get('x-request-id') !== id) tell('another request id', headers.get('x-request-id'));
    const right = await send(harness.plain.url, ask, id);
    if (right.kind !== 'reply') throw new Error('the plain engine gave no reply');
    const stream = ask.body['stream'] === true;
    if (status === 200) {
      const got = substanceOf(text, stream);
      if (!got.done) tell('a stream without [DONE]', text.slice(-300));
      if (got.errors.length > 0) {
        count.broken += 1;
        if (!excused) tell('an error in the stream without a cause', got);
        return;
      }
      const want = right.status === 200 ? substanceOf(right.text, stream) : right;
      // An engine that hangs up after the last finish reason keeps what it would have said then: that is no text.
      if ('usage' in want && got.usage === undefined && hit.some(({ kind }) => kind === 'end_stream'))
        want.usage = undefined;
      if (JSON.stringify(got) !== JSON.stringify(want)) tell('a wrong answer', { got, want });
      count.right += 1;
      if (hit.length === 0 && !wasOut) count.clean += 1;
      return;
    }
    if (!isEnvelope(text)) tell(`status ${status} without the envelope`, text);
    if (status === 503 && headers.get('retry-after') === null) tell('503 without Retry-After', text);
    if (status === right.status) {
      count.refused += 1;
      const message = (reply: string) => (JSON.parse(reply) as { error: { message: string } }).error.message;
      if (message(text) !== message(right.text) && !excused) tell('another refusal', { text, want: right.text });
      return;
    }
    count.failed += 1;
    if (!excused) tell(`status ${status} without a cause`, text);
  }

  /** Rounds of a random number of workers, so that there is quiet and there is crowd. */
  async function runAll(): Promise<void> {
    const draw = new Draw(createRandom(SEED ^ 0x5eed));
    while (next < REQUESTS && problems.length < 20) {
      const workers = draw.pick([1, draw.int(2, 6), WORKERS, WORKERS]);
      const end = Math.min(REQUESTS, next + workers * draw.int(5, 20));
      const work = async (worker: number) => {
        while (next < end && problems.length < 20) {
          const number = next;
          next += 1;
          await runOne(number, worker);
        }
      };
      await Promise.all(Array.from({ length: workers }, (_, worker) => work(worker)));
    }
  }

  const chaos = makeOutages(outages, watch, () => stopped);
  await runAll().finally(() => {
    stopped = true;
  });
  const made = await chaos;
  expect(problems, `seed ${SEED}`).toEqual([]);

  const engines: readonly Sim[] = [...harness.prefill, ...harness.decode];
  const busy = () =>
    engines.map((sim) => sim.state()).reduce((n, s) => n + s.running + s.waiting + s.loading + s.hanging, 0);
  await expect.poll(busy, { timeout: 10_000, message: `seed ${SEED}: nothing runs` }).toBe(0);
  for (const sim of engines) watch.add(sim.state());
  expect(watch, `seed ${SEED}`).toMatchObject({
    deaths: [],
    harm: { mismatchedPulls: 0, leakedPins: 0, leakedBlocks: 0, expiredReads: 0, doubleReads: 0, hung: 0 },
  });
  // Every block is free again: what was handed over was read or its lease has ended.
  const held = () => engines.map((sim) => ({ pins: sim.state().pins, blocks: BLOCKS - 1 - sim.state().freeBlocks }));
  const nothing = engines.map(() => ({ pins: 0, blocks: 0 }));
  await expect.poll(held, { timeout: 2 * LEASE_MS, message: `seed ${SEED}: blocks` }).toEqual(nothing);

  await checkBooks(complete);
  expect(rejections, `seed ${SEED}`).toEqual([]);

  // The run means something only if most of what it can meet was met.
  const sums = `seed ${SEED}: ${JSON.stringify({ ...count, made, pulls: watch.pulls, preemptions: watch.preemptions })}`;
  expect(count.right, sums).toBeGreaterThan(REQUESTS * 0.6);
  expect(count.clean, sums).toBeGreaterThan(REQUESTS * 0.1);
  expect(Math.min(count.refused, count.failed, count.broken, count.left), sums).toBeGreaterThan(10);
  expect(watch.pulls, sums).toBeGreaterThan(REQUESTS * 0.2);
  process.stdout.write(`${sums}\n`);
});

/** The log has one line for each request, and the counters say the same as the log. */
async function checkBooks(complete: ReadonlySet<string>): Promise<void> {
  const lines = harness.log.filter(({ msg }) => msg === 'request');
  const ids = lines.map((line) => String(line['request_id']));
  expect(new Set(ids).size, `seed ${SEED}`).toBe(ids.length);
  const logged = new Set(ids);
  expect(
    [...complete].filter((id) => !logged.has(id)),
    `seed ${SEED}`,
  ).toEqual([]);
  const series = (await (await fetch(`${harness.adminUrl}/metrics`)).text()).split('\n');
  const sum = (name: string) =>
    series
      .filter((line) => line.startsWith(`${name}{`))
      .reduce((total, line) => total + Number(line.split(' ').at(-1)), 0);
  expect(sum('baton_requests_total'), `seed ${SEED}`).toBe(lines.length);
  expect(sum('baton_request_duration_seconds_count'), `seed ${SEED}`).toBe(lines.length);
  expect(sum('baton_requests_in_flight'), `seed ${SEED}`).toBe(0);
  const left = lines.filter(({ ending }) => String(ending).startsWith('client_')).length;
  expect(sum('baton_client_aborts_total'), `seed ${SEED}`).toBe(left);
  expect(sum('baton_retries_total'), `seed ${SEED}`).toBe(
    lines.reduce((total, line) => total + Number(line['retries']), 0),
  );
}

test('the comparison notices a wrong handle', async () => {
  const [first, second] = [harness.prefill, harness.decode];
  for (const sim of [...first, ...second]) await sim.clearFaults();
  const mismatched = () => second.reduce((sum, sim) => sum + sim.state().mismatchedPulls, 0);
  const before = mismatched();
  const body = { model: 'alpha-0', prompt: 'w'.repeat(120), max_tokens: 12, ignore_eos: true, cache_salt: 'wrong' };
  const ask: Ask = { path: '/v1/completions', body };
  // 120 letters are 15 blocks of 8 tokens: ids of as many blocks, but of others.
  const patch = { remote_block_ids: [Array.from({ length: 15 }, (_, index) => 900 + index)] };
  for (const sim of first) await sim.setFault({ kind: 'patch_handle', model: 'alpha-0', leg: 'prefill', patch });
  const got = await send(harness.url, ask, 'wrong');
  const want = await send(harness.plain.url, ask, 'wrong');
  if (got.kind !== 'reply' || want.kind !== 'reply') throw new Error('no reply');
  expect(got.status, got.text).toBe(200);
  expect(substanceOf(got.text, false).choices).not.toEqual(substanceOf(want.text, false).choices);
  expect(mismatched()).toBe(before + 1);
});

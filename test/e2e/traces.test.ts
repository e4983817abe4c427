import { afterEach, expect, test } from 'vitest';
import { TTFT_PHASES } from '../../src/obs/metrics.ts';
import { type SimPools, startSimPools } from '../../src/sim/pools.ts';
import type { Sim } from '../../src/sim/start-sim.ts';
import { configOf, contentOf, post, startQuietly } from '../support/harness.ts';
import { type OtlpReceiver, type ReceivedSpan, startOtlpReceiver } from '../support/otlp-receiver.ts';
import { metricOf } from './ladder-support.ts';

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

const TRACE_ID = '0af7651916cd43dd8448eb211c80319c';
const CLIENT_SPAN = 'b7ad6b7169203331';
const PROMPT = 'the secret of the prompt';

interface Split {
  readonly collector: OtlpReceiver;
  readonly pools: SimPools;
  readonly url: string;
  readonly log: readonly Readonly<Record<string, unknown>>[];
  readonly routerAdmin: string;
  /** Ends all processes, so that what they have is sent. */
  readonly stop: () => Promise<void>;
}

/** A front door, a router with its registry, and a store, each with its own settings; all tell one collector. */
async function start(): Promise<Split> {
  const collector = stack.use(await startOtlpReceiver());
  const engine = { recordRequests: true, bidirectional: true, blockSize: 16, eosEvery: 0, prefillMsPerToken: 0.2 };
  const pools = stack.use(await startSimPools({ prefill: 1, decode: 1, engine }));
  await using parts = new AsyncDisposableStack();
  const open = async (roles: string, flags: Readonly<Record<string, string | readonly string[]>>) => {
    const yaml = `tracing: { service_name: baton-${roles.split(',')[0]} }\ntimeouts: { store: 5s, tokenize: 10s }`;
    const { baton, log } = await startQuietly(configOf({ roles, 'otlp-endpoint': collector.url, ...flags }, yaml));
    parts.defer(() => baton.stop());
    return { ...baton.addresses, log };
  };
  const store = await open('kvstore', {});
  const router = await open('router,registry', {
    'kvstore-url': `http://${store.rpc}`,
    prefill: pools.prefill.map(({ url }) => url),
    decode: pools.decode.map(({ url }) => url),
  });
  const { facade, log } = await open('facade', {
    'router-url': `http://${router.rpc}`,
    'kvstore-url': `http://${store.rpc}`,
    'rpc-port': 'off',
    'admin-port': 'off',
  });
  const url = `http://${facade}`;
  await expect.poll(async () => (await fetch(`${url}/readiness`)).status, { timeout: 20_000 }).toBe(200);
  const running = stack.use(parts.move());
  return { collector, pools, url, log, routerAdmin: `http://${router.admin}`, stop: () => running.disposeAsync() };
}

async function turn(url: string, messages: readonly object[], headers: Record<string, string> = {}) {
  const body = { model: 'sim-model', messages, max_tokens: 24, stream: true, conversation_id: 'c' };
  const reply = await post(`${url}/v1/chat/completions`, body, { headers: { 'x-baton-debug': '1', ...headers } });
  expect(reply.status, reply.text).toBe(200);
  return { text: contentOf(reply.text).texts[0] ?? '', plan: reply.headers.get('x-baton-plan') };
}

const first = (sims: readonly Sim[]) => {
  const [sim] = sims;
  if (sim === undefined) throw new Error('no engine');
  return sim;
};

function parentsOf(sim: Sim, path: string): readonly (string | undefined)[] {
  return sim.requests.filter((request) => request.path === path).map(({ headers }) => String(headers['traceparent']));
}

test('one request is one trace through facade, router, store and engines, and its phases add up', async () => {
  const { collector, pools, url, log, routerAdmin, stop } = await start();
  const history = [{ role: 'user', content: `${PROMPT} `.repeat(30) }];
  const { text } = await turn(url, history);
  // The handle of the first turn is in the store when its report has come through.
  const stored = () => metricOf({ adminUrl: routerAdmin }, 'baton_decode_handles_total{fate="stored"}');
  await expect.poll(stored, { timeout: 20_000 }).toBe(1);
  const traceparent = `00-${TRACE_ID}-${CLIENT_SPAN}-01`;
  const messages = [...history, { role: 'assistant', content: text }, { role: 'user', content: 'And then?' }];
  const { plan } = await turn(url, messages, { traceparent, tracestate: 'vendor=1', 'x-request-id': 'second' });
  expect(plan).toContain('outcome=hit');
  await stop();

  expect(collector.refused).toEqual([]);
  const spans = collector.spans.filter(({ traceId }) => traceId === TRACE_ID);
  const named = (name: string) => spans.filter((span) => span.name === name);
  const one = (name: string): ReceivedSpan => {
    const [span, ...more] = named(name);
    if (span === undefined || more.length > 0) throw new Error(`${more.length + 1} spans named ${name}`);
    return span;
  };
  const root = one('POST /v1/chat/completions');
  expect(root).toMatchObject({ parentId: CLIENT_SPAN, kind: 2, service: 'baton-facade', failure: undefined });
  expect(root.attributes).toMatchObject({
    'baton.request_id': 'second',
    'baton.mode': 'prefill_decode_reuse',
    'baton.reuse': expect.stringMatching(/^hit/),
    'http.response.status_code': 200,
  });

  // Phases: one after the other, without a gap, from the beginning of the request to its first content.
  const names: readonly string[] = TTFT_PHASES;
  const phases = spans
    .filter(({ name, service }) => names.includes(name) && service === 'baton-facade')
    .toSorted((a, b) => Number(a.startAt - b.startAt));
  expect(phases.map(({ name }) => name)).toEqual([
    'plan',
    'tokenize',
    'plan',
    'prefill',
    'hand_over',
    'decode_wait',
    'first_byte',
  ]);
  for (const [index, phase] of phases.entries()) {
    expect(phase.parentId).toBe(root.spanId);
    expect(phase.startAt).toBe(phases[index - 1]?.endAt ?? root.startAt);
  }
  const lastEnd = phases.at(-1)?.endAt ?? 0n;
  const access = log.find((line) => line['msg'] === 'request' && line['request_id'] === 'second');
  expect(Number(lastEnd - root.startAt) / 1e6).toBeCloseTo(Number(access?.['ttft_ms']), 0);
  expect(lastEnd).toBeLessThanOrEqual(root.endAt);

  // The router's calls are inside the planning, the store's inside the router's.
  const plans = named('baton.v1.Router/PlanRoute');
  const planPhases = phases.filter(({ name }) => name === 'plan');
  expect(plans.map(({ parentId }) => parentId).toSorted()).toEqual(planPhases.map(({ spanId }) => spanId).toSorted());
  for (const span of plans) expect(span).toMatchObject({ kind: 2, service: 'baton-router' });
  const take = one('baton.v1.KVCacheStore/TakeEntry');
  expect(plans.map(({ spanId }) => spanId)).toContain(take.parentId);
  expect(take).toMatchObject({ service: 'baton-kvstore', kind: 2 });
  const reports = named('baton.v1.Router/ReportOutcome');
  expect(new Set(reports.map(({ parentId }) => parentId))).toEqual(new Set([root.spanId]));
  expect(reports.map(({ spanId }) => spanId)).toContain(one('baton.v1.KVCacheStore/PutEntry').parentId);

  // Engines are told of the span of their leg.
  const [prefill, decode] = [first(pools.prefill), first(pools.decode)];
  for (const [leg, sim] of [
    ['prefill leg', prefill],
    ['decode leg', decode],
  ] as const) {
    const span = one(leg);
    expect(span).toMatchObject({ parentId: root.spanId, kind: 3, failure: undefined });
    expect(parentsOf(sim, '/v1/chat/completions').at(-1)).toBe(`00-${TRACE_ID}-${span.spanId}-01`);
    expect(span.attributes).toMatchObject({ 'baton.ending': 'ok', 'http.response.status_code': 200 });
  }
  const tokenized = [...parentsOf(prefill, '/tokenize'), ...parentsOf(decode, '/tokenize')];
  expect(tokenized).toContain(`00-${TRACE_ID}-${one('tokenize').spanId}-01`);

  // The first turn came without a trace and began one of its own; no checks of the processes are in any.
  const traces = new Set(collector.spans.map(({ traceId }) => traceId));
  expect(traces.size).toBe(2);
  for (const span of collector.spans) expect(span.startAt).toBeLessThanOrEqual(span.endAt);
  expect(Buffer.concat([...collector.bodies]).toString('latin1')).not.toContain(PROMPT);
});

test('a collector that takes nothing costs no request, and is told once', async () => {
  const collector = stack.use(await startOtlpReceiver(400));
  const pools = stack.use(await startSimPools({ prefill: 1, decode: 1, engine: {} }));
  const flags = {
    prefill: pools.prefill.map(({ url }) => url),
    decode: pools.decode.map(({ url }) => url),
    'otlp-endpoint': collector.url,
  };
  const { baton, log } = await startQuietly(configOf(flags));
  stack.defer(() => baton.stop());
  const url = `http://${baton.addresses.facade}`;
  await expect.poll(async () => (await fetch(`${url}/readiness`)).status, { timeout: 20_000 }).toBe(200);
  const missing = await post(`${url}/v1/chat/completions`, { model: 'nobody', messages: [] });
  expect(missing.status).toBe(404);
  expect((await turn(url, [{ role: 'user', content: 'hi' }])).text).not.toBe('');
  const adminUrl = `http://${baton.addresses.admin}`;
  const failed = () => metricOf({ adminUrl }, 'baton_trace_spans_total{result="failed"}');
  await expect.poll(failed, { timeout: 10_000 }).toBeGreaterThan(0);
  expect(log.filter(({ msg }) => msg === 'the collector takes no traces')).toHaveLength(1);
});

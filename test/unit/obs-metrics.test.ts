import { readFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';
import { credentialTenant } from '../../src/core/tenant.ts';
import { LabelSet } from '../../src/obs/label-set.ts';
import { Metrics, statusClass } from '../../src/obs/metrics.ts';
import { SERIES } from '../../src/obs/series.ts';

async function linesOf(metrics: Metrics, name: string): Promise<string[]> {
  const text = await metrics.render();
  return text.split('\n').filter((line) => line.startsWith(`${name}{`) || line.startsWith(`${name} `));
}

const REQUEST = {
  api: 'chat.completions',
  tenant: 'team-a',
  model: 'm',
  mode: 'prefill_decode',
  status: 200,
  durationMs: 1500,
};

describe('Metrics', () => {
  it('exposes every series of the table, and no other', async () => {
    const metrics = new Metrics({ version: '1.2.3' });
    const exposed = [...(await metrics.render()).matchAll(/^# TYPE (\S+) (\S+)$/gm)].map(
      ([, name, kind]) => `${name} ${kind}`,
    );
    expect(exposed.sort()).toEqual(SERIES.map(({ name, kind }) => `${name} ${kind}`).sort());
    expect(metrics.contentType).toContain('text/plain; version=0.0.4');
  });

  it('is described in docs/metrics.md, series for series', () => {
    const doc = readFileSync(new URL('../../docs/metrics.md', import.meta.url), 'utf8');
    const rows = [...doc.matchAll(/^\| `([a-z0-9_]+)` \| (\w+) \| ([^|]*) \| ([^|]+) \|$/gm)].map(
      ([, name, kind, labels, help]) => ({
        name,
        kind,
        labels: [...(labels ?? '').matchAll(/`(\w+)`/g)].map(([, label]) => label),
        help,
      }),
    );
    expect(rows).toEqual(SERIES.map(({ name, kind, labels, help }) => ({ name, kind, labels: [...labels], help })));
  });

  it('counts a request by api, model, mode and class of status', async () => {
    const metrics = new Metrics({ version: '0' });
    metrics.setKnownModels(['m']);
    metrics.requestStarted('chat.completions');
    expect(await linesOf(metrics, 'baton_requests_in_flight')).toEqual([
      'baton_requests_in_flight{api="chat.completions"} 1',
    ]);
    metrics.requestFinished({ ...REQUEST, promptTokens: 10, cachedTokens: 4, completionTokens: 0 });
    expect(await linesOf(metrics, 'baton_requests_total')).toEqual([
      'baton_requests_total{api="chat.completions",model="m",mode="prefill_decode",status_class="2xx"} 1',
    ]);
    expect(await linesOf(metrics, 'baton_requests_in_flight')).toEqual([
      'baton_requests_in_flight{api="chat.completions"} 0',
    ]);
    expect(await linesOf(metrics, 'baton_request_duration_seconds_sum')).toEqual([
      'baton_request_duration_seconds_sum{api="chat.completions",model="m",mode="prefill_decode"} 1.5',
    ]);
    expect(await linesOf(metrics, 'baton_tokens_total')).toEqual([
      'baton_tokens_total{model="m",kind="prompt"} 10',
      'baton_tokens_total{model="m",kind="cached"} 4',
    ]);
  });

  it('ignores token counts that are none', async () => {
    const metrics = new Metrics({ version: '0' });
    for (const promptTokens of [-1, 0.5, Number.NaN, Number.POSITIVE_INFINITY])
      metrics.requestFinished({ ...REQUEST, promptTokens });
    expect(await linesOf(metrics, 'baton_tokens_total')).toEqual([]);
  });

  it('never makes a label of a model that the engines do not have', async () => {
    const metrics = new Metrics({ version: '0' });
    metrics.setKnownModels(['m']);
    for (let i = 0; i < 500; i += 1) metrics.requestFinished({ ...REQUEST, model: `made-up-${i}\n"` });
    metrics.requestFinished({ ...REQUEST, model: '' });
    const labels = (await linesOf(metrics, 'baton_requests_total')).map((line) => /model="([^"]*)"/.exec(line)?.[1]);
    expect(labels).toEqual(['other', 'none']);
    metrics.setKnownModels([]);
    expect(metrics.modelLabel('m')).toBe('other');
  });

  it('folds words that are none of its vocabulary, and too many of them', async () => {
    const metrics = new Metrics({ version: '0' });
    metrics.retried('connection reset by 10.0.0.1');
    for (let i = 0; i < 100; i += 1) metrics.retried(`reason_${i}`);
    const lines = await linesOf(metrics, 'baton_retries_total');
    expect(lines).toHaveLength(65);
    expect(lines).toContain('baton_retries_total{reason="other"} 37');
    metrics.failed('NO_ROUTABLE_PAIR');
    expect(await linesOf(metrics, 'baton_errors_total')).toEqual(['baton_errors_total{reason="no_routable_pair"} 1']);
  });

  it('reads queue, instances and staleness at each scrape', async () => {
    const metrics = new Metrics({ version: '0' });
    let instances = [
      { role: 'prefill', state: 'ready' },
      { role: 'decode', state: 'ready' },
      { role: 'decode', state: 'ready' },
    ];
    let depth = 7;
    metrics.watchInstances(() => instances);
    metrics.watchQueueDepth(() => depth);
    metrics.watchRegistryStale(() => true);
    expect(await linesOf(metrics, 'baton_instances')).toEqual([
      'baton_instances{role="prefill",state="ready"} 1',
      'baton_instances{role="decode",state="ready"} 2',
    ]);
    expect(await linesOf(metrics, 'baton_queue_depth')).toEqual(['baton_queue_depth 7']);
    expect(await linesOf(metrics, 'baton_registry_stale')).toEqual(['baton_registry_stale 1']);
    instances = [{ role: 'prefill', state: 'suspect' }];
    depth = 0;
    expect(await linesOf(metrics, 'baton_instances')).toEqual(['baton_instances{role="prefill",state="suspect"} 1']);
    expect(await linesOf(metrics, 'baton_queue_depth')).toEqual(['baton_queue_depth 0']);
  });

  it('has bucket bounds from 1 ms to 240 s', async () => {
    const metrics = new Metrics({ version: '0' });
    metrics.firstContent('m', 3, {});
    const bounds = (await linesOf(metrics, 'baton_ttft_seconds_bucket')).map((line) => /le="([^"]+)"/.exec(line)?.[1]);
    expect([bounds[0], bounds.at(-2), bounds.at(-1)]).toEqual(['0.001', '240', '+Inf']);
  });

  it('counts the time to the first content, and every part of it, so that the parts add up', async () => {
    const metrics = new Metrics({ version: '0' });
    metrics.setKnownModels(['m']);
    metrics.firstContent('m', 1000, { queue: 250, plan: 125, prefill: 500, first_byte: 125 });
    metrics.firstContent('m', 240_001, { decode_wait: 240_001 });
    const sums = (await linesOf(metrics, 'baton_ttft_seconds_sum')).map((line) => Number(line.split(' ')[1]));
    const [total = 0, ...parts] = sums;
    expect(parts).toEqual([0.25, 0.125, 0, 0.5, 0, 240.001, 0.125]);
    expect(parts.reduce((sum, part) => sum + part, 0)).toBeCloseTo(total, 9);
    const ofTotal = (await linesOf(metrics, 'baton_ttft_seconds_bucket')).filter((line) => line.includes('"total"'));
    const counts = ofTotal.map((line) => `${/le="([^"]+)"/.exec(line)?.[1]} ${line.split(' ')[1]}`);
    // A bound holds what is equal to it; what is longer than all is in +Inf alone.
    expect(counts.slice(8, 10)).toEqual(['0.5 0', '1 1']);
    expect(counts.slice(-2)).toEqual(['240 1', '+Inf 2']);
  });

  it('counts the gaps of a stream without looking its labels up again', async () => {
    const metrics = new Metrics({ version: '0' });
    metrics.setKnownModels(['m']);
    const gaps = metrics.gapsOf('m');
    expect(metrics.gapsOf('m')).toBe(gaps);
    for (const ms of [0.5, 20, 20]) gaps.observe(ms);
    metrics.gapsOf('made-up').observe(1);
    expect(await linesOf(metrics, 'baton_itl_seconds_count')).toEqual([
      'baton_itl_seconds_count{model="m"} 3',
      'baton_itl_seconds_count{model="other"} 1',
    ]);
  });

  it('folds model names after a thousand, known as they may be', () => {
    const metrics = new Metrics({ version: '0' });
    const names = Array.from({ length: 1200 }, (_, index) => `adapter-${index}`);
    metrics.setKnownModels(names);
    const labels = names.map((model) => metrics.modelLabel(model));
    expect(labels.slice(0, 1000)).toEqual(names.slice(0, 1000));
    expect(new Set(labels.slice(1000))).toEqual(new Set(['other']));
  });

  it('folds tenants after a thousand, and those that have no name', async () => {
    const metrics = new Metrics({ version: '0' });
    for (let i = 0; i < 1200; i += 1) metrics.requestFinished({ ...REQUEST, tenant: `team-${i}` });
    for (const tenant of ['anonymous', credentialTenant('ab'.repeat(32)), 'a"b\n'])
      metrics.requestFinished({ ...REQUEST, tenant });
    const lines = await linesOf(metrics, 'baton_tenant_requests_total');
    expect(lines).toHaveLength(1001);
    expect(lines.at(-1)).toBe('baton_tenant_requests_total{tenant="other",status_class="2xx"} 203');
  });

  it('shows what the store tells in the very scrape that asks it', async () => {
    const metrics = new Metrics({ version: '0' });
    metrics.watchStore(async () => ({ entries: 3, releaseQueue: 2, pinnedBlocks: [{ instance: 'd', blocks: 5 }] }));
    expect(await linesOf(metrics, 'baton_pinned_kv_blocks')).toEqual(['baton_pinned_kv_blocks{engine="d"} 5']);
    expect(await linesOf(metrics, 'baton_store_release_queue')).toEqual(['baton_store_release_queue 2']);
  });

  it('tells how late the event loop was since the scrape before', async () => {
    const metrics = new Metrics({ version: '0' });
    const lag = async () => Number((await linesOf(metrics, 'nodejs_eventloop_lag_max_seconds'))[0]?.split(' ')[1]);
    expect(await lag()).toBe(0);
    using _watch = metrics.watchEventLoop();
    let seen = 0;
    // A pause before the first of Node's timers is not seen, and on a busy machine that comes late.
    for (let attempt = 0; attempt < 5 && seen < 0.2; attempt += 1) {
      await new Promise((next) => setTimeout(next, 50));
      const until = performance.now() + 300;
      while (performance.now() < until);
      await new Promise((next) => setTimeout(next, 50));
      seen = await lag();
    }
    // The timer that fell into the pause was due at most one interval after its beginning.
    expect(seen).toBeGreaterThan(0.2);
  });

  it('keeps the series of two instances in one process apart', async () => {
    const [a, b] = [new Metrics({ version: 'a' }), new Metrics({ version: 'b' })];
    a.streamed(10);
    expect(await linesOf(a, 'baton_stream_bytes_total')).toEqual(['baton_stream_bytes_total 10']);
    expect(await linesOf(b, 'baton_stream_bytes_total')).toEqual(['baton_stream_bytes_total 0']);
  });

  it('tells of the process without growing the CPU counter at each scrape', async () => {
    const metrics = new Metrics({ version: '0' });
    await metrics.render();
    const [line] = await linesOf(metrics, 'process_cpu_seconds_total');
    const { user, system } = process.cpuUsage();
    expect(Number(line?.split(' ')[1])).toBeLessThanOrEqual((user + system) / 1e6);
  });
});

describe('statusClass', () => {
  it.each([
    [200, '2xx'],
    [499, '4xx'],
    [503, '5xx'],
    [0, 'other'],
    [Number.NaN, 'other'],
  ])('%s is %s', (status, expected) => expect(statusClass(status)).toBe(expected));
});

describe('LabelSet', () => {
  it('lets no more values through than its limit', () => {
    const set = new LabelSet(2, () => true);
    expect(['a', 'b', 'c', 'a', '', undefined].map((value) => set.label(value))).toEqual([
      'a',
      'b',
      'other',
      'a',
      'none',
      'none',
    ]);
  });
});

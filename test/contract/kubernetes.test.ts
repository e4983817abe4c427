import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, describe, expect, it, vi } from 'vitest';
import { openSliceApi } from '../../src/discovery/kubernetes/api.ts';
import { followSlices } from '../../src/discovery/kubernetes/follow.ts';
import { configOf } from '../support/harness.ts';
import { FakeKubeApi } from '../support/kube-api.ts';

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

const PREFILL = { app: 'llm', 'llm-d.ai/role': 'prefill', 'kubernetes.io/service-name': 'p', zone: 'a' };
const DECODE = { ...PREFILL, 'llm-d.ai/role': 'decode' };

/** A source on a server of the test, and what it tells. */
async function setUp(more = '') {
  const api = stack.use(await FakeKubeApi.start('engines'));
  const folder = mkdtempSync(join(tmpdir(), 'baton-'));
  stack.defer(() => rmSync(folder, { recursive: true }));
  const kubeconfig = join(folder, 'config');
  writeFileSync(kubeconfig, api.kubeconfig);
  const yaml = `discovery: { kubernetes: { selector: app=llm, kubeconfig: ${kubeconfig}${more} } }`;
  const config = configOf({}, yaml);
  const told = { view: undefined as readonly string[] | undefined, labels: {}, warnings: [] as string[] };
  const follow = () => {
    const { kubernetes } = config.discovery;
    if (kubernetes === undefined) throw new Error('no kubernetes');
    const backoff = { firstMs: 5, lastMs: 40 };
    const source = followSlices(openSliceApi(kubernetes), kubernetes, config.instanceDefaults, backoff);
    const stop = new AbortController();
    const running = source.run(
      {
        view: (instances) => {
          told.view = instances.map(({ id, role }) => `${id} ${role}`).sort();
          told.labels = instances[0]?.labels ?? {};
        },
        warn: (fields, message) => void told.warnings.push(`${message}: ${Object.values(fields).join(' ')}`),
      },
      stop.signal,
    );
    stack.defer(async () => {
      stop.abort();
      await running;
    });
  };
  const views = (...ids: readonly string[]) => expect.poll(() => told.view, { timeout: 5000 }).toEqual(ids);
  const watching = () => expect.poll(() => api.openWatches, { timeout: 5000 }).toBe(1);
  const lists = () => api.requests.filter((request) => request === 'list').length;
  return { api, told, follow, views, watching, lists };
}

describe('EndpointSlices', () => {
  it('are listed in pages and then watched: engines come, change, stop being ready, and go', async () => {
    const { api, told, follow, views, watching, lists } = await setUp();
    api.put('p', { labels: PREFILL, addresses: ['10.0.0.1'] });
    api.put('d', { labels: DECODE, addresses: ['10.0.0.2', '10.0.0.3!'] });
    api.put('d2', { labels: { ...DECODE, 'llm-d.ai/role': 'prefill-decode' }, addresses: ['10.0.0.4'], port: 9000 });
    api.put('other', { labels: { app: 'web' }, addresses: ['10.9.9.9'] });
    follow();
    await views('10.0.0.1:8000 prefill', '10.0.0.2:8000 decode', '10.0.0.4:9000 both');
    await watching();
    expect(api.requests.slice(0, 3)).toEqual(['list', 'list+', 'watch 1004']);
    expect(told.labels).toEqual({ app: 'llm', 'llm-d.ai/role': 'prefill', zone: 'a', pod: 'p-0' });
    api.put('d', { labels: DECODE, addresses: ['10.0.0.2!', '10.0.0.3'] });
    await views('10.0.0.1:8000 prefill', '10.0.0.3:8000 decode', '10.0.0.4:9000 both');
    api.put('p2', { labels: PREFILL, addresses: ['10.0.0.1', '10.0.0.5'] });
    await views('10.0.0.1:8000 prefill', '10.0.0.3:8000 decode', '10.0.0.4:9000 both', '10.0.0.5:8000 prefill');
    api.delete('d2');
    // It leaves the selector, which a watch tells as a removal.
    api.put('p2', { labels: { app: 'web' }, addresses: ['10.0.0.5'] });
    await views('10.0.0.1:8000 prefill', '10.0.0.3:8000 decode');
    expect([lists(), told.warnings]).toEqual([1, []]);
  });

  it('go on from the last event or bookmark when a watch ends or breaks, and miss nothing', async () => {
    const { api, follow, views, watching, lists, told } = await setUp();
    api.put('d', { labels: DECODE, addresses: ['10.0.0.1'] });
    follow();
    await watching();
    api.bookmark();
    api.put('d', { labels: DECODE, addresses: ['10.0.0.2'] });
    await views('10.0.0.2:8000 decode');
    for (const [how, address] of [
      ['end', '10.0.0.3'],
      ['break', '10.0.0.4'],
    ] as const) {
      api.endWatches(how);
      api.put('d', { labels: DECODE, addresses: [address] });
      await views(`${address}:8000 decode`);
      await watching();
    }
    api.bookmark();
    api.compact();
    // The bookmark is newer than what was compacted: no list is needed.
    api.endWatches();
    api.put('d', { labels: DECODE, addresses: ['10.0.0.5'] });
    await views('10.0.0.5:8000 decode');
    expect(lists()).toBe(1);
    expect(told.warnings.filter((warning) => !warning.includes('last view stays'))).toEqual([]);
  });

  it.each(['event', 'status'] as const)('are listed again after 410 Gone as %s', async (goneAs) => {
    const { api, follow, views, watching, lists } = await setUp();
    api.goneAs = goneAs;
    api.put('d', { labels: DECODE, addresses: ['10.0.0.1'] });
    api.put('d2', { labels: DECODE, addresses: ['10.0.0.9'] });
    follow();
    await watching();
    const before = lists();
    api.refuse = 503;
    api.endWatches();
    api.delete('d2');
    api.put('d', { labels: DECODE, addresses: ['10.0.0.2'] });
    api.compact();
    api.refuse = undefined;
    await views('10.0.0.2:8000 decode');
    expect(lists()).toBe(before + 1);
  });

  it('leave the last view while the server is away or refuses, and it is said once', async () => {
    const { api, told, follow, views, watching } = await setUp();
    api.put('d', { labels: DECODE, addresses: ['10.0.0.1'] });
    api.refuse = 403;
    follow();
    await expect.poll(() => told.warnings.length).toBe(1);
    expect(told.warnings[0]).toMatch(/^the Kubernetes API does not tell of engines; the last view stays: .*403/);
    expect(told.view).toBeUndefined();
    api.refuse = undefined;
    await views('10.0.0.1:8000 decode');
    await watching();
    api.refuse = 500;
    const before = api.requests.length;
    api.endWatches('break');
    await expect.poll(() => told.warnings.length, { timeout: 5000 }).toBe(2);
    api.delete('d');
    await new Promise((next) => setTimeout(next, 100));
    expect([told.view, told.warnings.length, api.requests.length]).toEqual([['10.0.0.1:8000 decode'], 2, before]);
    api.refuse = undefined;
    await views();
  });

  it('of a pod with two addresses, or in two slices, are one engine', async () => {
    const { api, follow, views, told } = await setUp();
    api.put('d6', { labels: DECODE, addresses: ['fd00::1', 'fd00::2'], pods: 'd' });
    api.put('d4', { labels: DECODE, addresses: ['10.0.0.1'], pods: 'd' });
    api.put('d4-new', { labels: DECODE, addresses: ['10.0.0.1'], pods: 'd' });
    follow();
    await views('10.0.0.1:8000 decode', '[fd00::2]:8000 decode');
    expect(told.warnings).toEqual([]);
  });

  it('without a role or the wanted port tell no engines, and that is said once', async () => {
    const { api, told, follow, views } = await setUp(', port: http');
    api.put('x', { labels: { app: 'llm' }, addresses: ['10.0.0.1'] });
    api.put('y', { labels: { app: 'llm', 'llm-d.ai/role': 'cook' }, addresses: ['10.0.0.2'] });
    api.put('d', { labels: DECODE, addresses: ['10.0.0.3'] });
    follow();
    await views('10.0.0.3:8000 decode');
    api.put('d', { labels: DECODE, addresses: ['10.0.0.4'] });
    await views('10.0.0.4:8000 decode');
    expect(told.warnings).toEqual([
      'an EndpointSlice tells no engines: engines/x: the label llm-d.ai/role is not set; prefill, decode or both',
      'an EndpointSlice tells no engines: engines/y: the label llm-d.ai/role is "cook"; prefill, decode or both',
    ]);
  });
});

describe('a cluster that is not there', () => {
  const open = (kubeconfig?: string) => () =>
    openSliceApi({
      selector: 'a=b',
      roleLabel: 'role',
      scheme: 'http',
      ...(kubeconfig === undefined ? {} : { kubeconfig }),
    });

  it('is told in a sentence that names the setting', () => {
    const folder = mkdtempSync(join(tmpdir(), 'baton-'));
    stack.defer(() => rmSync(folder, { recursive: true }));
    stack.defer(() => void vi.unstubAllEnvs());
    const file = join(folder, 'config');
    expect(open(file)).toThrow(`discovery.kubernetes.kubeconfig: ${file} does not exist`);
    vi.stubEnv('KUBECONFIG', file);
    expect(open()).toThrow(`KUBECONFIG or ~/.kube/config: ${file} does not exist`);
    writeFileSync(file, 'clusters: [');
    expect(open()).toThrow('KUBECONFIG or ~/.kube/config: this is no kubeconfig');
    writeFileSync(file, 'clusters: []\n');
    expect(open(file)).toThrow('names no current cluster');
    vi.stubEnv('KUBECONFIG', '');
    vi.stubEnv('HOME', folder);
    expect(open()).toThrow('no Kubernetes cluster is known');
  });
});

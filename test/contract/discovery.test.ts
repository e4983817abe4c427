import { mkdirSync, mkdtempSync, renameSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, describe, expect, it } from 'vitest';
import { parseDnsName } from '../../src/config/discovery.ts';
import { type DnsQuestions, followDns } from '../../src/discovery/dns.ts';
import { followFile } from '../../src/discovery/file.ts';
import type { InstanceSource } from '../../src/discovery/source.ts';
import { configOf } from '../support/harness.ts';

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

const CONFIG = configOf({});

/** Runs a source, and keeps what it tells. */
function run(source: InstanceSource) {
  const told = { view: undefined as readonly string[] | undefined, views: 0, warnings: [] as string[] };
  const stop = new AbortController();
  const running = source.run(
    {
      view: (instances) => {
        told.view = instances.map(({ id, role }) => `${id} ${role}`);
        told.views += 1;
      },
      warn: (fields, message) => void told.warnings.push(`${message}: ${Object.values(fields).join(' ')}`),
    },
    stop.signal,
  );
  stack.defer(async () => {
    stop.abort();
    await running;
  });
  return { told, stop, running };
}

describe('the pool file', () => {
  const text = (...ids: readonly string[]) =>
    `instances:\n${ids.map((id) => `  - { url: "http://${id}", role: decode }\n`).join('')}`;
  function folder(): string {
    const path = mkdtempSync(join(tmpdir(), 'baton-'));
    stack.defer(() => rmSync(path, { recursive: true }));
    return path;
  }
  const follow = (file: string) => run(followFile(file, { config: CONFIG, connectors: ['nixl'] }, 10)).told;

  it('is read again after a write, a rename over it, and the swap of a link above it', async () => {
    const dir = folder();
    const file = join(dir, 'pools.yaml');
    writeFileSync(file, text('a:1'));
    const told = follow(file);
    await expect.poll(() => told.view).toEqual(['a:1 decode']);
    writeFileSync(file, text('a:1', 'a:2'));
    await expect.poll(() => told.view).toEqual(['a:1 decode', 'a:2 decode']);
    writeFileSync(join(dir, 'next'), text('a:3'));
    renameSync(join(dir, 'next'), file);
    await expect.poll(() => told.view).toEqual(['a:3 decode']);
    expect([told.views, told.warnings]).toEqual([3, []]);
  });

  it('follows a ConfigMap, whose files are links through a link that is swapped', async () => {
    const dir = folder();
    const publish = (version: string, ...ids: readonly string[]) => {
      mkdirSync(join(dir, version));
      writeFileSync(join(dir, version, 'pools.yaml'), text(...ids));
      symlinkSync(version, join(dir, '..data_tmp'));
      renameSync(join(dir, '..data_tmp'), join(dir, '..data'));
    };
    publish('..v1', 'a:1');
    symlinkSync(join('..data', 'pools.yaml'), join(dir, 'pools.yaml'));
    const told = follow(join(dir, 'pools.yaml'));
    await expect.poll(() => told.view).toEqual(['a:1 decode']);
    publish('..v2', 'a:2');
    rmSync(join(dir, '..v1'), { recursive: true });
    await expect.poll(() => told.view).toEqual(['a:2 decode']);
    expect(told.warnings).toEqual([]);
  });

  it('keeps its last view while it is away or broken, says so once, and leaves a bad entry out', async () => {
    const dir = folder();
    const file = join(dir, 'pools.yaml');
    const told = follow(file);
    await expect
      .poll(() => told.warnings)
      .toEqual([`the pool file cannot be read; its last view stays: ${file} it does not exist`]);
    writeFileSync(file, text('a:1'));
    await expect.poll(() => told.view).toEqual(['a:1 decode']);
    writeFileSync(file, 'instances: [');
    await expect.poll(() => told.warnings.length).toBe(2);
    expect(told.warnings[1]).toMatch(/^the pool file cannot be used; its last view stays: .*pools\.yaml:1:1/);
    writeFileSync(file, `${text('a:1', 'a:2')}  - { url: "http://a:3", role: cook }\n`);
    await expect.poll(() => told.view).toEqual(['a:1 decode', 'a:2 decode']);
    expect(told.warnings[2]).toMatch(
      /^a mistake in the pool file; the rest of it is used: .*pools\.yaml:4:\d+: .*role/,
    );
    rmSync(file);
    await expect.poll(() => told.warnings.length).toBe(4);
    expect([told.view, told.views]).toEqual([['a:1 decode', 'a:2 decode'], 2]);
  });
});

describe('DNS', () => {
  const name = (text: string) => {
    const parsed = parseDnsName(text);
    if (parsed.kind === 'bad') throw new Error(parsed.message);
    return parsed.value;
  };
  const names = { prefill: [name('p.svc:8100')], decode: [name('https://_d._tcp.svc/v')], both: [] };
  /** A name server of which the test says what it answers. */
  function dns(intervalMs = 10) {
    const world = { addresses: ['10.0.0.1', 'fd00::1'], asked: 0, fail: '' };
    const fail = () => {
      world.asked += 1;
      if (world.fail !== '') throw Object.assign(new Error('no'), { code: world.fail });
    };
    const ask: DnsQuestions = {
      addresses: async () => {
        fail();
        return world.addresses;
      },
      services: async () => {
        fail();
        return [{ host: 'd0.svc', port: 9000 }];
      },
    };
    return { world, ...run(followDns({ names, defaults: CONFIG.instanceDefaults, intervalMs, ask })) };
  }
  const service = 'd0.svc:9000/v decode';

  it('is asked again and again; addresses and services become instances', async () => {
    const { world, told } = dns();
    await expect.poll(() => told.view).toEqual(['10.0.0.1:8100 prefill', '[fd00::1]:8100 prefill', service]);
    world.addresses = ['10.0.0.2'];
    await expect.poll(() => told.view).toEqual(['10.0.0.2:8100 prefill', service]);
    expect(told.warnings).toEqual([]);
  });

  it('that answers nothing, or not at all, leaves the last view, and it is said once', async () => {
    const { world, told } = dns();
    await expect.poll(() => told.view?.length).toBe(3);
    world.addresses = [];
    await expect
      .poll(() => told.warnings)
      .toEqual(['DNS tells nothing of a name; its last addresses stay: p.svc it has no addresses']);
    world.fail = 'ETIMEOUT';
    await expect.poll(() => told.warnings.length).toBe(3);
    const asked = world.asked;
    await expect.poll(() => world.asked).toBeGreaterThan(asked + 6);
    expect(told.warnings.slice(1)).toEqual([
      'DNS tells nothing of a name; its last addresses stay: p.svc ETIMEOUT',
      'DNS tells nothing of a name; its last addresses stay: _d._tcp.svc ETIMEOUT',
    ]);
    expect(told.view).toHaveLength(3);
    world.fail = '';
    world.addresses = ['10.0.0.9'];
    await expect.poll(() => told.view).toEqual(['10.0.0.9:8100 prefill', service]);
  });

  it('that never answered names nothing, and does not hide the names that did', async () => {
    const failing: DnsQuestions = {
      addresses: async () => Promise.reject(Object.assign(new Error('no'), { code: 'ENOTFOUND' })),
      services: async () => [{ host: 'd0.svc', port: 9000 }],
    };
    const { told } = run(followDns({ names, defaults: CONFIG.instanceDefaults, intervalMs: 10, ask: failing }));
    await expect.poll(() => told.view).toEqual([service]);
    expect(told.warnings).toEqual(['DNS tells nothing of a name; it has no instances yet: p.svc ENOTFOUND']);
    const alone = { ...names, decode: [] };
    const nothing = run(followDns({ names: alone, defaults: CONFIG.instanceDefaults, intervalMs: 10, ask: failing }));
    await expect.poll(() => nothing.told.warnings.length).toBe(1);
    expect(nothing.told.view).toBeUndefined();
  });

  it('is asked once where the interval is 0', async () => {
    const { told, world, running } = dns(0);
    await running;
    expect([told.views, world.asked]).toEqual([1, 2]);
  });

  it('resolves with the names of the system', async () => {
    const local = { prefill: [], decode: [], both: [name('localhost:8000')] };
    const { told } = run(followDns({ names: local, defaults: CONFIG.instanceDefaults, intervalMs: 0 }));
    await expect.poll(() => told.view?.length ?? 0).toBeGreaterThan(0);
    expect(told.view?.every((id) => id === '127.0.0.1:8000 both' || id === '[::1]:8000 both')).toBe(true);
  });
});

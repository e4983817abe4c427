import { copyFileSync, mkdtempSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { Role } from '../../gen/baton/v1/instance_pb.ts';
import { stateWord } from '../../src/core/instance-words.ts';
import type { Running } from '../../src/roles.ts';
import { connectRemote, type RemoteServices } from '../../src/rpc/clients.ts';
import { configOf, startQuietly } from '../support/harness.ts';
import { waitUntil } from '../support/wait.ts';

let stack = new AsyncDisposableStack();
let file = '';
beforeEach(() => {
  const folder = mkdtempSync(join(tmpdir(), 'baton-'));
  stack.defer(() => rmSync(folder, { recursive: true }));
  file = join(folder, 'registry-state');
});
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

interface Started {
  readonly baton: Running;
  readonly registry: RemoteServices['poolRegistry'];
  readonly list: () => Promise<readonly string[]>;
  readonly log: readonly Record<string, unknown>[];
}

/** A registry alone; nothing listens at its engines, for nobody asks them anything here. */
async function start(path = file, more: Readonly<Record<string, string | readonly string[]>> = {}): Promise<Started> {
  const flags = { roles: 'registry', decode: ['http://127.0.0.1:9'], 'registry-state': path, ...more };
  const { baton, log } = await startQuietly(configOf(flags, 'pools: { prefill: { api_key: pool-key } }'));
  stack.defer(() => baton.stop());
  const { poolRegistry } = stack.use(connectRemote({ url: `http://${baton.addresses.rpc}` }));
  const list = async () => {
    const { instances } = await poolRegistry.listInstances({});
    return instances.map((i) => `${i.id} ${stateWord(i.state)} ${i.incarnation?.generation}`);
  };
  return { baton, registry: poolRegistry, list, log };
}

const instance = (id: string) => ({ id, url: `http://127.0.0.1:8/${id}`, role: Role.PREFILL, connector: 'nixl' });

test('registrations, drains and removals outlive the process, and nothing secret is written', async () => {
  const first = await start();
  for (const idempotencyKey of ['k1', 'k2']) {
    await first.registry.registerInstance({ idempotencyKey, instance: instance('p1') });
  }
  await first.registry.registerInstance({ idempotencyKey: 'k3', instance: instance('p2'), untilRemoved: true });
  await first.registry.registerInstance({ idempotencyKey: 'k4', instance: instance('p3'), untilRemoved: true });
  await first.registry.deregisterInstance({ instanceId: 'p3' });
  await first.registry.drainInstance({ instanceId: 'p2', reason: 'update' });
  await first.registry.drainInstance({ instanceId: '127.0.0.1:9', reason: 'update' });
  const before = ['127.0.0.1:9 draining 1', 'p1 starting 2', 'p2 draining 1'];
  expect(await first.list()).toEqual(before);
  // What a process that is killed leaves.
  await waitUntil(() => {
    const text = readFileSync(file, { encoding: 'utf8', flag: 'a+' });
    return text.includes('"127.0.0.1:9":"update"') && text.includes('"p3":1');
  });
  copyFileSync(file, `${file}.killed`);
  expect(readFileSync(file, 'utf8')).not.toContain('pool-key');
  expect(statSync(file).mode & 0o777).toBe(0o600);
  await first.baton.stop();

  for (const path of [file, `${file}.killed`]) {
    const second = await start(path);
    expect(await second.list()).toEqual(before);
    expect(await second.registry.renewLease({ instanceId: 'p1', incarnation: { generation: 2 } })).toMatchObject({
      lease: { seconds: 30n },
    });
    const late = second.registry.renewLease({ instanceId: 'p1', incarnation: { generation: 1 } });
    await expect(late).rejects.toThrow(/another life/);
    const again = await second.registry.registerInstance({ idempotencyKey: 'k5', instance: instance('p3') });
    expect(again.instance?.incarnation?.generation).toBe(2);
    await second.registry.resumeInstance({ instanceId: '127.0.0.1:9' });
    await second.baton.stop();
    const third = await start(path);
    expect((await third.list())[0]).toBe('127.0.0.1:9 starting 1');
    await third.registry.deregisterInstance({ instanceId: '127.0.0.1:9' });
    await third.baton.stop();
    expect(await (await start(path)).list()).toEqual(['p1 starting 2', 'p2 draining 1', 'p3 starting 2']);
  }
});

test('what DNS told last is there while DNS is not', async () => {
  const dns = { decode: ['http://127.0.0.1:9'], 'prefill-dns': ['localhost:7', 'nowhere.invalid:7'] };
  const first = await start(file, dns);
  await waitUntil(async () => (await first.list()).some((line) => line.startsWith('127.0.0.1:7')));
  await first.baton.stop();
  // As if the name that was known before did not resolve any more.
  const second = await start(file, { ...dns, 'prefill-dns': ['nowhere.invalid:7'] });
  expect((await second.list()).some((line) => line.startsWith('127.0.0.1:7 starting'))).toBe(true);
  expect(second.log.some(({ msg }) => String(msg).startsWith('DNS tells nothing of a name'))).toBe(true);
  await second.baton.stop();
  expect(await (await start(file)).list()).toEqual(['127.0.0.1:9 starting 1']);
});

test('a file of somebody else is not touched, one in use is refused, a damaged one is put aside', async () => {
  writeFileSync(file, 'dear diary');
  await expect(start()).rejects.toThrow(/is not one that a registry wrote; name a file .* \(--registry-state\)/);
  expect(readFileSync(file, 'utf8')).toBe('dear diary');
  writeFileSync(file, 'baton-registry-1\n{"registered": 5}');
  const damaged = await start();
  expect(damaged.log.some(({ msg }) => String(msg).includes('damaged'))).toBe(true);
  expect(readFileSync(`${file}.damaged`, 'utf8')).toContain('"registered": 5');
  await expect(start()).rejects.toThrow(/is used by another process/);
});

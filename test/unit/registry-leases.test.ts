import { create, type MessageInitShape } from '@bufbuild/protobuf';
import { durationFromMs, durationMs } from '@bufbuild/protobuf/wkt';
import { describe, expect, it } from 'vitest';
import { type Incarnation, InstanceSchema, InstanceState, Role } from '../../gen/baton/v1/instance_pb.ts';
import {
  DeregisterInstanceRequestSchema,
  DrainInstanceRequestSchema,
  GetInstanceRequestSchema,
  RegisterInstanceRequestSchema,
  RenewLeaseRequestSchema,
  ResumeInstanceRequestSchema,
  WatchInstancesRequestSchema,
} from '../../gen/baton/v1/pool_registry_pb.ts';
import { BatonError } from '../../src/core/errors.ts';
import { stateWord } from '../../src/core/instance-words.ts';
import type { PoolRegistryService } from '../../src/services/registry/pool-registry.ts';
import { bad, good, settle, setUp } from '../support/registry.ts';

type Init = MessageInitShape<typeof RegisterInstanceRequestSchema>;

let keys = 0;

const ENGINE = { url: 'http://e:1', role: Role.DECODE, connector: 'nixl' };
const register = (registry: PoolRegistryService, init: Init = {}) =>
  registry.registerInstance(
    create(RegisterInstanceRequestSchema, {
      idempotencyKey: `k${++keys}`,
      instance: create(InstanceSchema, ENGINE),
      ...init,
    }),
  );
const renew = (registry: PoolRegistryService, generation: number, more: object = {}) =>
  registry.renewLease(create(RenewLeaseRequestSchema, { instanceId: 'e:1', incarnation: { generation }, ...more }));
const deregister = (registry: PoolRegistryService, instanceId: string, more: object = {}) =>
  registry.deregisterInstance(create(DeregisterInstanceRequestSchema, { instanceId, ...more }));
const get = async (registry: PoolRegistryService, instanceId: string) => {
  const { instance } = await registry.getInstance(create(GetInstanceRequestSchema, { instanceId }));
  return `${stateWord(instance?.state ?? 0)} ${instance?.stateReason} ${instance?.incarnation?.generation}`;
};
/** Why a call was refused, and the field at fault. */
const refusal = async (call: Promise<unknown>) => {
  const error: unknown = await call.then(
    () => 'no refusal',
    (thrown: unknown) => thrown,
  );
  return error instanceof BatonError ? `${error.reason} ${error.param ?? ''}`.trim() : error;
};

describe('a registered instance', () => {
  it('is STARTING until a probe passes, and GONE when its lease ends, listed for 5 minutes', async () => {
    const { clock, registry } = setUp([]);
    const { instance, lease } = await register(registry);
    expect(lease === undefined ? 0 : durationMs(lease)).toBe(30_000);
    expect(instance).toMatchObject({ id: 'e:1', state: InstanceState.STARTING, incarnation: { generation: 1 } });
    await clock.pass(29_000);
    expect(await get(registry, 'e:1')).toBe('ready probe_ok 1');
    await clock.pass(1000);
    expect(await get(registry, 'e:1')).toBe('gone lease_expired 1');
    await clock.pass(299_000);
    expect(await get(registry, 'e:1')).toBe('gone lease_expired 1');
    await clock.pass(1000);
    expect(await refusal(get(registry, 'e:1'))).toBe('INSTANCE_NOT_FOUND');
    expect(registry.snapshot()).toEqual([]);
    expect(clock.pending).toBe(0);
  });

  it('lives on while it renews, sends its load, and learns that it drains', async () => {
    const { clock, world, registry } = setUp([]);
    world.reply = async () => good({});
    await register(registry, { lease: durationFromMs(10_000) });
    for (let i = 0; i < 5; i += 1) {
      await clock.pass(9000);
      const load = { running: i, waiting: 2, waitingDeferred: 1, kvCacheUsage: 0.5, age: durationFromMs(1000) };
      const { lease, state } = await renew(registry, 1, { load });
      expect([lease === undefined ? 0 : durationMs(lease), state]).toEqual([10_000, InstanceState.READY]);
    }
    const { instance } = await registry.getInstance(create(GetInstanceRequestSchema, { instanceId: 'e:1' }));
    expect(instance?.load).toMatchObject({ running: 4, waiting: 2, waitingDeferred: 1, kvCacheUsage: 0.5 });
    expect(instance?.load?.age === undefined ? 0 : durationMs(instance.load.age)).toBe(1000);
    await registry.drainInstance(create(DrainInstanceRequestSchema, { instanceId: 'e:1', reason: 'update' }));
    expect(await renew(registry, 1)).toMatchObject({ state: InstanceState.DRAINING, stateReason: 'update' });
    await clock.pass(10_000);
    expect(await get(registry, 'e:1')).toBe('gone lease_expired 1');
  });

  it('believes the newer of a load that was sent and one read off the metrics', async () => {
    const { clock, registry } = setUp([]);
    await register(registry, { lease: durationFromMs(600_000) });
    await clock.pass(7000);
    const running = async () => registry.snapshot()[0]?.load?.running;
    await renew(registry, 1, { load: { running: 9, age: durationFromMs(6000) } });
    expect(await running()).toBe(1);
    await renew(registry, 1, { load: { running: 9 } });
    expect(await running()).toBe(9);
    await clock.pass(5000);
    expect(await running()).toBe(1);
  });

  it('shows what its registration said of the engine until a probe tells', async () => {
    const { clock, registry } = setUp([]);
    const life = { engineId: 'eng', processStartSeconds: 100 };
    const engine = { kind: 'vllm', version: '0.32.0', blockSize: 8 };
    const { instance } = await register(registry, {
      instance: { ...ENGINE, id: 'e', incarnation: life, engine, models: [{ id: 'x' }], modelsKnown: true },
    });
    expect(instance).toMatchObject({
      id: 'e',
      incarnation: { ...life, generation: 1 },
      engine: { version: '0.32.0', blockSize: 8 },
      models: [{ id: 'x' }],
    });
    await clock.pass(0);
    expect(registry.snapshot()[0]).toMatchObject({
      incarnation: { ...life, generation: 1 },
      engine: { version: '0.33.0', blockSize: 16 },
      models: [{ id: 'm' }],
    });
  });

  it('needs no renewals if it is to live until it is removed', async () => {
    const { clock, registry } = setUp([]);
    expect((await register(registry, { untilRemoved: true, lease: durationFromMs(-1) })).lease).toBeUndefined();
    await clock.pass(3_600_000);
    expect(await get(registry, 'e:1')).toBe('ready probe_ok 1');
    expect((await renew(registry, 1)).lease).toBeUndefined();
    expect((await deregister(registry, 'e:1', { reason: 'moved' })).removed).toBe(true);
    expect(await get(registry, 'e:1')).toBe('gone moved 1');
    expect((await deregister(registry, 'e:1')).removed).toBe(false);
    expect((await deregister(registry, 'nobody')).removed).toBe(false);
  });

  it('is told to watches: as it comes, changes, leaves, and is listed no more', async () => {
    const { clock, registry } = setUp([], { start: false });
    const seen: Record<'live' | 'all', string[]> = { live: [], all: [] };
    const abort = new AbortController();
    const states = [InstanceState.STARTING, InstanceState.DRAINING, InstanceState.GONE];
    for (const [name, filter] of [
      ['live', {}],
      ['all', { states }],
    ] as const) {
      const request = create(WatchInstancesRequestSchema, { filter, checkpointInterval: durationFromMs(3_600_000) });
      void (async () => {
        for await (const { event } of registry.watchInstances(request, { signal: abort.signal })) {
          if (event.case === 'upserted') seen[name].push(`${stateWord(event.value.state)} ${event.value.stateReason}`);
          if (event.case === 'removed') seen[name].push(`-${event.value.instanceId} ${event.value.reason}`);
        }
      })();
    }
    await settle();
    await register(registry);
    await registry.drainInstance(create(DrainInstanceRequestSchema, { instanceId: 'e:1' }));
    await clock.pass(400_000);
    abort.abort();
    const before = ['starting awaiting_first_probe', 'draining operator'];
    expect(seen.live).toEqual([...before, '-e:1 lease_expired']);
    expect(seen.all).toEqual([...before, 'gone lease_expired', '-e:1 lease_expired']);
  });
});

describe('incarnations', () => {
  it('count up with each registration, also after the instance was forgotten; earlier ones are refused', async () => {
    const { clock, registry } = setUp([]);
    await register(registry);
    await clock.pass(1000);
    const { instance } = await register(registry);
    expect(instance).toMatchObject({ state: InstanceState.STARTING, incarnation: { generation: 2 } });
    expect(registry.snapshot()).toHaveLength(1);
    const stale = async (generation: number) => {
      const incarnation = { generation } as Incarnation;
      return [
        await refusal(renew(registry, generation)),
        await refusal(deregister(registry, 'e:1', { incarnation })),
        await refusal(registry.drainInstance(create(DrainInstanceRequestSchema, { instanceId: 'e:1', incarnation }))),
        await refusal(registry.resumeInstance(create(ResumeInstanceRequestSchema, { instanceId: 'e:1', incarnation }))),
      ];
    };
    expect(await stale(1)).toEqual(Array(4).fill('STALE_INCARNATION'));
    await clock.pass(400_000);
    expect(registry.snapshot()).toEqual([]);
    expect(await refusal(renew(registry, 2))).toBe('INSTANCE_NOT_FOUND');
    expect((await register(registry)).instance?.incarnation?.generation).toBe(3);
    expect(await stale(2)).toEqual(Array(4).fill('STALE_INCARNATION'));
  });

  it('end with the engine: a lease of a process that is gone is not renewed', async () => {
    const { clock, world, registry } = setUp([]);
    await register(registry);
    await clock.pass(1000);
    world.reply = async () => good({ processStartSeconds: 500 });
    await clock.pass(5000);
    expect(await refusal(renew(registry, 1))).toBe('STALE_INCARNATION');
    expect((await register(registry)).instance?.incarnation?.generation).toBe(3);
    await clock.pass(1000);
    expect(await get(registry, 'e:1')).toBe('ready probe_ok 3');
  });

  it('share a drain, until it is ended or the instance leaves', async () => {
    const { clock, registry } = setUp([]);
    await register(registry);
    await clock.pass(1000);
    await registry.drainInstance(create(DrainInstanceRequestSchema, { instanceId: 'e:1', reason: 'update' }));
    await register(registry);
    await clock.pass(1000);
    expect(await get(registry, 'e:1')).toBe('draining update 2');
    await deregister(registry, 'e:1');
    await register(registry);
    await clock.pass(1000);
    expect(await get(registry, 'e:1')).toBe('ready probe_ok 3');
  });

  it('ignores what probes of an earlier registration find', async () => {
    const { clock, world, registry } = setUp([]);
    const gate = Promise.withResolvers<ReturnType<typeof good>>();
    world.reply = () => gate.promise;
    await register(registry);
    await clock.pass(0);
    world.reply = async () => bad('refused');
    await register(registry);
    gate.resolve(good());
    await clock.pass(0);
    expect(await get(registry, 'e:1')).toBe('starting probe_refused 2');
  });
});

describe('idempotency keys', () => {
  it('give the first answer again for 10 minutes, and refuse another request', async () => {
    const { clock, registry } = setUp([]);
    const first = await register(registry, { idempotencyKey: 'same' });
    expect(await register(registry, { idempotencyKey: 'same' })).toEqual(first);
    expect(registry.snapshot()[0]?.incarnation?.generation).toBe(1);
    expect(await refusal(register(registry, { idempotencyKey: 'same', lease: durationFromMs(9000) }))).toBe(
      'IDEMPOTENCY_KEY_REUSED',
    );
    await clock.pass(600_000);
    expect((await register(registry, { idempotencyKey: 'same' })).instance?.incarnation?.generation).toBe(2);
  });
});

describe('nonsense', () => {
  const instance = (more: object): Init => ({ instance: { ...ENGINE, ...more } });
  it.each<readonly [string, Init, string]>([
    ['no key', { idempotencyKey: '' }, 'idempotency_key'],
    ['a long key', { idempotencyKey: 'x'.repeat(129) }, 'idempotency_key'],
    ['nothing', { instance: undefined as never }, 'instance'],
    ['no URL', instance({ url: '' }), 'instance.url'],
    ['no scheme', instance({ url: 'e:1' }), 'instance.url'],
    ['a file URL', instance({ url: 'file:///etc/passwd' }), 'instance.url'],
    ['credentials', instance({ url: 'http://user:secret@e:1' }), 'instance.url'],
    ['a query', instance({ url: 'http://e:1/?a=b' }), 'instance.url'],
    ['port 0', instance({ url: 'http://e:0' }), 'instance.url'],
    ['a long URL', instance({ url: `http://e:1/${'x'.repeat(3000)}` }), 'instance.url'],
    ['an id with blanks', instance({ id: 'my engine' }), 'instance.id'],
    ['a long id', instance({ id: 'x'.repeat(256) }), 'instance.id'],
    ['no role', instance({ role: Role.UNSPECIFIED }), 'instance.role'],
    ['a role of nobody', instance({ role: 77 as Role }), 'instance.role'],
    ['no connector', instance({ connector: '' }), 'instance.connector'],
    ['an unknown connector', instance({ connector: 'carrier-pigeon' }), 'instance.connector'],
    ['too many labels', instance({ labels: Object.fromEntries(Array(65).fill(0).map((_, i) => [`l${i}`, ''])) }), 'instance.labels'], // biome-ignore format: a row a line
    ['a long label', instance({ labels: { zone: 'x'.repeat(256) } }), 'instance.labels'],
    ['a lease of 0.5 s', { lease: durationFromMs(500) }, 'lease'],
    ['a negative lease', { lease: durationFromMs(-5000) }, 'lease'],
    ['a lease of two hours', { lease: durationFromMs(7_200_000) }, 'lease'],
    ['a negative time', instance({ kv: { decoderTtl: durationFromMs(-1) } }), 'instance.kv.decoder_ttl'],
    ['a word of nobody', instance({ kv: { bidirectional: 'maybe' } }), 'instance.kv.bidirectional'],
    ['a start that is no time', instance({ incarnation: { processStartSeconds: Number.NaN } }), 'instance.incarnation.process_start_seconds'], // biome-ignore format: a row a line
    ['too many models', instance({ models: Array(257).fill({ id: 'm' }) }), 'instance.models'],
    ['a model without an id', instance({ models: [{ root: 'r' }] }), 'instance.models'],
    ['a load beyond all', instance({ load: { kvCacheUsage: 3 } }), 'instance.load.kv_cache_usage'],
  ])('%s is refused and changes nothing', async (_, init, field) => {
    const { registry } = setUp(['a:1'], { start: false });
    expect(await refusal(register(registry, init))).toBe(`INVALID_ARGUMENT ${field}`);
    expect(registry.snapshot().map(({ id }) => id)).toEqual(['a:1']);
  });

  it('does not repeat a password of a URL', async () => {
    const { registry } = setUp([]);
    const message = await register(registry, { instance: { ...ENGINE, url: 'http://u:secret@e:1' } }).catch(String);
    expect(message).not.toContain('secret');
  });

  it('does not renew a lease that was never granted', async () => {
    const { registry } = setUp(['e:1'], { start: false });
    const renewal = (init: object) => registry.renewLease(create(RenewLeaseRequestSchema, init));
    const incarnation = { generation: 1 };
    expect(await refusal(renewal({ instanceId: 'stranger', incarnation }))).toBe('INSTANCE_NOT_FOUND');
    expect(await refusal(renewal({ instanceId: 'e:1', incarnation }))).toBe('INSTANCE_NOT_FOUND');
    expect(await refusal(renewal({ instanceId: 'e:1' }))).toBe('INVALID_ARGUMENT incarnation.generation');
    expect(await refusal(renewal({ instanceId: 'e:1', incarnation: {} }))).toBe(
      'INVALID_ARGUMENT incarnation.generation',
    );
    expect(await refusal(renewal({ incarnation }))).toBe('INVALID_ARGUMENT instance_id');
  });

  it('keeps an engine in the pool once: ids of sources and URLs of others are refused', async () => {
    const { clock, registry } = setUp(['a:1'], { start: false });
    expect(await refusal(register(registry, instance({ id: 'a:1' })))).toBe('INVALID_ARGUMENT instance.id');
    expect(await refusal(register(registry, instance({ url: 'http://a:1', id: 'b' })))).toBe(
      'INVALID_ARGUMENT instance.url',
    );
    await register(registry, instance({ id: 'one' }));
    expect(await refusal(register(registry, instance({ id: 'two' })))).toBe('INVALID_ARGUMENT instance.url');
    await clock.pass(30_000);
    expect((await register(registry, instance({ id: 'two' }))).instance?.id).toBe('two');
  });

  it('takes 4,096 instances and no more, and goes on taking new lives of those', async () => {
    const { registry } = setUp([], { start: false });
    const numbered = (i: number) => instance({ url: `http://e:${i + 1}` });
    for (let i = 0; i < 4096; i += 1) await register(registry, numbered(i));
    expect(await refusal(register(registry, numbered(4096)))).toBe('LIMIT_EXCEEDED');
    expect((await register(registry, numbered(7))).instance?.incarnation?.generation).toBe(2);
    await deregister(registry, 'e:1');
    expect((await register(registry, numbered(4096))).instance?.id).toBe('e:4097');
    expect(registry.snapshot()).toHaveLength(4097);
  });
});

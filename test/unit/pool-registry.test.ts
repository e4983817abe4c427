import { create } from '@bufbuild/protobuf';
import { durationFromMs, durationMs } from '@bufbuild/protobuf/wkt';
import { describe, expect, it } from 'vitest';
import { InstanceState, Role } from '../../gen/baton/v1/instance_pb.ts';
import {
  DrainInstanceRequestSchema,
  GetInstanceRequestSchema,
  InstanceFilterSchema,
  ListInstancesRequestSchema,
  ResumeInstanceRequestSchema,
  WatchInstancesRequestSchema,
  type WatchInstancesResponse,
} from '../../gen/baton/v1/pool_registry_pb.ts';
import { stateWord } from '../../src/core/instance-words.ts';
import type { ProbeResult } from '../../src/engine/probe.ts';
import { createLogger, SILENT_LOGGER } from '../../src/obs/log.ts';
import { probeKeyOf } from '../../src/services/probe-key.ts';
import { PoolRegistryService } from '../../src/services/registry/pool-registry.ts';
import { bad, CARD, FakeClock, good, settle, setUp, spec } from '../support/registry.ts';

const drain = (instanceId: string, reason = '') => create(DrainInstanceRequestSchema, { instanceId, reason });
const resume = (instanceId: string) => create(ResumeInstanceRequestSchema, { instanceId });

describe('probing', () => {
  it('starts with the first probe at once, then keeps the interval', async () => {
    const { clock, calls, only, state } = setUp();
    expect(state()).toBe('starting awaiting_first_probe');
    await clock.pass(0);
    expect(state()).toBe('ready probe_ok');
    expect(only()).toMatchObject({
      id: 'a:1',
      role: Role.DECODE,
      modelsKnown: true,
      models: [{ id: 'm', maxModelLen: 4096, rawJson: '{"id":"m"}' }],
      engine: { kind: 'vllm', version: '0.33.0', blockSize: 16, numGpuBlocks: 0 },
      incarnation: { generation: 1, processStartSeconds: 100, engineId: '' },
      load: { running: 1, waiting: 1, waitingDeferred: 2, kvCacheUsage: 0 },
    });
    await clock.pass(10_000);
    expect(calls.map(({ at }) => at)).toEqual([0, 5000, 10_000]);
  });

  it('retries fast while an engine starts, backing off to the interval', async () => {
    const { clock, calls, world, state } = setUp();
    world.reply = async () => bad('refused');
    await clock.pass(18_000);
    expect(calls.map(({ at }) => at)).toEqual([0, 250, 750, 1750, 3750, 7750, 12_750, 17_750]);
    expect(state()).toBe('starting probe_refused');
    world.reply = async () => good();
    await clock.pass(5000);
    expect(state()).toBe('ready probe_ok');
  });

  it('never calls READY what is no engine, and says so once for each time', async () => {
    const lines: Record<string, unknown>[] = [];
    const destination = { write: (line: string) => lines.push(JSON.parse(line)) };
    const log = createLogger({ level: 'warn', format: 'json', destination });
    const { clock, world, state } = setUp(['a:1'], { log });
    world.reply = async () => bad('no_engine');
    await clock.pass(20_000);
    expect(state()).toBe('starting probe_no_engine');
    expect(lines).toMatchObject([
      { instance: 'a:1', url: 'http://a:1', msg: expect.stringContaining('is the path of its URL right?') },
    ]);
    world.reply = async () => good();
    await clock.pass(5000);
    expect(state()).toBe('ready probe_ok');
    world.reply = async () => bad('no_engine');
    await clock.pass(20_000);
    expect(state()).toBe('suspect probe_no_engine');
    expect(lines).toHaveLength(2);
  });

  it('goes by another interval at once, counted from the last probe', async () => {
    const { clock, calls, registry, health } = setUp();
    await clock.pass(1000);
    health.intervalMs = 3000;
    registry.repace();
    await clock.pass(2000);
    health.intervalMs = 500;
    await clock.pass(100);
    registry.repace();
    await clock.pass(500);
    expect(calls.map(({ at }) => at)).toEqual([0, 3000, 3500]);
    health.intervalMs = 0;
    registry.repace();
    expect(clock.pending).toBe(0);
    health.intervalMs = 5000;
    registry.repace();
    await clock.pass(4900);
    expect(calls.map(({ at }) => at)).toEqual([0, 3000, 3500, 8500]);
  });

  it('spreads probes by a tenth', async () => {
    const clock = new FakeClock();
    const calls: number[] = [];
    const values = [0, 0.999];
    await using registry = new PoolRegistryService({
      health: { intervalMs: 1000, timeoutMs: 0, failures: 3 },
      log: SILENT_LOGGER,
      clock,
      random: () => values.shift() ?? 0.5,
      probe: async () => {
        calls.push(clock.now());
        return good();
      },
    });
    registry.applySource('static', [spec('a:1')]);
    registry.start();
    await clock.pass(2100);
    expect(calls.map(Math.round)).toEqual([0, 900, 2000]);
  });

  it('reads cards and version first, every 30 s, and after a recovery; load every time', async () => {
    const { clock, calls, world, registry } = setUp();
    await clock.pass(30_000);
    const full = () => calls.filter(({ parts }) => parts.includes('models')).map(({ at }) => at);
    expect(full()).toEqual([0, 30_000]);
    expect(calls.every(({ parts }) => parts.includes('metrics'))).toBe(true);
    await clock.pass(1000);
    registry.notePassive('a:1', 'refused');
    await clock.pass(0);
    expect(full()).toEqual([0, 30_000, 31_000]);
    world.reply = async () => ({ ...good(), models: [] });
    await clock.pass(30_000);
    expect(registry.snapshot()[0]?.models).toEqual([]);
  });

  it('keeps the cards it has when they cannot be read again, and never claims to know them all beyond 256', async () => {
    const { clock, world, only } = setUp();
    await clock.pass(0);
    world.reply = async () => ({ health: { kind: 'ok', detail: '' } });
    await clock.pass(60_000);
    expect(only()).toMatchObject({
      modelsKnown: true,
      models: [{ id: 'm' }],
      engine: { version: '0.33.0', blockSize: 16 },
    });
    world.reply = async () => ({
      ...good(),
      models: Array.from({ length: 300 }, (_, i) => ({ ...CARD, id: `m${i}` })),
    });
    await clock.pass(5000);
    expect([only().models.length, only().modelsKnown]).toEqual([256, false]);
  });

  it('knows nothing of an engine without the optional routes, and routes to it', async () => {
    const { clock, world, only, state } = setUp();
    world.reply = async () => ({ health: { kind: 'ok', detail: '' }, metrics: {} });
    await clock.pass(0);
    expect(state()).toBe('ready probe_ok');
    expect(only()).toMatchObject({ modelsKnown: false, models: [], engine: { kind: '', version: '', blockSize: 0 } });
    expect(only().load).toBeUndefined();
    expect(only().incarnation?.processStartSeconds).toBeUndefined();
  });

  it('stops after the first good probe where the interval is off', async () => {
    const { clock, calls, world } = setUp(['a:1'], { intervalMs: 0 });
    world.reply = async () => bad('refused');
    await clock.pass(250);
    world.reply = async () => good();
    await clock.pass(100_000);
    expect(calls.map(({ at }) => at)).toEqual([0, 250, 750]);
    expect(clock.pending).toBe(0);
  });

  it('survives a probe that throws', async () => {
    const { clock, world, state } = setUp();
    world.reply = async () => {
      throw new Error('bug');
    };
    await clock.pass(0);
    expect(state()).toBe('starting probe_unreachable');
    world.reply = async () => good();
    await clock.pass(250);
    expect(state()).toBe('ready probe_ok');
  });
});

describe('losing an instance', () => {
  it('is SUSPECT after the third failed probe in a row, and READY after one good', async () => {
    const { clock, world, state } = setUp();
    await clock.pass(0);
    world.reply = async () => bad('unhealthy');
    await clock.pass(5000);
    expect(state()).toBe('ready probe_ok');
    await clock.pass(250);
    expect(state()).toBe('ready probe_ok');
    await clock.pass(500);
    expect(state()).toBe('suspect probe_unhealthy');
    world.reply = async () => good();
    await clock.pass(1000);
    expect(state()).toBe('ready probe_ok');
  });

  it('counts failures in a row only', async () => {
    const { clock, world, state } = setUp();
    let n = 0;
    world.reply = async () => (n++ % 3 === 0 ? good() : bad('unhealthy'));
    await clock.pass(60_000);
    expect(n).toBeGreaterThan(12);
    expect(state()).toBe('ready probe_ok');
  });

  it('gives a slow engine whole intervals, because busy is not dead', async () => {
    const { clock, calls, world, state } = setUp();
    await clock.pass(0);
    world.reply = async () => bad('timeout');
    await clock.pass(10_000);
    expect(state()).toBe('ready probe_ok');
    await clock.pass(5000);
    expect(state()).toBe('suspect probe_timeout');
    expect(calls.map(({ at }) => at)).toEqual([0, 5000, 10_000, 15_000]);
  });

  it('lets a health timeout pass while requests are served', async () => {
    const { clock, world, registry, state } = setUp();
    await clock.pass(0);
    world.reply = async (id) => {
      registry.notePassive(id, 'ok');
      return bad('timeout');
    };
    await clock.pass(60_000);
    expect(state()).toBe('ready probe_ok');
  });

  it('is SUSPECT at once after a refused connection of a request, probed at once, and READY again if that is good', async () => {
    const { clock, calls, registry, state } = setUp();
    await clock.pass(1000);
    registry.notePassive('a:1', 'refused');
    expect(state()).toBe('suspect connection_refused');
    registry.notePassive('a:1', 'refused');
    await clock.pass(0);
    expect(state()).toBe('ready probe_ok');
    expect(calls.map(({ at }) => at)).toEqual([0, 1000]);
  });

  it('does not let refused connections set the pace of the probes', async () => {
    const { clock, calls, registry } = setUp();
    await clock.pass(1000);
    for (let i = 0; i < 100; i += 1) {
      registry.notePassive('a:1', 'refused');
      await clock.pass(10);
    }
    expect(calls.length).toBeLessThanOrEqual(6);
  });

  it('probes again after a running probe that may have begun before the refusal', async () => {
    const { clock, calls, world, registry, state } = setUp();
    await clock.pass(0);
    const gate = Promise.withResolvers<ProbeResult>();
    world.reply = () => gate.promise;
    await clock.pass(5000);
    registry.notePassive('a:1', 'refused');
    world.reply = async () => bad('refused');
    gate.resolve(good());
    await clock.pass(250);
    expect(calls.map(({ at }) => at)).toEqual([0, 5000, 5250]);
    expect(state()).toBe('ready probe_ok');
    await clock.pass(750);
    expect(state()).toBe('suspect probe_refused');
  });

  it('ignores refusals of what never answered, and of strangers', async () => {
    const { world, clock, registry, state } = setUp();
    world.reply = async () => bad('refused');
    await clock.pass(0);
    registry.notePassive('a:1', 'refused');
    registry.notePassive('nobody:1', 'refused');
    expect(state()).toBe('starting probe_refused');
  });
});

describe('an instance that comes and goes', () => {
  /** Is lost by a refused connection, and has a good probe at once; returns when it is READY again. */
  async function backAfter({ clock, registry, state }: ReturnType<typeof setUp>) {
    registry.notePassive('a:1', 'refused');
    const from = clock.now();
    while (state() !== 'ready probe_ok') await clock.pass(50);
    return clock.now() - from;
  }

  it('must pass its probes for longer each time it is lost within a minute', async () => {
    const world = setUp(['a:1'], { dampingMs: 1000 });
    await world.clock.pass(1000);
    const waits: number[] = [];
    for (let i = 0; i < 7; i++) waits.push(await backAfter(world));
    expect(waits[0]).toBeLessThanOrEqual(300);
    const rest = waits.slice(1);
    for (const [i, wait] of rest.entries()) expect(wait / 1000 / Math.min(2 ** i, 16)).toBeCloseTo(1, 0);
    await world.clock.pass(60_000);
    expect(await backAfter(world)).toBeLessThanOrEqual(300);
  });

  it('says so, and begins anew when a probe fails meanwhile', async () => {
    const { clock, registry, world, state } = setUp(['a:1'], { dampingMs: 1000 });
    await clock.pass(0);
    registry.notePassive('a:1', 'refused');
    await clock.pass(300);
    registry.notePassive('a:1', 'refused');
    await clock.pass(600);
    expect(state()).toBe('suspect flapping');
    world.reply = async () => bad('unhealthy');
    await clock.pass(1000);
    expect(state()).toBe('suspect probe_unhealthy');
    world.reply = async () => good();
    await clock.pass(900);
    expect(state()).toBe('suspect flapping');
    await clock.pass(1000);
    expect(state()).toBe('ready probe_ok');
  });

  it('is back with one good probe where that is off', async () => {
    const world = setUp();
    await world.clock.pass(1000);
    for (let i = 0; i < 5; i++) expect(await backAfter(world)).toBeLessThanOrEqual(300);
  });
});

describe('incarnation', () => {
  it('is a new one when the start time changes, and reads the new process at once', async () => {
    const { clock, calls, world, only, generation, state } = setUp();
    await clock.pass(0);
    world.reply = async () => ({
      ...good({ processStartSeconds: 200, blockSize: 32 }),
      version: '0.34.0',
      models: [{ ...CARD, id: 'n' }],
    });
    await clock.pass(5000);
    expect(generation()).toBe(2);
    expect(calls.map(({ at }) => at)).toEqual([0, 5000, 5000]);
    expect(only()).toMatchObject({
      incarnation: { processStartSeconds: 200 },
      engine: { version: '0.34.0', blockSize: 32 },
      models: [{ id: 'n' }],
    });
    expect(state()).toBe('ready probe_ok');
    await clock.pass(60_000);
    expect(generation()).toBe(2);
  });

  it('is not ready before its details are known: the process before may have had another template', async () => {
    const { clock, world, registry, only, state } = setUp();
    world.reply = async () => ({ ...good({ processStartSeconds: 100 }), version: '0.32.0' });
    await clock.pass(0);
    const seen: string[] = [];
    registry.onChange(() => seen.push(`${state()} ${only().engine?.version}`));
    world.reply = async () => ({ ...good({ processStartSeconds: 200 }), version: '0.33.0' });
    await clock.pass(5000);
    expect(seen).toEqual(['suspect restarted ', 'ready probe_ok 0.33.0']);
  });

  it('is a new one after a refused connection where the engine has no start time', async () => {
    const { clock, world, registry, generation } = setUp();
    world.reply = async () => good({});
    await clock.pass(1000);
    registry.notePassive('a:1', 'refused');
    expect(generation()).toBe(1);
    await clock.pass(0);
    expect(generation()).toBe(2);
  });

  it('is the same one after refused connections if the start time is the same', async () => {
    const { clock, world, registry, generation } = setUp();
    await clock.pass(1000);
    registry.notePassive('a:1', 'refused');
    world.reply = async () => bad('refused');
    await clock.pass(3000);
    world.reply = async () => good();
    await clock.pass(5000);
    expect(generation()).toBe(1);
  });

  it('is a new one after a single refused probe, even if it stayed READY', async () => {
    const { clock, world, generation, state } = setUp();
    world.reply = async () => good({});
    await clock.pass(0);
    world.reply = async () => bad('refused');
    await clock.pass(5000);
    expect(state()).toBe('ready probe_ok');
    world.reply = async () => good({});
    await clock.pass(250);
    expect(generation()).toBe(2);
  });

  it('is the same one after timeouts, and the first one however long the start took', async () => {
    const { clock, world, generation, state } = setUp();
    world.reply = async () => bad('refused');
    await clock.pass(10_000);
    world.reply = async () => good({});
    await clock.pass(5000);
    expect(generation()).toBe(1);
    world.reply = async () => bad('timeout');
    await clock.pass(20_000);
    expect(state()).toBe('suspect probe_timeout');
    world.reply = async () => good({});
    await clock.pass(5000);
    expect(generation()).toBe(1);
  });
});

describe('draining', () => {
  it('takes effect at once, outlives good probes, and ends with a resume and a good probe', async () => {
    const { clock, registry, state } = setUp();
    await clock.pass(1000);
    const drained = await registry.drainInstance(drain('a:1', 'rolling_update'));
    expect(drained.instance).toMatchObject({ state: InstanceState.DRAINING, stateReason: 'rolling_update' });
    await registry.drainInstance(drain('a:1', 'again'));
    await clock.pass(10_000);
    expect(state()).toBe('draining rolling_update');
    const resumed = await registry.resumeInstance(resume('a:1'));
    expect(resumed.instance).toMatchObject({ state: InstanceState.SUSPECT, stateReason: 'resumed' });
    await clock.pass(250);
    expect(state()).toBe('ready probe_ok');
    expect((await registry.resumeInstance(resume('a:1'))).instance).toMatchObject({ state: InstanceState.READY });
  });

  it('is GONE when a draining instance stops answering, and draining still when it is back', async () => {
    const { clock, world, registry, state, generation } = setUp();
    await clock.pass(0);
    await registry.drainInstance(drain('a:1'));
    registry.notePassive('a:1', 'refused');
    expect(state()).toBe('draining operator');
    world.reply = async () => bad('refused');
    await clock.pass(6000);
    expect(state()).toBe('gone probe_refused');
    world.reply = async () => good({ processStartSeconds: 300 });
    await clock.pass(5000);
    expect(state()).toBe('draining operator');
    expect(generation()).toBe(2);
  });

  it('refuses calls that mean another life, unknown instances and malformed fields', async () => {
    const { clock, registry } = setUp();
    await clock.pass(0);
    const code = (promise: Promise<unknown>) =>
      promise.then(
        () => 'ok',
        (error: unknown) => (error as { reason: string }).reason,
      );
    const life = (incarnation: object) =>
      code(registry.drainInstance(create(DrainInstanceRequestSchema, { instanceId: 'a:1', incarnation })));
    expect(await life({ generation: 2 })).toBe('STALE_INCARNATION');
    expect(await life({ processStartSeconds: 99 })).toBe('STALE_INCARNATION');
    expect(await life({ processStartSeconds: 100, engineId: 'unknown-yet' })).toBe('ok');
    expect(await code(registry.drainInstance(drain('')))).toBe('INVALID_ARGUMENT');
    expect(await code(registry.drainInstance(drain('a:1', 'Not a word')))).toBe('INVALID_ARGUMENT');
    expect(await code(registry.drainInstance(drain('x:1')))).toBe('INSTANCE_NOT_FOUND');
    expect(await code(registry.getInstance(create(GetInstanceRequestSchema, { instanceId: 'x:1' })))).toBe(
      'INSTANCE_NOT_FOUND',
    );
  });
});

describe('reading', () => {
  const list = (registry: PoolRegistryService, init: object) =>
    registry.listInstances(create(ListInstancesRequestSchema, init));
  const ids = async (registry: PoolRegistryService, init: object) =>
    (await list(registry, init)).instances.map(({ id }) => id);

  it('keeps one snapshot in the order of the configuration until something changes', async () => {
    const { clock, world, registry } = setUp(['p:1', 'a:1']);
    let changes = 0;
    const stop = registry.onChange(() => {
      changes += 1;
    });
    await clock.pass(0);
    const [before, revision] = [registry.snapshot(), registry.revision];
    expect(before.map(({ id }) => id)).toEqual(['p:1', 'a:1']);
    expect(changes).toBe(2);
    await clock.pass(20_000);
    expect(registry.snapshot()).toBe(before);
    expect(registry.revision).toBe(revision);
    world.reply = async (id) => (id === 'a:1' ? good({ processStartSeconds: 100, running: 9 }) : good());
    await clock.pass(5000);
    expect(registry.snapshot()).not.toBe(before);
    expect(registry.snapshot()[0]).toBe(before[0]);
    expect(registry.snapshot()[1]?.revision).toBe(registry.revision);
    expect(changes).toBe(3);
    stop();
    await registry.drainInstance(drain('p:1'));
    expect(changes).toBe(3);
  });

  it('goes on when a listener throws', async () => {
    const { clock, registry, state } = setUp();
    registry.onChange(() => {
      throw new Error('bug');
    });
    await clock.pass(0);
    expect(state()).toBe('ready probe_ok');
  });

  it('lists by role, model, state and label, GONE ones only when asked for', async () => {
    const { clock, world, registry } = setUp(['p:1', 'a:1', 'a:2', 'b:1']);
    world.reply = async (id) =>
      id === 'a:2' ? bad('refused') : { ...good(), models: [{ ...CARD, id: id === 'p:1' ? 'other' : 'm' }] };
    await clock.pass(0);
    const filter = (init: object) => ({ filter: create(InstanceFilterSchema, init) });
    expect(await ids(registry, {})).toEqual(['a:1', 'a:2', 'b:1', 'p:1']);
    expect(await ids(registry, filter({ role: Role.DECODE }))).toEqual(['a:1', 'a:2', 'b:1']);
    expect(await ids(registry, filter({ role: Role.BOTH }))).toEqual(['b:1']);
    expect(await ids(registry, filter({ model: 'm' }))).toEqual(['a:1', 'a:2', 'b:1']);
    expect(await ids(registry, filter({ model: 'm', states: [InstanceState.READY] }))).toEqual(['a:1', 'b:1']);
    expect(await ids(registry, filter({ labels: { zone: 'p:1' } }))).toEqual(['p:1']);
    await registry.drainInstance(drain('a:1'));
    world.reply = async () => bad('refused');
    await clock.pass(6000);
    expect(await ids(registry, {})).toEqual(['a:2', 'b:1', 'p:1']);
    expect(await ids(registry, filter({ states: [InstanceState.GONE] }))).toEqual(['a:1']);
  });

  it('pages by id and refuses tokens of others', async () => {
    const { registry } = setUp(['a:3', 'a:1', 'a:2'], { start: false });
    const first = await list(registry, { pageSize: 2 });
    expect(first.instances.map(({ id }) => id)).toEqual(['a:1', 'a:2']);
    const second = await list(registry, { pageSize: 2, pageToken: first.nextPageToken });
    expect([second.instances.map(({ id }) => id), second.nextPageToken]).toEqual([['a:3'], '']);
    expect((await list(registry, { pageSize: 3 })).nextPageToken).toBe('');
    await expect(list(registry, { pageToken: 'x' })).rejects.toMatchObject({ reason: 'PAGE_TOKEN_INVALID' });
    await expect(list(registry, { pageToken: `${first.nextPageToken}!` })).rejects.toMatchObject({
      reason: 'PAGE_TOKEN_INVALID',
    });
  });

  it('tells how old a load is without touching the shared message', async () => {
    const { clock, registry, only } = setUp();
    await clock.pass(3000);
    const { instance } = await registry.getInstance(create(GetInstanceRequestSchema, { instanceId: 'a:1' }));
    const age = instance?.load?.age;
    expect(age === undefined ? undefined : durationMs(age)).toBe(3000);
    expect(only().load?.age).toBeUndefined();
  });

  it('tells no load any more once it has not been read for long, and keeps the layout', async () => {
    const { clock, world, only } = setUp();
    await clock.pass(0);
    expect(only().load?.running).toBe(1);
    const { metrics: _, ...silent } = good();
    world.reply = async () => silent;
    await clock.pass(15_000);
    expect(only().load?.running).toBe(1);
    await clock.pass(5000);
    expect([only().load, only().engine?.blockSize]).toEqual([undefined, 16]);
  });
});

describe('watching', () => {
  function open(registry: PoolRegistryService, init: object = {}) {
    const abort = new AbortController();
    const stream = registry.watchInstances(create(WatchInstancesRequestSchema, init), { signal: abort.signal });
    const iterator = stream[Symbol.asyncIterator]();
    const next = async () => {
      const { value } = await iterator.next();
      return value === undefined ? 'end' : show(value);
    };
    return { abort, iterator, next };
  }
  function show({ event, revision, resumeToken }: WatchInstancesResponse): string {
    const at = `@${revision} ${resumeToken}`.trim();
    switch (event.case) {
      case 'upserted':
        return `${event.value.id} ${stateWord(event.value.state)} ${at}`;
      case 'removed':
        return `-${event.value.instanceId} ${event.value.reason} ${at}`;
      case 'reset':
        return `reset ${event.value.reason} ${at}`;
      default:
        return `${event.case} ${at}`;
    }
  }

  it('sends a snapshot, each change with a token, and checkpoints at the interval', async () => {
    const { clock, registry } = setUp(['a:1', 'a:2'], { start: false });
    const { abort, next } = open(registry, { checkpointInterval: durationFromMs(2000) });
    expect([await next(), await next(), await next()]).toEqual([
      'a:1 starting @2',
      'a:2 starting @2',
      'snapshotComplete @2 e1.2',
    ]);
    const waiting = next();
    await settle();
    await registry.drainInstance(drain('a:2'));
    await registry.drainInstance(drain('a:1'));
    expect([await waiting, await next()]).toEqual(['a:2 draining @3 e1.3', 'a:1 draining @4 e1.4']);
    const checkpoint = next();
    await clock.pass(2000);
    expect(await checkpoint).toBe('checkpoint @4 e1.4');
    const end = next();
    await settle();
    abort.abort();
    expect(await end).toBe('end');
    expect(clock.pending).toBe(0);
  });

  it('sends a checkpoint after an hour at the latest, however long it may be silent', async () => {
    const { clock, registry } = setUp(['a:1'], { start: false });
    const { abort, next } = open(registry, { checkpointInterval: { seconds: 2n ** 53n, nanos: 0 } });
    expect([await next(), await next()]).toEqual(['a:1 starting @1', 'snapshotComplete @1 e1.1']);
    let told = '';
    const checkpoint = next().then((text) => {
      told = text;
    });
    await settle();
    await clock.pass(3_599_000);
    expect(told).toBe('');
    await clock.pass(1000);
    await checkpoint;
    expect(told).toBe('checkpoint @1 e1.1');
    abort.abort();
  });

  it('resumes behind a token with what was missed, and with a checkpoint at once if nothing was', async () => {
    const { registry } = setUp(['a:1', 'a:2'], { start: false });
    await registry.drainInstance(drain('a:1'));
    const missed = open(registry, { resumeToken: 'e1.2' });
    expect(await missed.next()).toBe('a:1 draining @3 e1.3');
    const idle = open(registry, { resumeToken: 'e1.3' });
    expect(await idle.next()).toBe('checkpoint @3 e1.3');
  });

  it('resets a token of another life and one whose changes are compacted', async () => {
    const { registry } = setUp(['a:1'], { start: false, historyLimit: 2 });
    for (const [resumeToken, reason] of [
      ['e0.1', 'epoch'],
      ['e1.9', 'epoch'],
    ]) {
      const { next } = open(registry, { resumeToken });
      expect([await next(), await next(), await next()]).toEqual([
        `reset ${reason} @1`,
        'a:1 starting @1',
        'snapshotComplete @1 e1.1',
      ]);
    }
    await registry.drainInstance(drain('a:1'));
    await registry.resumeInstance(resume('a:1'));
    await registry.drainInstance(drain('a:1'));
    const { next } = open(registry, { resumeToken: 'e1.1' });
    expect([await next(), await next(), await next()]).toEqual([
      'reset compacted @4',
      'a:1 draining @4',
      'snapshotComplete @4 e1.4',
    ]);
    const near = open(registry, { resumeToken: 'e1.2' });
    expect(await near.next()).toBe('a:1 starting @3 e1.3');
    await expect(open(registry, { resumeToken: 'nonsense' }).iterator.next()).rejects.toMatchObject({
      reason: 'RESUME_TOKEN_INVALID',
    });
  });

  it('resets a reader that lags behind the history', async () => {
    const { registry } = setUp(['a:1'], { start: false, historyLimit: 2 });
    const { next } = open(registry);
    expect([await next(), await next()]).toEqual(['a:1 starting @1', 'snapshotComplete @1 e1.1']);
    for (let i = 0; i < 3; i += 1) {
      await registry.drainInstance(drain('a:1'));
      await registry.resumeInstance(resume('a:1'));
    }
    expect([await next(), await next(), await next()]).toEqual([
      'reset compacted @7',
      'a:1 starting @7',
      'snapshotComplete @7 e1.7',
    ]);
  });

  it('reports an instance that leaves the filter as removed, once', async () => {
    const { registry } = setUp(['a:1'], { start: false });
    const filter = create(InstanceFilterSchema, { states: [InstanceState.STARTING] });
    const { next } = open(registry, { filter });
    expect([await next(), await next()]).toEqual(['a:1 starting @1', 'snapshotComplete @1 e1.1']);
    await registry.drainInstance(drain('a:1'));
    expect(await next()).toBe('-a:1 filtered @2 e1.2');
    await registry.resumeInstance(resume('a:1'));
    expect(await next()).toBe('a:1 starting @3 e1.3');
    await registry.drainInstance(drain('a:1'));
    const resumed = open(registry, { filter, resumeToken: 'e1.1' });
    expect([await resumed.next(), await resumed.next(), await resumed.next()]).toEqual([
      '-a:1 filtered @2 e1.2',
      'a:1 starting @3 e1.3',
      '-a:1 filtered @4 e1.4',
    ]);
  });

  it('allows 1,024 watches at a time', async () => {
    const { registry } = setUp(['a:1'], { start: false });
    const watches = Array.from({ length: 1024 }, () => open(registry));
    for (const { next } of watches) await next();
    await expect(open(registry).iterator.next()).rejects.toMatchObject({ reason: 'LIMIT_EXCEEDED' });
    await watches[0]?.iterator.return?.();
    expect(await open(registry).next()).toBe('a:1 starting @1');
  });

  it('ends with SHUTTING_DOWN when the registry is disposed, leaving no timer', async () => {
    const { clock, registry } = setUp(['a:1']);
    await clock.pass(0);
    const { next, iterator } = open(registry);
    await next();
    await next();
    const waiting = iterator.next();
    await settle();
    expect(clock.pending).toBe(2);
    await registry[Symbol.asyncDispose]();
    await expect(waiting).rejects.toMatchObject({ reason: 'SHUTTING_DOWN' });
    expect(clock.pending).toBe(0);
    registry.notePassive('a:1', 'refused');
    registry.start();
    expect(clock.pending).toBe(0);
  });
});

describe('probeKeyOf', () => {
  it.each([
    ['auto', undefined, 'global', 'global'],
    ['auto', 'own', 'global', 'own'],
    ['replace', undefined, undefined, undefined],
    ['forward', undefined, 'global', undefined],
    ['forward', 'own', 'global', 'own'],
    ['strip', 'own', 'global', undefined],
  ] as const)('%s with instance key %s and global key %s sends %s', (engineAuth, apiKey, openaiApiKey, expected) => {
    const rules = { engineAuth, ...(openaiApiKey === undefined ? {} : { openaiApiKey }) };
    expect(probeKeyOf(apiKey === undefined ? {} : { apiKey }, rules)).toBe(expected);
  });
});

it('what handles pin shows until another process has the place; what ran out is the engine’s own count', async () => {
  const { clock, registry, only, world, generation } = setUp();
  const metrics = { processStartSeconds: 100, blockSize: 16 };
  world.reply = async () => good({ ...metrics, kvExpired: 3 });
  await clock.pass(10);
  registry.notePins('a:1', { entries: 2, blocks: 30, share: 0.25 });
  registry.notePins('nobody', { entries: 2, blocks: 30, share: 0.25 });
  const { revision } = only();
  registry.notePins('a:1', { entries: 2, blocks: 30, share: 0.25 });
  expect(only()).toMatchObject({ pins: { entries: 2, blocks: 30n, share: 0.25 }, kvExpired: 3n, revision });
  world.reply = async () => good({ ...metrics, processStartSeconds: 200 });
  await clock.pass(10_000);
  expect(generation()).toBe(2);
  expect([only().pins, only().kvExpired]).toEqual([undefined, undefined]);
});

it('what replies show of an engine holds for the life that it is of', async () => {
  const { clock, registry, only, world } = setUp();
  const start = (processStartSeconds: number) => {
    world.reply = async () => good({ processStartSeconds, blockSize: 16 });
  };
  start(100);
  await clock.pass(10);
  expect(only().engine).toMatchObject({ version: '0.33.0', blockSize: 16, handles: '', kvGroups: 0 });
  expect(only().engine?.tokenizeMembers).toContain('chat_template_kwargs');
  registry.noteLearnt('a:1', { handles: 'all', kvGroups: 1 }, 2);
  expect(only().engine?.handles).toBe('');
  registry.noteLearnt('a:1', { handles: 'whole', kvGroups: 1 }, 1);
  expect(only().engine).toMatchObject({ handles: 'whole', kvGroups: 1 });
  start(200);
  await clock.pass(10_000);
  expect(only().engine).toMatchObject({ handles: '', kvGroups: 0 });
});

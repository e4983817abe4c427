import { create } from '@bufbuild/protobuf';
import { durationFromMs } from '@bufbuild/protobuf/wkt';
import { describe, expect, it } from 'vitest';
import { Role } from '../../gen/baton/v1/instance_pb.ts';
import {
  DeregisterInstanceRequestSchema,
  DrainInstanceRequestSchema,
  RegisterInstanceRequestSchema,
  ResumeInstanceRequestSchema,
} from '../../gen/baton/v1/pool_registry_pb.ts';
import { stateWord } from '../../src/core/instance-words.ts';
import { createLogger } from '../../src/obs/log.ts';
import { LATE_READ } from '../../src/services/instance-record.ts';
import { bad, good, setUp, spec } from '../support/registry.ts';

function setUpSources(ids: readonly string[] = []) {
  const lines: { msg: string; instance?: string }[] = [];
  const destination = { write: (line: string) => void lines.push(JSON.parse(line)) };
  const world = setUp(ids, { log: createLogger({ level: 'warn', format: 'json', destination }) });
  const pool = () =>
    world.registry.snapshot().map((i) => `${i.id} ${stateWord(i.state)} ${i.stateReason} ${i.incarnation?.generation}`);
  const view = (...named: readonly string[]) =>
    world.registry.applySource(
      'file',
      named.map((id) => spec(id)),
    );
  return { ...world, pool, view, lines };
}

describe('a source', () => {
  it('adds what it names; what it names no more drains, and leaves when that is over', async () => {
    const { clock, registry, pool, view } = setUpSources();
    view('a:1', 'a:2');
    await clock.pass(0);
    expect(pool()).toEqual(['a:1 ready probe_ok 1', 'a:2 ready probe_ok 1']);
    view('a:2');
    expect(pool()).toEqual(['a:1 draining removed_from_source 1', 'a:2 ready probe_ok 1']);
    registry.endDrain('a:1');
    expect(pool()[0]).toBe('a:1 gone drained 1');
    await clock.pass(300_000);
    expect(pool()).toEqual(['a:2 ready probe_ok 1']);
  });

  it('resumes what it names again, and not what an operator drained', async () => {
    const { clock, registry, pool, view } = setUpSources();
    view('a:1', 'a:2');
    await clock.pass(0);
    await registry.drainInstance(create(DrainInstanceRequestSchema, { instanceId: 'a:2' }));
    view();
    expect(pool()).toEqual(['a:1 draining removed_from_source 1', 'a:2 draining operator 1']);
    view('a:1', 'a:2');
    await clock.pass(250);
    expect(pool()).toEqual(['a:1 ready probe_ok 1', 'a:2 draining operator 1']);
    registry.endDrain('a:2');
    expect(pool()[1]).toBe('a:2 gone drained 1');
    await clock.pass(400_000);
    await registry.resumeInstance(create(ResumeInstanceRequestSchema, { instanceId: 'a:2' }));
    await clock.pass(250);
    expect(pool()[1]).toBe('a:2 ready probe_ok 1');
  });

  it('loses at once what never served and what is down', async () => {
    const { clock, world, pool, view } = setUpSources();
    world.reply = async (id) => (id === 'a:1' ? bad('refused') : good());
    view('a:1', 'a:2');
    await clock.pass(0);
    world.reply = async () => bad('refused');
    await clock.pass(10_000);
    view();
    expect(pool()).toEqual(['a:1 gone removed_from_source 1', 'a:2 gone probe_refused 1']);
    view('a:1');
    expect(pool()[0]).toBe('a:1 starting awaiting_first_probe 2');
  });

  it('begins a new life with another URL, role or connector, and none with other labels', async () => {
    const { clock, registry, pool, view } = setUpSources();
    view('a:1');
    await clock.pass(0);
    registry.applySource('file', [{ ...spec('a:1'), labels: { zone: 'b' } }]);
    expect(pool()).toEqual(['a:1 ready probe_ok 1']);
    expect(registry.snapshot()[0]?.labels).toEqual({ zone: 'b' });
    registry.applySource('file', [{ ...spec('a:1'), url: 'http://b:1' }]);
    expect(pool()).toEqual(['a:1 starting awaiting_first_probe 2']);
    await clock.pass(0);
    expect(pool()).toEqual(['a:1 ready probe_ok 2']);
  });

  it('does not touch what another one named first, and complains once', async () => {
    const { registry, pool, view, lines } = setUpSources(['a:1']);
    view('a:1', 'a:2');
    view('a:1', 'a:2');
    registry.applySource('dns', [{ ...spec('x'), url: 'http://a:2' }]);
    view('a:2');
    expect(pool().map((line) => line.split(' ')[0])).toEqual(['a:1', 'a:2']);
    expect(lines.map(({ msg }) => msg)).toEqual([
      'an instance of a source is left out: its id is known from another source (static); it waits until that names it no more',
      'an instance of a source is left out: its URL is that of a:2; it waits until that has it no more',
    ]);
  });

  it('that names an engine twice, in two roles, has it once, and it does not begin a new life with each view', async () => {
    const { registry, pool, lines } = setUpSources();
    for (let i = 0; i < 3; i += 1) registry.applySource('dns', [spec('a:1', 'prefill'), spec('a:1', 'decode')]);
    expect(pool()).toEqual(['a:1 starting awaiting_first_probe 1']);
    expect(lines.map(({ msg }) => msg)).toEqual(['an instance of a source is left out: it is named twice']);
  });

  it('says that an engine restarted only where a process did', async () => {
    const { clock, registry, pool, lines, world } = setUpSources();
    registry.applySource('file', [spec('a:1', 'decode')]);
    await clock.pass(0);
    registry.applySource('file', [spec('a:1', 'prefill')]);
    await clock.pass(0);
    expect(pool()).toEqual(['a:1 ready probe_ok 2']);
    expect(lines).toEqual([]);
    world.reply = async () => good({ processStartSeconds: 200 });
    await clock.pass(10_000);
    expect(lines.map(({ msg }) => msg)).toEqual(['instance restarted']);
  });

  it('does not bring back what an operator removed, unless it stopped naming it; whoever registers it may', async () => {
    const { clock, registry, pool, view } = setUpSources(['s:1']);
    view('a:1', 'a:2');
    await clock.pass(0);
    for (const instanceId of ['a:1', 'a:2', 's:1']) {
      await registry.deregisterInstance(create(DeregisterInstanceRequestSchema, { instanceId }));
    }
    view('a:1', 'a:2');
    await clock.pass(400_000);
    view('a:1', 'a:2');
    expect(pool()).toEqual([]);
    view('a:2');
    view('a:1', 'a:2');
    await registry.registerInstance(
      create(RegisterInstanceRequestSchema, {
        idempotencyKey: 'k',
        instance: { url: 'http://s:1', role: Role.DECODE, connector: 'nixl' },
        untilRemoved: true,
      }),
    );
    await clock.pass(0);
    expect(pool()).toEqual(['a:1 ready probe_ok 2', 's:1 ready probe_ok 2']);
  });
});

describe('an engine whose name or source changes', () => {
  const D1 = { ...spec('d1'), url: 'http://a:1' };
  const register = (registry: ReturnType<typeof setUpSources>['registry']) =>
    registry.registerInstance(
      create(RegisterInstanceRequestSchema, {
        idempotencyKey: 'k',
        instance: { url: 'http://a:1', role: Role.DECODE, connector: 'nixl' },
        lease: durationFromMs(10_000),
      }),
    );
  const resume = (registry: ReturnType<typeof setUpSources>['registry'], instanceId: string) =>
    registry.resumeInstance(create(ResumeInstanceRequestSchema, { instanceId }));

  it('is in service under the new name at once, and again under the old one', async () => {
    const { clock, registry, pool, view, lines } = setUpSources();
    view('a:1');
    await clock.pass(0);
    registry.applySource('file', [D1]);
    await clock.pass(0);
    expect(pool()).toEqual(['a:1 draining removed_from_source 1', 'd1 ready probe_ok 1']);
    await expect(resume(registry, 'a:1')).rejects.toThrow(/in the pool as d1/);
    view('a:1');
    await clock.pass(250);
    expect(pool()).toEqual(['a:1 ready probe_ok 1', 'd1 draining removed_from_source 1']);
    await expect(resume(registry, 'd1')).rejects.toThrow(/in the pool as a:1/);
    registry.endDrain('d1');
    expect(pool()).toEqual(['a:1 ready probe_ok 1', 'd1 gone drained 1']);
    expect(lines).toEqual([]);
    registry.applySource('dns', [D1]);
    expect(registry.leftOut).toMatchObject([{ source: 'dns', instance: 'd1' }]);
  });

  it('lives on without a break where the new source names it before the old one drops it', async () => {
    const { clock, registry, pool, view } = setUpSources(['a:1', 'a:2']);
    await clock.pass(0);
    view('a:1');
    expect(registry.leftOut).toMatchObject([{ source: 'file', instance: 'a:1' }]);
    const states: string[] = [];
    registry.onChange(() => states.push(...pool()));
    registry.applySource('static', [spec('a:2')]);
    await clock.pass(0);
    expect([...new Set([...states, ...pool()])]).toEqual(['a:1 ready probe_ok 1', 'a:2 ready probe_ok 1']);
    expect(registry.leftOut).toEqual([]);
    view();
    expect(pool()[0]).toBe('a:1 draining removed_from_source 1');
  });

  it('lives on after the next check where the old source drops it first', async () => {
    const { clock, registry, pool, view, lines } = setUpSources(['a:1']);
    await clock.pass(0);
    registry.applySource('static', []);
    expect(pool()).toEqual(['a:1 draining removed_from_source 1']);
    view('a:1');
    await clock.pass(250);
    expect(pool()).toEqual(['a:1 ready probe_ok 1']);
    registry.applySource('static', []);
    expect(pool()).toEqual(['a:1 ready probe_ok 1']);
    expect(lines).toEqual([]);
  });

  it('is taken up without another view when the id or the URL that it waits for is free', async () => {
    const { clock, registry, pool, view } = setUpSources();
    await register(registry);
    view('a:1');
    registry.applySource('dns', [D1]);
    await clock.pass(9000);
    expect(pool()).toEqual(['a:1 ready probe_ok 1']);
    expect(registry.leftOut.map(({ source, instance }) => `${source} ${instance}`)).toEqual(['file a:1', 'dns d1']);
    // Its lease ends.
    await clock.pass(1000);
    expect(pool()).toEqual(['a:1 ready probe_ok 2']);
    expect(registry.leftOut.map(({ instance }) => instance)).toEqual(['d1']);
    view();
    await clock.pass(0);
    expect(pool()).toEqual(['a:1 draining removed_from_source 2', 'd1 ready probe_ok 1']);
    expect(registry.leftOut).toEqual([]);
  });

  it('is registered at once when its source drops it, as a new life', async () => {
    const { clock, registry, pool } = setUpSources(['a:1']);
    await clock.pass(0);
    await expect(register(registry)).rejects.toThrow(/another source \(static\)/);
    registry.applySource('static', []);
    await register(registry);
    await clock.pass(0);
    expect(pool()).toEqual(['a:1 ready probe_ok 2']);
  });

  it('may change places with another; one that finds its new place taken drains at the old one and waits', async () => {
    const { clock, registry, pool, view } = setUpSources(['s:1']);
    view('a:1', 'a:2');
    await clock.pass(0);
    const at = (id: string, url: string) => ({ ...spec(id), url: `http://${url}` });
    registry.applySource('file', [at('a:1', 'a:2'), at('a:2', 'a:1')]);
    await clock.pass(0);
    expect(pool().slice(1)).toEqual(['a:1 ready probe_ok 2', 'a:2 ready probe_ok 2']);
    expect(registry.snapshot().map(({ url }) => url)).toEqual(['http://s:1', 'http://a:2', 'http://a:1']);
    registry.applySource('file', [at('a:1', 's:1'), at('a:2', 'a:2')]);
    await clock.pass(0);
    expect(pool()).toEqual(['s:1 ready probe_ok 1', 'a:1 draining removed_from_source 2', 'a:2 ready probe_ok 3']);
    registry.applySource('static', []);
    await clock.pass(0);
    expect(pool()).toEqual(['s:1 draining removed_from_source 1', 'a:1 ready probe_ok 3', 'a:2 ready probe_ok 3']);
  });

  it('keeps the drain of an operator, and is not trusted under the new name either', async () => {
    const { clock, registry, pool, view } = setUpSources();
    view('a:1');
    await clock.pass(0);
    await registry.drainInstance(create(DrainInstanceRequestSchema, { instanceId: 'a:1', reason: 'update' }));
    registry.applySource('file', [D1]);
    await clock.pass(0);
    expect(pool()).toEqual(['a:1 draining update 1', 'd1 draining update 1']);
    await resume(registry, 'd1');
    await clock.pass(250);
    expect(pool()[1]).toBe('d1 ready probe_ok 1');
    // A request that began under the old name.
    registry.drain('a:1', LATE_READ);
    expect(pool()).toEqual(['a:1 draining late_read 1', 'd1 draining late_read 1']);
    registry.applySource('file', [{ ...D1, id: 'd2' }]);
    await clock.pass(0);
    expect(pool()[2]).toBe('d2 draining late_read 1');
  });

  it('stays away where an operator removed it, whoever else names it', async () => {
    const { clock, registry, pool, view } = setUpSources(['a:1']);
    view('a:1');
    registry.applySource('dns', [D1]);
    await registry.deregisterInstance(create(DeregisterInstanceRequestSchema, { instanceId: 'a:1' }));
    view('a:1');
    await clock.pass(400_000);
    expect(pool()).toEqual([]);
    expect(registry.leftOut).toEqual([]);
    view();
    view('a:1');
    await clock.pass(0);
    expect(pool()).toEqual(['a:1 ready probe_ok 2']);
  });
});

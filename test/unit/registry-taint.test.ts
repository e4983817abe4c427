import { create } from '@bufbuild/protobuf';
import { expect, it } from 'vitest';
import { DrainInstanceRequestSchema, ResumeInstanceRequestSchema } from '../../gen/baton/v1/pool_registry_pb.ts';
import { LATE_READ } from '../../src/services/instance-record.ts';
import { bad, good, setUp, spec } from '../support/registry.ts';

const ID = 'a:1';
const restarted = () => good({ processStartSeconds: 200 });

it('an engine that is not trusted is out of use until another process answers', async () => {
  const { clock, registry, state, world } = setUp();
  await clock.pass(0);
  world.reply = async () => bad('timeout');
  await clock.pass(20_000);
  registry.drain(ID, LATE_READ);
  expect(state()).toBe('gone probe_timeout');
  world.reply = async () => good();
  await clock.pass(10_000);
  expect(state()).toBe('draining late_read');
  world.reply = async () => restarted();
  await clock.pass(5000);
  expect(state()).toBe('ready probe_ok');
});

it('who resumes his own drain does not bring it back; who resumes it once more does', async () => {
  const { clock, registry, state } = setUp();
  await clock.pass(0);
  await registry.drainInstance(create(DrainInstanceRequestSchema, { instanceId: ID, reason: 'update' }));
  registry.drain(ID, LATE_READ);
  expect(state()).toBe('draining late_read');
  const resume = async () => {
    await registry.resumeInstance(create(ResumeInstanceRequestSchema, { instanceId: ID }));
    await clock.pass(1000);
  };
  await resume();
  expect(state()).toBe('draining late_read');
  await resume();
  expect(state()).toBe('ready probe_ok');
});

it('it is known again when its source drops it and names it anew', async () => {
  const { clock, registry, world, state } = setUp();
  await clock.pass(0);
  registry.drain(ID, LATE_READ);
  const leaveAndCome = async () => {
    registry.applySource('static', []);
    world.reply = async () => bad('refused');
    await clock.pass(20_000);
    expect(state()).toMatch(/^gone /);
    world.reply = async () => good();
    registry.applySource('static', [spec(ID)]);
    await clock.pass(0);
  };
  await leaveAndCome();
  expect(state()).toBe('draining late_read');
  // Long enough that it was not even listed any more.
  registry.applySource('static', []);
  world.reply = async () => bad('refused');
  await clock.pass(400_000);
  expect(registry.snapshot()).toEqual([]);
  world.reply = async () => good();
  registry.applySource('static', [spec(ID)]);
  await clock.pass(0);
  expect(state()).toBe('draining late_read');
  world.reply = async () => restarted();
  await clock.pass(5000);
  expect(state()).toBe('ready probe_ok');
});

it('a registry that is replaced tells the next one', async () => {
  const { clock, registry } = setUp();
  await clock.pass(0);
  registry.drain(ID, LATE_READ);
  const next = setUp([], { start: false });
  next.registry.restore(registry.state(['static']));
  next.registry.applySource('static', [spec(ID)]);
  next.registry.start();
  await next.clock.pass(0);
  expect(next.state()).toBe('draining late_read');
});

it('tells the silence of an engine, and that it is over', async () => {
  const { clock, only, registry, world } = setUp();
  await clock.pass(5000);
  expect(only().silence).toBeUndefined();
  world.reply = async () => bad('timeout');
  await clock.pass(5000);
  expect(only().silence).toMatchObject({ ended: false, length: { seconds: 5n } });
  await clock.pass(3000);
  const { instance } = await registry.getInstance({ $typeName: 'baton.v1.GetInstanceRequest', instanceId: ID });
  expect(instance?.silence).toMatchObject({ ended: false, length: { seconds: 8n } });
  // What it sends ends the silence as well as a check that it passes.
  registry.notePassive(ID, 'ok');
  expect(only().silence).toMatchObject({ ended: true, length: { seconds: 8n } });
});

it.each([
  ['is another process by its start time', { processStartSeconds: 200 }, undefined],
  ['is the same process by its start time', { processStartSeconds: 100 }, 65n],
  ['does not tell', {}, 65n],
])('an engine that its source drops in its silence and names anew, and that %s', async (_, metrics, seconds) => {
  const { clock, only, registry, world } = setUp();
  await clock.pass(5000);
  world.reply = async () => bad('timeout');
  await clock.pass(5000);
  registry.applySource('static', []);
  await clock.pass(60_000);
  registry.applySource('static', [spec(ID)]);
  world.reply = async () => good(metrics);
  await clock.pass(0);
  expect(only().silence?.length?.seconds).toBe(seconds);
  if (seconds !== undefined) expect(only().silence?.ended).toBe(true);
});

it('an engine that does not tell its start time is another one where its place refused connections meanwhile', async () => {
  const { clock, only, registry, world } = setUp();
  world.reply = async () => good({});
  await clock.pass(5000);
  registry.applySource('static', []);
  await clock.pass(60_000);
  world.reply = async () => bad('refused');
  registry.applySource('static', [spec(ID)]);
  await clock.pass(1000);
  world.reply = async () => good({});
  await clock.pass(10_000);
  expect(only().silence).toBeUndefined();
});

it('whose drain has ended is still told apart from one that an operator drained', async () => {
  const { clock, registry, state, world } = setUp();
  await clock.pass(0);
  registry.drain(ID, LATE_READ);
  registry.endDrain(ID);
  expect(state()).toBe('gone late_read');
  world.reply = async () => restarted();
  await clock.pass(5000);
  expect(state()).toBe('ready probe_ok');
});

import { create } from '@bufbuild/protobuf';
import { afterEach, describe, expect, it } from 'vitest';
import { KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { DrainInstanceRequestSchema, ResumeInstanceRequestSchema } from '../../gen/baton/v1/pool_registry_pb.ts';
import { stateWord } from '../../src/core/instance-words.ts';
import { createDirectClient } from '../../src/rpc/direct-client.ts';
import { DrainEnd } from '../../src/services/registry/drain-end.ts';
import { good, setUp, spec } from '../support/registry.ts';

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

const idle = () => good({ running: 0, waiting: 0 });

/** A registry with one engine, and a store of which the test says what it holds. */
async function setUpDrain(id: string, withStore = true) {
  const world = setUp([id]);
  const stored = { entries: 1, away: false };
  const service = {
    listEntries: async ({ filter }: { filter?: { instanceId: string } }) => {
      if (stored.away) throw new Error('away');
      return { entries: filter?.instanceId === id ? Array(stored.entries).fill({}) : [] };
    },
  };
  const store = createDirectClient(KVCacheStore, service as never);
  stack.use(new DrainEnd({ registry: world.registry, clock: world.clock, ...(withStore ? { store } : {}) }));
  world.world.reply = async () => idle();
  await world.clock.pass(0);
  await world.registry.drainInstance(create(DrainInstanceRequestSchema, { instanceId: id }));
  const state = () => stateWord(world.registry.snapshot()[0]?.state ?? 0);
  return { ...world, stored, state };
}

describe('a draining decode engine', () => {
  it('stays while the store has entries of it, and is GONE when they are used', async () => {
    const { clock, stored, state } = await setUpDrain('d:1');
    await clock.pass(60_000);
    expect(state()).toBe('draining');
    stored.entries = 0;
    await clock.pass(2000);
    expect(state()).toBe('gone');
    await clock.pass(20_000);
    expect(state()).toBe('gone');
  });

  it('is not GONE while it has work, nor by a load that was read before it drained', async () => {
    const { clock, world, stored, state } = await setUpDrain('d:1');
    stored.entries = 0;
    world.reply = async () => good({ running: 1, waiting: 0 });
    await clock.pass(120_000);
    expect(state()).toBe('draining');
    world.reply = async () => idle();
    await clock.pass(9000);
    expect(state()).toBe('gone');
  });

  it.each([
    ['a store that is away', true],
    ['no store', false],
  ])('with %s waits until the time of its blocks is over', async (_, withStore) => {
    const { clock, stored, state } = await setUpDrain('d:1', withStore);
    stored.away = true;
    await clock.pass(480_000);
    expect(state()).toBe('draining');
    await clock.pass(10_000);
    expect(state()).toBe('gone');
  });

  it('that does not tell its load is taken to be idle after half an hour', async () => {
    const { clock, world, stored, state } = await setUpDrain('d:1');
    stored.entries = 0;
    world.reply = async () => good({});
    await clock.pass(1_799_000);
    expect(state()).toBe('draining');
    await clock.pass(6000);
    expect(state()).toBe('gone');
  });

  it('whose engine works on under another name is done when that has no work for once', async () => {
    const { clock, registry, world, stored, state } = await setUpDrain('d:1');
    stored.entries = 0;
    world.reply = async () => good({ running: 1, waiting: 0 });
    registry.applySource('static', [{ ...spec('d1'), url: 'http://d:1' }]);
    await clock.pass(60_000);
    expect(state()).toBe('draining');
    world.reply = async () => idle();
    await clock.pass(5000);
    world.reply = async () => good({ running: 1, waiting: 0 });
    await clock.pass(9000);
    expect(state()).toBe('gone');
  });

  it('comes back by a resume, before and after its end, and can drain again', async () => {
    const { clock, registry, stored, state } = await setUpDrain('d:1');
    const resume = () => registry.resumeInstance(create(ResumeInstanceRequestSchema, { instanceId: 'd:1' }));
    await resume();
    stored.entries = 0;
    await clock.pass(20_000);
    expect(state()).toBe('ready');
    await registry.drainInstance(create(DrainInstanceRequestSchema, { instanceId: 'd:1' }));
    await clock.pass(10_000);
    expect(state()).toBe('gone');
    await resume();
    await clock.pass(1000);
    expect(state()).toBe('ready');
  });
});

it('a draining prefill engine is GONE when the lease of its last blocks is over, whatever is stored', async () => {
  const { clock, stored, state } = await setUpDrain('p:1');
  stored.entries = 5;
  await clock.pass(30_000);
  expect(state()).toBe('draining');
  await clock.pass(8000);
  expect(state()).toBe('gone');
});

import { durationFromMs } from '@bufbuild/protobuf/wkt';
import { expect, test } from 'vitest';
import { ids } from './kv-store.ts';
import { seeded } from './seeded.ts';
import { callKey, refusal } from './store-messages.ts';
import { callerFor, type OpenWorld, type StoreWorld } from './store-world.ts';
import { change, expectSame, follow, keyOf, putEntry, View, Watch } from './watch-reader.ts';

/** For what a loaded machine may delay. */
const SLOW = { timeout: 20_000, interval: 20 };

const remove = (world: StoreWorld, entryId: string) => world.client.deleteEntry({ idempotencyKey: callKey(), entryId });

async function claimOf(world: StoreWorld, name: string): Promise<string> {
  const { result } = await world.client.takeEntry(world.takeRequest({ key: keyOf(world, name) }));
  if (result.case !== 'taken') throw new Error(`a miss: ${result.value?.reason}`);
  return result.value.claimId;
}

/** Changes that a busy watch hears of. */
const STEPS = 100;

/** A watch without changes says so from time to time. */
export async function expectCheckpoint(world: StoreWorld): Promise<void> {
  const watch = new Watch(world, { checkpointInterval: durationFromMs(1) });
  const [first, second] = [await watch.read(), await watch.read()];
  expect([first?.event.case, second?.event.case]).toEqual(['snapshotComplete', 'checkpoint']);
  expect(second?.resumeToken).not.toBe('');
  expect(second?.revision).toBeGreaterThanOrEqual(first?.revision ?? 0n);
  await watch.end();
}

/** What WatchEntries promises to whoever sees nothing of the store but its port; `entries` is how many a busy watch sees. */
export function testWatchOnTheWire(open: OpenWorld, entries: number): void {
  test('a snapshot, then each change, and on from a token', async (context) => {
    await using run = await open(context);
    const first = await putEntry(run, 'a');
    await putEntry(run, 'b');
    const watch = new Watch(run);
    expect(await watch.take(3)).toEqual(['a idle', 'b idle', 'all 2']);
    await putEntry(run, 'c');
    await remove(run, first);
    expect(await watch.take(2)).toEqual(['c idle', 'RELEASED']);
    const { token } = watch;
    await watch.end();
    await putEntry(run, 'd');
    const resumed = new Watch(run, { resumeToken: token });
    expect(await resumed.next()).toBe('d idle');
    await resumed.end();
  });

  test('the life of an entry, each end with its reason', async (context) => {
    await using run = await open(context);
    const watch = new Watch(run);
    expect(await watch.next()).toBe('all 0');
    await putEntry(run, 'a');
    await run.client.releaseClaim({ claimId: await claimOf(run, 'a'), reason: 'not_sent' });
    await run.client.commitClaim({ claimId: await claimOf(run, 'a') });
    expect(await watch.take(5)).toEqual(['a idle', 'a claimed', 'a idle', 'a claimed', 'TAKEN']);
    await putEntry(run, 'b');
    await run.client.takeEntry(run.takeRequest({ key: keyOf(run, 'b') }, ids(300, 9000)));
    await run.client.putEntry(run.putRequest({ key: keyOf(run, 'c'), remainingTtl: durationFromMs(1000) }));
    expect(await watch.take(3)).toEqual(['b idle', 'RELEASED', 'c idle']);
    await run.pass(1000);
    // A store may let what is over lie until it is called.
    await run.client.getStats({});
    expect(await watch.next()).toBe('EXPIRED');
    await watch.end();
  });

  test('what an operator frees or drops', async (context) => {
    await using run = await open(context);
    const operator = callerFor(context, run, 'operator');
    const { instanceId } = run.names;
    await putEntry(run, 'a');
    await putEntry(run, 'b');
    const watch = new Watch(run);
    expect(await watch.take(3)).toEqual(['a idle', 'b idle', 'all 2']);
    await run.client.takeForRelease({ idempotencyKey: callKey(), instanceId }, operator);
    expect(await watch.next()).toBe('RELEASED');
    await run.client.invalidateOwner({ idempotencyKey: callKey(), instanceId }, operator);
    expect(await watch.next()).toBe('OWNER_GONE');
    await watch.end();
  });

  test('what the filter names', async (context) => {
    await using run = await open(context);
    await putEntry(run, 'a');
    await putEntry(run, 'b');
    const { conversationId } = keyOf(run, 'b');
    const one = new Watch(run, { filter: { conversationId } });
    expect(await one.take(2)).toEqual(['b idle', 'all 1']);
    await putEntry(run, 'a');
    await putEntry(run, 'b');
    expect(await one.next()).toBe('b idle');
    const elsewhere = new Watch(run, { filter: { instanceId: 'nobody', conversationId } });
    expect(await elsewhere.next()).toBe('all 0');
    await Promise.all([one.end(), elsewhere.end()]);
  });

  test('of tenants that the caller may see', async (context) => {
    await using run = await open(context);
    const other = callerFor(context, run, 'other');
    const { entry } = await run.client.putEntry(run.putRequest({ key: keyOf(run, 'a') }));
    const tenant = entry?.key?.tenant ?? '';
    await putEntry(run, 'b', other);
    expect(await refusal(new Watch(run, { filter: { tenant } }, other).read())).toEqual({
      reason: 'TENANT_FORBIDDEN',
      tenant,
    });
    const theirs = new Watch(run, {}, other);
    expect(await theirs.take(2)).toEqual(['b idle', 'all 1']);
    await putEntry(run, 'c');
    await putEntry(run, 'd', other);
    expect(await theirs.next()).toBe('d idle');
    await theirs.end();
    const all = new Watch(run, {}, callerFor(context, run, 'router'));
    expect((await all.take(5)).toSorted()).toEqual(['a idle', 'all 4', 'b idle', 'c idle', 'd idle']);
    await all.end();
  });

  test('so many watches a tenant; one that ended makes room', async (context) => {
    await using run = await open(context);
    const max = (await run.client.getStats({})).limits?.tenantWatches ?? 0;
    const watches: Watch[] = [];
    let answer: unknown = 'all 0';
    // Some may be others', and some of these may end.
    while (answer === 'all 0' && watches.length <= max) {
      const watch = new Watch(run);
      watches.push(watch);
      answer = await refusal(watch.next());
    }
    expect(answer).toEqual({ reason: 'LIMIT_EXCEEDED', limit: 'tenant_watches', max: String(max) });
    watches.pop();
    expect((await run.client.getStats({})).watches).toBeGreaterThanOrEqual(watches.length);
    await watches.pop()?.end();
    await expect
      .poll(async () => {
        const again = new Watch(run);
        const word = await again.next().catch(() => 'refused');
        await again.end();
        return word;
      }, SLOW)
      .toBe('all 0');
    await Promise.all(watches.map((watch) => watch.end()));
  });

  test('a token of nobody is refused', async (context) => {
    await using run = await open(context);
    expect(await refusal(new Watch(run, { resumeToken: 'what?' }).read())).toEqual({ reason: 'RESUME_TOKEN_INVALID' });
  });

  test('who follows sees what is listed, whatever happens and however often the connection breaks', async (context) => {
    await using run = await open(context);
    const random = seeded(7);
    for (let index = 0; index < entries; index += 6) {
      await Promise.all(Array.from({ length: 6 }, () => putEntry(run, `-${index / 6}`)));
    }
    const view = new View();
    const follower = follow(view, run);
    for (let step = 0; step < STEPS; step++) {
      if (step % 25 === 24) await follower.reconnect();
      await change(run, `-${Math.floor((random() * entries) / 6)}`, random);
    }
    await expectSame(view, run);
    await follower.end();
  });
}

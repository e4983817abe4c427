import { setTimeout } from 'node:timers/promises';
import { beforeEach, expect, test } from 'vitest';
import { MissReason } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { needsRedis, RedisServer } from '../support/redis.ts';
import { Fire } from '../support/store-fire.ts';
import { startSwitchboard } from '../support/switchboard.ts';
import { SLOW } from '../support/valkey.ts';

const TAKERS = 64;
const KEYS = 1000;
const TIMEOUT_MS = 120_000;

beforeEach((context) => needsRedis(context));

/** Calls `work` with each of these numbers, `TAKERS` at a time. */
async function atOnce(numbers: readonly number[], work: (index: number) => Promise<unknown>): Promise<void> {
  let next = 0;
  const taker = async () => {
    for (;;) {
      const index = numbers[next++];
      if (index === undefined) return;
      await work(index);
    }
  };
  await Promise.all(Array.from({ length: TAKERS }, taker));
}

const ALL = Array.from({ length: KEYS }, (_, index) => index);
/** Each key three times, the three near each other: takers meet. */
const CONTENDED = ALL.flatMap((index) => [index, index, index]);

test(
  'store processes are killed at chance: each handle is given at most once, and none is lost without a reason',
  async () => {
    await using redis = await RedisServer.start();
    const address = `127.0.0.1:${redis.port}`;
    await using fire = await Fire.start([address, address, address]);
    let over = false;
    const rage = fire.rage(() => over);
    await atOnce(ALL, (index) => fire.put(index));
    // Until processes were killed under it, however fast the machine is.
    do await atOnce(CONTENDED, (index) => fire.take(index));
    while (fire.kills < 4);
    over = true;
    await rage;
    expect(fire.twice).toEqual([]);
    const delivered = fire.lives.size;
    expect(delivered).toBeGreaterThan(KEYS / 2);
    // What nobody got is still there, or was in an answer that nobody heard.
    const endings: (string | MissReason | undefined)[] = [];
    await atOnce(ALL, async (index) => void endings.push(await fire.take(index, 50)));
    expect(fire.twice).toEqual([]);
    expect(new Set(endings)).toEqual(new Set(endings.filter((end) => end === 'given' || end === MissReason.TAKEN)));
    expect(endings).toHaveLength(KEYS);
  },
  TIMEOUT_MS,
);

test(
  'the primary is cut off, killed, and a replica promoted: no handle twice, and the lost ones have their reason',
  async () => {
    await using primary = await RedisServer.start(['--repl-diskless-sync-delay', '0']);
    await using replica = await RedisServer.start();
    await replica.command(`REPLICAOF 127.0.0.1 ${primary.port}`);
    await expect.poll(() => replica.command('INFO replication'), SLOW).toContain('master_link_status:up');
    const old = `127.0.0.1:${primary.port}`;
    await using far = await startSwitchboard([old]);
    await using near = await startSwitchboard([old]);
    await using fire = await Fire.start([far.address, near.address, near.address]);
    await atOnce(ALL, (index) => fire.put(index));
    await expect
      .poll(() => replica.command(`EVAL "return #redis.call('KEYS','{baton}:*:k:*')" 0`), SLOW)
      .toBe(`:${KEYS}\r\n`);
    let over = false;
    const rage = fire.rage(() => over);
    let taken = 0;
    let promoted = false;
    const takes = atOnce(CONTENDED, async (index) => {
      await fire.take(index);
      taken += 1;
    });
    const failover = (async () => {
      while (taken < 600) await setTimeout(5);
      // One process is on the wrong side: its primary goes on giving while the replica is promoted.
      await replica.command('REPLICAOF NO ONE');
      near.targets = [`127.0.0.1:${replica.port}`];
      near.cut();
      promoted = true;
      const before = taken;
      while (taken < before + 300) await setTimeout(5);
      await primary.kill();
      far.targets = near.targets;
      far.cut();
    })();
    await Promise.all([takes, failover]);
    over = true;
    await rage;
    expect(promoted).toBe(true);
    expect(fire.twice).toEqual([]);
    expect(fire.lives.size).toBeGreaterThan(0);
    expect(fire.lives.size).toBeLessThan(KEYS);
    const endings: (string | MissReason | undefined)[] = [];
    await atOnce(ALL, async (index) => void endings.push(await fire.take(index, 100)));
    expect(endings).toEqual(Array(KEYS).fill(MissReason.STORE_EPOCH));
    await fire.put(KEYS);
    expect(await fire.take(KEYS, 50)).toBe('given');
  },
  TIMEOUT_MS,
);

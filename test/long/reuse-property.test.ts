import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { Players } from './reuse-run.ts';
import { drawOf, until, World, type WorldOptions } from './reuse-world.ts';

/** `BATON_SEED=n` repeats the turns and faults of a run; what happens at the same time is never the same. */
const SEED = Number(process.env['BATON_SEED'] ?? Math.floor(Math.random() * 2 ** 31));
/** `BATON_TURNS=n`: a share of 5,600, for a quick look. */
const SHARE = Number(process.env['BATON_TURNS'] ?? 5600) / 5600;

const WORLDS: readonly WorldOptions[] = [
  {
    name: 'quiet',
    turns: 1500,
    workers: 6,
    prefill: 2,
    decode: 2,
    engine: { bidirectional: true, numBlocks: 2500, maxModelLen: 1500, eosEvery: 24, decoderTtlMs: 10_000 },
    bidirectional: 'on',
    toldTtlMs: 6000,
    faults: 0,
    outages: false,
  },
  {
    name: 'faulty',
    turns: 1800,
    workers: 8,
    prefill: 2,
    decode: 2,
    engine: {
      bidirectional: true,
      blockSize: 8,
      numBlocks: 4000,
      maxModelLen: 1500,
      eosEvery: 24,
      decoderTtlMs: 10_000,
      tokenizer: 'pairs',
      asyncScheduling: true,
    },
    bidirectional: 'auto',
    toldTtlMs: 6000,
    faults: 0.3,
    outages: false,
  },
  {
    name: 'stormy',
    turns: 1800,
    workers: 8,
    prefill: 3,
    decode: 3,
    engine: { bidirectional: true, numBlocks: 2500, maxModelLen: 1500, eosEvery: 24, decoderTtlMs: 12_000 },
    bidirectional: 'auto',
    toldTtlMs: 9000,
    faults: 0.15,
    outages: true,
  },
  {
    name: 'older',
    turns: 500,
    workers: 4,
    prefill: 1,
    decode: 1,
    engine: {
      bidirectional: true,
      version: '0.32.0',
      speculativeTokens: 3,
      numBlocks: 4000,
      maxModelLen: 1500,
      eosEvery: 24,
      decoderTtlMs: 10_000,
      tokenizer: 'pairs',
    },
    bidirectional: 'auto',
    toldTtlMs: 6000,
    faults: 0,
    outages: false,
  },
];

const rejections: unknown[] = [];
const onRejection = (reason: unknown) => void rejections.push(reason);
/** Left open until the end: what the engines still hold has to go by itself. */
const worlds: World[] = [];
beforeAll(() => void process.on('unhandledRejection', onRejection));
afterAll(async () => {
  for (const world of worlds) await world[Symbol.asyncDispose]();
  process.off('unhandledRejection', onRejection);
});

describe.each(WORLDS.map((options) => ({ ...options, turns: Math.ceil(options.turns * SHARE) })))(
  '$turns turns, $name',
  (options) => {
    test('every turn ends as the model says', { timeout: 290_000 }, async () => {
      const world = await World.start(options, SEED);
      worlds.push(world);
      const players = new Players(world, SEED);
      let isOver = false;
      const outages = options.outages ? world.makeOutages(drawOf(SEED ^ 0x0a7a6e), () => isOver) : undefined;
      await players.playAll().finally(() => {
        isOver = true;
      });
      const made = await outages;
      const { tally, problems } = players;
      expect(problems, `seed ${SEED}`).toEqual([]);
      await world.clearFaults();

      const busy = () =>
        world.engines.map((sim) => sim.state()).reduce((n, s) => n + s.running + s.waiting + s.loading + s.hanging, 0);
      await expect.poll(busy, { timeout: 10_000, message: `seed ${SEED}: nothing runs` }).toBe(0);
      for (const sim of world.engines) world.harm.add(sim.state());
      const sums = `seed ${SEED} ${options.name}: ${JSON.stringify({ ...tally, made, harm: world.harm })}`;
      expect(world.harm, sums).toMatchObject({
        deaths: [],
        counts: { mismatchedPulls: 0, leakedPins: 0, leakedBlocks: 0, expiredReads: 0, doubleReads: 0, hung: 0 },
      });
      if (!options.outages) expect(world.harm.refusedReads, sums).toBe(0);

      // The books agree with each other.
      const { kvCacheStore } = world.remote;
      const claims = async () => (await kvCacheStore.getStats({})).claims || undefined;
      expect(await until(async () => ((await claims()) === undefined ? 0 : undefined), 3000), sums).toBe(0);
      const stats = await kvCacheStore.getStats({});
      const read = await world.metrics();
      const logged: Record<string, number> = {};
      let matched = 0;
      for (const line of world.lines) {
        const outcome = String(line['reuse'] ?? 'none');
        logged[outcome] = (logged[outcome] ?? 0) + 1;
        if (outcome === 'hit' || outcome === 'hit_cut') matched += Number(line['matched_tokens']);
      }
      if (tally.ends.unheard === 0) expect(logged, sums).toEqual(tally.outcomes);
      for (const [outcome, count] of Object.entries(logged)) {
        const counted = read('baton_reuse_total', `outcome="${outcome}"`);
        expect({ outcome, counted }, sums).toEqual({ outcome, counted: outcome === 'none' ? 0 : count });
      }
      expect(read('baton_reuse_tokens_total', 'kind="reused"'), sums).toBe(matched);
      const fates = (fate: string) => read('baton_decode_handles_total', `fate="${fate}"`);
      expect(fates('stored') + fates('released'), sums).toBe(Number(stats.puts));
      expect(fates('store_unavailable'), sums).toBe(0);
      expect(fates('stored'), sums).toBeGreaterThanOrEqual(tally.seenEntries);
      const unseen = tally.pairHits + tally.ends.unheard + tally.media;
      expect(fates('stored'), sums).toBeLessThanOrEqual(tally.seenEntries + unseen);
      expect(rejections, sums).toEqual([]);
      process.stdout.write(`${sums}\n`);

      // The run means something only if the model was sure of many turns. Of a slow machine's entries more are at the end of
      // their time, where either may be, and each fault makes more of them: a quiet run is sure of 72, 55 and 33 %.
      const certain = options.outages ? 0.1 : options.faults > 0 ? 0.15 : 0.3;
      expect(tally.exact, sums).toBeGreaterThan(options.turns * certain);
      if (options.turns < 1500) return;
      const { outcomes } = tally;
      for (const outcome of ['hit', 'hit_cut', 'miss_mismatch', 'miss_taken', 'miss_too_small', 'miss_expired']) {
        expect({ outcome, met: (outcomes[outcome] ?? 0) > 0 }, sums).toEqual({ outcome, met: true });
      }
      expect((outcomes['hit'] ?? 0) + (outcomes['hit_cut'] ?? 0), sums).toBeGreaterThan(options.turns * 0.1);
    });
  },
);

test('every block is free again when its time is over', { timeout: 40_000 }, async () => {
  for (const { engines, options, remote } of worlds) {
    const { numBlocks = 0, decoderTtlMs = 0 } = options.engine;
    const held = () =>
      engines.map((sim) => ({ pins: sim.state().pins, blocks: numBlocks - 1 - sim.state().freeBlocks }));
    const nothing = engines.map(() => ({ pins: 0, blocks: 0 }));
    await expect.poll(held, { timeout: decoderTtlMs + 3000, message: `seed ${SEED}` }).toEqual(nothing);
    expect(await remote.kvCacheStore.getStats({}), `seed ${SEED}`).toMatchObject({ entries: 0, claims: 0 });
  }
});

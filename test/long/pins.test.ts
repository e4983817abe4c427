import { expect, test } from 'vitest';
import { Role } from '../../gen/baton/v1/instance_pb.ts';
import { connectRemote } from '../../src/rpc/clients.ts';
import { metricOf } from '../e2e/ladder-support.ts';
import { Conversation, chatWithPlan } from '../support/conversation.ts';
import { post, startHarness } from '../support/harness.ts';
import { waitUntil } from '../support/wait.ts';

const ONE_TURN = 2000;
const LIVE = 8;
const WATERMARK = 0.6;
/** Of each decode engine: a fraction of what so many conversations pin. */
const BLOCKS = 4096;

test('2,000 one-turn conversations: their pins fall long before their time, and no live conversation loses its handle', async () => {
  await using harness = await startHarness({
    engine: { bidirectional: true, eosEvery: 0 },
    engineOf: (role) => (role === 'decode' ? { numBlocks: BLOCKS } : {}),
    yaml: 'health: { interval: 250ms }\n',
  });
  await harness.ready();
  const send = (body: unknown) => chatWithPlan(harness.url, body);
  const live = Array.from(
    { length: LIVE },
    (_, index) => new Conversation(`live-${index}`, { stream: index % 2 === 0, plain: harness.plain }),
  );
  for (const talk of live) await talk.turn(send);
  for (const talk of live) await talk.turn(send);

  let next = 0;
  const askOnce = async () => {
    for (let index = next++; index < ONE_TURN; index = next++) {
      const messages = [{ role: 'user', content: `${index}: ${'what is a relay? '.repeat(6)}` }];
      const body = { model: 'sim-model', messages, max_tokens: 2, ignore_eos: true, conversation_id: `once-${index}` };
      const reply = await post(`${harness.url}/v1/chat/completions`, body);
      expect(reply.status, reply.text).toBe(200);
    }
  };
  // The live ones say nothing meanwhile: theirs are the oldest handles of all.
  await Promise.all(Array.from({ length: 16 }, askOnce));

  const usable = BLOCKS - 1;
  const pinned = () => harness.decode.map((sim) => sim.state().pinnedBlocks);
  await waitUntil(() => pinned().every((blocks) => blocks <= WATERMARK * usable));
  const event = (name: string) => metricOf(harness, `baton_pin_events_total{event="${name}"}`);
  await waitUntil(async () => (await event('effective')) > 0);
  expect(await event('above')).toBeGreaterThanOrEqual(2);
  expect(await event('ineffective')).toBe(0);
  // What was asked for pins more than both engines have.
  const blocksOfOne = Math.max(...harness.decode.flatMap((sim) => sim.state().pinList.map(({ blocks }) => blocks)));
  expect(ONE_TURN * blocksOfOne).toBeGreaterThan(2 * usable);
  // No handle ran out, and nothing was read that was free.
  for (const sim of harness.decode) expect(sim.state()).toMatchObject({ pinsExpired: 0, leakedPins: 0 });
  for (const sim of [...harness.prefill, ...harness.decode]) {
    expect(sim.state()).toMatchObject({ doubleReads: 0, expiredReads: 0, mismatchedPulls: 0 });
  }
  expect(await metricOf(harness, 'baton_releases_total{result="sent"}')).toBeGreaterThan(100);
  using remote = connectRemote({ url: harness.rpcUrl });
  await waitUntil(async () => {
    const { instances } = await remote.poolRegistry.listInstances({ filter: { role: Role.DECODE } });
    return instances.every(({ pins }) => pins !== undefined && pins.entries > 0 && pins.share < WATERMARK);
  });

  for (const talk of live) {
    await talk.turn(send);
    expect(talk.outcomes.slice(1), talk.id).toEqual(['hit', 'hit']);
  }
}, 120_000);

import { expect, test } from 'vitest';
import { Role } from '../../gen/baton/v1/instance_pb.ts';
import { connectRemote } from '../../src/rpc/clients.ts';
import { metricOf } from '../e2e/ladder-support.ts';
import { Conversation, chatWithPlan } from '../support/conversation.ts';
import { configOf, post, startHarness, startQuietly } from '../support/harness.ts';
import { waitUntil } from '../support/wait.ts';

const ONE_TURN = 2000;
const LIVE = 8;
const WATERMARK = 0.6;
/** Of each decode engine: a fraction of what so many conversations pin. */
const BLOCKS = 4096;

/** The store in one process with engines and clients may take longer than 20 ms. */
const PATIENT = 'health: { interval: 250ms }\ntimeouts: { store: 10s, tokenize: 10s }\n';

test('2,000 one-turn conversations: their pins fall long before their time, and no live conversation loses its handle', async () => {
  await using harness = await startHarness({
    engine: { bidirectional: true, eosEvery: 0 },
    engineOf: (role) => (role === 'decode' ? { numBlocks: BLOCKS } : {}),
    yaml: PATIENT,
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

test('two facades with one store: each handle is given back once, by one of them', async () => {
  await using harness = await startHarness({
    engine: { bidirectional: true, eosEvery: 0 },
    engineOf: (role) => (role === 'decode' ? { numBlocks: 1024 } : {}),
    yaml: PATIENT,
  });
  await harness.ready();
  const urls = (sims: typeof harness.prefill) => sims.map(({ url }) => url);
  const flags = { prefill: urls(harness.prefill), decode: urls(harness.decode), roles: 'facade,router,registry' };
  const { baton } = await startQuietly(configOf({ ...flags, 'kvstore-url': harness.rpcUrl }, PATIENT));
  await using second = { url: `http://${baton.addresses.facade}`, [Symbol.asyncDispose]: () => baton.stop() };
  const live = [harness.url, second.url].map((url) => ({
    url,
    talk: new Conversation(url, { stream: true, plain: harness.plain }),
  }));
  // Each learns by itself which prefill engines read.
  for (let turn = 0; turn < 3; turn++) {
    for (const { url, talk } of live) await talk.turn((body) => chatWithPlan(url, body));
  }
  const pinned = () => harness.decode.map((sim) => sim.state().pinnedBlocks);
  const pools = Array.from({ length: 400 }, (_, index) => index);
  const askOnce = async (url: string) => {
    for (let index = pools.pop(); index !== undefined; index = pools.pop()) {
      const messages = [{ role: 'user', content: `${index}: ${'what is a relay? '.repeat(6)}` }];
      const body = { model: 'sim-model', messages, max_tokens: 2, ignore_eos: true, conversation_id: `once-${index}` };
      expect((await post(`${url}/v1/chat/completions`, body)).status).toBe(200);
    }
  };
  await Promise.all([harness.url, second.url].flatMap((url) => Array.from({ length: 4 }, () => askOnce(url))));
  await waitUntil(() => pinned().every((blocks) => blocks <= WATERMARK * 1023));
  for (const sim of harness.decode) {
    // Blocks that were freed and are given back again would be counted here.
    expect(sim.state()).toMatchObject({ notificationsAfterExpiry: 0, doubleReads: 0, pinsExpired: 0 });
  }
  for (const { url, talk } of live) expect(await talk.turn((body) => chatWithPlan(url, body))).toBe('hit');
}, 120_000);

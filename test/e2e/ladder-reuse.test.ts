import { expect, test } from 'vitest';
import { Conversation, chatWithPlan } from '../support/conversation.ts';
import { engine, type Ladder, legsOf, metricOf, startLadder } from './ladder-support.ts';

/** Health checks are too rare to notice anything; the store has time on a busy machine. */
const YAML =
  'health: { interval: 60s }\ntimeouts: { store: 5s, tokenize: 5s }\npools: { prefill: { bidirectional: on } }\n';

const start = async (yaml = YAML): Promise<Ladder> => {
  const harness = await startLadder({ yaml, engine: { bidirectional: true } });
  await harness.ready();
  return harness;
};
const talkTo = (harness: Ladder, id: string) => {
  const talk = new Conversation(id, { stream: true, plain: harness.plain });
  return { talk, turn: () => talk.turn((body) => chatWithPlan(harness.url, body)) };
};

test('a prefill engine that refuses the connection has not had the handle: the next one reads with it', async () => {
  // Each request has a connection of its own, so that the one that told the tokens does not carry the leg.
  await using harness = await start(YAML.replace('timeouts: {', 'timeouts: { keep_alive: 0,'));
  const { turn } = talkTo(harness, 'kept');
  await turn();
  const served = harness.prefill.findIndex((sim) => legsOf(sim).length > 0);
  const [first, next] = [engine(harness.prefill, served), engine(harness.prefill, 1 - served)];
  await next.setFault({ kind: 'stall', ms: 500, path: '/tokenize' });
  const asked = () => next.requests.filter(({ path }) => path === '/tokenize').length;
  const before = asked();
  const outcome = turn();
  await expect.poll(asked, { interval: 5 }).toBe(before + 1);
  await next.setFault({ kind: 'refuse' });
  expect(await outcome).toBe('hit');
  expect(await metricOf(harness, 'baton_legs_total{leg="prefill",ending="not_sent"}')).toBe(1);
  const warm = legsOf(first).at(-1)?.params;
  expect(warm).toMatchObject({ do_remote_decode: true, remote_block_ids: expect.any(Array) });
  await harness.expectUnharmed();
});

test('two turns at once on one conversation: one has the handle, the other runs cold, both are right', async () => {
  await using harness = await start();
  const { turn } = talkTo(harness, 'twice');
  await turn();
  for (const sim of harness.prefill) await sim.setFault({ kind: 'stall', ms: 1000, leg: 'prefill' });
  const outcomes = await Promise.all([turn(), turn()]);
  expect(outcomes.toSorted()).toEqual(['hit', 'miss_taken']);
  await harness.expectUnharmed();
});

test('engines that tokenise too slowly cost their time and no more: the turn runs cold', async () => {
  await using harness = await start(YAML.replace('tokenize: 5s', 'tokenize: 200ms'));
  const { turn } = talkTo(harness, 'tokens');
  await turn();
  const engines = [...harness.prefill, ...harness.decode];
  for (const sim of engines) await sim.setFault({ kind: 'hang', path: '/tokenize' });
  expect(await turn()).toBe('miss_unverifiable');
  await harness.expectUnharmed();
});

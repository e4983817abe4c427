import { afterEach, describe, expect, test } from 'vitest';
import { configOf, post, startQuietly } from '../support/harness.ts';
import { STUB_MODEL, type Stubbed, startStubbed } from '../support/stub-engine.ts';

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

const counts = (stubs: Stubbed['prefill']) => stubs.map(({ requests }) => requests.length);
const ask = (url: string, document: string, question: string, headers = {}) =>
  post(
    `${url}/v1/chat/completions`,
    {
      model: STUB_MODEL,
      messages: [
        { role: 'system', content: document },
        { role: 'user', content: question },
      ],
    },
    { headers },
  );

describe('cache_aware', () => {
  test('prompts that begin alike go to one prefill engine, also where router and facade are two processes', async () => {
    const stubbed = stack.use(await startStubbed({ prefill: 3, flags: { 'prefill-policy': 'cache_aware' } }));
    const config = configOf({
      roles: 'facade',
      'prefill-policy': 'cache_aware',
      'router-url': stubbed.rpcUrl,
      'rpc-port': 'off',
      'admin-port': 'off',
    });
    const { baton } = await startQuietly(config);
    stack.defer(() => baton.stop());
    for (const url of [stubbed.url, `http://${baton.addresses.facade}`]) {
      await expect.poll(async () => (await fetch(`${url}/readiness`)).status, { timeout: 10_000 }).toBe(200);
    }
    const urls = [stubbed.url, `http://${baton.addresses.facade}`];
    for (let i = 0; i < 4; i++) {
      for (const document of ['one '.repeat(200), 'two '.repeat(200), 'six '.repeat(200)]) {
        const reply = await ask(urls[i % 2] ?? '', document, `question ${i}`);
        expect(reply.status).toBe(200);
      }
    }
    expect(counts(stubbed.prefill)).toEqual([4, 4, 4]);
    for (const { requests } of stubbed.prefill) {
      expect(new Set(requests.map(({ body }) => /one |two |six /.exec(body.toString())?.[0])).size).toBe(1);
    }
  });
});

describe('data parallel ranks', () => {
  const RANKS = 'pools: { prefill: { data_parallel_size: 4 }, decode: { data_parallel_size: 2 } }';
  const ranksOf = (stub: Stubbed['p']) => stub.requests.map(({ headers }) => headers['x-data-parallel-rank']);

  test('both legs of a conversation name a rank of their engine, the same in every turn', async () => {
    const stubbed = stack.use(await startStubbed({ yaml: RANKS }));
    for (let i = 0; i < 3; i++)
      await ask(stubbed.url, 'd', `q${i}`, { 'x-session-id': 'c', 'x-data-parallel-rank': '9' });
    for (const [stub, size] of [[stubbed.p, 4] as const, [stubbed.d, 2] as const]) {
      const [first] = ranksOf(stub);
      expect(Number(first)).toBeLessThan(size);
      expect(ranksOf(stub)).toEqual([first, first, first]);
    }
  });

  test('requests that run at once are spread over the ranks', async () => {
    const stubbed = stack.use(await startStubbed({ yaml: RANKS }));
    const { answer } = stubbed.p;
    const held: (() => void)[] = [];
    stubbed.p.answer = (...args) => {
      held.push(() => answer(...args));
      if (held.length === 8) for (const release of held) release();
    };
    await Promise.all(Array.from({ length: 8 }, (_, i) => ask(stubbed.url, 'd', `q${i}`)));
    expect(ranksOf(stubbed.p).toSorted()).toEqual(['0', '0', '1', '1', '2', '2', '3', '3']);
  });

  test('an engine that is not said to have ranks is told none', async () => {
    const stubbed = stack.use(await startStubbed());
    await ask(stubbed.url, 'd', 'q');
    expect([...ranksOf(stubbed.p), ...ranksOf(stubbed.d)]).toEqual([undefined, undefined]);
  });
});

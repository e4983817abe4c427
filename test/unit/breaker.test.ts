import { Code, ConnectError, createClient, createRouterTransport } from '@connectrpc/connect';
import { describe, expect, test } from 'vitest';
import { KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { Breaker } from '../../src/core/breaker.ts';
import { BatonError } from '../../src/core/errors.ts';
import { breakerInterceptor, ServerBreaker } from '../../src/rpc/breaker.ts';
import { connectErrorFromBaton } from '../../src/rpc/errors.ts';

describe('a breaker', () => {
  function setUp() {
    let now = 0;
    const events: string[] = [];
    const breaker = new ServerBreaker({
      failures: 3,
      openMs: 100,
      now: () => now,
      onChange: (event) => events.push(event),
    });
    const fail = () => {
      if (breaker.admit()) breaker.note('failed');
    };
    return { breaker, events, fail, pass: (ms: number) => (now += ms) };
  }

  test('opens after failures in a row, and an answer in between begins anew', () => {
    const { breaker, fail, events } = setUp();
    fail();
    fail();
    breaker.note('answered');
    fail();
    fail();
    breaker.note('neither');
    expect(breaker.isOpen).toBe(false);
    fail();
    expect([breaker.isOpen, breaker.admit()]).toEqual([true, false]);
    expect(events.filter((event) => event !== 'failure')).toEqual(['open']);
  });

  test('lets one call try after a while, waits longer each time, and closes at an answer', () => {
    const { breaker, fail, events, pass } = setUp();
    for (let index = 0; index < 3; index++) fail();
    pass(99);
    expect(breaker.admit()).toBe(false);
    pass(1);
    expect([breaker.admit(), breaker.admit()]).toEqual([true, false]);
    breaker.note('failed');
    pass(199);
    expect(breaker.admit()).toBe(false);
    pass(1);
    expect(breaker.admit()).toBe(true);
    // A call that was called off has tried nothing: the next one does.
    breaker.note('neither');
    expect(breaker.admit()).toBe(true);
    breaker.note('answered');
    expect([breaker.isOpen, breaker.admit(), breaker.admit()]).toEqual([false, true, true]);
    expect(events.filter((event) => event !== 'failure')).toEqual(['open', 'closed']);
  });
});

describe('the state of a breaker', () => {
  const opened = () => {
    const breaker = new Breaker({ failures: 2, openMs: 100 });
    breaker.note('failed', 0);
    expect(breaker.note('failed', 0)).toBe('opened');
    return breaker;
  };

  test('calls that were under way when it opened change nothing, well or badly ended', () => {
    const breaker = opened();
    for (let i = 0; i < 9; i++) breaker.note('failed', 50);
    breaker.note('answered', 60);
    expect([breaker.state(99), breaker.state(100)]).toEqual(['open', 'due']);
  });

  test('a trial that takes long lets another one begin, and still closes it', () => {
    const breaker = opened();
    expect(breaker.admit(100)).toBe(true);
    expect([breaker.state(199), breaker.admit(199), breaker.state(200), breaker.admit(200)]).toEqual([
      'trying',
      false,
      'due',
      true,
    ]);
    expect(breaker.note('answered', 5000)).toBe('closed');
    expect([breaker.state(5000), breaker.isClear]).toEqual(['closed', true]);
  });

  test('waits at most eight times as long', () => {
    const breaker = opened();
    let now = 100;
    for (const ms of [200, 400, 800, 800]) {
      breaker.admit(now);
      breaker.note('failed', now);
      expect([breaker.state(now + ms - 1), breaker.state(now + ms)]).toEqual(['open', 'due']);
      now += ms;
    }
  });

  test('a call that is made before its time is a trial as well', () => {
    const breaker = opened();
    breaker.force(10);
    expect(breaker.note('answered', 20)).toBe('closed');
    const other = opened();
    other.force(10);
    other.note('neither', 20);
    expect([other.state(20), other.state(100)]).toEqual(['open', 'due']);
  });

  test('without a number of failures it never opens', () => {
    const breaker = new Breaker({ failures: 0, openMs: 100 });
    for (let i = 0; i < 99; i++) breaker.note('failed', 0);
    expect(breaker.admit(0)).toBe(true);
  });
});

describe('before the calls of a store', () => {
  function setUp(answer: () => Error | undefined) {
    let calls = 0;
    const reply = () => {
      calls += 1;
      const error = answer();
      if (error !== undefined) throw error;
      return {};
    };
    const breaker = new ServerBreaker({ failures: 2, openMs: 60_000 });
    const transport = createRouterTransport(
      ({ service }) => service(KVCacheStore, { takeEntry: reply, getEntry: reply, commitClaim: reply }),
      { transport: { interceptors: [breakerInterceptor(breaker)] } },
    );
    const client = createClient(KVCacheStore, transport);
    const codeOf = (promise: Promise<unknown>) =>
      promise.then(
        () => 0,
        (error) => ConnectError.from(error).code,
      );
    return { client, breaker, codeOf, calls: () => calls };
  }

  test('counts what gets no answer, and then asks no more but for ends of claims', async () => {
    const { client, codeOf, calls } = setUp(() => new ConnectError('away', Code.Unavailable));
    for (let index = 0; index < 4; index++) expect(await codeOf(client.takeEntry({}))).toBe(Code.Unavailable);
    expect(await codeOf(client.getEntry({}))).toBe(Code.Unavailable);
    expect(calls()).toBe(2);
    await codeOf(client.commitClaim({}));
    expect(calls()).toBe(3);
  });

  test.each([
    ['a refusal', connectErrorFromBaton(new BatonError({ reason: 'PROMPT_REQUIRED', message: 'no prompt' }))],
    ['a fault that the store tells of', connectErrorFromBaton(new BatonError({ reason: 'INTERNAL', message: 'x' }))],
    ['a call that was called off', new ConnectError('gone', Code.Canceled)],
  ])('%s is no failure', async (_, error) => {
    const { client, breaker, codeOf } = setUp(() => error);
    for (let index = 0; index < 4; index++) await codeOf(client.takeEntry({}));
    expect(breaker.isOpen).toBe(false);
  });

  test('a store whose own server is away is one', async () => {
    const away = connectErrorFromBaton(new BatonError({ reason: 'STORE_UNAVAILABLE', message: 'away' }));
    const { client, breaker, codeOf } = setUp(() => away);
    for (let index = 0; index < 2; index++) await codeOf(client.takeEntry({}));
    expect(breaker.isOpen).toBe(true);
  });
});

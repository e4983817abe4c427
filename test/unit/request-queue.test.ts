import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';
import { type QueueLimits, type QueueOutcome, RequestQueue } from '../../src/services/request-queue.ts';

beforeEach(() => {
  vi.useFakeTimers({ toFake: ['setTimeout', 'clearTimeout', 'performance'] });
});
afterEach(() => {
  vi.useRealTimers();
});

/** A queue before engines with so many slots of each kind. */
function setUp(slots: Record<string, number>, limits: QueueLimits = { max: 100, tenantMax: 0 }) {
  const free = { ...slots };
  const placed: string[] = [];
  const ended: string[] = [];
  const left: QueueOutcome[] = [];
  const listeners = new Set<() => void>();
  let attempts = 0;
  const queue = new RequestQueue({
    limits,
    now: () => performance.now(),
    onChange: (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    observe: (outcome) => left.push(outcome),
  });
  const ask = (
    name: string,
    more: { kind?: string; priority?: number; maxWaitMs?: number; signal?: AbortSignal } = {},
  ) => {
    const { kind = 'm', priority = 0, maxWaitMs = 10_000, signal = new AbortController().signal } = more;
    const attempt = () => {
      attempts += 1;
      if ((free[kind] ?? 0) === 0) return undefined;
      free[kind] = (free[kind] ?? 0) - 1;
      placed.push(name);
      return name;
    };
    return queue
      .place({ tenant: name[0] ?? '', priority, kind, maxWaitMs, signal, attempt })
      .then((value) => ended.push(value ?? `${name} timeout`))
      .catch((error: { reason?: string }) => ended.push(`${name} ${error.reason ?? String(error)}`));
  };
  const release = (kind = 'm', count = 1) => {
    free[kind] = (free[kind] ?? 0) + count;
    queue.pump();
  };
  return { queue, ask, release, placed, ended, left, listeners, attempts: () => attempts };
}

describe('a full queue', () => {
  test('gives the place of the newest request of the tenant with the most to one with fewer', async () => {
    const { ask, release, placed, ended, left } = setUp({ m: 0 }, { max: 4, tenantMax: 0 });
    for (let i = 0; i < 4; i++) void ask(`a${i}`);
    await ask('a4');
    void ask('b0');
    void ask('b1');
    await vi.advanceTimersByTimeAsync(0);
    // Two each: nobody has to give way to one of them.
    await ask('b2');
    void ask('c0');
    await vi.advanceTimersByTimeAsync(0);
    expect(ended).toEqual([
      'a4 QUEUE_FULL',
      'a3 TENANT_QUEUE_FULL',
      'a2 TENANT_QUEUE_FULL',
      'b2 QUEUE_FULL',
      'a1 TENANT_QUEUE_FULL',
    ]);
    expect(left).toEqual(['displaced', 'displaced', 'displaced']);
    release('m', 4);
    expect(placed).toEqual(['a0', 'b0', 'c0', 'b1']);
  });
});

describe('who goes first', () => {
  test('tenants take turns, however many requests one of them has sent before', () => {
    const { ask, release, placed, queue } = setUp({ m: 0 });
    for (let i = 0; i < 6; i++) void ask(`a${i}`);
    void ask('b0');
    void ask('b1');
    void ask('c0');
    for (let i = 0; i < 9; i++) release();
    expect(placed).toEqual(['a0', 'b0', 'c0', 'a1', 'b1', 'a2', 'a3', 'a4', 'a5']);
    expect(queue.depth).toBe(0);
  });

  test('several slots at once are shared as well', () => {
    const { ask, release, placed } = setUp({ m: 0 });
    for (let i = 0; i < 6; i++) void ask(`a${i}`);
    for (let i = 0; i < 3; i++) void ask(`b${i}`);
    release('m', 4);
    expect(placed).toEqual(['a0', 'b0', 'a1', 'b1']);
  });

  test('of one tenant the lowest priority value, then the order of arrival; it gives no right over others', () => {
    const { ask, release, placed } = setUp({ m: 0 });
    void ask('a0', { priority: 5 });
    void ask('a1');
    void ask('a2', { priority: -3 });
    void ask('a3');
    void ask('b0', { priority: 9 });
    release('m', 5);
    expect(placed).toEqual(['a2', 'b0', 'a1', 'a3', 'a0']);
  });

  test('nobody comes in before those who wait for the same, and everybody may before those who wait for something else', () => {
    const { ask, placed, release } = setUp({ m: 0, n: 1 });
    void ask('a0');
    void ask('b0', { kind: 'n' });
    expect(placed).toEqual(['b0']);
    void ask('c0');
    release('m', 1);
    expect(placed).toEqual(['b0', 'a0']);
  });

  test('a request that cannot be placed does not block those of other kinds behind it, and costs one try a round', () => {
    const { ask, release, placed, attempts } = setUp({ m: 0, n: 0 });
    for (let i = 0; i < 50; i++) void ask(`a${i}`, { kind: 'm' });
    void ask('a-n', { kind: 'n' });
    const before = attempts();
    release('n');
    expect(placed).toEqual(['a-n']);
    expect(attempts() - before).toBeLessThanOrEqual(3);
  });
});

describe('the end of a wait', () => {
  test('comes with the deadline, each its own', async () => {
    const { ask, queue, ended, left } = setUp({ m: 0 });
    void ask('a0', { maxWaitMs: 1000 });
    void ask('a1', { maxWaitMs: 500 });
    await vi.advanceTimersByTimeAsync(500);
    expect([ended, queue.depth]).toEqual([['a1 timeout'], 1]);
    await vi.advanceTimersByTimeAsync(500);
    expect([ended, queue.depth]).toEqual([['a1 timeout', 'a0 timeout'], 0]);
    expect(left).toEqual(['timeout', 'timeout']);
  });

  test('comes with the client that leaves, and with the end of the router; nothing stays behind', async () => {
    const { ask, queue, ended, listeners } = setUp({ m: 0 });
    const client = new AbortController();
    void ask('a0', { signal: client.signal });
    void ask('b0');
    client.abort();
    await vi.advanceTimersByTimeAsync(0);
    expect(ended).toEqual(['a0 CLIENT_GONE']);
    queue.stop();
    await ask('c0');
    await ask('d0', { signal: client.signal });
    expect(ended.slice(1)).toEqual(['b0 SHUTTING_DOWN', 'c0 SHUTTING_DOWN', 'd0 CLIENT_GONE']);
    expect([queue.depth, listeners.size, vi.getTimerCount()]).toEqual([0, 0, 0]);
  });

  test('comes with what the attempt throws, and others go on', async () => {
    const { queue, ask, release, ended } = setUp({ m: 0 });
    let known = true;
    const attempt = () => {
      if (!known) throw new Error('no such model');
      return undefined;
    };
    const signal = new AbortController().signal;
    const waiting = queue.place({ tenant: 'a', priority: 0, kind: 'x', maxWaitMs: 1000, signal, attempt });
    void ask('a1');
    known = false;
    release();
    await expect(waiting).rejects.toThrow('no such model');
    expect(ended).toEqual(['a1']);
  });
});

describe('room', () => {
  test('there is a limit for all and one for each tenant, with the reason that says which', async () => {
    const { ask, ended } = setUp({ m: 0 }, { max: 3, tenantMax: 2 });
    void ask('a0');
    void ask('a1');
    await ask('a2');
    void ask('b0');
    await ask('b1');
    expect(ended).toEqual(['a2 TENANT_QUEUE_FULL', 'b1 QUEUE_FULL']);
  });

  test('who is turned away is told how long others have waited lately, within bounds', async () => {
    const { ask, release, queue } = setUp({ m: 0 });
    expect(queue.retryAfterMs).toBe(1000);
    for (let i = 0; i < 60; i++) {
      void ask(`a${i}`, { maxWaitMs: 600_000 });
      await vi.advanceTimersByTimeAsync(8000);
      release();
    }
    expect(queue.retryAfterMs).toBeGreaterThan(7000);
    expect(queue.retryAfterMs).toBeLessThanOrEqual(8000);
    for (let i = 0; i < 60; i++) {
      void ask(`a${i}`, { maxWaitMs: 600_000 });
      await vi.advanceTimersByTimeAsync(90_000);
      release();
    }
    expect(queue.retryAfterMs).toBe(30_000);
  });

  test('who does not want to wait takes no room', async () => {
    const { ask, ended, queue } = setUp({ m: 0 }, { max: 0, tenantMax: 0 });
    await ask('a0', { maxWaitMs: 0 });
    expect([ended, queue.depth]).toEqual([['a0 timeout'], 0]);
  });
});

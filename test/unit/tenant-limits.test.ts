import { describe, expect, test } from 'vitest';
import { BatonError } from '../../src/core/errors.ts';
import type { TenantLimit } from '../../src/core/tenant.ts';
import { type Admission, TenantLimits } from '../../src/services/tenant-limits.ts';

const NONE: TenantLimit = { requestsPerMinute: 0, tokensPerMinute: 0, concurrency: 0 };

function setUp(limit: Partial<TenantLimit>, own: Readonly<Record<string, Partial<TenantLimit>>> = {}) {
  const clock = { ms: 1_000_000 };
  const current = { limit };
  const limits = new TenantLimits(
    (tenant) => ({ ...NONE, ...(own[tenant] ?? current.limit) }),
    () => clock.ms,
  );
  const enter = (tenant = 't'): Admission => {
    const admission = limits.admit(tenant);
    if (admission instanceof BatonError) throw admission;
    return admission;
  };
  /** Milliseconds until the tenant may come again; undefined where it is let in, and has left. */
  const wait = (tenant = 't') => {
    const admission = limits.admit(tenant);
    if (admission instanceof BatonError) return admission.retryAfterMs;
    admission.leave();
    return undefined;
  };
  return { clock, current, limits, enter, wait };
}

describe('requests a minute', () => {
  test('a minute of them at once, then as many as time gives back', () => {
    const { clock, wait } = setUp({ requestsPerMinute: 60 });
    expect(Array.from({ length: 60 }, () => wait())).toEqual(Array(60).fill(undefined));
    expect(wait()).toBe(1000);
    clock.ms += 400;
    expect(wait()).toBe(600);
    clock.ms += 600;
    expect([wait(), wait()]).toEqual([undefined, 1000]);
    clock.ms += 3_600_000;
    expect(Array.from({ length: 60 }, () => wait())).toEqual(Array(60).fill(undefined));
    expect(wait()).toBe(1000);
  });

  test('a refused request uses nothing, and the error is the one of OpenAI', () => {
    const { clock, limits, wait } = setUp({ requestsPerMinute: 1 });
    wait();
    for (let i = 0; i < 100; i++) wait();
    const refused = limits.admit('t');
    expect(refused).toMatchObject({ reason: 'RATE_LIMIT_EXCEEDED', httpStatus: 429, type: 'rate_limit_error' });
    clock.ms += 60_000;
    expect(wait()).toBeUndefined();
  });

  test('tenants do not share; one may have limits of its own', () => {
    const { wait } = setUp({ requestsPerMinute: 1 }, { big: { requestsPerMinute: 2 }, free: {} });
    expect([wait('a'), wait('a'), wait('b')]).toEqual([undefined, 60_000, undefined]);
    expect([wait('big'), wait('big'), wait('big')]).toEqual([undefined, undefined, 30_000]);
    expect(Array.from({ length: 9 }, () => wait('free'))).toEqual(Array(9).fill(undefined));
  });

  test('other limits hold from the next request on', () => {
    const { current, wait } = setUp({ requestsPerMinute: 1 });
    wait();
    expect(wait()).toBe(60_000);
    current.limit = { requestsPerMinute: 3 };
    expect(wait()).toBeUndefined();
    current.limit = {};
    expect(wait()).toBeUndefined();
  });
});

describe('tokens a minute', () => {
  test('who has some left is let in, and owes what was used beyond', () => {
    const { clock, enter, wait } = setUp({ tokensPerMinute: 600 });
    const first = enter();
    first.reserve(100);
    first.settle(1200);
    // 601 too many, at ten a second.
    expect(wait()).toBe(60_100);
    clock.ms += 60_100;
    expect(wait()).toBeUndefined();
  });

  test('what is reserved counts while it runs, and is replaced by what was used', () => {
    const { enter, wait } = setUp({ tokensPerMinute: 100 });
    const first = enter();
    first.reserve(500);
    expect(wait()).toBeGreaterThan(0);
    first.settle(0);
    expect(wait()).toBeUndefined();
  });
});

describe('requests at a time', () => {
  test('one that ended makes room, once', () => {
    const { enter, wait } = setUp({ concurrency: 2 });
    const first = enter();
    enter();
    expect(wait()).toBe(1000);
    first.leave();
    first.leave();
    enter();
    expect(wait()).toBe(1000);
  });
});

test('tenants that come and go do not add up, and who runs or owes is remembered', () => {
  const { clock, limits, enter, wait } = setUp({ concurrency: 1, requestsPerMinute: 1000, tokensPerMinute: 10 });
  enter('runs');
  const spent = enter('owes');
  spent.settle(1000);
  spent.leave();
  for (let i = 0; i < 60_000; i++) {
    wait(`other-${i}`);
    clock.ms += 10;
  }
  // A minute's worth of them.
  expect(limits.size).toBeLessThan(6_100);
  expect(wait('runs')).toBe(1000);
  expect(wait('owes')).toBeGreaterThan(60_000);
});

test('however many tenants come at once, a bounded number is remembered', () => {
  const { limits, wait } = setUp({ requestsPerMinute: 1 });
  for (let i = 0; i < 60_000; i++) wait(`t-${i}`);
  expect(limits.size).toBe(50_000);
});

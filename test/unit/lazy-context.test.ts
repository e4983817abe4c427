import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { LazyContext } from '../../src/rpc/lazy-context.ts';

/** A call that may have to end as soon as somebody wants to know. */
class TestContext extends LazyContext {
  readonly protocolName = 'test';
  readonly url = 'test:/';
  readonly #stopped: boolean;

  constructor(stopped: boolean) {
    super(KVCacheStore.method.getStats, 60_000);
    this.#stopped = stopped;
  }

  protected readRequestHeader(): Headers {
    return new Headers();
  }

  protected override watchForEnd(): void {
    if (this.#stopped) this.end(new Error('the process stops'));
    super.watchForEnd();
  }
}

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

test('a deadline is waited for from the first look at the signal to the end of the call, by one timer', () => {
  const context = new TestContext(false);
  expect(vi.getTimerCount()).toBe(0);
  const { signal } = context;
  expect([vi.getTimerCount(), context.signal]).toEqual([1, signal]);
  expect(vi.getTimerCount()).toBe(1);
  context.end();
  expect([vi.getTimerCount(), signal.aborted]).toEqual([0, true]);
});

test('nothing waits for the deadline of a call that has ended', () => {
  const stopped = new TestContext(true);
  expect(stopped.signal.reason).toEqual(new Error('the process stops'));
  const over = new TestContext(false);
  over.end();
  expect(over.signal.aborted).toBe(true);
  expect(vi.getTimerCount()).toBe(0);
});

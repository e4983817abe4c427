import { describe, expect, test } from 'vitest';
import type { ProcessSpec } from '../../src/launch/plan.ts';
import { createProgress } from '../../src/launch/progress.ts';
import { runLaunch } from '../../src/launch/run-launch.ts';
import type { LaunchSystem, ProcessEnd } from '../../src/launch/system.ts';
import { planOf, settingsOf } from '../support/launch-parts.ts';

/** A machine whose processes are ready when the test says so, and end when they are signalled or told to. */
function fakeSystem(behaviour: { readonly ignoresTerm?: readonly string[] } = {}) {
  const events: string[] = [];
  const ready = new Set<string>();
  const ends = new Map<string, (end: ProcessEnd) => void>();
  const groups = new Map<number, { readonly name: string; readonly logFile: string }>();
  const started = new Map<string, () => void>();
  const system: LaunchSystem = {
    run: async () => undefined,
    portIsFree: async () => true,
    exists: () => false,
    write: (path) => void events.push(`write ${path}`),
    tail: (path) => [`last words in ${path}`],
    isReady: async (url) => ready.has(url),
    start(spec: ProcessSpec) {
      events.push(`start ${spec.name}`);
      const pid = 1000 + groups.size;
      groups.set(pid, spec);
      const { promise, resolve } = Promise.withResolvers<ProcessEnd>();
      ends.set(spec.name, resolve);
      started.get(spec.name)?.();
      return { pid, ended: promise };
    },
    signalGroup(group, signal) {
      const name = groups.get(group)?.name ?? '?';
      if (signal === 0) return false;
      events.push(`${signal} ${name}`);
      if (signal === 'SIGKILL' || !behaviour.ignoresTerm?.includes(name)) ends.get(name)?.({ code: null, signal });
      return true;
    },
    startReaper: () => ({
      watch: () => void events.push('watch'),
      forget: () => void events.push('forget'),
      close: async () => void events.push('reaper closed'),
    }),
  };
  return {
    system,
    events,
    ready,
    end: (name: string, end: Partial<ProcessEnd>) => ends.get(name)?.({ code: null, signal: null, ...end }),
    /** Resolves when the process is started. */
    start: (name: string) => new Promise<void>((resolve) => void started.set(name, resolve)),
  };
}

function launchOn(fake: ReturnType<typeof fakeSystem>, flags: Record<string, string> = {}) {
  const settings = settingsOf({ sim: 'true', ...flags });
  const plan = planOf(settings);
  const { promise, resolve: stop } = Promise.withResolvers<void>();
  let text = '';
  const waiters: { readonly pattern: RegExp; resolve(): void }[] = [];
  const say = (more: string): void => {
    text += more;
    for (const waiter of waiters) if (waiter.pattern.test(text)) waiter.resolve();
  };
  const done = runLaunch({
    settings,
    plan,
    system: fake.system,
    progress: createProgress({ terminal: false, write: say }),
    out: say,
    stopRequested: () => promise,
  });
  return {
    plan,
    stop,
    done,
    text: () => text,
    /** Resolves when the output matches. */
    seen: (pattern: RegExp) =>
      new Promise<void>((resolve) => {
        waiters.push({ pattern, resolve });
        say('');
      }),
    allReady() {
      for (const { readyUrl } of [...plan.engines, plan.proxy]) fake.ready.add(readyUrl);
    },
  };
}

describe('a launch', () => {
  test('engines come up, then the proxy; on request the proxy stops first', async () => {
    const fake = fakeSystem();
    const run = launchOn(fake);
    run.allReady();
    await run.seen(/up: http:\/\/127\.0\.0\.1:9100\n/);
    expect(run.text()).toMatch(/curl http:\/\/127\.0\.0\.1:9100\/v1\/chat\/completions/);
    run.stop();
    expect(await run.done).toBe(true);
    expect(fake.events.filter((event) => event.startsWith('start')).at(-1)).toBe('start proxy');
    const terms = fake.events.filter((event) => event.startsWith('SIGTERM'));
    expect(terms).toHaveLength(5);
    expect(terms[0]).toBe('SIGTERM proxy');
    expect(fake.events.filter((event) => event === 'watch')).toHaveLength(5);
    expect(fake.events.filter((event) => event === 'forget')).toHaveLength(5);
    expect(fake.events.at(-1)).toBe('reaper closed');
    expect(run.text()).not.toMatch(/going on|was ended/);
  });

  test('an engine that dies is reported with the end of its log, and the rest goes on', async () => {
    const fake = fakeSystem();
    const run = launchOn(fake);
    run.allReady();
    await run.seen(/up: /);
    fake.end('decoder1', { signal: 'SIGKILL' });
    await run.seen(/going on/);
    expect(run.text()).toContain(
      'decoder1 was ended by SIGKILL; the end of decoder1.log:\n  | last words in decoder1.log\ngoing on with 2 prefill and 1 decode\n',
    );
    // Its workers go with it.
    expect(fake.events).toContain('SIGKILL decoder1');
    run.stop();
    expect(await run.done).toBe(true);
    expect(fake.events).not.toContain('SIGTERM decoder1');
  });

  test('without the last engine of a kind all is stopped', async () => {
    const fake = fakeSystem();
    const run = launchOn(fake, { decode: '1' });
    run.allReady();
    await run.seen(/up: /);
    fake.end('decoder1', { code: 1 });
    expect(await run.done).toBe(false);
    expect(run.text()).toMatch(/decoder1 ended with exit code 1[\s\S]*the rest cannot serve\nstopping\nstopped\n$/);
    expect(fake.events).toContain('SIGTERM prefiller2');
  });

  test('without the proxy too', async () => {
    const fake = fakeSystem();
    const run = launchOn(fake);
    run.allReady();
    await run.seen(/up: /);
    fake.end('proxy', { code: 1 });
    expect(await run.done).toBe(false);
  });

  test('an engine that cannot be started is reported, and the rest comes up', async () => {
    const fake = fakeSystem();
    const run = launchOn(fake);
    fake.end('prefiller1', { error: 'spawn python3 ENOENT' });
    run.allReady();
    await run.seen(/up: /);
    expect(run.text()).toContain('prefiller1 could not be started (spawn python3 ENOENT)');
    run.stop();
    expect(await run.done).toBe(true);
  });

  test('an engine that takes too long is killed, and the rest comes up', async () => {
    const fake = fakeSystem();
    const run = launchOn(fake, { 'ready-timeout': '1ms' });
    const [slow] = run.plan.engines;
    run.allReady();
    fake.ready.delete(slow?.readyUrl ?? '');
    await run.seen(/up: /);
    expect(run.text()).toMatch(/prefiller1 is not ready after [\d.]+ s \(--ready-timeout\), so it is killed/);
    expect(run.text()).toContain('going on with 1 prefill and 2 decode');
    run.stop();
    await run.done;
  });

  test('a stop while engines load starts nothing more', async () => {
    const fake = fakeSystem();
    const run = launchOn(fake);
    await run.seen(/decoder2 started/);
    run.stop();
    expect(await run.done).toBe(true);
    run.allReady();
    expect(fake.events).not.toContain('start proxy');
    expect(run.text()).not.toMatch(/ is ready/);
  });

  test('whoever ignores the request to stop is killed', async () => {
    const fake = fakeSystem({ ignoresTerm: ['decoder2'] });
    const run = launchOn(fake, { 'stop-timeout': '1ms' });
    run.allReady();
    await run.seen(/up: /);
    run.stop();
    expect(await run.done).toBe(true);
    expect(fake.events.filter((event) => event.endsWith('decoder2'))).toEqual([
      'start decoder2',
      'SIGTERM decoder2',
      'SIGKILL decoder2',
      'SIGKILL decoder2',
    ]);
  });
});

describe('the display', () => {
  test('elsewhere than on a terminal only lines that stay', () => {
    let text = '';
    const progress = createProgress({ terminal: false, write: (more) => (text += more) });
    progress.waitFor(['a', 'b']);
    progress.line('a is ready');
    progress.waitFor([]);
    expect(text).toBe('a is ready\n');
  });

  test('on a terminal a line that moves, above it the lines that stay', () => {
    let text = '';
    const progress = createProgress({ terminal: true, write: (more) => (text += more) });
    progress.waitFor(['a', 'b']);
    progress.line('a is ready');
    progress.waitFor([]);
    expect(text).toMatch(/waiting for a, b \(\d+ s\)/);
    expect(text).toContain('\r\u001b[Ka is ready\n');
    expect(text.endsWith('\r\u001b[K')).toBe(true);
  });
});
